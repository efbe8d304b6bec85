"""Keep the state of a stream's rows between training steps, and save it with third-party trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.models.segments import for_loops, remembers
from cached_transformers.state import State, detach, from_tensors, named_tensors

_NOTHING = "nothing"
"""Name of a placeholder for an empty state: some trainers do not save empty mappings."""


class CarriedState:
    """Hold the detached state between steps, with the `state_dict` protocol of optimisers.

    `Accelerator.register_for_checkpointing`, a hook of Lightning, or `torch.save` can save it. Each process has its own
    rows and therefore its own file.

    Args:
        model: of this package, or a model of transformers with a memory; before it is wrapped.

    Attributes:
        state: None at the start of a text; detached when it is set.

    Raises:
        ValueError: the model has no memory with a state.

    Example:
        >>> carried = CarriedState(model)
        >>> loss, carried.state = loop(inputs, targets, carried.state)
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = for_loops(model)
        if not remembers(self._model.init_state(1)):
            raise ValueError(
                f"{type(model).__name__} has no memory with a state; give it one, or leave CarriedState out"
            )
        self._state: State | None = None

    @property
    def state(self) -> State | None:
        return self._state

    @state.setter
    def state(self, state: State | None) -> None:
        self._state = None if state is None else detach(state)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the state by name, on the CPU."""
        if self._state is None:
            return {_NOTHING: torch.zeros(0)}
        return {name: tensor.detach().cpu().clone() for name, tensor in named_tensors(self._state)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of `state_dict` (ValueError: it is of another model)."""
        if set(tensors) == {_NOTHING}:
            self._state = None
            return
        rows = next((len(tensor) for tensor in tensors.values() if tensor.dim()), 0)
        training = self._model.training
        self._model.train()  # the size of a state may depend on the mode
        like = self._model.init_state(rows)
        self._model.train(training)
        device = next(self._model.parameters()).device
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._state = from_tensors(moved, like, "the checkpoint of CarriedState")
