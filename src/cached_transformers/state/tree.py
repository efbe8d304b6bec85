"""State: the tree of tensors that a model carries from one segment to the next, and every operation on it.

A state is a tensor, or a (named) tuple of states; nothing else. In particular there is no None, no Python number and no
list that grows: emptiness is a mask or a counter tensor, so that the structure (shapes, dtypes, devices, strides) is
the same before and after every segment and one compiled graph serves them all. The first dimension of every tensor is
the row of the batch.

Legend: B rows, F fingerprint of a memory's name, options and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = Any
"""A Tensor or a (named) tuple of states, which Python's types cannot say without losing those of the named tuples."""
KIND = "kind_B0F"
"""Name of the tensor without elements whose size tells the memory that made a state: it costs no byte and no wait."""


def kind_of(memory: str) -> int:
    """F of a memory that is described by its name, options and sizes; its states hold an empty (B, 0, F) in int64."""
    return 1 + int.from_bytes(hashlib.sha256(memory.encode()).digest()[:4], "big") % (2**31 - 2)


def _parts(state: State, like: State = None) -> State:
    """The children of a node (ValueError: it is no tuple, or not as long as `like`)."""
    if not isinstance(state, tuple) or (like is not None and len(state) != len(like)):
        found = f"tuple of {len(state)}" if isinstance(state, tuple) else type(state).__name__
        raise ValueError(
            f"state={found}: a state is a tensor or a (named) tuple of states; give that of init_state or of the last "
            "segment"
        )
    return state


