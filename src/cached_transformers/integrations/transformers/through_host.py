"""The way of a segment through the layers of a decoder that somebody else wrote, for memories that span the layers.

Tokens of the memory take the host's first places: positions count from the first token in front of the segment.

Legend: B rows, N tokens, L tokens that they may see, D width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import Entry, ModelMemory, Projections, Query, Reading, Trace
from cached_transformers.state import State

from .segment_cache import SegmentCache
from .stream_tap import Passage


class HostThrough:
    """The way through a host's layers, for one segment; see `seam.memory.BlockRunner`.

    Args:
        host: the decoder's own forward, `SegmentReader.host`. options: what else it is called with.
        shift_B1: makes a place in the segment of a position in the stream when it is added.
        depth: how many layers there are.

    Attributes:
        layers: none, since a host's projections are its own affair.
        states: of the layer memories, as the last call that writes has left them.
        outs: the host's output of each call that writes, for the segment's tokens.
        host_cache: keys and values of the memory's tokens in front and the segment's, where they are kept.
    """

    layers: Sequence[Projections] = ()

    def __init__(
        self,
        host: Callable[..., Any],
        states: tuple[State, ...],
        host_cache: Any,
        options: dict[str, Any],
        shift_B1: Tensor,
        depth: int,
    ) -> None:
        self.host, self.states, self.host_cache, self.options = host, states, host_cache, options
        self.shift_B1, self.depth = shift_B1, depth
        self.outs: list[Any] = []

    def __call__(self, entry: Entry, *, write: bool = True) -> tuple[Tensor, list[Trace]]:
        """The decoder's output; the traces of all layers, or one of them together where not all have a memory."""
        x_BND, positions_BNP, padding_BN = entry.tokens[:3]
        total = x_BND.shape[1]
        start, length = entry.segment or (0, total)
        layers = passage_for(entry, 0, total, self.states, self.shift_B1, self.host_cache, writes=write)
        out = self.host(*call_for(entry, 0, total, self.shift_B1), self.host_cache, layers, self.options)
        y_BND = out.last_hidden_state
        if write:
            self.states = tuple(layers.after)
            self.outs.append(narrowed(out, start, length))
        if self.host_cache is not None and total > start + length:
            self.host_cache.crop(start + length - total)
        traces = [trace for trace in layers.traces or () if trace is not None]
        if len(traces) == self.depth:
            return y_BND, traces
        query = Query(x_BND, positions_BNP=positions_BNP, padding_BN=padding_BN)
        return y_BND, [Trace(x_BND, y_BND, query, Reading())]


def front_of(entry: Entry) -> int:
    """Tokens of the memory in front of the segment's, which take the host's first places."""
    return 0 if entry.segment is None else entry.segment[0]


def passage_for(
    entry: Entry,
    first: int,
    end: int,
    states: tuple[State, ...],
    shift_B1: Tensor,
    host_cache: SegmentCache | None,
    *,
    writes: bool,
) -> Passage:
    """What the layers are handed for the tokens first..end of an entry."""
    tokens = entry.tokens
    return Passage(
        states,
        tokens.positions_BNP[:, :end],
        shift_B1 + front_of(entry),
        None if tokens.padding_BN is None else tokens.padding_BN[:, first:end],
        writes=writes,
        segment=entry.segment,
        offers=entry.contexts,
        slots=entry.slots,
        host_cache=host_cache,
        traced=first == 0,  # what goes on in a segment that was begun leaves none
    )


def call_for(entry: Entry, first: int, end: int, shift_B1: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """What the host is called with for the tokens first..end of an entry, and its mask over all up to there."""
    x_BND, positions_BNP, padding_BN = entry.tokens[:3]
    places_BN = (positions_BNP[:, first:end, 0] + shift_B1 + front_of(entry)).clamp(min=0)
    call = {"inputs_embeds": x_BND[:, first:end], "position_ids": places_BN}
    rows, total = x_BND.shape[:2]
    if entry.visible_NN is None:
        # Without a mask, transformers takes positions that do not rise by one for texts packed into one row.
        keep_BN = x_BND.new_ones(rows, total, dtype=torch.bool) if padding_BN is None else ~padding_BN
        return call, keep_BN[:, :end].long()
    visible_BNL = entry.visible_NN[first:end, :end].expand(rows, -1, -1)
    if padding_BN is not None:
        itself_NL = torch.eye(total, dtype=torch.bool, device=x_BND.device)[first:end, :end]
        visible_BNL = visible_BNL & (~padding_BN[:, None, :end] | itself_NL)
    lowest = torch.finfo(x_BND.dtype).min
    return call, torch.zeros_like(visible_BNL, dtype=x_BND.dtype).masked_fill(~visible_BNL, lowest)[:, None]


def place_of_segment(entry: Entry, tokens: int, memory: ModelMemory) -> tuple[int, int]:
    """Tokens that are not the segment's, and the place of its first one.

    Raises:
        ValueError: there are some, and the memory does not say where.
    """
    total = entry.tokens.x_BND.shape[1]
    if entry.segment is None and total != tokens:
        raise ValueError(
            f"memory {type(memory).__name__} makes {total} tokens of a segment of {tokens} and does not say where "
            "these stand among them; give Entry.segment=(start, length)"
        )
    return total - tokens, 0 if entry.segment is None else entry.segment[0]


def narrowed(out: Any, start: int, length: int) -> Any:
    """The output for some neighbouring tokens."""
    out["last_hidden_state"] = out.last_hidden_state.narrow(1, start, length)
    if out.get("hidden_states") is not None:
        out["hidden_states"] = tuple(t.narrow(1, start, length) for t in out.hidden_states)
    return out


def joined(outs: list[Any]) -> Any:
    """One output for pieces that follow each other."""
    out = outs[-1]
    if len(outs) > 1:
        out["last_hidden_state"] = torch.cat([part.last_hidden_state for part in outs], 1)
        if out.get("hidden_states") is not None:
            out["hidden_states"] = tuple(
                torch.cat(parts, 1) for parts in zip(*(p.hidden_states for p in outs), strict=True)
            )
    return out
