"""Reading a text of any length in constant memory: segment after segment, with the state carried and nothing kept.

Legend: N tokens of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import perplexity
from cached_transformers.loops.segments import token_losses
from cached_transformers.models.diagonal import check_schedule, read_diagonally
from cached_transformers.models.segments import as_language_model, read_segments
from cached_transformers.state import State, seal


class Progress(NamedTuple):
    """What reading one more segment gave.

    Attributes:
        tokens: tokens predicted so far. nats: sum of their losses so far.
        segment_tokens, segment_nats: of this segment alone.
        consumed: tokens of the source that were inputs so far; the next segment begins with the one after them.
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
        """Of a token, over everything read; infinite where it is too large for a number."""
        return perplexity(self.nats / max(self.tokens, 1))

    def bits_per_byte(self, size: int) -> float:
        """Bits that a text of `size` bytes takes, a byte."""
        return self.nats / math.log(2) / max(size, 1)


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

    Memory does not grow with the text: what is held is one segment, one piece and the state. The last segment is as
    long as what is left. Every token but the first is predicted once, from all that stands before it.

    Args:
        model: a language model; it is put into evaluation mode. pieces: token ids in order, cut anywhere.
        segment_length: N.
        start: the last `Progress` of an earlier call, to go on behind it; `pieces` then begin after its `consumed`.
        in_place: a promise that no state is looked at once the next `Progress` was asked for. Large stores are then
            written where they lie instead of being copied for each segment; the state of `start` is copied once.
        schedule: as of `SegmentLoop`; with "diagonal" as many segments are held as the model has layers, and their
            states, so that none is written in place.

    Raises:
        ValueError: the segment is shorter than one token, or the schedule does not suit the model.
    """
    if segment_length < 1:
        raise ValueError(f"segment_length={segment_length} must be at least 1 token")
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
    # Not a block of no_grad, in which the caller would go on after each yield.
    if schedule == "diagonal":
        outputs = torch.no_grad()(read_diagonally)(model, parts, begun)
    else:
        if in_place:
            begun = model.init_state(1) if begun is None else seal(begun)  # type: ignore[operator]  # it may be kept
        outputs = torch.no_grad()(read_segments)(read, parts, begun, in_place=in_place)
    for losses_1N, state, _ in outputs:
        nats, count = losses_1N.double().sum().item(), losses_1N.shape[1]
        now = Progress(now.tokens + count, now.nats + nats, count, nats, now.consumed + count, state)
        yield now


def _segments(pieces: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """The tokens of each segment, with the one behind it, which is its last target."""
    buffer: list[int] = []
    for piece in pieces:
        buffer += piece
        while len(buffer) > length:
            yield buffer[: length + 1]
            del buffer[:length]
    if len(buffer) > 1:
        yield buffer
