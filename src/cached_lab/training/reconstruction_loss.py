"""An auxiliary loss for what a memory holds: say the segment again that was just written.

Memformer (Wu et al. 2020, arXiv:2010.06891) trains on recalling earlier text beside going on with it, so that slots are
taught what to keep by more than the rare word that needs it. There the encoder-decoder draws one objective a step; no
code of it is published. Here every segment of a language model has both losses, with any memory that is carried:

    S', y = model(x; S),   loss = loss(y) + weight * mean_i loss(x_{i+1} | x_1 .. x_i; S')

The model reads the segment a second time with the state that holds it, and is asked for its tokens. What it says better
than at the first time comes from the memory, and the gradient reaches how it was written one segment ago, not many.
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
class Recall:
    """Token losses with the recall of each segment as auxiliary loss: `scoring` of a `SegmentLoop` or `ReplayLoop`.

    It costs a second forward and backward. Without gradient there is none of it, nor is it a part of the losses.

    Attributes:
        weight: of the recall, in nats a token; the loop takes the mean over segments.

    Raises:
        ValueError: the weight is not above 0; when called, the model has no memory with a state.

    Example:
        >>> loop = SegmentLoop(model, segment_length=64, bptt=2, scoring=Recall(0.3))
    """

    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight={self.weight} of a recall must be above 0; leave the recall out for none")

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
        """As `token_losses`."""
        out = token_losses(model, inputs_BN, targets_BN, state, reset, padding, places)
        if not torch.is_grad_enabled():
            return out
        if not remembers(out.state):
            raise ValueError(
                f"a recall is of a memory with a state, and {type(model).__name__} has none; leave the recall out"
            )
        text_BN = inputs_BN if padding is None else inputs_BN.masked_fill(padding, IGNORED)
        asked_BN = F.pad(text_BN[:, 1:], (0, 1), value=IGNORED)
        told = token_losses(model, inputs_BN, asked_BN, out.state, padding=padding)
        recall = told.outputs.sum() / (asked_BN != IGNORED).sum().clamp(min=1)
        return out._replace(auxiliary_loss=out.auxiliary_loss + self.weight * recall)
