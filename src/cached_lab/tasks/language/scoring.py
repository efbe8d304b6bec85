"""Reading a text with a trained language model, and going on where reading stopped, with the numbers of one reading.

What has to be kept is the model's state, the place in the file and the sums so far: a `Bookmark`, which is saved whole
or not at all.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cached_lab.data.subwords import PairTokenizer
from cached_lab.data.tokenizers import SpecialTokens, Tokenizer, load_tokenizer
from cached_transformers import state as states
from cached_transformers.loops.streaming import Progress, read_stream

from .text_pieces import Piece, text_pieces


class Bookmark(NamedTuple):
    """Where reading stands: the model's state and, as tensors of one number, the place and the sums so far.

    `begin` is the byte at which the piece of the next token begins, `skip` counts the tokens of that piece that are
    read, `unknown` the tokens so far that stand for words which the vocabulary lacks. `what` tells run, file and
    segments that it belongs to. As one state it is saved whole or not at all.
    """

    state: states.State
    begin: Tensor
    skip: Tensor
    tokens: Tensor
    nats: Tensor
    unknown: Tensor
    what: Tensor


class Places:
    """Remembers in which piece of the file the next token of the stream stands, and counts unknown words.

    Args:
        skip: tokens of the first piece that are read already.
        id: of unknown words; None where there are none.
    """

    def __init__(self, pieces: Iterator[Piece], skip: int, id: int | None = None) -> None:
        self._pieces, self._skip, self._id = pieces, skip, id
        self._unknown: deque[int] = deque()  # tokens handed out before each unknown word that is not counted yet
        self._starts: list[tuple[int, int]] = []  # tokens handed out before a piece, byte at which it begins
        self._handed, self.end = -skip, 0

    def __iter__(self) -> Iterator[list[int]]:
        for piece in self._pieces:
            self._starts.append((self._handed, piece.begin))
            self._unknown += [self._handed + i for i, token in enumerate(piece.ids) if token == self._id]
            self._handed += len(piece.ids)
            self.end = piece.end
            yield piece.ids[self._skip :]
            self._skip = 0

    def place(self, consumed: int) -> tuple[int, int]:
        """Byte at which the piece of the token after `consumed` ones begins, and that token's place in it."""
        while len(self._starts) > 1 and self._starts[1][0] <= consumed:
            self._starts.pop(0)
        handed, begin = self._starts[0]
        return begin, consumed - handed

    def unknown(self, consumed: int) -> int:
        """Unknown words among the tokens that were predicted up to so many inputs, and not counted by another call."""
        count = 0
        while self._unknown and self._unknown[0] <= consumed:
            count += self._unknown.popleft() > 0  # the first token was an input alone, or predicted before
        return count


class Lap(NamedTuple):
    """What is told of a reading from time to time.

    Attributes:
        now: where reading stands.
        tokens, nats: of the time since the last telling.
        rate: tokens a second in that time.
    """

    now: Progress
    tokens: int
    nats: float
    rate: float


class TextReader:
    """A text that is read with a model, from the beginning or from where a saved state stands.

    Args:
        model: a language model. tokenizer: of the model.
        file: the text. length: tokens of a segment.
        path: file of the state. what: its `fingerprint`; a state of another is refused.
        schedule: as of `read_stream`; a state goes on with either.

    Attributes:
        first: tokens that were read before.
        now: where it stands; None before anything is read.
        unknown: how many of the tokens up to there stand for words that the vocabulary lacks.

    Raises:
        ValueError: the state belongs to something else.
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
        self.model, self.file, self.length, self.path, self.what = model.eval(), file, length, path, what
        self.schedule = schedule
        self.now: Progress | None = None
        begin = skip = self.unknown = 0
        if (before := _load(path, model, what)) is not None:
            begin, skip, self.unknown = int(before.begin), int(before.skip), int(before.unknown)
            self.now = Progress(int(before.tokens), float(before.nats), 0, 0.0, 0, before.state)
        self.first = 0 if self.now is None else self.now.tokens
        self.places = Places(text_pieces(file, tokenizer, begin), skip, tokenizer.unknown)

    def laps(self, every: int, tokens: int | None = None) -> Iterator[Lap]:
        """Read on; the state is saved, and a lap given, whenever `every` tokens are read, and saved at the end.

        Args:
            tokens: stop after about so many; None reads to the end.
        """
        done, nats = self.first, 0.0 if self.now is None else self.now.nats
        clock = time.perf_counter()
        stream = read_stream(
            self.model, self.places, self.length, start=self.now, in_place=True, schedule=self.schedule
        )
        for now in stream:
            self.now = now
            self.unknown += self.places.unknown(now.consumed)
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
        place = self.places.place(now.consumed)
        states.save(_bookmark(now.state, *place, now.tokens, now.nats, self.unknown, self.what), self.path)


def read_tokenizer(path: Path, model: nn.Module) -> Tokenizer:
    """The tokenizer in a folder of a run of a language model.

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
        raise ValueError(
            f"{path} has {found.vocabulary} ids, the model {size}: it is that of another run; put the run's own back"
        )
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


def _bookmark(
    state: states.State, begin: int, skip: int, tokens: int, nats: float, unknown: int, what: Tensor
) -> Bookmark:
    place_1, skip_1, tokens_1, unknown_1 = (torch.tensor([n]) for n in (begin, skip, tokens, unknown))
    return Bookmark(state, place_1, skip_1, tokens_1, torch.tensor([nats], dtype=torch.float64), unknown_1, what)


def _load(path: Path, model: nn.Module, what: Tensor) -> Bookmark | None:
    if not path.is_file():
        return None
    empty = _bookmark(model.init_state(1), 0, 0, 0, 0.0, 0, what)  # type: ignore[operator]
    stored: Bookmark = states.load(path, empty)
    if not torch.equal(stored.what, what):
        raise ValueError(
            f"{path} belongs to another run, checkpoint, file or segment length; give another --state, or remove it"
        )
    return stored
