"""Memory replay back-propagation (Memformer, arXiv:2010.06891, Algorithm 1), for memories with gradient.

Training over T segments keeps the activations of all of them. A replay keeps only the inputs of each segment, the state
before it and the random state. In the backward it runs each segment once more, from the last to the first:

    forward   y_t, M_{t+1} = f(x_t, M_t),  nothing else is kept
    backward  t = T .. 1:  f once more from (x_t, M_t), gradient of loss_t + <M_{t+1}, g>,  g <- gradient of M_t

Memory: activations of one segment and T states. Time: two forwards and one backward. The gradient equals plain
backpropagation through time, dropout included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.state import State

from .segments import SegmentLoop, SegmentPiece


class ReplayLoop(SegmentLoop):
    """A segment loop that keeps no activations and runs each segment again in the backward.

    It replaces a `SegmentLoop`, with its arguments, loss, state and gradients. `bptt` costs no activations, so it may
    cover all segments of the batch. Each segment is one non-reentrant activation checkpoint, so DDP and FSDP may wrap
    the loop; the model may also recompute its blocks (`set_activation_checkpointing`). With bptt_window="sliding" a
    segment runs again for each backward through it.

    Between forward and backward the model must not change (weights, buffers, mode).

    Raises:
        ValueError: see `SegmentLoop`; or a schedule other than "segments".

    Example:
        >>> loop = ReplayLoop(model, segment_length=64, bptt=32)
        >>> loss, state = loop(tokens[:, :-1], tokens[:, 1:], state)
        >>> loss.backward()
    """

    def _segment(self, piece: SegmentPiece, state: State | None, reset_B: Tensor | None) -> ModelOutput:
        read = super()._segment
        if not torch.is_grad_enabled():
            return read(piece, state, reset_B)
        return checkpoint(read, piece, state, reset_B, use_reentrant=False, preserve_rng_state=True)  # type: ignore[no-any-return]
