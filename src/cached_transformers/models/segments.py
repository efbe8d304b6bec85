"""The one loop over segments and passes: a text is cut, read segment after segment, and the state goes along.

The loop knows nothing of losses or scores. Whoever runs it says how one segment is read, by a function of a piece (what
the reader needs of a segment: tokens, or tokens with targets and padding), the state before it, and the rows that begin
anew with it. Training, evaluation, streaming, generation and probes differ in that function alone.

    state_0  --read-->  state_1  --read-->  ...  --read-->  state_S      one pass; cut from the graph now and then
    state_0' = next_pass(state_0, [state_1, ..., state_S])               with what another pass begins

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from cached_transformers.interfaces.memory import ModelMemory
from cached_transformers.layers.stack import StackState
from cached_transformers.state import State, detach, last_use, named_tensors
from cached_transformers.state import reset as reset_rows


class HasState(Protocol):
    """What reading a segment gives: anything with the state after it, as a `ModelOutput` has."""

    @property
    def state(self) -> State: ...


Piece = TypeVar("Piece")
Output = TypeVar("Output", bound=HasState)
Read = Callable[[Piece, Any, Tensor | None], Output]
"""Reads one segment: (piece, state before it, rows (B,) that begin anew with it or None) -> output with the state."""


def cut(tokens: int, length: int | None, filled: int = 0) -> list[slice]:
    """The segments of so many tokens: `length` each, the last one what is left.

    Args:
        length: tokens in a segment; None for one segment of all.
        filled: tokens that the first segment holds already, of an earlier call.
    """
    if length is None:
        return [slice(0, tokens)]
    bounds = [0, *range(length - filled, tokens, length), tokens]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def read_segments(
    read: Read[Piece, Output],
    pieces: Iterable[Piece],
    state: State | None,
    resets: Sequence[Tensor | None] = (),
    bptt: int | None = None,
    in_place: bool = False,
    first: int = 0,
) -> Iterator[Output]:
    """Read pieces one after the other, each with the state that the one before it left, and yield every output.

    Nothing is read before it is asked for, and nothing is kept, so that pieces may be an endless stream.

    Args:
        state: before the first piece; None for the start of a stream.
        resets: rows that begin anew at each of the first pieces.
        bptt: the state is cut from the graph after every so many pieces; None never cuts.
        in_place: a promise that nobody looks at the given state again, nor at that of an output once the next output
            was asked for (`state.last_use`). Of a state that somebody may keep, give a copy (`state.seal`).
        first: number of the first piece in its row, from which windows of `bptt` are counted.
    """
    for index, piece in enumerate(pieces):
        if bptt is not None and index and (first + index) % bptt == 0:
            state = detach(state)
        with last_use(state) if in_place else nullcontext():
            output = read(piece, state, resets[index] if index < len(resets) else None)
        state = output.state
        yield output


def read_earlier_passes(
    read: Read[Piece, Output],
    pieces: Sequence[Piece],
    state: State,
    next_pass: Callable[[State, Sequence[State]], State],
    passes: int,
    bptt: int | None = None,
) -> State:
    """Run all passes over the pieces but the last; the state with which the last one begins.

    The gradient crosses from pass to pass where `bptt` covers all pieces.

    Args:
        state: before the first piece, after resets.
        next_pass: of the model's memory, see `ModelMemory.next_pass`.
    """
    for _ in range(passes - 1):
        after = [output.state for output in read_segments(read, pieces, state, bptt=bptt)]
        state = next_pass(state, after)
        if bptt is not None and len(after) > bptt:
            state = detach(state)
    return state


def for_loops(model: Any) -> Any:
    """What loops call, with a state in and a `ModelOutput` out: the model, or what a host with a memory brings for it.

    Raises:
        ValueError: a model of transformers that has none, or a prompt of PEFT.
    """
    make = getattr(model, "__dict__", {}).get("for_loops")
    inside = getattr(model, "get_base_model", None)
    if inside is not None:  # of PEFT: adapters act in the model inside, prompts in front of it
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(model).__name__} puts a prompt in front of each text, which a loop over segments would leave "
                "out; call the model itself with memory_state, or tune_initial_state in the place of a prompt"
            )
        make = vars(inside()).get("for_loops")
    if make is not None:
        return make()
    if hasattr(getattr(model, "config", None), "to_json_string"):
        raise ValueError(
            f"{type(model).__name__} is a model of transformers, and has no memory with a state; give "
            "create_model('transformers', model=...), or add_memory first"
        )
    return model


def as_language_model(model: Any) -> Any:
    """As `for_loops`, of what predicts the next token.

    Raises:
        ValueError: the model sees it.
    """
    found = for_loops(model)
    if not getattr(found, "predicts_next", True):
        raise ValueError(
            f"{type(model).__name__} sees what follows each token, so that it predicts none; SegmentLoop trains it on "
            "an answer for each, and decoders predict"
        )
    return found


def begun(model: nn.Module, state: State | None, reset_B: Tensor | None, rows: int) -> State:
    """The state with which rows begin: the given one, a fresh one where there is none or where a row is reset."""
    if state is not None and reset_B is None:
        return state
    fresh = model.init_state(rows)  # type: ignore[operator]
    return fresh if state is None else reset_rows(state, fresh, reset_B)  # type: ignore[arg-type]


def model_memory(model: nn.Module, passes: int) -> ModelMemory:
    """The memory that says how another pass begins.

    Raises:
        ValueError: the model has no stack.
    """
    if not hasattr(model, "stack"):
        raise ValueError(f"passes={passes} needs a model with a stack, whose memory says how to go on; take passes=1")
    return model.stack.model_memory  # type: ignore[union-attr, return-value]


def remembers(state: State) -> bool:
    """Whether a state holds more than the place in the stream."""
    held = (state.model, state.layers) if isinstance(state, StackState) else state
    return any(True for _ in named_tensors(held))
