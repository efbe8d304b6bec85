"""State: the tree of tensors that a model carries from one segment to the next, and every operation on it.

A state is a tensor, or a (named) tuple of states; nothing else. In particular there is no None, no Python number and no
list that grows: emptiness is a mask or a counter tensor, so that the structure (shapes, dtypes, devices, strides) is
the same before and after every segment and one compiled graph serves them all. A store without a limit is the
exception: its second dimension grows from 0, and counters tell its entries. The first dimension of every tensor is
the row of the batch.

Legend: B rows, F fingerprint of a memory's name, options and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        raise ValueError(f"state={found}: a state is a tensor or a (named) tuple of states; give that of init_state")
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


def named(state: State) -> dict[str, Tensor]:
    """The tensors by path."""
    return dict(named_tensors(state))


def detach(state: State) -> State:
    """Cut the graph: no gradient flows through the result into earlier segments."""
    return map_state(torch.Tensor.detach, state)


def reset(state: State, fresh: State, rows_B: Tensor) -> State:
    """Give the rows marked in `rows_B` (bool) the values of `fresh`; the others keep theirs, bit for bit (ValueError:
    marks of another dtype or number; a state of another structure or number of rows)."""
    if not torch.compiler.is_compiling():
        _compare(named(fresh), named(state), "fresh")
        _check_rows("rows_B", rows_B, torch.bool, state)

    def choose(old: Tensor, new: Tensor) -> Tensor:
        if old.shape[1:2] != new.shape[1:2] and 0 in new.shape[1:2]:  # a store that grew: its counts begin again
            return old
        if _grows(old, new):
            return _put(old, rows_B.nonzero()[:, 0], new[rows_B.nonzero()[:, 0]])
        return torch.where(rows_B.view(-1, *[1] * (old.dim() - 1)), new.to(old.dtype), old)

    return map_state(choose, state, fresh)


def reorder(state: State, index_B: Tensor) -> State:
    """Rows in the order of `index_B` (long); rows may repeat or vanish, as in beam search (ValueError: no such row)."""
    if not torch.compiler.is_compiling():
        _check_rows("index_B", index_B, torch.long, state)
    return map_state(lambda t: t.index_select(0, index_B), state)


def replace(state: State, index_D: Tensor, new: State) -> State:
    """The state whose rows `index_D` (long) are those of `new`."""
    return map_state(lambda old, put: _put(old, index_D, put), state, new)


def join(states: Sequence[State]) -> State:
    """The rows of several states of one structure, one state after the other (ValueError: of another structure)."""
    if not isinstance(states, list | tuple) or not states:
        raise ValueError(f"states={type(states).__name__}: must be a list of at least one state")
    for place, other in enumerate(states[1:], 1):
        _compare(named(other), named(states[0]), f"states[{place}]", first=1)
    return map_state(lambda *ts: torch.cat(ts), *states)


def repeat(state: State, times: int) -> State:
    """Each row `times` times in a row, as for the beams of one sentence (ValueError: less than once)."""
    if not isinstance(times, int) or times < 1:
        raise ValueError(f"times={times!r} must be a whole number, at least 1")
    return map_state(lambda t: t.repeat_interleave(times, 0), state)


def to(state: State, device: torch.device | str) -> State:
    """Move every tensor to `device`; dtypes stay."""
    return map_state(lambda t: t.to(device), state)


def refuse_narrow(state: State, what: str) -> None:
    """Raise a ValueError if a part of a state of sums is narrower than float32: it would lose `what`."""
    for name, t in named_tensors(state):
        if t.is_floating_point() and torch.finfo(t.dtype).bits < 32:
            raise ValueError(
                f"a state of {t.dtype} loses {what}: {name} of it; keep it in float32, as init_state makes it for "
                "every model"
            )


def nbytes(state: State) -> int:
    """Bytes that the state occupies."""
    return sum(t.numel() * t.element_size() for _, t in named_tensors(state))


def signature(state: State) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Path, shape and dtype of each tensor: what must not change from segment to segment."""
    return [(name, tuple(t.shape), t.dtype) for name, t in named_tensors(state)]


def _grows(*tensors: Tensor) -> bool:
    """Return True for a store that grows: it has any number of slots; its attribute `grows` tells."""
    return any(getattr(t, "grows", False) for t in tensors)


def _put(old: Tensor, index_D: Tensor, new: Tensor) -> Tensor:
    """The tensor with other rows; a store that grows may have another number of slots in them."""
    if not _grows(old, new):
        return old.index_copy(0, index_D, new)
    order_B = torch.arange(len(old), device=index_D.device)
    order_B[index_D] = torch.arange(len(old), len(old) + len(new), device=index_D.device)
    return torch.cat([old, new]).index_select(0, order_B)


