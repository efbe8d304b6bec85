"""Parallel text: two files with corresponding lines, or a TSV file, in a folder or archive.

Names of files consist of a split and a language:

    train.de, train.en                        one file per language, plain or compressed (.gz, .xz, .bz2)
    train.lc.norm.tok.de, train.de-en.de      with any text between the split and the language
    train.tsv                                 two columns, or those named by the languages in the first line
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from cached_lab.data.archives import ARCHIVES, OPENERS, refuse_utf16
from cached_lab.data.text_files import TextFile, members

TABLE = "tsv"


class Parallel(NamedTuple):
    """The lines of both sides, and the name of their files."""

    source: list[str]
    target: list[str]
    name: str


class PairFiles(NamedTuple):
    """Files of one part of a split: one per side, or the same TSV file twice."""

    source: TextFile
    target: TextFile


def find_pair(path: str | Path, split: str, names: Sequence[str], languages: tuple[str, str]) -> PairFiles:
    """Find the files of one part of a split in a folder or archive.

    Args:
        names: of its files, without language; the first that exists.
        languages: of source and target, as in the names of files.

    Raises:
        FileNotFoundError: no such path, name or languages; the message lists the existing ones.
        ValueError: several matching files.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"{path} does not exist; give data.path=FOLDER")
    if folder.is_file() and not folder.name.endswith(ARCHIVES):
        raise FileNotFoundError(f"{path} is a single file, which has no splits; give a folder or an archive")
    files = members(folder) if folder.is_file() else list(_listed(folder))
    for name in names:
        if (pair := _pair(files, name, languages)) is not None:
            return pair
    known = ", ".join(sorted({".".join(_parts(file)) for file in files})[:20])
    raise FileNotFoundError(
        f"{path} holds no {'-'.join(languages)} for split {split!r}: expected "
        f"{' or '.join(f'{name}.{languages[0]}' for name in names)}; it has {known or 'no file'}; set data.source and "
        f"data.target to its languages, or data.{split}=NAME"
    )


def read_pair(files: PairFiles, languages: tuple[str, str]) -> Parallel:
    """Read the lines of both sides.

    Raises:
        ValueError: different numbers of lines, not UTF-8 (file and line are named), a TSV line without two columns.
    """
    if files.source == files.target:
        return _read_tsv(files.source, languages)
    source, target = (_lines(file) for file in files)
    if len(source) != len(target):
        raise ValueError(
            f"{files.source} has {len(source)} lines and {files.target} has {len(target)}: they must correspond; fetch "
            "both again"
        )
    return Parallel(source, target, f"{files.source}, {files.target}")


def decode_line(line: bytes, name: object, number: int) -> str:
    """Decode a line without its end; ValueError names file, line and byte if it is not UTF-8."""
    if number == 1:
        refuse_utf16(line, name)
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}, line {number} is not UTF-8 (byte {error.start} of the line); convert the file, e.g. with "
            "iconv -f latin1 -t utf-8"
        ) from None
    return text.rstrip("\r")


def _listed(folder: Path) -> Iterable[TextFile]:
    """All files of a folder, and the members of archives in it."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder).as_posix()
        if not any(part.startswith(".") for part in PurePosixPath(name).parts):
            yield from members(file) if name.endswith(ARCHIVES) else [TextFile(file, name)]


def _parts(file: TextFile) -> tuple[str, str]:
    """Name and language (or "tsv") of a file: ("train.lc", "de") for x/train.lc.de.gz."""
    name = PurePosixPath(file.name).name
    for suffix in (*OPENERS, ".txt"):
        name = name.removesuffix(suffix)
    stem, _, language = name.rpartition(".")
    return stem, language


def _pair(files: Sequence[TextFile], name: str, languages: tuple[str, str]) -> PairFiles | None:
    """The files of one name, from the same folder; None if there are none."""
    stems = {_parts(file)[0] for file in files}
    chosen = {name} if name in stems else {stem for stem in stems if stem.startswith(f"{name}.")}
    places: dict[tuple[str, PurePosixPath], dict[str, TextFile]] = {}
    for file in files:
        stem, language = _parts(file)
        if stem in chosen:
            places.setdefault((stem, PurePosixPath(file.name).parent), {})[language] = file
    sides = [
        PairFiles(*(here[language] for language in languages)) for here in places.values() if {*languages} <= {*here}
    ]
    found = sides or [PairFiles(here[TABLE], here[TABLE]) for here in places.values() if TABLE in here]
    if len(found) > 1:
        listed = "; ".join(f"{source}, {target}" for source, target in found[:4])
        raise ValueError(f"several files are named {name!r} ({listed}); give the folder of one")
    return found[0] if found else None


def _lines(file: TextFile) -> list[str]:
    content = file.content()
    if not content.strip():
        raise ValueError(f"{file} is empty; remove it, or fetch it again")
    parts = content.removesuffix(b"\n").split(b"\n")
    return [decode_line(line, file, number) for number, line in enumerate(parts, 1)]


def _read_tsv(file: TextFile, languages: tuple[str, str]) -> Parallel:
    rows = [line.split("\t") for line in _lines(file)]
    columns, first = [0, 1], 1
    if set(languages) <= set(rows[0]):
        columns, first, rows = [rows[0].index(language) for language in languages], 2, rows[1:]
    for number, row in enumerate(rows, first):
        if len(row) <= max(columns):
            raise ValueError(
                f"{file}, line {number} has {len(row)} columns; give source and target, separated by a tab"
            )
    source, target = ([row[column] for row in rows] for column in columns)
    return Parallel(source, target, str(file))
