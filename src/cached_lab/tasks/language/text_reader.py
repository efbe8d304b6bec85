"""Read a text of any length with a trained language model, and resume with the same result as one uninterrupted pass.

The text is tokenised piece by piece, so that one piece is in memory. A `Bookmark` keeps the model's state and the sums
so far, and is saved whole or not at all.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cached_lab.data.archives import OPENERS, naming, refuse_utf16
from cached_lab.data.subwords import PairTokenizer
from cached_lab.data.tokenizers import SpecialTokens, Tokenizer, load_tokenizer
from cached_transformers import state as states
from cached_transformers.loops.streaming import Progress, read_stream

BLOCK = 1 << 16
LONGEST = 1 << 20
_LINE_END = re.compile(rb"(?<=\S)\n(?=\S)")
"""End of a piece: no token of any tokenizer crosses a single line feed."""


class TextPiece(NamedTuple):
    """Token ids of a piece, and its bytes in the (decompressed) text."""

    ids: list[int]
    size: int


def text_pieces(path: Path, tokenizer: Tokenizer) -> Iterator[TextPiece]:
    """Pieces of a file, plain or compressed (.xz, .gz, .bz2).

    Together they are the ids of the whole text, with the id before the first token.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, has lines of more than 1 MiB, or is not UTF-8 where the tokenizer needs that.
    """
    exact = tokenizer.vocabulary == 256 and tokenizer.lossless  # a piece of bytes may end anywhere
    first, begin = [tokenizer.start], 0

    def piece(text: bytes, last: bool) -> TextPiece:
        try:
            ids = tokenizer.encode(text.decode("utf-8", "surrogateescape")).tolist()
        except (UnicodeError, TypeError) as error:  # byte pairs need characters
            way = "convert it, or train with data.tokenizer=byte"
            raise ValueError(f"{path} is not UTF-8 after byte {begin:,}; {way}") from error
        if tokenizer.ends_document and not last:
            ids = ids[:-1]  # the mark of the end of a document
        return TextPiece([*first, *ids], len(text))

    rest = b""
    for block in _blocks(path):
        if not begin and not rest:
            refuse_utf16(block, path)
        rest += block
        ends = [len(rest)] if exact else [found.end() for found in _LINE_END.finditer(rest)]
        if ends:
            yield piece(rest[: ends[-1]], last=False)
            first, rest, begin = [], rest[ends[-1] :], begin + ends[-1]
        elif len(rest) > LONGEST:
            raise ValueError(
                f"{path} has no line end in {LONGEST:,} bytes from byte {begin:,} on, and a token may not be split; "
                "break the text into lines, or train with data.tokenizer=byte"
            )
    if rest:
        yield piece(rest, last=True)


def _blocks(path: Path) -> Iterator[bytes]:
    with OPENERS.get(path.suffix, open)(path, "rb") as file, naming(path, "file"):
        yield from iter(partial(file.read, BLOCK), b"")


class Bookmark(NamedTuple):
    """Position of a reading: the model's state and, float64 (1, 2), the tokens and nats so far. `what` identifies run,
    file and segments.
    """

    state: states.State
    numbers: Tensor
    what: Tensor


class Lap(NamedTuple):
    """A report during a reading.

    Attributes:
        now: the progress so far.
        tokens, nats: since the last report.
        rate: tokens per second since the last report.
    """

    now: Progress
    tokens: int
    nats: float
    rate: float


class TextReader:
    """A text read with a model, from the beginning or from a saved state.

    Args:
        model: a language model. tokenizer: of the model.
        file: the text. length: tokens of a segment.
        path: file of the state. what: its `fingerprint`; a state with another is refused.
        schedule: see `read_stream`; a state resumes with either.

    Attributes:
        first: tokens read before.
        now: the progress; None before anything is read.
        size: bytes of the text, once it is read to its end.

    Raises:
        ValueError: the state belongs to another run, file or segment length.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        file: Path,
        length: int,
        path: Path,
        what: Tensor,
        schedule: str = "segments",
    ) -> None:
        self.model, self.tokenizer, self.file, self.length = model.eval(), tokenizer, file, length
        self.path, self.what, self.schedule, self.size = path, what, schedule, 0
        self.now: Progress | None = None
        if path.is_file():
            empty = Bookmark(model.init_state(1), torch.zeros(1, 2, dtype=torch.float64), what)  # type: ignore[operator]
            before = states.load(path, empty)
            if not torch.equal(before.what, what):
                raise ValueError(
                    f"{path} belongs to another run, checkpoint, file or segment length; give another --state, or "
                    "remove it"
                )
            tokens, nats = before.numbers[0].tolist()
            self.now = Progress(int(tokens), nats, 0, 0.0, 0, before.state)
        self.first = 0 if self.now is None else self.now.tokens

    def _unread(self) -> Iterator[list[int]]:
        """Return the ids after the earlier inputs; the text read before is tokenised again."""
        skip = self.first
        for ids, size in text_pieces(self.file, self.tokenizer):
            self.size += size
            if skip < len(ids):
                yield ids[skip:]
            skip = max(skip - len(ids), 0)
        if skip:
            way = "give the same file, or another --state"
            raise ValueError(f"{self.file} is shorter than what was read of it before; {way}")

    def laps(self, every: int, tokens: int | None = None) -> Iterator[Lap]:
        """Read on; save the state and yield a report after each `every` tokens, and save at the end.

        Args:
            tokens: stop after about this number of tokens; None reads to the end.
        """
        done, nats = self.first, 0.0 if self.now is None else self.now.nats
        clock = time.perf_counter()
        stream = read_stream(
            self.model, self._unread(), self.length, start=self.now, in_place=True, schedule=self.schedule
        )
        for now in stream:
            self.now = now
            if now.tokens - done >= every:
                count = now.tokens - done
                yield Lap(now, count, now.nats - nats, count / (time.perf_counter() - clock))
                self._save(now)
                done, nats, clock = now.tokens, now.nats, time.perf_counter()
            if tokens is not None and now.tokens - self.first >= tokens:
                break
        if self.now is not None and self.now.tokens > self.first:
            self._save(self.now)

    def _save(self, now: Progress) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        numbers = torch.tensor([[now.tokens, now.nats]], dtype=torch.float64)
        states.save(Bookmark(now.state, numbers, self.what), self.path)


def read_tokenizer(path: Path, model: nn.Module) -> Tokenizer:
    """Load the tokenizer of a run of a language model.

    Args:
        path: the file. model: of the run.

    Raises:
        ValueError: there is none, it is damaged, or it belongs to another run or to a run of another kind.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: it is not a run of a language model on text")
    found = load_tokenizer(path.read_bytes(), path)
    if isinstance(found, (PairTokenizer, SpecialTokens)) or not hasattr(model, "init_state"):
        raise ValueError(
            f"{path.parent} is a run on pairs of texts, and no language model; give another run, or "
            "use cached translate where these are translations"
        )
    size = getattr(model, "vocabulary", found.vocabulary)
    if found.vocabulary > size:
        raise ValueError(f"{path} has {found.vocabulary} ids, the model {size}: it is of another run; restore the own")
    return found


def fingerprint(checkpoint: Path, file: Path, length: int) -> Tensor:
    """32 bytes that change with the weights, the beginning of the file, and the segments.

    Args:
        checkpoint: folder of the weights. file: the text. length: tokens of a segment.
    """
    digest = hashlib.sha256(f"{length}".encode())
    digest.update((checkpoint / "meta.json").read_bytes())
    with file.open("rb") as opened:
        digest.update(opened.read(4096))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)[None]
