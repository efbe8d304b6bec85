"""Translate a text line by line, in constant memory and in order: one output line per input line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from cached_lab.data.pairs import Pair, pad_pairs
from cached_lab.data.subwords import PairTokenizer
from cached_lab.data.tokenizers import load_tokenizer
from cached_transformers.models.encoder_decoder import EncoderDecoder

from .datasets import truncated
from .parallel_files import decode_line
from .translate import translate


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
    """Yield lines of a file without their ends.

    Args:
        skip: number of first lines to leave out.

    Raises:
        ValueError: a line is not UTF-8; the lines before it have been yielded.
    """
    for number, content in enumerate(file, 1):
        if number > skip:
            yield NumberedLine(number, decode_line(content.removesuffix(b"\n"), name, number))


def translated(
    model: EncoderDecoder,
    tokenizer: PairTokenizer,
    source: Iterator[NumberedLine],
    batch: int,
    options: dict[str, Any],
    scores: bool = False,
) -> Iterator[list[str]]:
    """Yield translations of batches of lines; an unreadable line raises ValueError after all lines before it.

    Args:
        options: of `translate`: begin, end, beams, tokens, length_penalty.
        scores: put the log-probability and a tab before each translation.
    """
    problem: ValueError | None = None
    while problem is None:
        waiting: list[NumberedLine] = []
        try:
            for line in islice(source, batch):
                waiting.append(line)  # lines before an error count
        except ValueError as error:
            problem = error
        if waiting:
            yield _translate(model, tokenizer, waiting, options, scores)
        elif problem is None:
            return
    raise problem


def _translate(
    model: EncoderDecoder, tokenizer: PairTokenizer, batch: list[NumberedLine], options: dict[str, Any], scores: bool
) -> list[str]:
    texts = ["0.0000\t" if scores else ""] * len(batch)
    # Empty lines stay empty.
    places = [place for place, line in enumerate(batch) if line.text.strip()]
    if not places:
        return texts
    encoded = tokenizer.encode_batch([batch[place].text for place in places])
    for place, ids in zip(places, encoded, strict=True):
        if len(ids) > model.max_length:
            kept = f"the first {model.max_length - 1:,} are translated"
            print(f"warning: line {batch[place].number} has {len(ids):,} tokens; {kept}", file=sys.stderr, flush=True)
    nothing = torch.tensor([tokenizer.begin])
    sources = [Pair(torch.tensor(truncated(ids, model.max_length)), nothing, nothing) for ids in encoded]
    pairs, device = pad_pairs(sources, tokenizer.pad), next(model.parameters()).device
    found = translate(model, pairs.inputs.to(device), padding=pairs.padding.to(device), **options)
    for place, (answer, score) in zip(places, found.texts(tokenizer), strict=True):
        text = " ".join(answer.splitlines())  # one output line per input line
        texts[place] = f"{score:.4f}\t{text}" if scores else text
    return texts


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
