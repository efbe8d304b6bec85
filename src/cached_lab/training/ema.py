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


class WeightAverage:
    """Average of a model's weights, starting with those of the first step: w <- d w + (1 - d) weights.

    Args:
        model: the unwrapped model. decay: d. warmup: use min(d, (1 + t) / (10 + t)) in step t, from 1.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = False) -> None:
        self.decay, self.warmup = decay, warmup
        self._averaged = AveragedModel(model, multi_avg_fn=self._mean, use_buffers=False)  # type: ignore[arg-type]

    @property
    def module(self) -> nn.Module:
        """The model with averaged weights."""
        module: nn.Module = self._averaged.module
        return module

    @property
    def updates(self) -> int:
        """Number of averaged steps."""
        return int(self._averaged.n_averaged)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Average the weights after a step, and copy the buffers."""
        commit_caches(model)
        self._averaged.update_parameters(model)

    def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Restore saved averages."""
        self.module.load_state_dict(weights)
        self._averaged.n_averaged.fill_(updates)

    def replace(self, module: nn.Module) -> None:
        """Replace the module by one with the same averaged weights."""
        self._averaged.module = module

    def _mean(self, average: list[Tensor], current: list[Tensor], count: Tensor | int) -> None:
        t = int(count) + 1
        decay = min(self.decay, (1 + t) / (10 + t)) if self.warmup else self.decay
        if average[0].is_floating_point():
            torch._foreach_lerp_(average, current, 1 - decay)
        else:
            torch._foreach_copy_(average, current)
