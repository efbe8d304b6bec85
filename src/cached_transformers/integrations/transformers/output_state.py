"""The outputs of a model of transformers, with the memory's state in them."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import torch
from torch import nn

from cached_transformers.state import State

try:
    from transformers.utils import ModelOutput
except ImportError:  # this module is of use to those alone who hold a model of transformers, but imports without it
    ModelOutput = object

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


def prepare_outputs(*modules: nn.Module) -> None:
    """Make the classes that the outputs of these modules of transformers will have.

    transformers tells torch of a class of outputs when it is made or used first, unless a graph is being traced.
    """
    for part in {sys.modules[kind.__module__] for module in modules for kind in type(module).__mro__}:
        for kind in list(vars(part).values()):
            if isinstance(kind, type) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind):
                output_with_state(kind)


@torch.compiler.assume_constant_result
def _outside_of_graphs(kind: type) -> type:
    """`output_with_state`, which a graph that is traced takes as given."""
    return output_with_state(kind)


def with_state(out: Any, state: State) -> Any:
    """The host's output, with the state beside what it holds."""
    return _outside_of_graphs(type(out))(**dict(out.items()), **{OUTPUT: state})
