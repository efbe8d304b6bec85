"""Texts with labels on disk: tables (JSON lines, CSV, TSV), or text files in a folder for each class."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from cached_lab.data.splits import named_split
from cached_lab.data.text_files import DECOMPRESS, TextFile, decoded, find_texts
from cached_transformers.annotations import shown

DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLES = (".jsonl", *DELIMITERS)


class Labelled(NamedTuple):
    """A text, its label as it is written, and the split that its file or folder is named after, if any."""

    text: str
    label: str
    split: str | None


def read_labelled(path: str | Path, text: str, label: str) -> list[Labelled]:
    """All texts with labels in a file or folder, in order of the names.

    A table has a text and a label in each row, in the fields of these names; several tables of a folder may be named
    after splits. Without a table the text files of a folder are read, whose label is the folder they lie in: a class,
    in a folder named after a split or not. Files may be compressed (.xz, .gz, .bz2).

    Raises:
        FileNotFoundError: there is no such path, or neither a table nor a text in it.
        ValueError: a row (named) without text or label, what is no JSON or not UTF-8, or a text in no class's folder.
    """
    path = Path(path).expanduser()
    if path.is_file() and not _is_table(path.name):
        raise ValueError(
            f"{path} is no table ({', '.join(TABLES)}); give one, or a folder with a folder for each class"
        )
    found = [TextFile(path, path.name)] if path.is_file() else []
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _is_table(file.name))
        found = [TextFile(file, file.relative_to(path).as_posix()) for file in files]
    if found:
        return [record for table in found for record in _rows(table, text, label)]
    return [_of_folder(file) for file in find_texts(path)]


def _is_table(name: str) -> bool:
    return not name.startswith(".") and _suffix(name) in TABLES


def _suffix(name: str) -> str:
    """The suffix below that of compression."""
    inner = PurePosixPath(name)
    return inner.with_suffix("").suffix if inner.suffix in DECOMPRESS else inner.suffix


def _rows(table: TextFile, text: str, label: str) -> Iterator[Labelled]:
    parts = PurePosixPath(table.name).parts
    split = named_split(parts[-1].partition(".")[0], parts[:-1])
    content = decoded(table.content(), table)
    suffix = _suffix(table.name)
    rows = _json_lines(content, table) if suffix == ".jsonl" else _table_rows(content, DELIMITERS[suffix], table)
    for number, row in rows:
        missing = [name for name in (text, label) if row.get(name) in (None, "")]
        if missing:
            raise ValueError(
                f"{table}, line {number} has no {missing[0]!r}, only {', '.join(map(str, row)) or 'nothing'}; set "
                "data.text and data.label to the names of the fields"
            )
        if not isinstance(row[text], str) or isinstance(row[label], list | dict):
            raise ValueError(f"{table}, line {number}: {shown(row)} must have a text, and a word or number for a label")
        yield Labelled(row[text], str(row[label]), split)


def _json_lines(content: str, table: TextFile) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{table}, line {number} is not JSON ({error}); mend the line, or remove it") from None
        if not isinstance(row, dict):
            raise ValueError(f"{table}, line {number} must be an object with a text and a label, not {shown(row)}")
        yield number, row


def _table_rows(content: str, delimiter: str, table: TextFile) -> Iterator[tuple[int, Mapping[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # documents are longer than the fields that it expects
    reader = csv.DictReader(io.StringIO(content, newline=""), delimiter=delimiter)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"{table}, line {reader.line_num}: {error}; mend the line, or remove it") from None


def _of_folder(file: TextFile) -> Labelled:
    *folders, _ = PurePosixPath(file.name).parts
    split = named_split("", folders)
    if not folders or (split is not None and named_split("", folders[-1:]) is not None):
        raise ValueError(
            f"{file} lies in no folder of a class; lay texts out as <class>/*.txt, or <split>/<class>/*.txt"
        )
    return Labelled(decoded(file.content(), file), folders[-1], split)
