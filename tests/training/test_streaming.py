"""Streams: the same numbers however a text is cut into pieces and wherever reading stopped, in constant memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.loops.streaming import Progress, read_stream

VOCABULARY, SEGMENT = 17, 8
MEMORY = {"name": "grc_stream", "length": 4}


def model_with(memory: dict[str, object] | None, width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": width, "depth": 1, "heads": 2, "feed_forward": width}
    return create_model("language_model", **sizes, memory=memory)


def text(length: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def cut(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]


@torch.no_grad()
def by_hand(model: nn.Module, tokens: list[int]) -> float:
    state, total = None, 0.0
    for begin in range(0, len(tokens) - 1, SEGMENT):
        chunk = torch.tensor([tokens[begin : begin + SEGMENT + 1]])
        out = model.eval()(chunk[:, :-1], state)
        state = out.state
        total += F.cross_entropy(out.outputs[0].double(), chunk[0, 1:], reduction="sum").item()
    return total


@pytest.mark.parametrize("length", [2, SEGMENT, SEGMENT + 1, 5 * SEGMENT + 1, 61])
@pytest.mark.parametrize("size", [1, 3, SEGMENT, 100])
def test_every_token_but_the_first_is_predicted_once_however_the_text_is_cut(length: int, size: int) -> None:
    model, tokens = model_with(MEMORY), text(length)
    pieces = cut(tokens, size)
    *_, last = read_stream(model, map(np.array, pieces) if size == 3 else pieces, SEGMENT)  # type: ignore[arg-type]
    assert last.tokens == last.consumed == length - 1
    assert last.nats == pytest.approx(by_hand(model, tokens), rel=1e-6)
    assert last.bits_per_byte(length) == pytest.approx(last.nats / length * 1.4426950408889634)


def test_reading_goes_on_with_identical_numbers_and_of_nothing_is_nothing() -> None:
    model, tokens = model_with(MEMORY), text(100)
    whole = list(read_stream(model, [tokens], SEGMENT))
    for stop in (0, 4, 10):
        middle = whole[stop]
        rest = list(read_stream(model, [tokens[middle.consumed :]], SEGMENT, start=middle))
        assert [r[:5] for r in rest] == [r[:5] for r in whole[stop + 1 :]]
        got, want = (dict(states.named_tensors(read[-1].state)) for read in (rest, whole))
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert list(read_stream(model_with(None), [[], [3]], SEGMENT)) == []
    with pytest.raises(ValueError, match="segment_length=0"):
        next(read_stream(model_with(None), [[1, 2]], 0))


def long_text(tokens: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(tokens // 1000):
        yield torch.randint(0, VOCABULARY, (1000,), generator=generator).tolist()


def resident() -> int:
    """Bytes in memory now; the most there ever were where the system does not say."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_long_text_takes_constant_memory_and_constant_time_a_token() -> None:
    """Measure the memory added by each tenth of the text, so that growth is visible in a third of a million tokens."""
    model, tokens = model_with({"name": "rmt", "length": 4}), 300_000
    every = tokens // 512 // 10
    held, seconds, size = [], [], set()
    began = time.process_time()
    last: Progress | None = None
    for index, last in enumerate(read_stream(model, long_text(tokens), 512)):
        if index % every == every - 1:
            now = time.process_time()
            seconds.append(now - began)
            began = now
            held.append(resident())
            size.add(states.nbytes(last.state))
    assert last is not None and last.tokens == tokens - 1 and len(seconds) == 10
    assert len(size) == 1, "the state grew"
    assert held[-1] - held[0] < 6 * 2**20, f"bytes in memory at every tenth: {held}"
    early, late = sorted(seconds[:5])[2], sorted(seconds[5:])[2]
    assert late < 2 * early, f"CPU seconds for each tenth: {seconds}"
