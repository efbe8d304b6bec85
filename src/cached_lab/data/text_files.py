"""Texts on disk: plain or compressed files, archives and folders of them, and their splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from .archives import ARCHIVES, OPENERS, Listing, as_text, naming, read_file, refuse_utf16, unpacked
from .splits import SPLIT_WORDS, named_split

_TEXT = (".txt", ".tokens", ".text", ".raw")


@dataclass(frozen=True)
class TextFile:
    """One text: a file, or a member of an archive. `name` is its path in the folder or archive."""

    path: Path
    name: str
    member: str | None = None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"

    def content(self) -> bytes:
        """The text as bytes, decompressed (ValueError: the file is damaged)."""
        with naming(self, "file"):
            if self.member is None:
                content = read_file(self.path)
            else:
                content = _listing(self.path, self.path.stat().st_mtime_ns).read(self.member)
            return unpacked(content, self, PurePosixPath(self.name).suffix)

    def stem(self) -> str:
        """File name without the suffixes of text and compression: `wiki.train` for wiki.train.tokens.xz."""
        name = PurePosixPath(self.name).name
        for suffixes in (tuple(OPENERS), _TEXT):
            name = next((name.removesuffix(s) for s in suffixes if name.endswith(s)), name)
        return name


def find_texts(path: str | Path) -> list[TextFile]:
    """The texts in a folder (and its sub-folders) or archive, sorted by name; a single file is itself.

    Raises:
        FileNotFoundError: no such path, or no text in it.
        ValueError: an archive is damaged.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give data.path=FOLDER_OR_FILE")
    if path.is_file():
        found = members(path) if path.name.endswith(ARCHIVES) else [TextFile(path, path.name)]
    else:
        found = []
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            if file.name.endswith(ARCHIVES):
                found += members(file)
            elif _is_text(name := file.relative_to(path).as_posix()):
                found.append(TextFile(file, name))
    if not found:
        raise FileNotFoundError(f"{path} holds no text ({', '.join(_TEXT)}; also .xz, .gz, .bz2, or in an archive)")
    return sorted(found, key=lambda text: text.name)


def split_of(text: TextFile) -> str | None:
    """The split in a text's file name or in the name of one of its folders; None without one."""
    return named_split(text.stem(), PurePosixPath(text.name).parts[:-1])


def split_texts(path: str | Path, split: str) -> list[TextFile]:
    """The texts of one split, by the names of files or folders (FileNotFoundError: there is none)."""
    texts = find_texts(path)
    chosen = [text for text in texts if split_of(text) == split]
    if not chosen:
        words, names = ", ".join(SPLIT_WORDS[split]), ", ".join(text.name for text in texts[:10])
        message = f"{path} holds no text for split {split!r}: expected a file or folder named {words}; found {names}"
        raise FileNotFoundError(message)
    return chosen


def split_text(path: str | Path, split: str) -> TextFile:
    """The only text of a split (ValueError: there are several; others as `split_texts`)."""
    chosen = split_texts(path, split)
    if len(chosen) > 1:
        names = ", ".join(map(str, chosen))
        raise ValueError(f"several texts are named after split {split!r} ({names}); give a folder with one of each")
    return chosen[0]


def decoded(content: bytes, name: object, exact: bool = False) -> str:
    """Decode UTF-8, with line feeds for all line ends.

    Args:
        exact: keep every byte: line ends as they are, and bytes outside UTF-8 as `surrogateescape` keeps them.

    Raises:
        ValueError: not UTF-8, or no text.
    """
    if not content.strip():
        raise ValueError(f"{name} is empty; remove it, or fetch it again")
    if exact:
        refuse_utf16(content, name)
        return content.decode("utf-8", "surrogateescape")
    text = as_text(content, name, "read it with data.tokenizer=byte").removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _is_text(name: str) -> bool:
    parts = PurePosixPath(name).parts
    if not parts or any(part.startswith(".") or part == "__MACOSX" for part in parts):
        return False
    return any(parts[-1].endswith(f"{text}{packed}") for text in _TEXT for packed in ("", *OPENERS))


def members(archive: Path) -> list[TextFile]:
    """The texts in an archive; all its files where none has the suffix of a text (enwik8.zip holds `enwik8`)."""
    names = _listing(archive, archive.stat().st_mtime_ns).names
    texts = [name for name in names if _is_text(name)]
    return [TextFile(archive, name, member=name) for name in texts or names]


@lru_cache(maxsize=4)
def _listing(archive: Path, modified: int) -> Listing:
    return Listing(archive)
