"""Exponential moving average of the weights (Polyak and Juditsky, 1992), as in timm and DeiT.

Buffers, including shared caches, are copied from the model and not averaged: a cache was written by the live gates, and
batch-norm statistics are averages already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from cached_transformers.memories.grc.shared_cache import commit_caches


class WeightAverage(AveragedModel):
    """Average of a model's weights, starting with those of the first step: w <- d w + (1 - d) weights.

    Args:
        model: the unwrapped model. decay: d.

    Attributes:
        module: the model with averaged weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        def mean(average: list[Tensor], current: list[Tensor], count: Tensor | int) -> None:
            if average[0].is_floating_point():
                torch._foreach_lerp_(average, current, 1 - decay)
            else:
                torch._foreach_copy_(average, current)

        super().__init__(model, multi_avg_fn=mean, use_buffers=False)  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """Number of averaged steps."""
        return int(self.n_averaged)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Average the weights after a step, and copy the buffers."""
        commit_caches(model)
        self.update_parameters(model)

    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Restore saved averages."""
        self.module.load_state_dict(weights)
        self.n_averaged.fill_(updates)
