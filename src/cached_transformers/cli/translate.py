"""`cached translate RUN < FILE > FILE`: translate line by line, in constant memory and in order.

One line out for each line in. What was translated is written after each batch, so that a stop leaves whole lines
behind; with --output FILE --resume the same command goes on behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from cached_transformers.data.pairs import Pair, pad_pairs
from cached_transformers.data.subwords import PairTokenizer
from cached_transformers.data.tokenizers import load_tokenizer
from cached_transformers.experiments.load import load_run
from cached_transformers.tasks.translation.datasets import truncated
from cached_transformers.tasks.translation.parallel_files import decode_line
from cached_transformers.tasks.translation.translate import translate
from cached_transformers.training.distributed import pick_device
from cached_transformers.training.run_files import TOKENIZER

LONGEST = 1 << 20
"""Bytes of a line that are read; no model sees so much of one."""


class Line(NamedTuple):
    """A line of the input: its number from 1 on, and its text."""

    number: int
    text: str


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "translate",
        help="translate lines of text with a trained run",
        description="Reads lines, writes a line for each, in order; an empty line stays empty. Text is to look as the "
        "training data did: raw, or Moses tokens with blanks between them.",
        epilog="example: cached translate runs/multi30k_en_de_plain < english.txt > german.txt",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder of a translation model")
    parser.add_argument("--input", type=Path, metavar="FILE", help="default: standard input")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--resume", action="store_true", help="go on behind the lines that --output holds already")
    parser.add_argument(
        "--beams", type=int, metavar="K", help="continuations that the search keeps (default: the run's)"
    )
    parser.add_argument(
        "--length-penalty", type=float, metavar="A", help="score = log-probability / length ** A (default: the run's)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="T", help="tokens of a translation at most (default: twice the source's, and 10)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="lines at a time (default: 32; 1 from a terminal)")
    parser.add_argument(
        "--checkpoint",
        default="tested",
        metavar="tested|best|last|PATH",
        help="default: tested, the one of the summary",
    )
    parser.add_argument("--average", type=int, metavar="N", help="average the weights of the newest N checkpoints")
    parser.add_argument(
        "--scores", action="store_true", help="put the log-probability and a tab before each translation"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Translate and return 0.

    Raises:
        ValueError: not a run of a translation model, an option out of its range, a line that is not UTF-8.
        FileNotFoundError: there is no such input.
    """
    batch = arguments.batch
    if batch is not None and batch < 1:
        raise ValueError(f"--batch {batch} must be at least 1 line")
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume goes on with a file; give --output FILE")
    if arguments.input is not None and not arguments.input.is_file():
        raise FileNotFoundError(f"{arguments.input} is not a file; give the text that is to be translated")
    config, model, _ = load_run(arguments.folder, arguments.checkpoint, arguments.average)
    tokenizer = read_tokenizer(arguments.folder)
    options: dict[str, Any] = {
        "beams": config.evaluation.beams if arguments.beams is None else arguments.beams,
        "tokens": config.evaluation.tokens if arguments.tokens is None else arguments.tokens,
        "length_penalty": (
            config.evaluation.length_penalty if arguments.length_penalty is None else arguments.length_penalty
        ),
    }
    model.to(pick_device(arguments.device)).eval()
    _check(model, **options)
    done = 0 if not arguments.resume else _whole_lines(arguments.output)
    name = "standard input" if arguments.input is None else str(arguments.input)
    if done:
        print(f"going on behind line {done:,} of {arguments.output}", file=sys.stderr)
    with contextlib.ExitStack() as opened:
        source: IO[bytes] = sys.stdin.buffer
        if arguments.input is not None:
            source = opened.enter_context(arguments.input.open("rb"))
        target: IO[bytes] = sys.stdout.buffer
        if arguments.output is not None:
            target = opened.enter_context(arguments.output.open("ab" if arguments.resume else "wb"))
        if batch is None:
            batch = 1 if source.isatty() else 32
        for texts in translated(model, tokenizer, lines(source, name, done), batch, options, arguments.scores):
            target.write("".join(f"{text}\n" for text in texts).encode())
            target.flush()
    return 0


def read_tokenizer(folder: Path) -> PairTokenizer:
    """The tokenizer of a translation run (ValueError when it is none)."""
    path = folder / TOKENIZER
    found = load_tokenizer(path.read_bytes()) if path.is_file() else None
    if not isinstance(found, PairTokenizer):
        raise ValueError(f"{folder} is not a run of a translation model: it has no {TOKENIZER} of two languages")
    return found


