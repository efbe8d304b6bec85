"""A trainable initial state of rows."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from cached_transformers.state import State, map_state, named_tensors

PLACE = "initial_state"
"""Attribute of a stack, or of a host's decoder, that holds it."""


class InitialState(nn.Module):
    """A state of one row with which every row begins.

    Args:
        state: of one row. learned: names of its tensors that are parameters (`named_tensors`); the others are buffers.
    """

    def __init__(self, state: State, learned: Collection[str]) -> None:
        super().__init__()
        self.like = map_state(lambda t: t.detach().to("meta"), state)
        for place, (name, t) in enumerate(named_tensors(state)):
            if name in learned:
                self.register_parameter(f"tensor_{place}", nn.Parameter(t.detach().clone()))
            else:
                self.register_buffer(f"tensor_{place}", t.detach().clone())

    def forward(self, rows: int) -> State:
        """The initial state of `rows` rows."""
        places = iter(range(len(list(named_tensors(self.like)))))

        def of_rows(_: Tensor) -> Tensor:
            t = getattr(self, f"tensor_{next(places)}")
            return t.expand(rows, *t.shape[1:]).clone(memory_format=torch.contiguous_format)

        return map_state(of_rows, self.like)


def initial_state_of(place: nn.Module) -> InitialState | None:
    """The initial state that `place` holds; None for an empty state."""
    found = place._modules.get(PLACE)
    return found if isinstance(found, InitialState) else None
