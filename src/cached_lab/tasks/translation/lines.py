"""Translate a text line by line, in constant memory and in order: one output line per input line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from cached_lab.data.pairs import Pair, pad_pairs
from cached_lab.data.subwords import PairTokenizer
from cached_lab.data.tokenizers import load_tokenizer
from cached_transformers.checks import comparing_lengths

from .datasets import truncated
from .parallel_files import decode_line
from .translate import translate

LONGEST = 1 << 20
"""Most bytes read of a line, more than any model takes."""


class NumberedLine(NamedTuple):
    """A line of the input: its number, from 1 on, and its text."""

    number: int
    text: str


def read_tokenizer(path: Path) -> PairTokenizer:
    """Return the tokenizer of a translation run, or raise ValueError."""
    found = load_tokenizer(path.read_bytes(), path) if path.is_file() else None
    if not isinstance(found, PairTokenizer):
        raise ValueError(f"{path.parent} is not a run of a translation model: it has no {path.name} of two languages")
    return found


def read_lines(file: IO[bytes], name: str, skip: int = 0) -> Iterator[NumberedLine]:
    """Yield lines of a file without their ends, truncated to a mebibyte.

    Args:
        skip: number of first lines to leave out.

    Raises:
        ValueError: a line is not UTF-8; the lines before it have been yielded.
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
            # The last character may be incomplete.
            content = content.decode("utf-8", "ignore").encode()
            _warn(f"{name}, line {number} has more than {LONGEST:,} bytes; the rest is left out")
        if number > skip:
            yield NumberedLine(number, decode_line(content.removesuffix(b"\n"), name, number))


def translated(
    model: nn.Module,
    tokenizer: PairTokenizer,
    source: Iterator[NumberedLine],
    batch: int,
    options: dict[str, Any],
    scores: bool = False,
) -> Iterator[list[str]]:
    """Yield translations of batches of lines; an unreadable line raises ValueError after all lines before it.

    Args:
        options: of the search (`translate`), checked by `check_search`.
        scores: put the log-probability and a tab before each translation.
    """
    problem: ValueError | None = None
    while problem is None:
        waiting: list[NumberedLine] = []
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
    model: nn.Module, tokenizer: PairTokenizer, batch: list[NumberedLine], options: dict[str, Any], scores: bool
) -> list[str]:
    texts = ["0.0000\t" if scores else ""] * len(batch)
    # Empty lines stay empty.
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
    for place, (answer, score) in zip(places, found.texts(tokenizer), strict=True):
        text = " ".join(answer.splitlines())  # one output line per input line
        texts[place] = f"{score:.4f}\t{text}" if scores else text
    return texts


def check_search(model: nn.Module, beams: int, tokens: int | None, length_penalty: float) -> None:
    """Raise ValueError for wrong options, before any line is read or written."""
    if beams < 1:
        raise ValueError(f"--beams {beams} must be at least 1; 1 takes the likeliest token each time")
    longest = int(model.max_length)  # type: ignore[arg-type]
    if tokens is not None and not 1 <= tokens <= longest:
        raise ValueError(f"--tokens {tokens} must be at least 1, and at most the {longest} of the model")
    comparing_lengths(**{"--length-penalty": length_penalty})


def cut_to_whole_lines(path: Path) -> int:
    """Remove an incomplete last line of a file, and return the number of whole lines."""
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
