"""Some neighbouring segments of a row read layer by layer, so that the state of a layer leaves before the next runs.

    time          0     1     2     3     4         two processes of two segments each: layer l of segment t needs
    segments 2,3        l=0   l=1   l=2   l=3       layer l - 1 of segment t, and its own state behind segment t - 1,
    segments 0,1  l=0   l=1   l=2   l=3             so that the later segments follow one layer behind

This is the order of `diagonal.py` for processes in the place of groups: each lets all of its segments pass the first
layer, hands on that layer's state, and goes to the second. Outputs, states and gradients are those of one segment after
the other; a backward pass, which goes through what was made in reverse, needs the states' gradients in reverse.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.state import State

from .diagonal import Line

PartOf = Callable[[int, State], State]
"""(number, state) -> state: number 0 is the clock of the rows, l + 1 the state of layer l."""


def read_by_layers(
    model: Any,
    pieces: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
    state: StackState | None,
    resets: Sequence[Tensor | None],
    bptt: int | None,
    first: int,
    arrive: PartOf,
    leave: PartOf,
) -> list[ModelOutput]:
    """Read pieces layer by layer; their outputs in order, with the states behind them.

    Args:
        model: what `diagonal.check_layers` lets pass.
        pieces: inputs of a segment, targets or None, padding or None; at least one.
        state: before the first piece; None for the start of a stream.
        resets: rows that begin anew at each of the pieces.
        bptt: the state is cut from the graph before every piece whose number is a multiple of it; None never cuts.
        first: number of the first piece in its row.
        arrive: what a part of `state` is, asked for right before it is used. leave: told each part behind the last
            piece as soon as it is there; what it returns is ignored.
    """
    before = model.init_state(len(pieces[0][0])) if state is None else state
    before = before._replace(clock_B=arrive(0, before.clock_B))
    line = Line(model, [[layer] for layer in range(len(model.stack.blocks))], before)
    for index, piece in enumerate(pieces):
        reset_B = resets[index] if index < len(resets) else None
        line.enter(*piece, reset_B, cut=bool(bptt and index and (first + index) % bptt == 0))
    leave(0, line.last.clock_B)  # type: ignore[union-attr]
    for layer, group in enumerate(line.groups):
        line.states[layer] = arrive(layer + 1, line.states[layer])
        for segment in line.moving:
            line.run(group, 0, [segment])
        leave(layer + 1, line.states[layer])
    return [line.leave() for _ in pieces]
