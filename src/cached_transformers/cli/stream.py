"""`cached stream RUN FILE`: read a text of any length in constant memory, and go on where reading stopped."""

from __future__ import annotations

import argparse
import hashlib
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers import state as states
from cached_transformers.data.tokenizers import Tokenizer, load_tokenizer
from cached_transformers.experiments.load import load_run
from cached_transformers.tasks.language.streaming import Progress, read_stream
from cached_transformers.tasks.language.text_pieces import Piece, text_pieces
from cached_transformers.training.checkpoint import Checkpoints
from cached_transformers.training.run_files import TOKENIZER


class Bookmark(NamedTuple):
    """Where reading stands: the model's state and, as tensors of one number, the place and the sums so far.

    `begin` is the byte at which the piece of the next token begins, `skip` counts the tokens of that piece that are
    read. `what` tells the run, the file and the segments it belongs to. As one state it is saved whole or not at all.
    """

    state: states.State
    begin: Tensor
    skip: Tensor
    tokens: Tensor
    nats: Tensor
    what: Tensor


class Places:
    """Remembers in which piece of the file the next token of the stream stands."""

    def __init__(self, pieces: Iterator[Piece], skip: int) -> None:
        self._pieces, self._skip = pieces, skip
        self._starts: list[tuple[int, int]] = []  # tokens handed out before a piece, byte at which it begins
        self._handed, self.end = -skip, 0

    def __iter__(self) -> Iterator[list[int]]:
        for piece in self._pieces:
            self._starts.append((self._handed, piece.begin))
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


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "stream",
        help="read a text of any length with a trained language model, in constant memory",
        description="Prints perplexity (bits per byte for bytes) as it reads, and keeps the state in a file: the same "
        "command goes on where it was stopped, with the numbers that an uninterrupted reading gives.",
        epilog="example: cached stream runs/lm war_and_peace.txt --every 100000",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder of a language model")
    parser.add_argument("file", metavar="FILE", type=Path, help="a text, plain or .xz, .gz, .bz2")
    parser.add_argument("--state", type=Path, help="file of the state (default: RUN/stream_FILE.safetensors)")
    parser.add_argument("--segment-length", type=int, metavar="N", help="tokens in a segment (default: the run's)")
    parser.add_argument("--every", type=int, default=50_000, metavar="TOKENS", help="tokens between lines and saves")
    parser.add_argument("--tokens", type=int, metavar="N", help="stop after about so many tokens; the state is kept")
    parser.add_argument("--checkpoint", default="best", metavar="best|last|PATH", help="default: best")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read on, print, save, and return 0.

    Raises:
        ValueError: not a run of a language model, a state of another run or file, numbers below 1.
        FileNotFoundError: there is no such text.
    """
    for name in ("segment_length", "every", "tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not arguments.file.is_file():
        raise FileNotFoundError(f"{arguments.file} is not a file; give the text that is to be read")
    config, model, _ = load_run(arguments.folder, arguments.checkpoint)
    if not (arguments.folder / TOKENIZER).is_file():
        raise ValueError(f"{arguments.folder} has no {TOKENIZER}: it is not a run of a language model on text")
    tokenizer = load_tokenizer((arguments.folder / TOKENIZER).read_bytes())
    length = arguments.segment_length or config.evaluation.segment_length or config.training.segment_length
    path = arguments.state or arguments.folder / f"stream_{arguments.file.name}.safetensors"
    what = _fingerprint(arguments, length)
    return _read(model.to(arguments.device), tokenizer, arguments, length, path, what)


def _read(
    model: nn.Module, tokenizer: Tokenizer, arguments: argparse.Namespace, length: int, path: Path, what: Tensor
) -> int:
    before = _load(path, model, what)
    start, begin, skip = None, 0, 0
    if before is not None:
        begin, skip = int(before.begin), int(before.skip)
        start = Progress(int(before.tokens), float(before.nats), 0, 0.0, 0, before.state)
        print(f"going on behind token {start.tokens:,} ({path})")
    places = Places(text_pieces(arguments.file, tokenizer, begin), skip)
    first = 0 if start is None else start.tokens
    now, printed, clock, nats = start, first, time.perf_counter(), 0.0 if start is None else start.nats
    for now in read_stream(model, places, length, start=start):
        if now.tokens - printed >= arguments.every:
            rate = (now.tokens - printed) / (time.perf_counter() - clock)
            print(_line(now, now.nats - nats, now.tokens - printed, tokenizer, rate), flush=True)
            _save(path, now, places, what)
            printed, clock, nats = now.tokens, time.perf_counter(), now.nats
        if arguments.tokens is not None and now.tokens - first >= arguments.tokens:
            break
    if now is None or now.tokens == first:
        print(f"nothing new to read in {arguments.file}")
        return 0
    _save(path, now, places, what)
    size = f", {now.bits_per_byte(places.end):.4f} bits per byte" if arguments.tokens is None else ""
    print(f"{now.tokens:,} tokens: loss {now.nats / now.tokens:.4f} nats, perplexity {now.perplexity:.3f}{size}")
    print(f"state: {path}")
    return 0


def _line(now: Progress, nats: float, tokens: int, tokenizer: Tokenizer, rate: float) -> str:
    recent = Progress(tokens, nats, 0, 0.0, 0, None)
    exact = tokenizer.vocabulary == 256 and tokenizer.lossless
    kind = "bits per byte" if exact else "perplexity"
    values = [r.bits_per_byte(r.tokens) if exact else r.perplexity for r in (now, recent)]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    numbers = f"{kind} {values[0]:.4f}, of the last {tokens:,} {values[1]:.4f}"
    return f"{now.tokens:>12,} tokens  {numbers}  {rate:,.0f} tokens/s  {resident:,.0f} MiB"


def _bookmark(state: states.State, begin: int, skip: int, tokens: int, nats: float, what: Tensor) -> Bookmark:
    place_1, skip_1, tokens_1 = (torch.tensor([n], dtype=torch.long) for n in (begin, skip, tokens))
    return Bookmark(state, place_1, skip_1, tokens_1, torch.tensor([nats], dtype=torch.float64), what)


def _save(path: Path, now: Progress, places: Places, what: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    states.save(_bookmark(now.state, *places.place(now.consumed), now.tokens, now.nats, what), path)


def _load(path: Path, model: nn.Module, what: Tensor) -> Bookmark | None:
    if not path.is_file():
        return None
    empty = _bookmark(model.init_state(1), 0, 0, 0, 0.0, what)  # type: ignore[operator]
    stored: Bookmark = states.load(path, empty)
    if not torch.equal(stored.what, what):
        raise ValueError(
            f"{path} belongs to another run, checkpoint, file or segment length; give another --state, or remove it"
        )
    return stored


def _fingerprint(arguments: argparse.Namespace, length: int) -> Tensor:
    """32 bytes that change with the weights, the beginning of the file, and the segments."""
    checkpoint = arguments.checkpoint
    named = checkpoint in ("best", "last")
    folder = Checkpoints(arguments.folder / "checkpoints").named(checkpoint) if named else Path(checkpoint)
    digest = hashlib.sha256(f"{length}".encode())
    digest.update((folder / "meta.json").read_bytes())
    with arguments.file.open("rb") as file:
        digest.update(file.read(4096))
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)[None]