def map_state(fn: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply `fn` to each tensor of `state`, together with the tensors in the same place of `others`."""
    if isinstance(state, Tensor):
        return fn(state, *others)
    same = [_parts(other, state) for other in others]
    children = [map_state(fn, *parts) for parts in zip(_parts(state), *same, strict=True)]
    return type(state)(*children) if hasattr(state, "_fields") else tuple(children)


def named_tensors(state: State, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Pairs of (path, tensor), e.g. ("layers.0.cache_BMC", ...), in a fixed order."""
    if isinstance(state, Tensor):
        yield prefix or "state", state
        return
    names = getattr(state, "_fields", range(len(_parts(state))))
    for name, part in zip(names, state, strict=True):
        yield from named_tensors(part, f"{prefix}.{name}" if prefix else str(name))


def detach(state: State) -> State:
    """Cut the graph: no gradient flows through the result into earlier segments."""
    return map_state(torch.Tensor.detach, state)


def reset(state: State, fresh: State, rows_B: Tensor) -> State:
    """Give the rows marked in `rows_B` (bool) the values of `fresh`; the others keep theirs, bit for bit.

    Raises:
        ValueError: another dtype or number of rows; a state of another structure.
    """
    _refuse_other(state, fresh, "fresh")
    _check_rows("rows_B", rows_B, (torch.bool,), state)

    def choose(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(rows_B.view(-1, *[1] * (old.dim() - 1)), new.to(old.dtype), old)

    return map_state(choose, state, fresh)


def reorder(state: State, index_B: Tensor) -> State:
    """Rows in the order of `index_B` (long); rows may repeat or vanish, as in beam search.

    Raises:
        ValueError: another dtype, or a row that there is not.
    """
    _check_rows("index_B", index_B, (torch.long, torch.int), state)
    return map_state(lambda t: t.index_select(0, index_B), state)


def join(states: Sequence[State]) -> State:
    """The rows of several states of one structure, one state after the other (ValueError: of another structure)."""
    if not isinstance(states, list | tuple) or not states:
        raise ValueError(f"states={type(states).__name__}: must be a list of at least one state")
    for place, other in enumerate(states[1:], 1):
        _refuse_other(states[0], other, f"states[{place}]")
    return map_state(lambda *ts: torch.cat(ts), *states)


def repeat(state: State, times: int) -> State:
    """Each row `times` times in a row, as for the beams of one sentence (ValueError: less than once)."""
    if not isinstance(times, int) or times < 1:
        raise ValueError(f"times={times!r} must be a whole number, at least 1")
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


def _refuse_other(state: State, other: State, name: str) -> None:
    """Refuse (ValueError) a state of other tensors or sizes; in compiled code torch does."""
    if torch.compiler.is_compiling():
        return
    found, expected = ({name: tuple(t.shape[1:]) for name, t in named_tensors(s)} for s in (other, state))
    if found != expected:
        difference = _some(dict(found.items() ^ expected.items()))
        raise ValueError(f"{name} is a state of another structure ({difference}); give states of one model in one mode")


def _some(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)[:4])


def _check_rows(name: str, given_B: Tensor, dtypes: tuple[torch.dtype, ...], state: State) -> None:
    """Refuse (ValueError) marks that are not one per row, or indices (on the CPU) of rows that there are not."""
    if torch.compiler.is_compiling():
        return
    rows = next((len(t) for _, t in named_tensors(state) if t.dim()), None)
    if not isinstance(given_B, Tensor) or given_B.dim() != 1 or given_B.dtype not in dtypes:
        found = f"{tuple(given_B.shape)} {given_B.dtype}" if isinstance(given_B, Tensor) else type(given_B).__name__
        raise ValueError(f"{name}={found}: must be a tensor of one dimension and dtype {dtypes[0]}")
    if given_B.dtype == torch.bool and rows not in (None, len(given_B)):
        raise ValueError(f"{name} has {len(given_B)} rows, the state {rows}; give one mark per row")
    indices = given_B.is_cpu and len(given_B) and given_B.dtype != torch.bool and rows is not None
    if indices and not 0 <= int(given_B.min()) <= int(given_B.max()) < rows:  # type: ignore[operator]
        raise ValueError(f"{name}={given_B.tolist()[:8]}: must lie in 0..{rows - 1}, the rows of the state")  # type: ignore[operator]


def check(state: State, fresh: State, rows: int, *, memory: str = "", device: torch.device | None = None) -> None:
    """Refuse a state that cannot be of the model that gives `fresh` (of any number of rows), or has not `rows` rows.

    The number of slots (the second dimension) may differ, in a memory that is longer in evaluation than in training.
    Other weights of the same model are not found; see `check_weights`.

    Args:
        memory: description of the model's memory, for the message. device: of the state; None for that of `fresh`.

    Raises:
        ValueError: the message names the first difference.
    """
    found, expected = dict(named_tensors(state)), dict(named_tensors(fresh))
    if found.keys() != expected.keys():
        raise ValueError(
            f"the state is that of another model, or of this one's other mode (training or evaluation, which may keep "
            f"other things; begin with init_state in this mode, or see as_kept): these tensors are in one only: "
            f"{_some(found.keys() ^ expected.keys())}"
        )
    for name, t in found.items():
        want = expected[name]
        place = want.device if device is None else device
        if t.shape[:1] != (rows,):
            raise ValueError(
                f"the state has {t.shape[0] if t.dim() else 0} rows ({name}), the segment {rows}; rows keep their "
                "place in a stream"
            )
        if t.dim() != want.dim() or t.shape[2:] != want.shape[2:]:
            sizes = f"{tuple(t.shape)}, this model's is {(rows, *want.shape[1:])}"
            raise ValueError(f"the state is that of another model: {other_kind(name, memory) or f'{name} is {sizes}'}")
        if t.dtype != want.dtype or (t.device != place and place.type != "meta"):
            raise ValueError(
                f"the state's {name} is {t.dtype} on {t.device}, this model's {want.dtype} on {place}; make the state "
                "after the model has its dtype and device, or convert it with state.map_state or state.to"
            )


def other_kind(name: str, memory: str = "") -> str:
    """Return the message for a tensor that tells another memory; empty for other tensors."""
    if not name.endswith(KIND):
        return ""
    return (
        f"{name} tells another memory, or other options or sizes, than this model's {memory}; build the model with the "
        "options that made the state, or begin with init_state"
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
    # Files of earlier versions do not tell the memory's options.
    stored = {**{name: t for name, t in expected.items() if name.endswith(KIND)}, **stored}
    if stored.keys() != expected.keys():
        difference = ", ".join(sorted(stored.keys() ^ expected.keys()))
        raise ValueError(f"{source} holds the state of another model: these tensors are in one only: {difference}")
    for name, t in expected.items():
        found = stored[name]
        if (found.shape, found.dtype) != (t.shape, t.dtype):
            raise ValueError(
                f"{source}: {other_kind(name)}"
                if name.endswith(KIND)
                else f"{source}: {name} is {tuple(found.shape)} {found.dtype}, this model expects {tuple(t.shape)} "
                f"{t.dtype}; build the state with the same number of rows and the same memory settings"
            )
    names = iter(expected)
    return map_state(lambda t: stored[next(names)].to(t.device), like)
