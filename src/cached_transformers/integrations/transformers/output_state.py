"""The outputs of a model of transformers, with the memory's state in them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from cached_transformers.state import State

OUTPUT = "memory_state"


class Carried:
    """A state on its way down from a model to its decoder, and the one that comes back."""

    def __init__(self, state: State | None) -> None:
        self.state = state
        self.after: State | None = None


def _rebuild(kind: type, fields: dict[str, Any]) -> Any:
    """An output that was pickled."""
    return output_with_state(kind)(**fields)


@functools.cache
def output_with_state(kind: type) -> type:
    """The host's class of outputs with a field for the state: torch.export takes an output apart by its fields."""

    def reduce(self: Any) -> tuple[Any, ...]:
        return _rebuild, (kind, dict(self.items()))

    made = type(kind.__name__, (kind,), {"__annotations__": {OUTPUT: Any}, OUTPUT: None, "__doc__": kind.__doc__})
    made = dataclasses.dataclass(made)
    made.__reduce__ = reduce  # type: ignore[method-assign, assignment]
    return made


@torch.compiler.assume_constant_result
def _outside_of_graphs(kind: type) -> type:
    """`output_with_state`, which a graph that is traced takes as given."""
    return output_with_state(kind)


def with_state(out: Any, state: State) -> Any:
    """The host's output, with the state beside what it holds."""
    return _outside_of_graphs(type(out))(**dict(out.items()), **{OUTPUT: state})
