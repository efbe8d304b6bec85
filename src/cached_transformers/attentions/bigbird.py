"""BigBird (Zaheer et al. 2020, arXiv:2007.14062; github.com/google-research/bigbird), internal form (ITC).

Tokens are cut into Q blocks of W. The first and the last block are global: they see and are seen by all. A block i
between them sees

    {0, i - (w - 1) / 2 .. i + (w - 1) / 2, Q - 1} + R_hi,   R_hi: r blocks outside this set, drawn per head,

each of them once, in one softmax. A sequence of at most r + (w - 1) / 2 + 3 blocks is all seen: exact attention.
The causal form (ours; the paper has an encoder alone) sees the past of this pattern: block 0, the blocks up to i of the
window, r blocks drawn from the rest of the past, and of all these the tokens up to its own; no last block.

Cost: W (E + V) (2 N + (Q - 2) (w + r + 2) W) multiply-adds a head; causal W (E + V) Q ((w + 1) / 2 + 1 + r) W.

Differs from the original: the drawn blocks are a function of (seed, layer, head, block), for whatever length and on any
device, the same in training and evaluation. Original and ports keep tables drawn for one length, in part from the first
1024 tokens alone, and transformers replaces them in evaluation by block 0, which then counts 1 + r times. A row ends
where its padding begins, so that its last block is that of the row alone.

Legend: B rows (or 1 for all), H heads, N tokens, E key width, V value width, Q blocks, W tokens of a block, R drawn
blocks, K blocks that one sees.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, gather_blocks, into_blocks
from .parts.flex import Lengths, Sees, Shown, by_blocks, shown_blocks
from .parts.kernels import FlexKernel
from .parts.keys import visible
from .parts.pattern import PatternAttention, in_sequence

Number = TypeVar("Number", int, Tensor)
WORD = 2**32 - 1


def mixed(x: Number) -> Number:
    """A bijection of the integers below 2^32 that looks random (lowbias32, nullprogram.com/blog/2018/07/31)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    # 0x846CA68B less 2^32: the same modulo 2^32, and the product stays within 64 bits.
    x = ((x ^ (x >> 15)) * (0x846CA68B - 2**32)) & WORD
    return x ^ (x >> 16)


