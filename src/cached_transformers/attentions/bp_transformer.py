"""BP-Transformer (Ye et al. 2019, arXiv:1911.04070; github.com/yzh119/BPT): a binary partition tree over the tokens.

A token sees K nodes of each level on each side, the tokens next to it first, then spans of 2, 4, 8 .. tokens: all of
the sequence in some 2 K log2(N / K) keys, which together hold each token once.

    out_i = softmax(q_i (K_i + a)^T / sqrt(E)) V_i,  K_i = [k_i; keys of the nodes of token i]
    a learned, one vector for each level, side and rank (the node's place among the K)

Nodes of a level are taken from where those of the level below ended. Where a level's first node would hold tokens that
are covered already, its half that is not is taken in its place (of the level below, but as a node of this one).

    leaf 5 of 16, K = 1:   5 | left 4, 2-3, 0-1 | right 6, 7, 8-11, 12-15

`BPAttention` is the core on plain q, k, v: key and value of a span are the means of its tokens. `BPLayer`
(bp_layer.py) is the paper's layer, in which spans have states of their own.

Differences from the original implementation: its table names nodes that do not exist where N is no power of two, and
misses tokens; here the tree is filled up to a power of two, and nodes without a token are not seen. Spans are of the
tokens that are no padding. The causal form (the left side alone) is strict, as in the original.

No key is gathered: what token i sees of a level lies within 2 K nodes of the node that holds i. So blocks of A nodes
(2 K, or the next power of two) and their neighbours, with the A 2^level tokens in a block as queries, make every level
a dense product, in which a mask leaves some third of the weights.

Cost: N S (E + V) + N T E multiply-adds a head, S = 3 A J (2 A J when causal), J <= 2 + log2(N / K) levels, T types,
(2 K + 1) (clip + 1). Levels of at most 3 A (2 A) nodes take what there is, the others fill their last block up. A layer
has N log2(2 N) (E + V) more for the spans, and projections of 2 N nodes.

Legend: B rows, H heads, N tokens, M nodes (of a level, or of all laid end to end), K nodes of a level and side, A nodes
of a block, S keys in reach of a token, T types, E key width, V value width, D = H E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import into_blocks, one_softmax, out_of_blocks, product, wide, with_neighbours, zero_unseen
from .parts.pattern import PatternAttention
from .parts.sizes import head_width


@ATTENTIONS.register(
    "bp_transformer",
    paper="arXiv:1911.04070",
    title="BP-Transformer",
    purpose="a regular pattern",
    equation="softmax over k_i and K nodes of each level of a binary tree on each side, each the mean of its tokens",
    order="N K log(N / K)",
    cost="N (6 K J (E + V) + T E) multiply-adds a head (causal 4 K J), J <= 2 + log2(N / K) levels, T types",
)
class BPAttention(PatternAttention):
    """Near tokens one by one, far ones as spans of a binary tree that grow with the distance.

    Args:
        width: D. heads: H.
        k: K, nodes of each level on each side.
        clip: levels above it share its types.
        types: a learned vector, the same for all heads, is added to the keys of each level, side and rank.
        dropout: share of the weights to drop in training.

    Raises:
        ValueError: K below 1, a clip below 0, or heads that do not divide the width.
    """

    can = PatternAttention.can | {"causal"}

    def __init__(
        self, width: int, heads: int, *, k: int = 4, clip: int = 5, types: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(dropout=dropout)
        size = check_tree(width, heads, k, clip)
        self.k, self.clip = k, clip
        self.types_TE = new_types(k, clip, size) if types else None

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens = k_BHNE.shape[2]
        nearby = reach(tokens, self.k, self.clip, causal=call.causal, device=q_BHNE.device)
        means, there = span_means(torch.cat([k_BHNE, v_BHNV], -1), call.key_padding_mask, len(nearby.levels))
        widths = [k_BHNE.shape[-1], v_BHNV.shape[-1]]
        pairs = [tuple(both_BHME.split(widths, -1)) for both_BHME in means]
        return AttentionOutput(
            *attend_levels(q_BHNE, pairs, there, nearby, self.types_TE, self.drop, want_lse=call.want_lse)
        )


class Level(NamedTuple):
    """One level of the tree.

    Attributes:
        height: tokens of a node. size: nodes that hold a token.
        width: nodes in reach of a token.
        block: A, or 0 where all nodes are in reach of all tokens.
    """

    height: int
    size: int
    width: int
    block: int


class Reach(NamedTuple):
    """The nodes in reach of each token, level after level; some do not exist, which are then not seen.

    Attributes:
        node_NS: place of the node in its level.
        seen_NS: whether the token sees it.
        type_NS: its type; any where it is not seen.
    """

    levels: list[Level]
    node_NS: Tensor
    seen_NS: Tensor
    type_NS: Tensor


def check_tree(width: int, heads: int, k: int, clip: int) -> int:
    """E, or a ValueError."""
    at_least_one(" node of each level, or far tokens are not seen", k=k)
    at_least_one(", the level of the tokens", least=0, clip=clip)
    return head_width(width, heads)


def new_types(k: int, clip: int, size: int) -> nn.Parameter:
    """Vectors of all types: 0 of a token itself, (2 K + 1) level + 2 rank + 1 on the left, one more on the right."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty((2 * k + 1) * (clip + 1), size)))


