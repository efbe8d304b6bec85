"""State: the tree of tensors that a model carries from one segment to the next, and every operation on it.

A state is a tensor, or a (named) tuple of states; nothing else. In particular there is no None, no Python number and no
list that grows: emptiness is a mask or a counter tensor, so that the structure (shapes, dtypes, devices, strides) is
the same before and after every segment and one compiled graph serves them all. The first dimension of every tensor is
the row of the batch.

Legend: B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Any
"""A Tensor or a (named) tuple of states, which Python's types cannot say without losing those of the named tuples."""


def map_state(fn: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply `fn` to each tensor of `state`, together with the tensors in the same place of `others`."""
    if isinstance(state, Tensor):
        return fn(state, *others)
    children = [map_state(fn, *parts) for parts in zip(state, *others, strict=True)]
    return type(state)(*children) if hasattr(state, "_fields") else tuple(children)


def named_tensors(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Pairs of (path, tensor), e.g. ("layers.0.cache_BMC", ...), in a fixed order."""
    if isinstance(state, Tensor):
        yield prefix or "state", state
        return
    names = getattr(state, "_fields", range(len(state)))
    for name, part in zip(names, state, strict=True):
        yield from named_tensors(part, f"{prefix}.{name}" if prefix else str(name))


def detach(state: State) -> State:
    """Cut the graph: no gradient flows through the result into earlier segments."""
    return map_state(torch.Tensor.detach, state)


def reset(state: State, fresh: State, rows_B: Tensor) -> State:
    """Give the rows marked in `rows_B` (bool) the values of `fresh`; the others keep theirs, bit for bit."""

    def choose(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(rows_B.view(-1, *[1] * (old.dim() - 1)), new.to(old.dtype), old)

    return map_state(choose, state, fresh)


def reorder(state: State, index_B: Tensor) -> State:
    """Rows in the order of `index_B` (long); rows may repeat or vanish, as in beam search."""
    return map_state(lambda t: t.index_select(0, index_B), state)


def join(states: Sequence[State]) -> State:
    """The rows of several states of one structure, one state after the other."""
    return map_state(lambda *ts: torch.cat(ts), *states)


def repeat(state: State, times: int) -> State:
    """Each row `times` times in a row, as for the beams of one sentence."""
    return map_state(lambda t: t.repeat_interleave(times, 0), state)


def to(state: State, device: torch.device | str) -> State:
    """Move every tensor to `device`; dtypes stay."""
    return map_state(lambda t: t.to(device), state)


def refuse_narrow(state: State, what: str, name: str = "state") -> None:
    """Raise a ValueError if a part of a state of sums is narrower than float32: it would lose `what`."""
    if isinstance(state, Tensor):
        if state.is_floating_point() and torch.finfo(state.dtype).bits < 32:
            raise ValueError(
                f"a state of {state.dtype} loses {what}: {name} of it; keep it in float32, as init_state makes it for "
                "every model"
            )
        return
    for part, child in zip(getattr(state, "_fields", range(len(state))), state, strict=True):
        refuse_narrow(child, what, str(part))


def nbytes(state: State) -> int:
    """Bytes that the state occupies."""
    return sum(t.numel() * t.element_size() for _, t in named_tensors(state))


def signature(state: State) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Path, shape and dtype of each tensor: what must not change from segment to segment."""
    return [(name, tuple(t.shape), t.dtype) for name, t in named_tensors(state)]


def check(state: State, fresh: State, rows: int) -> None:
    """Refuse a state that cannot be of the model that gives `fresh` (of any number of rows), or has not `rows` rows.

    The number of slots (the second dimension) may differ: a memory may be longer in evaluation than in training.

    Raises:
        ValueError: the message names the first difference.
    """
    if not isinstance(state, Tensor | tuple):
        raise ValueError(f"state of type {type(state).__name__} must be what init_state or the last segment gave")
    found, expected = ({name: t for name, t in named_tensors(s)} for s in (state, fresh))
    if found.keys() != expected.keys():
        difference = ", ".join(sorted(found.keys() ^ expected.keys())[:4])
        raise ValueError(
            f"the state is that of another model, or of this one's other mode (training or evaluation, which may keep "
            f"other things; begin with init_state in this mode, or see as_kept): these tensors are in one only: "
            f"{difference}"
        )
    for name, t in found.items():
        want = expected[name]
        if t.shape[:1] != (rows,):
            raise ValueError(
                f"the state has {t.shape[0] if t.dim() else 0} rows ({name}), the segment {rows}; rows keep their "
                "place in a stream"
            )
        if t.dim() != want.dim() or t.shape[2:] != want.shape[2:]:
            sizes = f"{tuple(t.shape)}, this model's is {(rows, *want.shape[1:])}"
            raise ValueError(f"the state is that of another model: {name} is {sizes}")
        if t.dtype != want.dtype:
            raise ValueError(
                f"the state's {name} is {t.dtype}, this model's {want.dtype}; make the state after the model has its "
                "dtype, or convert it with state.map_state"
            )


def summary(state: State) -> str:
    """A table for people: one line a tensor, and the total."""
    lines = [f"{name:<40} {tuple(t.shape)!s:<20} {t.dtype}" for name, t in named_tensors(state)]
    return "\n".join([*lines, f"{nbytes(state):,} bytes"])


def from_tensors(stored: Mapping[str, Tensor], like: State, source: str) -> State:
    """The state in the structure of `like` whose tensors, by name, are `stored`: the inverse of `named_tensors`.

    Raises:
        ValueError: they are of another structure; the message names `source` and the first difference.
    """
    expected = dict(named_tensors(like))
    if stored.keys() != expected.keys():
        difference = ", ".join(sorted(stored.keys() ^ expected.keys()))
        raise ValueError(f"{source} holds the state of another model: these tensors are in one only: {difference}")
    for name, t in expected.items():
        found = stored[name]
        if (found.shape, found.dtype) != (t.shape, t.dtype):
            raise ValueError(
                f"{source}: {name} is {tuple(found.shape)} {found.dtype}, this model expects {tuple(t.shape)} "
                f"{t.dtype}; build the state with the same number of rows and the same memory settings"
            )
    names = iter(expected)
    return map_state(lambda t: stored[next(names)].to(t.device), like)
