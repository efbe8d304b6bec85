"""The loop over segments and passes: slices, states, and laziness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cached_transformers.models.segments import cut, read_earlier_passes, read_segments


class Out(NamedTuple):
    value: Tensor
    state: Tensor


@pytest.mark.parametrize(("length", "filled"), [(None, 0), (1, 0), (4, 0), (4, 1), (4, 3), (20, 0), (20, 3)])
@pytest.mark.parametrize("tokens", [1, 4, 11, 12])
def test_all_tokens_are_in_segments_and_an_open_one_is_filled(tokens: int, length: int | None, filled: int) -> None:
    parts = [range(tokens)[part] for part in cut(tokens, length, filled)]
    assert [token for part in parts for token in part] == list(range(tokens))
    if length is None:
        assert len(parts) == 1
        return
    sizes = [len(part) for part in parts]
    assert sizes[0] == min(length - filled, tokens) and all(size == length for size in sizes[1:-1])
    assert 0 < sizes[-1] <= length


def test_nothing_is_read_before_it_is_asked_for() -> None:
    """An endless stream can be read, and the caller may stop."""
    drawn: list[int] = []

    def stream() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            drawn.append(number)
            yield number

    outs = read_segments(lambda n, state, reset: Out(n, (0 if state is None else state) + n), stream(), None)
    assert drawn == []
    assert [next(outs).state for _ in range(3)] == [1, 3, 6] and drawn == [1, 2, 3]


@pytest.mark.parametrize(("bptt", "reached"), [(None, 3), (1, 1), (2, 1), (3, 3)])
def test_the_gradient_crosses_so_many_segments(bptt: int | None, reached: int) -> None:
    weights = [torch.ones(1, requires_grad=True) for _ in range(3)]
    outs = list(read_segments(lambda w, state, reset: Out(w, state + w), weights, torch.zeros(1), bptt=bptt))
    outs[-1].state.backward()
    assert outs[-1].state == 3 and sum(w.grad is not None for w in weights) == reached


def test_rows_begin_anew_with_the_first_segments_alone() -> None:
    met: list[object] = []
    resets = [torch.tensor([True]), None]
    list(read_segments(lambda n, state, reset: Out(met.append(reset), n), range(4), None, resets))
    assert met == [resets[0], None, None, None]


@pytest.mark.parametrize(("bptt", "cut_off"), [(None, False), (3, False), (2, True)])
def test_a_pass_begins_with_what_is_made_of_the_last_one(bptt: int | None, cut_off: bool) -> None:
    weight, calls = torch.ones(1, requires_grad=True), []

    def next_pass(before: Tensor, after: list[Tensor]) -> Tensor:
        calls.append((before.item(), [state.item() for state in after]))
        return before + 10 * after[-1]

    start = torch.zeros(1)
    state = read_earlier_passes(
        lambda n, state, reset: Out(n, state + n * weight), [1, 2, 3], start, next_pass, 3, bptt=bptt
    )
    assert calls == [(0, [1, 3, 6]), (60, [61, 63, 66])] and state == 720
    assert state.requires_grad is not cut_off
    assert read_earlier_passes(lambda *piece: pytest.fail("nothing is read"), [1], start, next_pass, 1) is start