@ATTENTIONS.register(
    "bigbird",
    paper="arXiv:2007.14062",
    title="BigBird",
    purpose="near tokens and a few that all see",
    equation="softmax over the first, the last, w neighbouring and r random blocks; first and last block see all",
    order="N W",
    cost="about N W (w + r + 4) (E + V) multiply-adds a head",
)
class BigBird(PatternAttention):
    """Sliding window of blocks, global first and last block, and random blocks.

    Class tokens in front lie in the first block and so are global.

    Args:
        heads: H. index: of the layer.
        block: W, tokens of a block.
        window: w, blocks of the window, odd.
        random: r, drawn blocks.
        seed: of the draw.
        dropout: share of the weights to drop in training.

    Raises:
        ValueError: a block below 1, an even window, fewer than 0 random blocks, a seed that is not below 2^32.
    """

    can = PatternAttention.can | {"causal"}
    steps_from = "keys"

    def __init__(
        self,
        heads: int,
        *,
        index: int = 0,
        block: int = 64,
        window: int = 3,
        random: int = 3,
        seed: int = 0,
        kernel: FlexKernel = "plain",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout, kernel=kernel)
        at_least_one(" token", block=block)
        if window < 1 or window % 2 == 0:
            raise ValueError(f"window={window} counts blocks on both sides and the block itself: take an odd number")
        at_least_one(" blocks; 0 leaves window and global blocks", least=0, random=random)
        if not 0 <= seed <= WORD:
            raise ValueError(f"seed={seed} must lie in [0, 2^32)")
        self.heads, self.index, self.block, self.window, self.random = heads, index, block, window, random
        self.seed = seed

    def sees_all(self, blocks: int, causal: bool) -> bool:
        """True if the pattern covers all pairs of these blocks: block 1 sees the fewest, causal the last one."""
        return blocks <= self.random + self.window // 2 + (2 if causal else 3)

    def draw(self, blocks: int, last_B111: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Drawn blocks (B, H, Q, R) and which of them there are (B, 1, Q, R), with the last block of each row given.

        Every block has a random rank for each layer, head and block that asks; the r highest of those that may be drawn
        are, which is a draw without replacement, whatever the number of blocks.
        """
        device = last_B111.device
        place_Q = torch.arange(blocks, device=device)
        asks_Q1 = place_Q[:, None]
        state = mixed(mixed(self.seed) ^ self.index)
        rank_H11 = mixed(torch.arange(self.heads, device=device)[:, None, None] ^ state)
        rank_HQQ = mixed(mixed(rank_H11 ^ asks_Q1) ^ place_Q)
        side = self.window // 2
        free_BHQQ = (place_Q >= 1) & (place_Q < asks_Q1 - side)
        if not causal:
            free_BHQQ = (free_BHQQ | (place_Q > asks_Q1 + side)) & (place_Q < last_B111)
        chosen = torch.where(free_BHQQ, rank_HQQ, -1).view(-1, self.heads, blocks, blocks).topk(self.random)
        return chosen.indices, chosen.values[:, :1] >= 0

    def table(self, blocks: int, last_B111: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Blocks that each block sees (B, H, Q, K), and which entries count (B, 1, Q, K): no block counts twice."""
        drawn_BHQR, is_drawn_B1QR = self.draw(blocks, last_B111, causal)
        side, (rows, heads) = self.window // 2, drawn_BHQR.shape[:2]
        asks_Q1 = torch.arange(blocks, device=last_B111.device)[:, None]
        near_QW = asks_Q1 + torch.arange(-side, 1 if causal else side + 1, device=last_B111.device)
        is_near = near_QW >= 1
        first_Q1 = torch.zeros_like(asks_Q1)
        ids, counts = [first_Q1, near_QW], [first_Q1 == 0, is_near]
        if not causal:
            ids, counts = [*ids, last_B111], [first_Q1 == 0, is_near & (near_QW < last_B111), last_B111 > 0]
        ids_BHQK = torch.cat([t.expand(rows, heads, blocks, -1) for t in (*ids, drawn_BHQR)], -1)
        counts_B1QK = torch.cat([t.expand(rows, 1, blocks, -1) for t in (*counts, is_drawn_B1QR)], -1)
        return ids_BHQK.clamp(0, blocks - 1), counts_B1QK

    def sees(self, place: int, place_S: Tensor) -> Tensor | None:
        blocks = place // self.block + 1
        if self.sees_all(blocks, causal=True):
            return None
        last_B111 = place_S.new_full((1, 1, 1, 1), blocks - 1)
        ids_HK, counts_HK = (t[0, :, -1] for t in self.table(blocks, last_B111, causal=True))
        return _named(ids_HK, counts_HK, blocks)[:, place_S // self.block]

    def seen_blocks(self, blocks: int, last_B111: Tensor, causal: bool) -> Tensor:
        """(B, H, Q, Q): which blocks each block sees."""
        if self.sees_all(blocks, causal):
            return last_B111.new_ones(1, self.heads, blocks, blocks, dtype=torch.bool)
        ids_BHQK, counts_B1QK = self.table(blocks, last_B111, causal)
        seen_BHQQ = _named(ids_BHQK, counts_B1QK.expand_as(ids_BHQK), blocks)
        if causal:
            return seen_BHQQ
        place_Q = torch.arange(blocks, device=last_B111.device)[:, None]
        return seen_BHQQ | (place_Q == 0) | (place_Q == last_B111)

    def rule(self, heads: int, tokens: int, causal: bool) -> _Blocks:
        settings = (self.heads, self.index, self.block, self.window, self.random, self.seed)
        return _Blocks(*settings, -(-tokens // self.block), causal)

    def shown(self, lengths: Lengths, call: Call) -> Shown:
        if call.key_padding_mask is None:
            return super().shown(lengths, call)
        # A row ends where its padding begins, and random blocks depend on its end.
        rows, blocks = len(call.key_padding_mask), -(-lengths.keys // self.block)
        seen_BHQQ = self.seen_blocks(blocks, self._last(call.key_padding_mask), call.causal).expand(rows, -1, -1, -1)
        return shown_blocks(seen_BHQQ, self.block, lengths)

    def _last(self, padding_BN: Tensor) -> Tensor:
        """(B, 1, 1, 1): the last block of each row in which there is a token."""
        place_N = torch.arange(padding_BN.shape[1], device=padding_BN.device)
        return torch.where(padding_BN, 0, place_N).amax(1)[:, None, None, None] // self.block

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens, padding_BN, causal = k_BHNE.shape[2], call.key_padding_mask, call.causal
        softmax = functools.partial(attend, dropout=self.drop, want_lse=call.want_lse)
        blocks = -(-tokens // self.block)
        if self.sees_all(blocks, causal):
            mask = visible(q_BHNE, k_BHNE, causal, padding_BN, None, None)
            return AttentionOutput(*softmax(q_BHNE, k_BHNE, v_BHNV, mask))
        q, k, v = (into_blocks(t, self.block) for t in (q_BHNE, k_BHNE, v_BHNV))
        place_1N = torch.arange(blocks * self.block, device=k.device)[None]
        if padding_BN is None:
            absent_BQW = (place_1N >= tokens).unflatten(1, (blocks, -1))
            last_B111 = place_1N.new_full((1, 1, 1, 1), blocks - 1)
        else:
            padding_BN = F.pad(padding_BN, (0, blocks * self.block - tokens), value=True)
            absent_BQW = padding_BN.unflatten(1, (blocks, -1))
            last_B111 = self._last(padding_BN)
        # Global blocks have a result of their own; with padding, which block is the last differs from row to row.
        one_last = padding_BN is None
        first, stop = (0, blocks) if causal else (1, blocks - 1 if one_last else blocks)
        ids_BHQK, counts_B1QK = (t[:, :, first:stop] for t in self.table(blocks, last_B111, causal))
        # Without padding all drawn blocks are full, so that one mask serves all heads.
        masked = ids_BHQK[:, :1] if one_last else ids_BHQK
        seen = counts_B1QK[..., None] & ~absent_BQW[_rows(absent_BQW), masked]
        seen = seen.flatten(3)[:, :, :, None]
        if causal:
            keys, queries = (t.unflatten(0, (blocks, -1)) for t in (place_1N[0], place_1N[0]))
            seen = seen & (keys[masked].flatten(3)[:, :, :, None] <= queries[:, :, None])
        out, lse = softmax(q[:, :, first:stop], _picked(k, ids_BHQK), _picked(v, ids_BHQK), seen)
        if not causal:
            last_q = q[:, :, -1] if one_last else q[torch.arange(len(q), device=q.device), :, last_B111.flatten()]
            mask = None if call.key_padding_mask is None else ~call.key_padding_mask[:, None, None]
            ends, ends_lse = softmax(torch.cat([q[:, :, 0], last_q], 2), k_BHNE, v_BHNV, mask)
            last = None if one_last else last_B111
            out = _joined(ends, out, last)
            if lse is not None and ends_lse is not None:
                lse = _joined(ends_lse[..., None], lse[..., None], last)[..., 0]
        return in_sequence(out, lse, tokens)


class _Blocks(NamedTuple):
    """Pattern of rows without padding: settings from which `bind` rebuilds the table."""

    heads: int
    layer: int
    block: int
    window: int
    random: int
    seed: int
    blocks: int
    causal: bool

    def bind(self, length: int, device: torch.device) -> Sees:
        heads, layer, block, window, random, seed = self[:6]
        core = BigBird(heads, index=layer, block=block, window=window, random=random, seed=seed)
        last_1111 = torch.full((1, 1, 1, 1), self.blocks - 1, device=device)
        return by_blocks(core.seen_blocks(self.blocks, last_1111, self.causal), self.block)


def _named(ids: Tensor, counts: Tensor, blocks: int) -> Tensor:
    """(..., Q): whether a table (..., K) names each block in an entry that counts."""
    nowhere = torch.where(counts, ids, blocks)
    return ids.new_zeros(*ids.shape[:-1], blocks + 1, dtype=torch.bool).scatter(-1, nowhere, True)[..., :blocks]


def _rows(t: Tensor) -> Tensor:
    """(B, 1, 1, 1): index of each row, to go with the ids of a table."""
    return torch.arange(len(t), device=t.device)[:, None, None, None]


def _picked(t_BHQWE: Tensor, ids_BHQK: Tensor) -> Tensor:
    """(B, H, Q', K W, E): the blocks that the table names, which may differ from row to row."""
    if len(ids_BHQK) == 1:
        return gather_blocks(t_BHQWE, ids_BHQK[0])
    heads_H11 = torch.arange(t_BHQWE.shape[1], device=ids_BHQK.device)[:, None, None]
    return t_BHQWE[_rows(ids_BHQK), heads_H11, ids_BHQK].flatten(3, 4)


def _joined(ends: Tensor, between: Tensor, last_B111: Tensor | None) -> Tensor:
    """(B, H, Q, W, V): the first block, those after it, and the last one at its place in each row (None: the end)."""
    first, last = ends.unflatten(2, (2, -1)).split(1, 2)
    if last_B111 is None:
        return torch.cat([first, between, last], 2)
    place_Q11 = torch.arange(between.shape[2] + 1, device=ends.device)[:, None, None]
    return torch.where(place_Q11 == last_B111[..., None], last, torch.cat([first, between], 2))
