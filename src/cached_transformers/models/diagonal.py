"""Diagonal batching: layers work on different segments at the same time (Sivtsov et al. 2025, arXiv:2506.05229).

    time      0    1    2    3    4    5      layer l of segment t needs layer l - 1 of segment t and its own state
    layer 2             0    1    2    3      after segment t - 1: the entries of one column are independent and run
    layer 1        0    1    2    3           at once, S + L - 1 groups instead of S L blocks
    layer 0   0    1    2    3

Outputs, states and gradients equal sequential reading. At most L segments are in flight, so a stream
of any length is read in the memory of L segments and L states.

Legend: B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import ModelMemory, Tokens
from cached_transformers.layers.incremental_decoding import is_watched
from cached_transformers.layers.stack import ModelOutput, Stack, StackState
from cached_transformers.layers.vmap_blocks import VmapBlocks, difference, group_equal
from cached_transformers.memories.parts.composite import members_of
from cached_transformers.registry import unknown_name
from cached_transformers.state import State, detach, seal
from cached_transformers.state import reset as reset_rows

SCHEDULES = ("segments", "diagonal")
"""Orders of the layers of several segments."""
WAY_OUT = "take schedule='segments'"


def check_schedule(schedule: str, model: Any) -> None:
    """Refuse (ValueError) an unknown schedule, and a model that the diagonal one cannot read."""
    if schedule not in SCHEDULES:
        raise ValueError(unknown_name("schedule", schedule, list(SCHEDULES)))
    if schedule == "diagonal":
        _groups(model)


def read_diagonally(
    model: Any,
    pieces: Iterable[tuple[Tensor, Tensor | None, Tensor | None]],
    state: StackState | None = None,
    resets: Sequence[Tensor | None] = (),
    bptt: int | None = None,
) -> Iterator[ModelOutput]:
    """Read pieces along diagonals and yield every output in the order of the pieces.

    The outputs equal `segments.read_segments`, but up to L pieces are requested before the first output.
    Neighbouring pieces of one shape run together. Weights are read at the first piece.

    Args:
        model: a `LanguageModel`, a `SequenceClassifier`, or a model with their parts: `check_call`, `embed`, a stack,
            and `answer`.
        pieces: inputs of a segment, targets or None, padding or None; with targets, outputs are their losses.
        state: before the first piece; None for the start of a stream.
        resets: rows that are reset before each of the first pieces.
        bptt: the state is detached after every `bptt` pieces; None never detaches.

    Raises:
        ValueError: the model cannot be read along diagonals.
    """
    reader = _DiagonalReader(model, state)
    for index, piece in enumerate(pieces):
        reset_B = resets[index] if index < len(resets) else None
        reader.enter(*piece, reset_B, detached=bool(bptt and index and index % bptt == 0))
        yield from reader.advance()
    while reader.in_flight:
        yield from reader.advance()


@dataclass
class _SegmentInFlight:
    """A segment before the layer `len(states)`.

    Attributes:
        reset: rows to reset before it, and fresh states of the layers; None for no row.
        detached: whether no gradient crosses from it into the segment before.
        after: the state after the segment, without the states of its layers.
        states, losses: of the layers that have read it.
    """

    targets_BN: Tensor | None
    tokens: Tokens
    reset: tuple[Tensor, State] | None
    detached: bool
    after: StackState
    states: list[State] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def stacks_with(self, other: _SegmentInFlight) -> bool:
        """Return whether both segments have one shape."""
        mine, others = self.tokens, other.tokens
        return mine.x_BND.shape == others.x_BND.shape and (mine.padding_BN is None) == (others.padding_BN is None)


class _DiagonalReader:
    """The layers of a model and the segments in flight.

    Attributes:
        in_flight: segments, the oldest first.
        last: the state before the next segment, whose clock is current; None for the start of a stream.
        states: of each layer, after the last segment that it read.
    """

    def __init__(self, model: Any, state: StackState | None) -> None:
        self.model, self.stack = model, model.stack
        self.groups = [VmapBlocks(model.stack, layers) for layers in _groups(model)]
        self.in_flight: deque[_SegmentInFlight] = deque()
        self.last = state
        self.states: list[State] = []

    def enter(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor | None,
        padding_BN: Tensor | None,
        reset_B: Tensor | None,
        detached: bool,
    ) -> None:
        """Put a segment before the first layer."""
        rows, before = inputs_BN.shape[0], self.last
        self.model.check_call(inputs_BN, before, reset_B, padding_BN, targets_BN)
        if before is None:
            before = self.model.init_state(rows)
        self.states = self.states or list(before.layers)
        reset = None
        if reset_B is not None:
            fresh = self.model.init_state(rows)
            reset = (reset_B, fresh.layers)
            before = before._replace(clock_B=reset_rows(before.clock_B, fresh.clock_B, reset_B))
        x_BND, options = self.model.embed(inputs_BN, before, padding_BN)
        tokens = self.stack.placed(before, x_BND, **options)
        self.last = before._replace(clock_B=self.stack.clock_after(before, tokens))
        self.in_flight.append(_SegmentInFlight(targets_BN, tokens, reset, detached, self.last))

    def advance(self) -> list[ModelOutput]:
        """Run the next layer of every segment; return the output of a segment that has passed all layers."""
        by_layer = {len(segment.states): segment for segment in self.in_flight}
        for group in self.groups:
            for first, segments in _runs(group.layers, by_layer):
                self._run(group, first, segments)
        if len(self.in_flight[0].states) < len(self.stack.blocks):
            return []
        segment = self.in_flight.popleft()
        h_BND, state = segment.tokens.x_BND, segment.after._replace(layers=tuple(segment.states))
        loss = torch.stack([h_BND.new_zeros(()), *segment.losses]).sum()
        return [ModelOutput(self.model.answer(self.stack.norm(h_BND), segment.targets_BN), seal(state), loss)]

    def _run(self, group: VmapBlocks, first: int, segments: Sequence[_SegmentInFlight]) -> None:
        """Run the layers of a group from index `first` on, each on its segment."""
        layers = group.layers[first : first + len(segments)]
        states = [self._state_before(segment, layer) for segment, layer in zip(segments, layers, strict=True)]
        outputs = group.run(first, [segment.tokens for segment in segments], states)
        for segment, layer, (x_BND, state, loss) in zip(segments, layers, outputs, strict=True):
            segment.tokens = segment.tokens._replace(x_BND=x_BND)
            segment.states.append(state)
            segment.losses += [] if loss is None else [loss]
            self.states[layer] = state

    def _state_before(self, segment: _SegmentInFlight, layer: int) -> State:
        state = detach(self.states[layer]) if segment.detached else self.states[layer]
        if segment.reset is not None:
            reset_B, fresh = segment.reset
            state = reset_rows(state, fresh[layer], reset_B)
        return state


def _runs(layers: Sequence[int], by_layer: dict[int, _SegmentInFlight]) -> Iterator[tuple[int, list[_SegmentInFlight]]]:
    """Segments that run together through neighbouring layers of a group, with the index of the first layer."""
    run: list[_SegmentInFlight] = []
    for index, layer in enumerate([*layers, -1]):
        segment = by_layer.get(layer)
        if run and (segment is None or not segment.stacks_with(run[0])):
            yield index - len(run), run
            run = []
        if segment is not None:
            run.append(segment)


def _groups(model: Any) -> list[list[int]]:
    """Groups of equal layers; ValueError for a model that cannot be read along diagonals."""
    name, refused = type(model).__name__, "schedule='diagonal'"
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"{refused} would leave out its compiled forward; give the loop the uncompiled model, and compile the loop"
        )
    if not all(hasattr(model, part) for part in ("stack", "embed", "answer", "check_call")):
        raise ValueError(f"{refused} runs the layers of a model, and {name} does not offer its parts; {WAY_OUT}")
    order = type(model).__mro__
    if _defined_in(order, "forward") < min(_defined_in(order, part) for part in ("embed", "answer")):
        raise ValueError(f"{refused}: {name} overrides forward but not embed and answer; write them, too, or {WAY_OUT}")
    stack: Stack = model.stack
    if any(is_watched(called) or called._backward_hooks for called in (model, stack)):
        raise ValueError(f"{refused} would leave out the hooks on its own calls; wrap the loop instead, or {WAY_OUT}")
    if getattr(model, "pool", None) == "last":  # `answer` gets no padding
        raise ValueError(f"{refused} with pool='last' is not offered; take pool='class_token', or {WAY_OUT}")
    blocks = list(stack.blocks)
    groups: list[list[int]] = []
    why = None
    if type(stack.model_memory) is not ModelMemory:
        why = f"memory {type(stack.model_memory).__name__} spans the layers"
    elif stack.reversible:
        why = "reversible=True computes activations again from the last layer's result"
    for member in (member for own in stack.layer_memories() for member in members_of(own)):
        if member.shared:
            why = f"memory {type(member).__name__} is shared by all rows, and each segment would write it"
    if why is None:
        groups = group_equal(blocks)
    if why is None and len(groups) == len(blocks):
        differ = "there is one layer" if len(blocks) == 1 else f"they differ in {difference(blocks[0], blocks[1])!r}"
        why = f"no two layers could run at once: {differ}"
    if why is not None:
        raise ValueError(f"{refused} is for layers that work on different segments at once, but {why}; {WAY_OUT}")
    return groups


def _defined_in(classes: Sequence[type], method: str) -> int:
    return next(index for index, kind in enumerate(classes) if method in vars(kind))
