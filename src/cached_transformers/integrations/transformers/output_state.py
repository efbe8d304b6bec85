"""The outputs of a model of transformers, with the memory's state in them."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from torch import nn

from cached_transformers.state import State

from .packed_rows import Documents

try:
    from transformers.utils import ModelOutput
except ImportError:  # this module is of use to those alone who hold a model of transformers, but imports without it
    ModelOutput = object

OUTPUT = "memory_state"


class Carried:
    """A state on its way down from a model to its decoder, and the one that comes back.

    Attributes:
        documents: in the rows of the call, where the model was told of them.
    """

    def __init__(self, state: State | None) -> None:
        self.state = state
        self.after: State | None = None
        self.documents: Documents | None = None


def _rebuild(kind: type, fields: dict[str, Any]) -> Any:
    """An output that was pickled."""
    return output_with_state(kind)(**fields)


_KINDS: dict[type, type] = {}


def output_with_state(kind: type) -> type:
    """The host's class of outputs with a field for the state: torch.export takes an output apart by its fields."""
    if kind not in _KINDS:
        fields: dict[str, Any] = {"__annotations__": {OUTPUT: Any}, OUTPUT: None, "__doc__": kind.__doc__}
        fields["__reduce__"] = lambda self: (_rebuild, (kind, dict(self.items())))
        _KINDS[kind] = dataclasses.dataclass(type(kind.__name__, (kind,), fields))
    return _KINDS[kind]


def prepare_outputs(*modules: nn.Module) -> None:
    """Make the classes that the outputs of these modules of transformers will have.

    A graph that is being traced cannot make one, nor does transformers then tell torch of a class that is new.
    """
    names = {kind.__module__ for module in modules for kind in type(module).__mro__}
    for part in [sys.modules[name] for name in names if name in sys.modules]:
        for kind in list(vars(part).values()):
            if isinstance(kind, type) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind):
                output_with_state(kind)


def with_state(out: Any, state: State) -> Any:
    """The host's output, with the state beside what it holds."""
    return output_with_state(type(out))(**dict(out.items()), **{OUTPUT: state})


def handed_back(out: Any, after: State | None, carried: Carried, tuples: bool) -> Any:
    """The output with the state after it, where somebody knows it."""
    if after is not None:
        carried.after = after
        out = with_state(out, after)
    return out.to_tuple() if tuples else out
