"""Local attention of the Image Transformer (Parmar et al. 2018, arXiv:1802.05751; tensor2tensor,
layers/common_attention.py: local_attention_1d and local_attention_2d).

Tokens are cut into blocks of queries that do not overlap, and all queries of a block share one block of keys:

    out_i = softmax over M(i) of (q_i k_j / sqrt(E)) v_j
    1-D: M(i) = the block of i, and the m tokens before it
    2-D: M(i) = the block of i on the map, and the rows above it and columns on both sides within m_h and m_w

Without a causal order the memory lies on all sides: also after the block in 1-D, and below it in 2-D. Causally, of
these the keys up to i: in 2-D the sequence may go through the map row by row ("raster"), or block by block, row by row
inside each ("blocks", the order in which the paper generates an image).

Cost: N (b + m) (E + V) multiply-adds a head in 1-D (b + 2 m without causal order), for N a multiple of b;
N (b_h + m_h) (b_w + 2 m_w) (E + V) in 2-D (b_h + 2 m_h), for a map of whole blocks; never more than N^2 (E + V).

What differs from the original: the map need not be of whole blocks; class tokens see all and are seen by all.

Legend: B rows, H heads, N tokens, E key width, V value width, Q blocks, W queries of a block, S keys that a block sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cached_transformers.interfaces.attention import AttentionOutput, Call, StepsFrom
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, seen_places
from .parts.flex import Sees
from .parts.kernels import FlexKernel
from .parts.pattern import PatternAttention
from .parts.windows import beside_class_tokens, local_attention


@ATTENTIONS.register(
    "image_transformer",
    paper="arXiv:1802.05751",
    title="Image Transformer",
    purpose="a regular pattern",
    equation="softmax over the block of i and the memory round it of (q k^T / sqrt(E)) v",
    order="N (b + m)",
    cost="N (b + 2 m) (E + V) multiply-adds a head for b = block and m = memory, N (b + m) (E + V) causally; "
    "2-D: N (b_h + 2 m_h) (b_w + 2 m_w) (E + V), and N (b_h + m_h) (b_w + 2 m_w) (E + V)",
)
class ImageTransformerAttention(PatternAttention):
    """Blocks of queries that each share their own block and a memory round it, along the sequence or on a map.

    Args:
        block: queries of a block: a number of tokens, or (rows, columns) on the map.
        memory: how far keys reach beyond the block: a number of tokens, or (rows, columns).
        size: (rows, columns) of the map, for blocks on a map. A shorter sequence is the beginning of a map.
        order: how the sequence goes through the map, "raster" or "blocks".
        prefix: class tokens before the others, which see all and are seen by all.

    Raises:
        ValueError: a block below 1 or a negative memory; one of them a number and the other a pair; blocks on a map of
            unknown size; an unknown order.
    """

    can = PatternAttention.can | {"causal"}
    steps_from: StepsFrom = "keys"

    def __init__(
        self,
        *,
        block: int | Sequence[int] = 256,
        memory: int | Sequence[int] = 256,
        size: Sequence[int] | None = None,
        order: str = "raster",
        prefix: int = 0,
        kernel: FlexKernel = "plain",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout, kernel=kernel)
        flat = isinstance(block, int)
        if flat != isinstance(memory, int):
            raise ValueError(f"block={block} and memory={memory} must both be numbers (1-D) or both be pairs (2-D)")
        self.block, self.memory = pair(block), pair(memory)
        if len(self.block) != 2 or len(self.memory) != 2 or min(self.block) < 1 or min(self.memory) < 0:
            raise ValueError(f"block={block} must be at least 1 and memory={memory} at least 0, as numbers or pairs")
        if not flat and size is None:
            raise ValueError(f"block={block} lies on a map of unknown size; give size=(rows, columns)")
        if order not in ("raster", "blocks"):
            raise ValueError(f"order={order!r} must be 'raster' (row by row) or 'blocks' (block by block)")
        if prefix < 0:
            raise ValueError(f"prefix={prefix} must be a number of class tokens, or 0")
        self.size = None if flat or size is None else pair(size)
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ValueError(f"size={size} must be (rows, columns) of a map")
        if self.size is not None:
            self.block = (min(self.block[0], self.size[0]), min(self.block[1], self.size[1]))
        self.order, self.prefix = order, prefix
        if self.size is not None:
            self.on_map, self.steps_from = True, None  # blocks of a map have no place in a text

    def rule(self, heads: int, tokens: int, causal: bool) -> _Line | _Map:
        (block, _), (memory, _) = self.block, self.memory
        if self.size is None:
            return _Line(block, memory, 0 if causal else memory, self.prefix)
        self._check_fits(tokens - self.prefix)
        return _Map(self.size, self.block, self.memory, self.order, self.prefix, causal)

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        body = self._along_the_sequence if self.size is None else self._on_the_map
        return beside_class_tokens(body, self.prefix, q_BHNE, k_BHNE, v_BHNV, call, dropout=self.drop)

    def _along_the_sequence(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        size, reach, causal = self.block[0], self.memory[0], call.causal

        def sees(i: Tensor, j: Tensor) -> Tensor:
            first = i // size * size
            last = i if causal else first + size - 1 + reach
            return (j >= first - reach) & (j <= last)

        after = 0 if causal else reach
        return local_attention(
            q_BHNE, k_BHNE, v_BHNV, call, sees, size=size, before=reach, after=after, dropout=self.drop
        )

    def _on_the_map(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens, device = q_BHNE.shape[2], q_BHNE.device
        query_QW, key_QS = self._tables(tokens, call.causal, device)
        # Where each token's query is among the blocks; queries outside the sequence all write to a place of their own.
        slots = torch.arange(query_QW.numel(), device=device)
        back_N = slots.new_zeros(tokens + 1).scatter(0, query_QW.flatten(), slots)[:tokens]
        if tokens * tokens <= query_QW.numel() * key_QS.shape[1]:
            return self._all_pairs(q_BHNE, k_BHNE, v_BHNV, call, back_N // query_QW.shape[1], key_QS)
        q = q_BHNE[:, :, query_QW.clamp(max=tokens - 1)]
        k, v = (t[:, :, key_QS.clamp(min=0)] for t in (k_BHNE, v_BHNV))
        mask = seen_places(key_QS[:, None], tokens, call.key_padding_mask)
        if call.causal:
            mask = mask & (key_QS[:, None] <= query_QW[..., None])
        out, lse = attend(q, k, v, mask, dropout=self.drop, want_lse=call.want_lse)
        return AttentionOutput(out.flatten(2, 3)[:, :, back_N], None if lse is None else lse.flatten(2)[:, :, back_N])

    def _all_pairs(
        self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, block_N: Tensor, key_QS: Tensor
    ) -> AttentionOutput:
        """The same from all pairs of tokens, where blocks with their overlaps are more than these."""
        tokens = q_BHNE.shape[2]
        key_QS = torch.where(key_QS < 0, tokens, key_QS)
        near_QN = torch.zeros(len(key_QS), tokens + 1, dtype=torch.bool, device=key_QS.device)
        mask = near_QN.scatter(1, key_QS, True)[block_N, :tokens]
        if call.causal:
            mask = mask.tril()
        if call.key_padding_mask is not None:
            mask = mask & ~call.key_padding_mask[:, None, None]
        return AttentionOutput(*attend(q_BHNE, k_BHNE, v_BHNV, mask, dropout=self.drop, want_lse=call.want_lse))

    def _tables(self, tokens: int, causal: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Places in the sequence of the queries (Q, W), `tokens` where there is none, and of the keys (Q, S), or -1."""
        assert self.size is not None
        self._check_fits(tokens)
        rows, columns = self.size
        high, wide = self.block
        bands, across = -(-tokens // (high * columns)), -(-columns // wide)  # only the bands that the sequence reaches
        above, aside = min(self.memory[0], (bands - 1) * high), min(self.memory[1], (across - 1) * wide)

        def line(blocks: int, step: int, before: int, after: int) -> Tensor:
            first_Q1 = torch.arange(blocks, device=device)[:, None] * step
            return first_Q1 + torch.arange(-before, step + after, device=device)

        def table(row: Tensor, column: Tensor, nowhere: int) -> Tensor:
            row, column = row[:, None, :, None], column[None, :, None]
            place = place_on_map(row, column, (rows, columns), self.block, self.order)
            inside = (row >= 0) & (row < rows) & (column >= 0) & (column < columns) & (place < tokens)
            return torch.where(inside, place, nowhere).flatten(2).flatten(0, 1)

        query_QW = table(line(bands, high, 0, 0), line(across, wide, 0, 0), tokens)
        below = 0 if causal else above
        return query_QW, table(line(bands, high, above, below), line(across, wide, aside, aside), -1)

    def _check_fits(self, tokens: int) -> None:
        if self.size is not None and tokens > self.size[0] * self.size[1]:
            raise ValueError(f"{tokens} tokens do not fit the map of size={self.size}; give the size of the whole map")


class _Line(NamedTuple):
    """The block of a query, and this many tokens before and after it; class tokens see all and are seen by all."""

    block: int
    before: int
    after: int
    prefix: int

    def bind(self, length: int, device: torch.device) -> Sees:
        def sees(row: Any, head: Any, i: Any, j: Any) -> Tensor:
            first = (i - self.prefix) // self.block * self.block + self.prefix
            near = (j >= first - self.before) & (j < first + self.block + self.after)
            return near | (i < self.prefix) | (j < self.prefix)

        return sees


class _Map(NamedTuple):
    """The block of a query on a map, and the memory round it; causally not below it."""

    size: tuple[int, ...]
    block: tuple[int, ...]
    memory: tuple[int, ...]
    order: str
    prefix: int
    causal: bool

    def bind(self, length: int, device: torch.device) -> Sees:
        (rows, columns), (high, wide), (above, aside) = self.size, self.block, self.memory
        below = 0 if self.causal else above
        row_N, column_N = torch.zeros(2, max(length, rows * columns + self.prefix), dtype=torch.long, device=device)
        row_R1, column_C = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
        place_RC = place_on_map(row_R1, column_C, self.size, self.block, self.order) + self.prefix
        row_N[place_RC], column_N[place_RC] = row_R1.expand_as(place_RC), column_C.expand_as(place_RC)

        def sees(row: Any, head: Any, i: Any, j: Any) -> Tensor:
            top, left = row_N[i] // high * high, column_N[i] // wide * wide
            near = (row_N[j] >= top - above) & (row_N[j] < top + high + below)
            near = near & (column_N[j] >= left - aside) & (column_N[j] < left + wide + aside)
            return near | (i < self.prefix) | (j < self.prefix)

        return sees


def place_on_map(row: Tensor, column: Tensor, size: Sequence[int], block: Sequence[int], order: str) -> Tensor:
    """Place of a map's cell in the sequence."""
    rows, columns = size
    if order == "raster":
        return row * columns + column
    top, left = row // block[0] * block[0], column // block[1] * block[1]
    # The last band and the last block of a band may be cut off by the edge of the map.
    high, wide = (rows - top).clamp(max=block[0]), (columns - left).clamp(max=block[1])
    return top * columns + left * high + (row - top) * wide + column - left


def pair(value: int | Sequence[int]) -> tuple[int, ...]:
    """(rows, columns); a number is the length along a sequence."""
    return (value, value) if isinstance(value, int) else tuple(value)
