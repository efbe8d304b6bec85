"""A text of any length as token ids, piece by piece: never more than one piece is in memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from cached_lab.data.archives import naming
from cached_lab.data.tokenizers import Tokenizer

BLOCK = 1 << 16
LONGEST = 1 << 20
_OPEN: dict[str, Callable[..., IO[bytes]]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}  # type: ignore[dict-item]
_LINE_END = re.compile(rb"(?<=\S)\n(?=\S)")
"""Where a text may be cut: no token of any tokenizer reaches across a single line feed."""


class Piece(NamedTuple):
    """Token ids of a piece, and the bytes of the (decompressed) text before and behind it."""

    ids: list[int]
    begin: int
    end: int


def text_pieces(path: Path, tokenizer: Tokenizer, begin: int = 0) -> Iterator[Piece]:
    """Pieces of a file, plain or compressed (.xz, .gz, .bz2), from the byte `begin` on, where an earlier piece ended.

    Together they are what the tokenizer makes of the whole text, with the id that stands before the first token.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is shorter than `begin`, or has lines that are longer than 1 MiB; or it is not
            UTF-8 and the tokenizer needs that.
    """
    exact = tokenizer.vocabulary == 256 and tokenizer.lossless  # bytes may be cut anywhere
    first = [tokenizer.start] if begin == 0 else []
    with _OPEN.get(path.suffix, open)(path, "rb") as file:
        _skip(file, begin, path)
        rest = b""
        while block := _read(file, BLOCK, path):
            rest += block
            end = len(rest) if exact else _last_cut(rest)
            if end:
                yield Piece([*first, *_encode(tokenizer, rest[:end], False, path, begin)], begin, begin + end)
                first, rest, begin = [], rest[end:], begin + end
            elif len(rest) > LONGEST:
                raise ValueError(
                    f"{path} has no line end in {LONGEST:,} bytes from byte {begin:,} on, and a token may not be "
                    "cut; break the text into lines, or train with data.tokenizer=byte"
                )
        if rest:
            yield Piece([*first, *_encode(tokenizer, rest, True, path, begin)], begin, begin + len(rest))


def _read(file: IO[bytes], size: int, path: Path) -> bytes:
    """So many bytes of the (decompressed) text, or what is left of it (ValueError: the file is damaged)."""
    with naming(path, "file"):
        return file.read(size)


def _encode(tokenizer: Tokenizer, text: bytes, last: bool, path: Path, begin: int) -> list[int]:
    try:
        ids = tokenizer.encode(text.decode("utf-8", "surrogateescape")).tolist()
    except (UnicodeError, TypeError) as error:  # byte pairs are of characters
        raise ValueError(
            f"{path} is not UTF-8 behind byte {begin:,}; convert it, or train with data.tokenizer=byte"
        ) from error
    # Byte pairs mark the end of a document, which a piece in the middle is not.
    return ids[:-1] if not last and tokenizer.ends_document else ids


def _last_cut(text: bytes) -> int:
    end = 0
    for found in _LINE_END.finditer(text):
        end = found.end()
    return end


def _skip(file: IO[bytes], count: int, path: Path) -> None:
    while count:
        skipped = len(_read(file, min(count, BLOCK), path))
        if not skipped:
            raise ValueError(
                f"{path} is shorter than what was read of it before; give the same file, or another --state"
            )
        count -= skipped
