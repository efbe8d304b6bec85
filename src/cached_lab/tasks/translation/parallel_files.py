"""Parallel text: two files with corresponding lines or a TSV file, in a folder or archive, or a data set of the hub.

Names of files consist of a split and a language:

    train.de, train.en                        one file per language, plain or compressed (.gz, .xz, .bz2)
    train.lc.norm.tok.de, train.de-en.de      with any text between the split and the language
    train.tsv                                 two columns, or those named by the languages in the first line
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from cached_lab.data.huggingface import hub_split
from cached_lab.data.splits import SPLIT_WORDS
from cached_lab.data.text import fingerprint
from cached_lab.data.text_files import ARCHIVES, DECOMPRESS, TextFile, members
from cached_transformers.registry import unknown_name

PairPath = str | Path | Mapping[str, str | Path | Sequence[str | Path]]
"""A folder, archive or TSV file, or a mapping from split to a TSV file or to [source file, target file]."""
_TSV = (".tsv", ".tab")


class Parallel(NamedTuple):
    """The lines of both sides, and the name of their files."""

    source: list[str]
    target: list[str]
    name: str


class PairFiles(NamedTuple):
    """Files of one part of a split: one per side, or the same TSV file twice."""

    source: TextFile
    target: TextFile


def find_pair(path: PairPath, split: str, names: Sequence[str], languages: tuple[str, str]) -> list[PairFiles]:
    """Find the files of a split.

    Args:
        names: of its files, without language; several are joined.
        languages: of source and target, as in the names of files.

    Raises:
        FileNotFoundError: no such path, name or languages; the message lists the existing ones.
        ValueError: an incomplete mapping, or several matching files.
    """
    if isinstance(path, Mapping):
        return [_given(path, split)]
    folder = Path(path).expanduser()
    if not folder.exists():
        raise FileNotFoundError(f"{path} does not exist; give data.path=FOLDER")
    if folder.is_file() and not folder.name.endswith(ARCHIVES):
        raise FileNotFoundError(
            f"{path} is a single file, which has no splits; give a folder, an archive, or a mapping from split to "
            "file, e.g. data.path={train: train.tsv, validation: dev.tsv, test: test.tsv}"
        )
    files = _listed(folder)
    found = {name: pair for name in names if (pair := _of_name(files, name, languages))}
    if found and tuple(names) == SPLIT_WORDS[split]:
        return list(found.values())[:1]
    missing = [name for name in names if name not in found]
    if missing:
        raise FileNotFoundError(_nothing(path, files, split, missing, languages))
    return list(found.values())


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


def pair_key(files: Iterable[PairFiles]) -> list[Any]:
    """Return name and content of the files, for the key of a cache."""
    return [fingerprint(list(pair)) for pair in files]


def decode_line(line: bytes, name: object, number: int) -> str:
    """Decode a line without its end; ValueError names file, line and byte if it is not UTF-8."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}, line {number} is not UTF-8 (byte {error.start} of the line); convert the file, e.g. with "
            "iconv -f latin1 -t utf-8"
        ) from None
    return text.rstrip("\r")


def load_hub(dataset: str, config: str | None, split: str, languages: tuple[str, str]) -> tuple[Any, list[str]]:
    """Return rows of a data set of the Hugging Face hub (or one saved to disk), and the columns of source and target.

    The languages name columns, or keys of a column `translation`, which then is the first column returned.

    Raises:
        ImportError: the `datasets` library is not installed.
        ValueError: unknown data set, split or languages.
    """
    rows = hub_split(dataset, config, split, ", or give files by data.path")
    nested = "translation" in rows.column_names
    known = list(rows[0]["translation"]) if nested and len(rows) else list(rows.column_names)
    for option, language in zip(("source", "target"), languages, strict=True):
        if language not in known:
            raise ValueError(f"data.{option}: {unknown_name(f'language of {dataset}', language, known)}")
    return rows, [*(["translation"] if nested else []), *languages]


def read_hub(rows: Any, columns: list[str], name: str) -> Parallel:
    """Return the lines of a data set of the hub."""
    *nested, source, target = columns
    found = [row["translation"] for row in rows] if nested else rows
    sides = [[" ".join(str(row[side]).splitlines()) for row in found] for side in (source, target)]
    return Parallel(sides[0], sides[1], name)


