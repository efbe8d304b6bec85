"""Memory replay back-propagation (Memformer, arXiv:2010.06891, Algorithm 1), for memories with gradient.

Training over T segments keeps the activations of all of them. A replay keeps, of each segment, its inputs, the state
before it and the state of the random generators; going back, it runs each segment once more, from the last to the
first, takes its gradient with that of the state after it, and hands the gradient of the state before it to the segment
before.

    forward   y_t, M_{t+1} = f(x_t, M_t),  nothing else is kept
    backward  t = T .. 1:  f once more from (x_t, M_t), gradient of loss_t + <M_{t+1}, g>,  g <- gradient of M_t

Memory: activations of one segment and T states. Time: two forwards and one backward. The gradient is that of plain
backpropagation through time, dropout included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.state import State

from .segments import Piece, SegmentLoop


class ReplayLoop(SegmentLoop):
    """A segment loop that keeps no activations and runs each segment again when its gradient is due.

    It takes the place of a `SegmentLoop`, with its arguments, calls, loss, state and gradients. `bptt` remains the
    number of segments that a gradient crosses; it no longer costs activations, so it may be as large as the batch has
    segments. Each segment is one non-reentrant activation checkpoint: there is one forward and one backward of the
    whole, so DDP and FSDP wrap the loop as they wrap a segment loop, and every parameter reports its gradient once.
    The model may itself recompute its blocks (`set_activation_checkpointing`), which also cuts what the segment in
    replay needs. Without gradient nothing is different from a segment loop. With bptt_window="sliding" a segment is run
    again for each way back through it.

    Kept for each segment: its inputs, targets and padding, the state before it, and the random state. Between forward
    and backward the model has to stay as it is (weights, buffers, training or evaluation), since it is run again then.

    Raises:
        ValueError: as `SegmentLoop`, and for another schedule than "segments", whose states follow one another.

    Example:
        >>> loop = ReplayLoop(model, segment_length=64, bptt=32)
        >>> loss, state = loop(tokens[:, :-1], tokens[:, 1:], state)
        >>> loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        segment_length: int,
        bptt: int = 1,
        passes: int = 1,
        schedule: str = "segments",
        scoring: Callable[..., ModelOutput] | None = None,
        bptt_window: str = "blocks",
    ) -> None:
        if schedule != "segments":
            raise ValueError(
                f"ReplayLoop runs one segment after the other again and cannot have schedule={schedule!r}; take "
                "SegmentLoop, with set_activation_checkpointing() to save memory"
            )
        super().__init__(model, segment_length, bptt, passes, scoring=scoring, bptt_window=bptt_window)

    def _segment(self, piece: Piece, state: State | None, reset_B: Tensor | None) -> ModelOutput:
        read = super()._segment
        if not torch.is_grad_enabled():
            return read(piece, state, reset_B)
        return checkpoint(read, piece, state, reset_B, use_reentrant=False, preserve_rng_state=True)  # type: ignore[no-any-return]
