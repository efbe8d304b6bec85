"""The promise that a state is not used again, by which a memory may change it in place.

A state that is given is never changed: a caller that keeps it can go back to it. A loop that made a state itself, and
hands it on for the last time, can say so, and a large store is then written where it lies instead of being copied:

    with last_use(state):
        output = model(segment, state)        # `state` must not be used from here on

The promise covers these tensors only, and each may be changed once: derived tensors (a row that is
reset, a state between two segments of one call) are excluded. Nothing is changed in place while a gradient is recorded
or code is being compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from .tree import State, map_state, named_tensors


class Promise(NamedTuple):
    """Tensors by identity: those that may still be changed, and those that were."""

    free: dict[int, Tensor]
    written: dict[int, Tensor]


_PROMISE: ContextVar[Promise | None] = ContextVar("last_use", default=None)


@contextmanager
def _standing(promise: Promise | None) -> Iterator[None]:
    before = _PROMISE.set(promise)
    try:
        yield
    finally:
        _PROMISE.reset(before)


def last_use(state: State | None) -> AbstractContextManager[None]:
    """Promise that `state` is not used again after it was passed to a model in this block; None promises nothing.

    The state must share no memory with anything that is used later. `seal` gives such a one of any state.
    """
    given = {} if state is None else {id(t): t for _, t in named_tensors(state)}
    return _standing(Promise(given, {}))


def used_again() -> AbstractContextManager[None]:
    """Take the promise back inside this block, for code that uses a state more than once."""
    return nullcontext() if torch.compiler.is_compiling() else _standing(None)


def may_change(*tensors: Tensor) -> bool:
    """True if a memory may change these tensors of its state in place, which it then has to do.
    Each of them must be one of its own.

    Asked once: the answer is no the next time.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    promise = _PROMISE.get()
    if (
        promise is None
        or len({id(t) for t in tensors}) < len(tensors)
        or any(id(t) not in promise.free or not t.is_contiguous() or t.requires_grad for t in tensors)
        or any(t.is_inference() != torch.is_inference_mode_enabled() for t in tensors)
    ):
        return False
    for t in tensors:
        promise.written[id(t)] = promise.free.pop(id(t))
    return True


def seal(state: State) -> State:
    """Copy every tensor into the canonical (contiguous) layout, but those that were written in place by a promise.

    Compiled code is specialised to strides: a slice of a longer buffer has others, which would cost a recompilation.
    """
    promise = None if torch.compiler.is_compiling() else _PROMISE.get()
    kept = {} if promise is None else promise.written
    return map_state(lambda t: t if kept and id(t) in kept else t.clone(memory_format=torch.contiguous_format), state)
