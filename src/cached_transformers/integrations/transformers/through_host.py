"""The way of a segment through the layers of a decoder that somebody else wrote, for memories that span the layers.

Tokens of the memory take the host's first places: positions count from the first token in front of the segment.

Legend: B rows, N tokens, L tokens that they may see, D width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cached_transformers.seam.memory import Entry, ModelMemory, Projections, Query, Reading, Trace
from cached_transformers.state import State

from .stream_tap import Passage


class HostThrough:
    """The way through a host's layers, for one segment; see `seam.memory.Through`.

    Args:
        host: the decoder's own forward, `SegmentReader.host`. options: what else it is called with.

    Attributes:
        layers: none, since a host's projections are its own affair.
        states: of the layer memories, as the last call that writes has left them.
        outs: the host's output of each call that writes, for the segment's tokens.
        host_cache: keys and values of the memory's tokens in front and the segment's, where they are kept.
    """

    layers: Sequence[Projections] = ()

    def __init__(
        self, host: Callable[..., Any], states: tuple[State, ...], host_cache: Any, options: dict[str, Any]
    ) -> None:
        self.host, self.states, self.host_cache, self.options = host, states, host_cache, options
        self.outs: list[Any] = []

    def __call__(self, entry: Entry, *, write: bool = True) -> tuple[Tensor, list[Trace]]:
        """The decoder's output; one trace, of all layers together."""
        x_BND, places_BNP, padding_BN = entry.tokens[:3]
        total = x_BND.shape[1]
        start, length = entry.segment or (0, total)
        layers = Passage(self.states, padding_BN, writes=write, segment=entry.segment)
        out = self.host(*call_for(entry, 0, total), self.host_cache, layers, self.options)
        y_BND = out.last_hidden_state
        if write:
            self.states = tuple(layers.after)
            self.outs.append(narrowed(out, start, length))
        if self.host_cache is not None and total > start + length:
            self.host_cache.crop(start + length - total)
        query = Query(x_BND, positions_BNP=places_BNP, padding_BN=padding_BN)
        return y_BND, [Trace(x_BND, y_BND, query, Reading()).narrow(start, length)]


def call_for(entry: Entry, first: int, end: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """What the host is called with for the tokens first..end of an entry, and its mask over all up to there."""
    x_BND, places_BNP, padding_BN = entry.tokens[:3]
    front = 0 if entry.segment is None else entry.segment[0]  # tokens in front take the host's first places
    places_BN = (places_BNP[:, first:end, 0] + front).clamp(min=0)
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
