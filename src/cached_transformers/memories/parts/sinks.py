"""Attention sinks: the first tokens of each row's stream, kept for good beside a store of later ones.

A softmax has to put its weight somewhere, and pretrained decoders put it on the first tokens: without these they break
(Xiao et al. 2023, arXiv:2309.17453). The sinks are read at the places right before the store's oldest slot, so that no
distance is one that training did not have.

Legend: B rows, N tokens, M slots, P position channels, H heads, G heads of keys, E head width,
L slots and tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from cached_transformers.interfaces.memory import LayerMemory, Trace

from .fifo_store import Pairs, Rows, empty_pairs, empty_rows, lined_up, push, right_before, side_by_side, stored_pair


class SinksState(NamedTuple):
    """The first S inputs of the layer, or their keys and values, and the store of the later ones."""

    sinks: Rows | Pairs
    recent: Any


def placed(older: Rows | Pairs, newer: Rows | Pairs, first_B1P: Tensor | None) -> Any:
    """Two stores as one, whose slots are right before the segment."""
    assert first_B1P is not None
    rows = lined_up(older, newer)
    return rows._replace(positions_BMP=right_before(first_B1P, rows.positions_BMP.shape[1]))


class KeepsSinks(LayerMemory):
    """A memory with a store, which may keep the first `sinks` tokens beside it."""

    keep = "hidden"
    channels = 1
    """Number of stored positions of a slot."""
    width: int
    heads: int
    sinks: int = 0

    def empty(self, slots: int, batch_size: int, like: Tensor) -> Any:
        """A store that holds nothing: of keys and values in evaluation with keep='kv'."""
        if self.keep == "kv" and not self.training:
            return empty_pairs(batch_size, slots, math.prod(self.stored_heads), like, self.channels)
        return empty_rows(batch_size, slots, self.width, like, self.channels)

    @property
    def stored_heads(self) -> tuple[int, int]:
        """(G, E): number and width of the layer's heads of keys."""
        return self.key_shape or (self.heads, self.width // self.heads)

    def beside_sinks(self, store: Any, batch_size: int, like: Tensor) -> Any:
        """The state before the first segment, of the store's."""
        return SinksState(self.empty(self.sinks, batch_size, like), store) if self.sinks else store

    def push(self, rows: Any, trace: Trace) -> Any:
        """Store the layer's inputs, detached, or their keys and values, whichever the rows hold."""
        query, new_BNW = trace.query, trace.x_BND
        assert query.positions_BNP is not None
        if isinstance(rows, Pairs):
            new_BNW = side_by_side(*stored_pair(query, self.stored_heads[0]))
        return type(rows)(*push(Rows(*rows), new_BNW.detach(), query.positions_BNP, query.padding_BN))

    def store(self, state: Any, trace: Trace) -> tuple[Any, Tensor | None]:
        """`write` of the store."""
        return self.push(state, trace), None

    def write(self, state: Any, trace: Trace) -> tuple[Any, Tensor | None]:
        if not isinstance(state, SinksState):
            return self.store(state, trace)
        real_BN, weights_BHWL = trace.query.real_BN, trace.weights_BHWL
        later_BN = state.sinks.count_B[:, None] + real_BN.cumsum(1) > self.sinks
        first, later = (
            trace._replace(query=trace.query._replace(padding_BN=~real_BN | left_out_BN))
            for left_out_BN in (later_BN, ~later_BN)
        )
        if weights_BHWL is not None:
            later = later._replace(weights_BHWL=weights_BHWL[..., self.sinks :])
        recent, loss = self.store(state.recent, later)
        return SinksState(self.push(state.sinks, first), recent), loss