def levels_used(tokens: int, k: int) -> int:
    """J: levels after which K nodes of each have covered any distance, though the first of a level may be a half."""
    levels, covered = 0, 0.0
    while covered < tokens - 1:
        covered += k * 2**levels - (2 ** (levels - 1) if levels else 0)
        levels += 1
    return levels


def level_sizes(tokens: int, levels: int) -> list[int]:
    """Nodes of each level that hold a token."""
    return [-(-tokens // 2**level) for level in range(levels)]


def reach(tokens: int, k: int, clip: int, *, causal: bool, device: torch.device) -> Reach:
    """Keys of each token: itself, then level by level K nodes on the left, and K on the right unless causal.

    The nodes of a token hold each token once; when causal, each up to itself. A half that replaces a node of the
    next level is the node of this level after the K that were taken, and has the type of the next level's first.

    The first node on the left is i - 1, and where it was l, the one of the next level is floor((l - K) / 2): at level j
    it is floor((i - 1 + K) / 2^j) - K, and its right half is taken already if the quotient before was even. The right
    side is the mirror image.
    """
    block = 1 << (2 * k - 1).bit_length()
    most = block * (2 if causal else 3)
    levels = [
        Level(1 << at, size, *((size, 0) if size <= most else (most, block)))
        for at, size in enumerate(level_sizes(tokens, max(levels_used(tokens, k), 1)))
    ]
    columns = [
        (at, level.size, column, min(level.block, 1))
        for at, level in enumerate(levels)
        for column in range(level.width)
    ]
    at_S, size_S, column_S, cut_S = torch.tensor(columns, device=device).T
    place_N1 = torch.arange(tokens, device=device)[:, None]
    node_NS = column_S + cut_S * block * ((place_N1 // block >> at_S) - 1)
    seen_NS = (node_NS == place_N1) & (at_S == 0)
    type_NS = torch.zeros_like(node_NS)
    for side in (1, -1)[: 1 if causal else 2]:
        shifted_N1 = place_N1 - side + side * k
        taken = 0 if side == 1 else 1
        rank_NS = side * ((shifted_N1 >> at_S) - node_NS) - k
        half_NS = ((shifted_N1 >> (at_S - 1).clamp(min=0)) % 2 == taken) & (at_S > 0)
        next_half_NS = (rank_NS == k) & ((shifted_N1 >> at_S) % 2 == taken)
        full_NS = (rank_NS >= 0) & (rank_NS < k) & ~((rank_NS == 0) & half_NS)
        above_NS = at_S + next_half_NS.long()
        here_NS = (2 * k + 1) * above_NS.clamp(max=clip) + torch.where(next_half_NS, 0, 2 * rank_NS) + 1 + taken
        type_NS = torch.where(full_NS | next_half_NS, here_NS, type_NS)
        seen_NS = seen_NS | full_NS | next_half_NS
    return Reach(levels, node_NS, seen_NS & (node_NS >= 0) & (node_NS < size_S), type_NS)


def span_means(t_BHNE: Tensor, padding_BN: Tensor | None, levels: int) -> tuple[list[Tensor], Tensor | None]:
    """For each level the means (B, H, M, E) of its nodes; and which nodes of all (B, M) hold a token, if padded."""
    rows, _, tokens, _ = t_BHNE.shape
    sum_BHME = wide(t_BHNE)
    count_BM1 = torch.ones(rows, tokens, 1, dtype=sum_BHME.dtype, device=t_BHNE.device)
    if padding_BN is not None:
        sum_BHME = sum_BHME.masked_fill(padding_BN[:, None, :, None], 0)
        count_BM1 = count_BM1.masked_fill(padding_BN[..., None], 0)
    means, counts = [], []
    for level in range(levels):
        if level:
            sum_BHME, count_BM1 = in_pairs(sum_BHME).sum(-2), in_pairs(count_BM1).sum(-2)
        means.append((sum_BHME / count_BM1.clamp(min=1)[:, None]).to(t_BHNE.dtype))
        counts.append(count_BM1[..., 0])
    return means, None if padding_BN is None else torch.cat(counts, 1) > 0


def in_pairs(t: Tensor) -> Tensor:
    """(..., N / 2, 2, E): two and two, with zeros after the last one if it is alone."""
    return F.pad(t, (0, 0, 0, t.shape[-2] % 2)).unflatten(-2, (-1, 2))


def attend_levels(
    q_BHNE: Tensor,
    pairs: Sequence[tuple[Tensor, ...]],
    there_BM: Tensor | None,
    nearby: Reach,
    types_TE: Tensor | None,
    dropout: float,
    *,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One softmax per token over its nodes of all levels.

    Args:
        pairs: keys (B, H, M, E) and values (B, H, M, V) of each level's nodes.
        there_BM: whether nodes, those of all levels laid end to end, hold more than padding; None without padding.
    """
    tokens, levels, seen = q_BHNE.shape[2], nearby.levels, nearby.seen_NS
    keys, values = zip(*pairs, strict=True)
    slabs = _slabs(keys, levels)
    parts = [out_of_blocks(product(into_blocks(q_BHNE, size), k), tokens) for k, size in slabs]
    logits_BHNS = torch.cat(parts, -1)
    if types_TE is not None:
        logits_BHNS = logits_BHNS + product(q_BHNE, types_TE).gather(-1, nearby.type_NS.expand_as(logits_BHNS))
    if there_BM is not None:
        firsts = [
            sum(level.size for level in levels[:at]) for at, level in enumerate(levels) for _ in range(level.width)
        ]
        index_NS = torch.where(seen, nearby.node_NS + torch.tensor(firsts, device=seen.device), 0)
        seen = seen & there_BM[:, None][..., index_NS]
    weights_BHNS, lse_BHN = one_softmax(logits_BHNS / q_BHNE.shape[-1] ** 0.5, seen, dropout=dropout, want_lse=True)
    shares = weights_BHNS.to(q_BHNE.dtype).split([k.shape[-2] for k, _ in slabs], -1)
    parts = [
        out_of_blocks(into_blocks(share_BHNS, size) @ v, tokens)
        for share_BHNS, (v, size) in zip(shares, _slabs(values, levels), strict=True)
    ]
    return zero_unseen(torch.stack(parts).sum(0), seen), lse_BHN if want_lse else None


def _slabs(nodes: Sequence[Tensor], levels: Sequence[Level]) -> list[tuple[Tensor, int]]:
    """(B, H, Q, S, E), nodes in reach of the tokens of each block, and how many tokens these are.

    One for each level that is cut into blocks, and one for all those after them, which all tokens have in reach.
    """
    slabs = []
    for level, t_BHME in zip(levels, nodes, strict=True):
        if level.block:
            blocks = into_blocks(t_BHME, level.block)
            slabs.append((with_neighbours(blocks, 1, level.width // level.block - 2), level.block * level.height))
    whole = list(nodes[len(slabs) :])
    return [*slabs, (torch.cat(whole, 2)[:, :, None], levels[0].size)]
