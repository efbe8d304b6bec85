"""Long ListOps in files: the tab-separated form of the Long Range Arena, read, written and verified.

A file has the header `Source<TAB>Target` and one expression with its value per line; it may be xz-compressed.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from cached_lab.data.splits import SPLIT_WORDS, named_split
from cached_transformers.files import write_whole

from .expressions import Expression, evaluate, to_source, tokenize

T = TypeVar("T")
SUFFIXES = (".tsv", ".tsv.xz")


def write_tsv(path: str | Path, expressions: Iterable[Expression]) -> int:
    """Write expressions as the arena does (parenthesised source, lines ending in CR LF), atomically; return the number.

    Args:
        path: ends in `.tsv`, or in `.tsv.xz` for compression.

    Raises:
        ValueError: a label is not the value of its expression, or the name has another ending.
    """
    path = _checked_name(Path(path))
    rows = ["Source\tTarget"]
    for expression in expressions:
        source = to_source(expression.tokens)
        if evaluate(source) != expression.label:
            raise ValueError(f"label {expression.label} of row {len(rows)} is not its value, {evaluate(source)}")
        rows.append(f"{source}\t{expression.label}")
    content = "".join(f"{row}\r\n" for row in rows).encode()
    write_whole(path, lzma.compress(content) if path.suffix == ".xz" else content)
    return len(rows) - 1


def read_tsv(path: str | Path) -> list[Expression]:
    """Expressions of a file, in order; `verify_tsv` checks their labels.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file, or one of its lines (named), is malformed.
    """
    return [Expression(tokens, label) for _, tokens, label in _rows(Path(path), tokenize)]


def verify_tsv(path: str | Path) -> int:
    """Recompute every label of a file; return the number of expressions.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line (named) is malformed, is not one complete expression, or has another value than its label.
    """
    checked = 0
    for line, value, label in _rows(Path(path), evaluate):
        if value != label:
            raise ValueError(f"{path}, line {line}: the label is {label}, but the expression evaluates to {value}")
        checked += 1
    return checked


def find_tsv(path: str | Path | Mapping[str, str | Path], split: str) -> Path:
    """The file of a split.

    Args:
        path: a folder with one file per split, e.g. `basic_train.tsv`, `basic_val.tsv.xz`; one file with such a name;
            or a mapping from split to file, with any names.

    Raises:
        FileNotFoundError: no file for the split.
        ValueError: several files for the split, or a file named after another split or none.
    """
    if isinstance(path, Mapping):
        if split not in path:
            raise FileNotFoundError(f"no file is given for split {split!r}; path names {', '.join(path) or 'none'}")
        return Path(path[split])
    path = Path(path).expanduser()
    expected = f"*_{SPLIT_WORDS[split][0]}.tsv or .tsv.xz (or {', '.join(SPLIT_WORDS[split])})"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a folder with {expected}")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
    found = [file for file in files if named_split(file.name.partition(".tsv")[0], ()) == split]
    if path.is_file() and not found:  # one file would serve as training and as validation data
        way = f"give its folder, or a mapping such as {{{split!r}: {path.name!r}}}"
        raise ValueError(f"{path} is not named after split {split!r} (expected {expected}); {way}")
    if not found:
        present = ", ".join(file.name for file in files) or "no .tsv file"
        raise FileNotFoundError(f"{path} holds no file for split {split!r}: expected {expected}, found {present}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} holds several files for split {split!r} ({names}); give a mapping from split to file")
    return found[0]


def _rows(path: Path, read: Callable[[str], T]) -> Iterator[tuple[int, T, int]]:
    """Line number, result of `read` for the source, and label of each row."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected a file of ListOps rows (.tsv or .tsv.xz)")
    content = _checked_name(path).read_bytes()
    try:
        lines = (lzma.decompress(content) if path.suffix == ".xz" else content).decode("ascii").splitlines()
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged or no ListOps file: {error}") from error
    if not lines or lines[0].split("\t") != ["Source", "Target"]:
        first = lines[0][:60] if lines else ""
        raise ValueError(f"{path}, line 1: expected the header 'Source<TAB>Target', found {first!r}")
    if len(lines) == 1:
        raise ValueError(f"{path} holds a header and no row")
    for number, line in enumerate(lines[1:], 2):
        columns = line.split("\t")
        if len(columns) != 2:
            raise ValueError(f"{path}, line {number}: expected 2 columns separated by a tab, found {len(columns)}")
        source, label = columns
        if label not in {*"0123456789"}:
            raise ValueError(f"{path}, line {number}: the label must be a digit 0..9, found {label!r}")
        try:
            found = read(source)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield number, found, int(label)


def _checked_name(path: Path) -> Path:
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{path} must end in .tsv or .tsv.xz")
    return path
