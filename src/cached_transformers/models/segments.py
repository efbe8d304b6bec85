"""The loop over segments and passes that training, evaluation, streaming, generation and probes share.

The caller provides a function that reads one segment: from a piece (tokens, or tokens with targets and padding), the
state before it, and the rows to reset.

    state_0  --read-->  state_1  --read-->  ...  --read-->  state_S      one pass; detached every `bptt` segments
    state_0' = next_pass(state_0, [state_1, ..., state_S])               first state of the next pass

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from cached_transformers.interfaces.memory import ModelMemory
from cached_transformers.state import KIND, State, detach, last_use, named_tensors
from cached_transformers.state import reset as reset_rows


class HasState(Protocol):
    """Output of a segment with the state after it, such as `ModelOutput`."""

    @property
    def state(self) -> State: ...


Piece = TypeVar("Piece")
Output = TypeVar("Output", bound=HasState)
Read = Callable[[Piece, Any, Tensor | None], Output]
"""Reads one segment: (piece, state before it, rows (B,) to reset or None) -> output with the state."""


def cut(tokens: int, length: int | None, filled: int = 0) -> list[slice]:
    """Slices of the segments of `tokens` tokens; the last one may be shorter.

    Args:
        length: tokens in a segment; None for one segment.
        filled: tokens that an earlier call has put into the first segment.
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
    """Read pieces one after the other and yield every output; lazy, so pieces may be an endless stream.

    Args:
        state: before the first piece; None for the start of a stream.
        resets: rows to reset before each of the first pieces.
        bptt: the state is detached after every `bptt` pieces; None never detaches.
        in_place: a promise that the given state is not read again, nor the state of an output once the next output is
            requested (`state.last_use`). Pass a copy (`state.seal`) of a state that the caller keeps.
        first: number of the first piece in its row, for windows of `bptt`.
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
    """Run all passes over the pieces but the last and return the first state of the last pass.

    The gradient crosses passes if `bptt` covers all pieces.

    Args:
        state: before the first piece, after resets.
        next_pass: see `ModelMemory.next_pass`.
    """
    for _ in range(passes - 1):
        after = [output.state for output in read_segments(read, pieces, state, bptt=bptt)]
        state = next_pass(state, after)
        if bptt is not None and len(after) > bptt:
            state = detach(state)
    return state


def for_loops(model: Any) -> Any:
    """Return the module that a segment loop calls: the model, or the wrapper that a host with a memory registered.

    Raises:
        ValueError: a model of transformers without a memory, or a prompt of PEFT.
    """
    make = getattr(model, "__dict__", {}).get("for_loops")
    inside = getattr(model, "get_base_model", None)
    if inside is not None:  # PEFT: adapters act inside the model, prompts before it
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError(
                f"{type(model).__name__} puts a prompt before each text, which a segment loop would leave out; use "
                "tune_initial_state instead"
            )
        make = vars(inside()).get("for_loops")
    if make is not None:
        return make()
    if hasattr(getattr(model, "config", None), "to_json_string"):
        name = type(model).__name__
        raise ValueError(
            f"{name} is no decoder and no encoder of images with a memory that has a state; take add_memory, or "
            "create_model('transformers', ...); an encoder of texts reads its segments itself"
        )
    return model


def host_reader(model: nn.Module) -> Any:
    """Return what reads the segments of a host with a state, a `HostForward`; None for any other model."""
    return next((vars(m)["segment_reader"] for m in model.modules() if "segment_reader" in vars(m)), None)


def as_language_model(model: Any) -> Any:
    """Like `for_loops`, but require a causal model (ValueError: its tokens see later tokens)."""
    found = for_loops(model)
    if not getattr(found, "predicts_next", True):
        raise ValueError(f"{type(model).__name__} is not causal: its tokens see the next one; take a decoder")
    return found


def begun(model: nn.Module, state: State | None, reset_B: Tensor | None, rows: int) -> State:
    """The first state of rows: the given state, checked where the model can, or a fresh one for none and for resets."""
    if state is not None and hasattr(model, "check_state"):
        model.check_state(state, rows)  # type: ignore[operator]
    if state is not None and reset_B is None:
        return state
    fresh = model.init_state(rows)  # type: ignore[operator]
    return fresh if state is None else reset_rows(state, fresh, reset_B)  # type: ignore[arg-type]


def model_memory(model: nn.Module, passes: int) -> ModelMemory:
    """The model memory, whose `next_pass` begins another pass (ValueError: the model has no stack)."""
    if not hasattr(model, "stack"):
        raise ValueError(f"passes={passes} needs a model with a stack and a model memory; take passes=1")
    return model.stack.model_memory  # type: ignore[union-attr, return-value]


def remembers(state: State) -> bool:
    """Return whether a state holds more than clocks."""
    return any(name not in ("clock_B", KIND) for name, _ in named_tensors(state))
