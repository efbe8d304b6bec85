"""Segments read along diagonals: layers work on different segments at the same time.

Diagonal batching, Sivtsov et al. 2025, arXiv:2506.05229 (github.com/svtdanny/diagonal-batching).

    time      0    1    2    3    4    5      layer l of segment t needs layer l - 1 of segment t, and its own state
    layer 2             0    1    2    3      behind segment t - 1: what stands in one column is independent of each
    layer 1        0    1    2    3           other, and runs at once, S + L - 1 groups in the place of S L blocks
    layer 0   0    1    2    3

Outputs, states and gradients are those of one segment after the other. Where the memory has its place in the layers
this is all that crosses; one that spans them goes from the last layer of a segment to the first of the next.

As a segment enters whenever the first layer is free, and leaves behind the last, no more than L are on their way, and a
stream of any length is read in the memory of L segments and L states. The corners, where some layers wait, are cut out
of the stacked weights, not computed and thrown away.

Legend: B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import ModelMemory, Tokens
from cached_transformers.layers.alike import difference, groups_of
from cached_transformers.layers.open_stack import is_watched
from cached_transformers.layers.stack import ModelOutput, Stack, StackState
from cached_transformers.layers.together import AlikeBlocks
from cached_transformers.memories.parts.composite import members_of
from cached_transformers.registry import unknown_name
from cached_transformers.state import State, detach, seal
from cached_transformers.state import reset as reset_rows

SCHEDULES = ("segments", "diagonal")
"""Orders in which a loop can run the layers of several segments: one segment after the other, or along diagonals."""
WAY_OUT = "take schedule='segments'"


class InParts(Protocol):
    """A model whose forward is `check_call`, `embed`, the stack, and `answer`."""

    stack: Stack

    def init_state(self, batch_size: int) -> StackState: ...

    def check_call(
        self,
        inputs_BN: Tensor,
        state: StackState | None = None,
        reset: Any = None,
        padding: Tensor | None = None,
        targets: Any = None,
    ) -> None: ...

    def embed(
        self, inputs_BN: Tensor, state: StackState, padding: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]: ...

    def answer(self, h_BND: Tensor, targets: Any = None) -> Tensor: ...


def check_schedule(schedule: str, model: Any) -> None:
    """Refuse (ValueError) an unknown schedule, and the diagonal one for a model that it would not read as it is."""
    if schedule not in SCHEDULES:
        raise ValueError(unknown_name("schedule", schedule, list(SCHEDULES)))
    if schedule == "diagonal":
        _groups(model)


def check_layers(model: Any, schedule: str) -> None:
    """Refuse (ValueError) a model whose layers cannot be run one by one, each over several segments."""
    name, refused = type(model).__name__, f"schedule={schedule!r}"
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"{refused} runs the parts of a model itself and would leave out its compiled forward; give the "
            "loop the model as it was, and compile the loop"
        )
    if not all(hasattr(model, part) for part in ("stack", "embed", "answer", "check_call")):
        raise ValueError(
            f"{refused} runs a model's layers itself, and {name} does not offer its parts; {WAY_OUT}, or a "
            "language_model or sequence_classifier"
        )
    order = type(model).__mro__
    if _written_in(order, "forward") < min(_written_in(order, part) for part in ("embed", "answer")):
        raise ValueError(
            f"{refused} runs the parts of a model, and {name} has a forward that is newer than they are; "
            f"write embed and answer for it, too, or {WAY_OUT}"
        )
    stack: Stack = model.stack
    if any(is_watched(called) or called._backward_hooks for called in (model, stack)):
        raise ValueError(
            f"{refused} runs the parts of {name} and would leave out the hooks on its own calls (as FSDP's "
            f"round the model); wrap or watch the loop instead, or {WAY_OUT}"
        )
    memory = type(stack.model_memory)
    if memory is not ModelMemory:
        why = f"memory {memory.__name__} spans the layers: it leaves the last of a segment for the first of the next"
        _refuse(why, schedule)
    if stack.reversible:
        _refuse("reversible=True computes activations again from the last layer's result", schedule)
    for member in (member for own in stack.layer_memories() for member in members_of(own)):
        if member.shared:
            why = f"memory {type(member).__name__} is one for all rows and steps, which each segment would write"
            _refuse(why, schedule)
    if getattr(model, "pool", None) == "last":  # `answer` is told of no padding
        raise ValueError(f"{refused} with pool='last' is not offered; take pool='class_token', or {WAY_OUT}")


def read_diagonally(
    model: Any,
    pieces: Iterable[tuple[Tensor, Tensor | None, Tensor | None]],
    state: StackState | None = None,
    resets: Sequence[Tensor | None] = (),
    bptt: int | None = None,
) -> Iterator[ModelOutput]:
    """Read pieces along diagonals, and yield every output in the order of the pieces.

    What `segments.read_segments` gives with the model's forward, though up to L pieces are asked for before the first
    output. Neighbouring pieces of one shape go together; a shorter one passes the layers by itself. Weights are those
    at the first piece.

    Args:
        model: a `LanguageModel` or a `SequenceClassifier`, or what else is `InParts`.
        pieces: inputs of a segment, targets or None, padding or None; outputs are losses of the targets where there are
            some.
        state: before the first piece; None for the start of a stream.
        resets: rows that begin anew at each of the first pieces.
        bptt: the state is cut from the graph after every so many pieces; None never cuts.

    Raises:
        ValueError: the model has something that crosses its layers, no two layers are alike, or one of them cannot be
            run for several at once.
    """
    line = _Diagonals(model, state)
    for index, piece in enumerate(pieces):
        reset_B = resets[index] if index < len(resets) else None
        line.enter(*piece, reset_B, cut=bool(bptt and index and index % bptt == 0))
        yield from line.advance()
    while line.moving:
        yield from line.advance()


@dataclass
class _Moving:
    """A segment on its way, before the layer `len(states)`.

    Attributes:
        begin: rows that begin anew with it, and what all layers begin with; None for no row.
        cut: whether no gradient crosses from it into the segment before.
        after: the state behind it, in which those of the layers are not yet its own.
        states, losses: of the layers that it has passed.
    """

    targets_BN: Tensor | None
    tokens: Tokens
    begin: tuple[Tensor, State] | None
    cut: bool
    after: StackState
    states: list[State] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    def alike(self, other: _Moving) -> bool:
        """Whether both can be stacked."""
        mine, others = self.tokens, other.tokens
        return mine.x_BND.shape == others.x_BND.shape and (mine.padding_BN is None) == (others.padding_BN is None)


class Line:
    """The layers, and the segments that move through them.

    Attributes:
        moving: segments, the first to leave in front.
        last: the state before the next segment, of which the clock is true; None for the start of a stream.
        states: of each layer behind the segment that passed it last.
    """

    def __init__(self, model: InParts, groups: Sequence[Sequence[int]], state: StackState | None) -> None:
        self.model, self.stack = model, model.stack
        self.groups = [AlikeBlocks(model.stack, layers) for layers in groups]
        self.moving: deque[_Moving] = deque()
        self.last = state
        self.states: list[State] = []

    def enter(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor | None,
        padding_BN: Tensor | None,
        reset_B: Tensor | None,
        cut: bool,
    ) -> None:
        """Put a segment before the first layer."""
        rows, before = inputs_BN.shape[0], self.last
        self.model.check_call(inputs_BN, before, reset_B, padding_BN, targets_BN)
        if before is None:
            before = self.model.init_state(rows)
        self.states = self.states or list(before.layers)
        begin = None
        if reset_B is not None:
            fresh = self.model.init_state(rows)
            begin = (reset_B, fresh.layers)
            before = before._replace(clock_B=reset_rows(before.clock_B, fresh.clock_B, reset_B))
        x_BND, options = self.model.embed(inputs_BN, before, padding_BN)
        tokens = self.stack.placed(before, x_BND, **options)
        self.last = before._replace(clock_B=self.stack.clock_after(before, tokens))
        self.moving.append(_Moving(targets_BN, tokens, begin, cut, self.last))

    def run(self, group: AlikeBlocks, first: int, segments: Sequence[_Moving]) -> None:
        """Let each of some segments pass a layer of its own of a group, from the layer at the place `first` on."""
        layers = group.layers[first : first + len(segments)]
        states = [self._state_for(segment, layer) for segment, layer in zip(segments, layers, strict=True)]
        passed = group.run(first, [segment.tokens for segment in segments], states)
        for segment, layer, (x_BND, state, loss) in zip(segments, layers, passed, strict=True):
            segment.tokens = segment.tokens._replace(x_BND=x_BND)
            segment.states.append(state)
            segment.losses += [] if loss is None else [loss]
            self.states[layer] = state

    def _state_for(self, segment: _Moving, layer: int) -> State:
        """The state with which a segment passes a layer."""
        state = self.states[layer]
        if segment.cut:
            state = detach(state)
        if segment.begin is not None:
            reset_B, fresh = segment.begin
            state = reset_rows(state, fresh[layer], reset_B)
        return state

    def leave(self) -> ModelOutput:
        """The output of the first segment, which is behind the last layer."""
        segment = self.moving.popleft()
        h_BND, state = segment.tokens.x_BND, segment.after._replace(layers=tuple(segment.states))
        loss = torch.stack([h_BND.new_zeros(()), *segment.losses]).sum()
        return ModelOutput(self.model.answer(self.stack.norm(h_BND), segment.targets_BN), seal(state), loss)


class _Diagonals(Line):
    """Segments pass a layer each at once."""

    def __init__(self, model: InParts, state: StackState | None) -> None:
        super().__init__(model, _groups(model), state)

    def advance(self) -> list[ModelOutput]:
        """Let every segment pass its next layer; the output of the one that has passed all, if there is one."""
        before = {len(segment.states): segment for segment in self.moving}
        for group in self.groups:
            for first, segments in _runs(group.layers, before):
                self.run(group, first, segments)
        return [self.leave()] if len(self.moving[0].states) == len(self.stack.blocks) else []


def _runs(layers: Sequence[int], before: dict[int, _Moving]) -> Iterator[tuple[int, list[_Moving]]]:
    """Segments that go together through neighbouring layers of a group, with the place of the first of these."""
    run: list[_Moving] = []
    for place, layer in enumerate([*layers, -1]):
        segment = before.get(layer)
        if run and (segment is None or not segment.alike(run[0])):
            yield place - len(run), run
            run = []
        if segment is not None:
            run.append(segment)


def _groups(model: Any) -> list[list[int]]:
    """Numbers of the layers that are alike; ValueError for a model that cannot be read along diagonals."""
    check_layers(model, "diagonal")
    blocks = list(model.stack.blocks)
    groups = groups_of(blocks)
    if len(groups) == len(blocks):
        why = "there is one alone" if len(blocks) == 1 else f"they differ, e.g. in {difference(blocks[0], blocks[1])!r}"
        _refuse(f"no two layers could run at once: {why}", "diagonal")
    return groups


def _written_in(classes: Sequence[type], method: str) -> int:
    """Place of the first of these classes that writes a method."""
    return next(place for place, written in enumerate(classes) if method in vars(written))


def _refuse(why: str, schedule: str) -> None:
    raise ValueError(
        f"schedule={schedule!r} is for layers that work on different segments at once, but {why}; {WAY_OUT}"
    )
