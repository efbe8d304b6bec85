"""Auxiliary loss that reconstructs each segment from the memory that has just stored it.

Memformer (Wu et al. 2020, arXiv:2010.06891) also trains on recalling earlier text. Its encoder-decoder samples one
objective per step; here every segment of a language model has both losses, with any memory with a state:

    S', y = model(x; S),   loss = loss(y) + weight * mean_i loss(x_{i+1} | x_1 .. x_i; S')

The model reads the segment again with the state that contains it. The gradient reaches the write of one segment ago.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.loops.segments import token_losses
from cached_transformers.models.segments import remembers
from cached_transformers.state import State


@dataclass(frozen=True)
class ReconstructionLoss:
    """Token losses with this auxiliary loss: the `scoring` of a `SegmentLoop` or `ReplayLoop`.

    It costs a second forward and backward, and is skipped without gradients.

    Attributes:
        weight: weight in nats per token; the loop takes the mean over segments.

    Raises:
        ValueError: the weight is not above 0, or a called model has no memory with a state.

    Example:
        >>> loop = SegmentLoop(model, segment_length=64, bptt=2, scoring=ReconstructionLoss(0.3))
    """

    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight={self.weight} must be above 0; leave the reconstruction out for none")

    def __call__(
        self,
        model: Any,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
        places: Tensor | None = None,
    ) -> ModelOutput:
        """Return the output of `token_losses`, with the auxiliary loss added."""
        out = token_losses(model, inputs_BN, targets_BN, state, reset, padding, places)
        if not torch.is_grad_enabled():
            return out
        if not remembers(out.state):
            raise ValueError(f"reconstruction needs a memory with a state, and {type(model).__name__} has none")
        text_BN = inputs_BN if padding is None else inputs_BN.masked_fill(padding, IGNORED)
        asked_BN = F.pad(text_BN[:, 1:], (0, 1), value=IGNORED)
        told = token_losses(model, inputs_BN, asked_BN, out.state, padding=padding)
        recall = told.outputs.sum() / (asked_BN != IGNORED).sum().clamp(min=1)
        return out._replace(auxiliary_loss=out.auxiliary_loss + self.weight * recall)
