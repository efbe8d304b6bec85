"""Read a text of any length in constant memory, segment after segment.

Legend: N tokens of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.annotations import checked, shown
from cached_transformers.checks import at_least_one
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import perplexity
from cached_transformers.loops.segments import token_losses
from cached_transformers.models.diagonal import check_schedule, read_diagonally
from cached_transformers.models.segments import as_language_model, read_segments
from cached_transformers.state import State, seal


class Progress(NamedTuple):
    """Progress after one more segment.

    Attributes:
        tokens: tokens predicted so far. nats: sum of their losses so far.
        segment_tokens, segment_nats: of this segment.
        consumed: number of source tokens that were inputs so far.
        state: state after the segment.
    """

    tokens: int
    nats: float
    segment_tokens: int
    segment_nats: float
    consumed: int
    state: Any

    @property
    def perplexity(self) -> float:
        """Perplexity per token over the whole text so far; infinite on overflow."""
        return perplexity(self.nats / max(self.tokens, 1))

    def bits_per_byte(self, size: int) -> float:
        """Bits per byte of a text of `size` bytes."""
        return self.nats / math.log(2) / max(size, 1)


@checked
def read_stream(
    model: nn.Module,
    pieces: Iterable[list[int]],
    segment_length: int,
    *,
    start: Progress | None = None,
    in_place: bool = False,
    schedule: str = "segments",
) -> Iterator[Progress]:
    """Read tokens and yield after every segment.

    Memory does not grow with the text: it holds one segment, one piece and the state. The last segment may be shorter.
    Every token but the first is predicted once, from all tokens before it.

    Args:
        model: a language model; it is put into evaluation mode. pieces: token ids in order, of any lengths.
        segment_length: N.
        start: the last `Progress` of an earlier call, to continue it; `pieces` then begin after its `consumed`.
        in_place: a promise that no state is read once the next `Progress` is requested. Large stores are then written
            in place instead of copied for each segment; the state of `start` is copied once.
        schedule: see `SegmentLoop`; "diagonal" holds one segment and one state per layer of the model, and writes no
            state in place.

    Raises:
        ValueError: the segment is shorter than one token, or the schedule does not fit the model.
    """
    at_least_one(" token", segment_length=segment_length)
    model = as_language_model(model)
    check_schedule(schedule, model)
    model.eval()
    device = next(model.parameters()).device

    def read(piece: tuple[Tensor, Tensor, None], state: State | None, reset_1: Tensor | None) -> ModelOutput:
        return token_losses(model, *piece[:2], state)

    now = start if start is not None else Progress(0, 0.0, 0, 0.0, 0, None)
    begun: State | None = now.state
    ids = (torch.tensor(tokens, device=device)[None] for tokens in _segments(pieces, segment_length))
    parts = ((ids_1N[:, :-1], ids_1N[:, 1:], None) for ids_1N in ids)
    # No `with` block: the caller runs between yields.
    if schedule == "diagonal":
        outputs = torch.no_grad()(read_diagonally)(model, parts, begun)
    else:
        if in_place:
            begun = model.init_state(1) if begun is None else seal(begun)  # type: ignore[operator]
        outputs = torch.no_grad()(read_segments)(read, parts, begun, in_place=in_place)
    for losses_1N, state, _ in outputs:
        nats, count = losses_1N.double().sum().item(), losses_1N.shape[1]
        now = Progress(now.tokens + count, now.nats + nats, count, nats, now.consumed + count, state)
        yield now


def _segments(pieces: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """The tokens of each segment and the next token, its last target."""
    buffer: list[int] = []
    for piece in [pieces] if getattr(pieces, "shape", 0) == () or not isinstance(pieces, Iterable) else pieces:
        if isinstance(piece, str) or getattr(piece, "shape", 0) == () or not isinstance(piece, Iterable):
            raise ValueError(f"pieces has {shown(piece)}: each piece must be a list of token ids")
        buffer.extend(piece)  # type: ignore[arg-type]  # += would add an array to the numbers
        while len(buffer) > length:
            yield buffer[: length + 1]
            del buffer[:length]
    if len(buffer) > 1:
        yield buffer
