"""Warn of training that never reaches the memory: rows of one segment, and no state between the calls."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import Memory


class OneSegmentSteps:
    """Warn once if two training steps in a row read one segment without a state and leave the memory untrained.

    Two, since a loop that carries the state begins with a step without one. Memories that are read within the first
    segment train there: hooks on the parameters tell the gradient of the first of the two steps.
    """

    done = reached = trained = False
    hooks: list[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hooks": None}  # parameters are copied and pickled without theirs

    def step(self, model: nn.Module, segment_length: int | None, tokens: int, alone: bool) -> None:
        """Note a call of the model; `alone`: it reads one segment of `tokens` tokens, without a state."""
        if torch.compiler.is_compiling() or self.done or not (model.training and torch.is_grad_enabled()):
            return
        first = self.hooks is None
        for hook in self.hooks or ():
            hook.remove()
        self.done = not (alone and first)
        if alone and first:
            own = {p for module in model.modules() if isinstance(module, Memory) for p in module.parameters()}
            self.hooks = [p.register_hook(partial(self._got, p in own)) for p in model.parameters() if p.requires_grad]
        elif alone and self.reached and not self.trained:  # sharded parameters call no hook
            warnings.warn(
                f"segment_length={segment_length}: texts of {tokens} tokens are one segment, after which the memory is "
                "written, so that these steps neither read nor train it; take a segment_length below the texts' "
                "length, or carry memory_state from call to call",
                stacklevel=2,
            )

    def _got(self, of_memory: bool, gradient: Tensor) -> None:
        self.reached = True
        self.trained = self.trained or (of_memory and bool(gradient.any()))