def lines(file: IO[bytes], name: str, skip: int = 0) -> Iterator[Line]:
    """Lines of a file without their ends; of a line beyond a mebibyte, its beginning.

    Args:
        skip: so many are read and left out.

    Raises:
        ValueError: a line is not UTF-8; the lines before it have been given.
    """
    number = 0
    while content := file.readline(LONGEST):
        number += 1
        left_out = False
        if len(content) == LONGEST and not content.endswith(b"\n"):
            while rest := file.readline(LONGEST):
                left_out = left_out or rest != b"\n"
                if rest.endswith(b"\n"):
                    break
        if left_out:
            # The cut may stand in the middle of a character.
            content = content.decode("utf-8", "ignore").encode()
            _warn(f"{name}, line {number} has more than {LONGEST:,} bytes; the rest is left out")
        if number > skip:
            yield Line(number, decode_line(content.removesuffix(b"\n"), name, number))


def translated(
    model: nn.Module,
    tokenizer: PairTokenizer,
    source: Iterator[Line],
    batch: int,
    options: dict[str, Any],
    scores: bool = False,
) -> Iterator[list[str]]:
    """Translations of batches of lines; those that cannot be read end the stream behind what was translated."""
    problem: ValueError | None = None
    while problem is None:
        waiting: list[Line] = []
        try:
            for line in source:
                waiting.append(line)
                if len(waiting) == batch:
                    break
        except ValueError as error:
            problem = error
        if waiting:
            yield _translate(model, tokenizer, waiting, options, scores)
        elif problem is None:
            return
    raise problem


def _translate(
    model: nn.Module, tokenizer: PairTokenizer, batch: list[Line], options: dict[str, Any], scores: bool
) -> list[str]:
    texts = ["0.0000\t" if scores else ""] * len(batch)
    # Empty lines are no sentences, whatever a model would make of them.
    places = [place for place, line in enumerate(batch) if line.text.strip()]
    if not places:
        return texts
    encoded = tokenizer.encode_batch([batch[place].text for place in places])
    longest = int(model.max_length)  # type: ignore[arg-type]
    for place, ids in zip(places, encoded, strict=True):
        if len(ids) > longest:
            _warn(f"line {batch[place].number} has {len(ids):,} tokens; the first {longest - 1:,} are translated")
        if tokenizer.unknown in ids and not tokenizer.knows(ids):
            _warn(f"line {batch[place].number} holds nothing that the tokenizer knows")
    sources = [torch.tensor(truncated(ids, longest)) for ids in encoded]
    nothing = torch.tensor([tokenizer.begin])
    pairs = pad_pairs([Pair(ids, nothing, nothing) for ids in sources], tokenizer.pad)
    device = next(model.parameters()).device
    found = translate(
        model,  # type: ignore[arg-type]
        pairs.inputs.to(device),
        padding=pairs.padding.to(device),
        begin=tokenizer.begin,
        end=tokenizer.end,
        **options,
    )
    for place, ids, length, score in zip(
        places, found.tokens_BT.tolist(), found.length_B.tolist(), found.score_B.tolist(), strict=True
    ):
        # A line in is a line out, whatever the model says.
        text = " ".join(tokenizer.decode(ids[:length]).splitlines())
        texts[place] = f"{score:.4f}\t{text}" if scores else text
    return texts


def _check(model: nn.Module, beams: int, tokens: int | None, length_penalty: float) -> None:
    """Refuse wrong options before anything is read or written (ValueError)."""
    if beams < 1:
        raise ValueError(f"--beams {beams} must be at least 1; 1 takes the likeliest token each time")
    longest = int(model.max_length)  # type: ignore[arg-type]
    if tokens is not None and not 1 <= tokens <= longest:
        raise ValueError(
            f"--tokens {tokens} must be at least 1, and at most the {longest} that the model was built for"
        )
    if not math.isfinite(length_penalty):
        raise ValueError(f"--length-penalty {length_penalty} must be finite; 0 compares sums, 1 means")


def _whole_lines(path: Path) -> int:
    """How many whole lines a file has; one that was cut short is removed."""
    if not path.is_file():
        return 0
    count = end = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
    os.truncate(path, end)
    return count


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