def _given(path: Mapping[str, Any], split: str) -> PairFiles:
    if split not in path:
        raise FileNotFoundError(f"data.path names no file for split {split!r}, only {', '.join(path)}")
    given = path[split]
    names = [given, given] if isinstance(given, (str, Path)) else list(given)
    if len(names) != 2:
        raise ValueError(f"data.path.{split}={given!r} must be a TSV file, or [source file, target file]")
    files = [Path(name).expanduser() for name in names]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"data.path.{split}: {file} is no file")
    return PairFiles(*(TextFile(file, file.name) for file in files))


def _listed(path: Path) -> list[TextFile]:
    """Return all files of a folder or archive, and the members of archives in the folder."""
    if path.is_file():
        return members(path)
    found: list[TextFile] = []
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        name = file.relative_to(path).as_posix()
        if not any(part.startswith(".") for part in PurePosixPath(name).parts):
            found += members(file) if name.endswith(ARCHIVES) else [TextFile(file, name)]
    return found


def _parts(file: TextFile) -> tuple[str, str]:
    """Return name and language (or "tsv") of a file: ("train.lc", "de") for x/train.lc.de.gz."""
    name = PurePosixPath(file.name).name
    for suffix in (*DECOMPRESS, ".txt"):
        name = name.removesuffix(suffix)
    stem, _, language = name.rpartition(".")
    return stem, language


def _of_name(files: Sequence[TextFile], name: str, languages: tuple[str, str]) -> PairFiles | None:
    """Return the files of one name; None if a side is missing."""
    named = [(file, *_parts(file)) for file in files]
    fitting = [part for part in named if part[1] == name] or [part for part in named if part[1].startswith(f"{name}.")]
    sides = [[file for file, _, language in fitting if language == wanted] for wanted in languages]
    tables = [file for file, _, language in fitting if f".{language}" in _TSV]
    if not all(sides) and len(tables) == 1:
        return PairFiles(tables[0], tables[0])
    if not all(sides):
        return None
    # A folder may hold both directions or two preparations of a pair: prefer files with the same stem and folder.
    every = [(a, b) for a in sides[0] for b in sides[1]]
    places = [[(_parts(file)[0], PurePosixPath(file.name).parent) for file in pair] for pair in every]
    pairs = [pair for pair, (one, other) in zip(every, places, strict=True) if one == other] or every
    if len(pairs) > 1:
        listed = "; ".join(f"{a}, {b}" for a, b in pairs[:4])
        raise ValueError(f"several files are named {name!r} ({listed}); give the folder of one, or a mapping")
    return PairFiles(*pairs[0])


def _nothing(
    path: object, files: Sequence[TextFile], split: str, missing: Sequence[str], languages: tuple[str, str]
) -> str:
    """Return why no file matches: another language, or another name."""
    by_name: dict[str, set[str]] = {}
    for file in files:
        stem, language = _parts(file)
        if re.fullmatch(r"[A-Za-z]{2,3}([_-]\w+)?", language) or f".{language}" in _TSV:
            by_name.setdefault(stem, set()).add(language)
    wanted = "-".join(languages)
    for name in missing:
        there = sorted(
            {n for stem, found in by_name.items() if stem == name or stem.startswith(f"{name}.") for n in found}
        )
        if there:
            absent = next((language for language in languages if language not in there), languages[0])
            what = unknown_name("language", absent, there)
            return f"{path} holds no {wanted} for {name!r}: {what}; set data.source and data.target to two of these"
    complete = sorted(name for name, found in by_name.items() if len(found) > 1 or found & {"tsv", "tab"})
    return (
        f"{path} holds no parallel text for split {split!r}: expected "
        f"{' or '.join(f'{n}.{languages[0]}' for n in missing)}; "
        f"it has {', '.join(complete[:12]) or 'none'}; name one by data.{split}=NAME"
    )


def _lines(file: TextFile) -> list[str]:
    content = file.content()
    if not content.strip():
        raise ValueError(f"{file} is empty; remove it, or fetch it again")
    parts = content.removesuffix(b"\n").split(b"\n")
    return [decode_line(line, file, number) for number, line in enumerate(parts, 1)]


def _read_tsv(file: TextFile, languages: tuple[str, str]) -> Parallel:
    rows = [line.split("\t") for line in _lines(file)]
    columns, first = (0, 1), 1
    if set(languages) <= set(rows[0]):
        columns, first = (rows[0].index(languages[0]), rows[0].index(languages[1])), 2
        rows = rows[1:]
    for number, row in enumerate(rows, first):
        if len(row) <= max(columns):
            raise ValueError(
                f"{file}, line {number} has {len(row)} columns; give source and target, separated by a tab"
            )
    return Parallel([row[columns[0]] for row in rows], [row[columns[1]] for row in rows], str(file))