def _check_rows(name: str, given_B: Tensor, dtype: torch.dtype, state: State) -> None:
    """Refuse (ValueError) marks that are not one per row, or indices (read on the CPU) of rows that there are not."""
    rows = next((len(t) for _, t in named_tensors(state)), None)
    if not isinstance(given_B, Tensor) or given_B.dim() != 1 or given_B.dtype != dtype:
        found = f"{tuple(given_B.shape)} {given_B.dtype}" if isinstance(given_B, Tensor) else type(given_B).__name__
        raise ValueError(f"{name}={found}: must be a tensor of one dimension and dtype {dtype}")
    if rows is None or (dtype != torch.bool and not (given_B.is_cpu and len(given_B))):
        return
    if len(given_B) != rows if dtype == torch.bool else not 0 <= int(given_B.min()) <= int(given_B.max()) < rows:
        raise ValueError(f"{name}={given_B.tolist()[:8]}: does not suit the {rows} rows of the state")


def _compare(
    have: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    what: str,
    way_out: str = "give states of one model in one mode",
    *,
    first: int = 0,
    rows: int | None = None,
    typed: bool = False,
    placed: torch.device | None = None,
) -> None:
    """Refuse (ValueError) a state of other tensors, of other sizes from dimension `first` on, of other than `rows`
    rows, of other dtypes if `typed`, or not on `placed`."""
    if have.keys() != want.keys():
        some = ", ".join(sorted(have.keys() ^ want.keys())[:4])
        raise ValueError(f"{what}: these tensors are in one only: {some}; {way_out}")
    for name, w in want.items():
        t = have[name]
        if rows is not None and t.shape[:1] != (rows,):
            raise ValueError(f"the state has {len(t) if t.dim() else 0} rows ({name}), the segment {rows} of them")
        place = placed or w.device
        other = typed and (t.dtype != w.dtype or (t.device != place and place.type != "meta"))
        grew = 0 in (*t.shape[1:2], *w.shape[1:2]) or _grows(t, w)
        have_sizes, want_sizes = ((*one.shape[first:1], *one.shape[max(first, 1 + grew) :]) for one in (t, w))
        if other or t.dim() != w.dim() or have_sizes != want_sizes:
            if name.endswith(KIND):
                raise ValueError(f"{what}: {name} tells another memory, options or sizes; {way_out}")
            sizes = tuple(w.shape if rows is None else (rows, *w.shape[1:]))
            raise ValueError(
                f"{what}: {name} is {tuple(t.shape)} {t.dtype} on {t.device.type}, this model expects {sizes} "
                f"{w.dtype}; {way_out}"
            )


def check(state: State, fresh: State, rows: int, *, memory: str = "", device: torch.device | None = None) -> None:
    """Refuse (ValueError) a state that is not of the model that gives `fresh` (of any rows), or has not `rows` rows.

    The number of slots (the second dimension) may differ, in a memory that is longer in evaluation than in training.
    Other weights of the same model are not found; see `check_weights`. `memory` describes the model's, for the message;
    `device` is that of all tensors, None for those of `fresh`.
    """
    way_out = (
        f"begin with init_state in this mode (training or evaluation), take the options that made the state (here "
        f"{memory or 'others'}), or convert it with state.map_state or as_kept"
    )
    what = "the state is that of another model"
    _compare(named(state), named(fresh), what, way_out, first=2, rows=rows, typed=True, placed=device)


def summary(state: State) -> str:
    """A table for people: one line a tensor, and the total."""
    lines = [f"{name:<40} {tuple(t.shape)!s:<20} {t.dtype}" for name, t in named_tensors(state)]
    return "\n".join([*lines, f"{nbytes(state):,} bytes"])


def from_tensors(stored: Mapping[str, Tensor], like: State, source: str) -> State:
    """The state in the structure of `like` whose tensors, by name, are `stored`: the inverse of `named_tensors`
    (ValueError: of another structure; the message names `source` and the first difference)."""
    expected = named(like)
    # Files of earlier versions do not tell the memory's options.
    stored = {**{name: t for name, t in expected.items() if name.endswith(KIND)}, **stored}
    stored = {name: t.to(expected[name].device) if name in expected else t for name, t in stored.items()}
    way_out = "build the state with the same number of rows and the same memory settings"
    _compare(stored, expected, f"{source} holds the state of another model", way_out, typed=True)
    names = iter(expected)
    return map_state(lambda t: stored[next(names)], like)
