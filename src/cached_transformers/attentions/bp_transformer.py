"""BP-Transformer (Ye et al. 2019, arXiv:1911.04070; github.com/yzh119/BPT): a binary partition tree over the tokens.

A token sees K nodes of each level on each side, the tokens next to it first, then spans of 2, 4, 8 .. tokens: all of
the sequence in some 2 K log2(N / K) keys, which together hold each token once.

    out_i = softmax(q_i (K_i + A)^T / sqrt(E)) V_i,  K_i = [k_i; k of the nodes of token i], A one vector a column

Nodes of a level are taken from where those of the level below ended. Where a level's first node would hold tokens that
are covered already, its half that is not is taken in its place (of the level below, but as a node of this one).

    leaf 5 of 16, K = 1:   5 | left 4, 2-3, 0-1 | right 6, 7, 8-11, 12-15

`BPAttention` is the core on plain q, k, v: key and value of a span are the means of its tokens. `BPLayer` is the
paper's layer, in which spans have states of their own: each span attends all tokens in it, at the same time as the
tokens attend their nodes, and states of spans start at 0. (A type that is added to all keys of a softmax changes
nothing, so spans need no A.)

Differences from the original implementation: its table names nodes that do not exist where N is no power of two, and
misses tokens; here the tree is filled up to a power of two, and nodes without a token are not seen. Spans are of the
tokens that are no padding. The causal form (the left side alone) is strict, as in the original.

Cost: N (1 + s K J) (E + V) multiply-adds a head, s = 2 sides (1 when causal), J levels, at most 2 + log2(N / K). A
layer has N (J' + s K J) (E + V), J' = 1 + log2(N) levels of the whole tree, and projections of 2 N nodes.

Legend: B rows, H heads, N tokens, M nodes of the levels laid end to end, C nodes that a token sees, K nodes of a level
and side, E key width, V value width, D = H E model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..registry import ATTENTIONS
from .base import AttentionOutput, Call, PatternAttention
from .building_blocks import attend, gather_keys


@ATTENTIONS.register(
    "bp_transformer",
    paper="arXiv:1911.04070",
    equation="softmax over k_i and K nodes of each level of a binary tree on each side, each the mean of its tokens",
    order="N K log(N / K)",
    cost="N (1 + 2 K J) (E + V) multiply-adds a head, J <= 2 + log2(N / K) levels; causal N (1 + K J) (E + V)",
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

    supports_causal = True

    def __init__(
        self, width: int, heads: int, *, k: int = 4, clip: int = 5, types: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__(dropout=dropout)
        size = check_tree(width, heads, k, clip)
        self.k, self.clip = k, clip
        self.types_TE = new_types(k, clip, size) if types else None

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens, padding_BN = k_BHNE.shape[2], call.key_padding_mask
        table = context_table(tokens, self.k, self.clip, causal=call.causal, device=q_BHNE.device)
        both, there = span_means(torch.cat([k_BHNE, v_BHNV], -1), padding_BN, levels_used(tokens, self.k))
        k_BHME, v_BHMV = both.split([k_BHNE.shape[-1], v_BHNV.shape[-1]], -1)
        seen = table.seen_NC if there is None else table.seen_NC & there[:, None][..., table.node_NC]
        return AttentionOutput(
            *attend_nodes(q_BHNE, k_BHME, v_BHMV, table, seen, self.types_TE, self.drop, want_lse=call.want_lse)
        )


class Table(NamedTuple):
    """The nodes that each token sees: index, whether there is one, and the type of each column."""

    node_NC: Tensor
    seen_NC: Tensor
    type_C: Tensor


def check_tree(width: int, heads: int, k: int, clip: int) -> int:
    """E, or a ValueError."""
    if k < 1:
        raise ValueError(f"k={k} must be at least 1 node of each level, or far tokens are not seen")
    if clip < 0:
        raise ValueError(f"clip={clip} must be at least 0, the level of the tokens")
    if heads < 1 or width % heads:
        raise ValueError(f"width={width} must be a multiple of heads={heads}, which share it")
    return width // heads


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


def context_table(tokens: int, k: int, clip: int, *, causal: bool, device: torch.device) -> Table:
    """What each token sees: itself, then level by level K nodes on the left, and K on the right unless causal.

    The nodes of a token hold each token once; when causal, each up to itself.
    """
    own_N1 = torch.arange(tokens, device=device)[:, None]
    nodes, seen, types = [own_N1], [torch.ones_like(own_N1, dtype=torch.bool)], [0]
    sizes = level_sizes(tokens, levels_used(tokens, k))
    first = below = 0
    left_N1, right_N1 = own_N1 - 1, own_N1 + 1
    half_left_N1 = half_right_N1 = torch.zeros_like(own_N1, dtype=torch.bool)
    rank_K = torch.arange(min(k, max(tokens - 1, 1)), device=device)
    for level, size in enumerate(sizes):
        begin = rank_K == 0
        # A half is a child: the left one of a node whose right one is covered, and the other way round.
        node_NK = left_N1 - rank_K
        nodes.append(torch.where(half_left_N1 & begin, below + 2 * node_NK, first + node_NK))
        seen.append(node_NK >= 0)
        if not causal:
            node_NK = right_N1 + rank_K
            child_NK = 2 * node_NK + 1
            half_NK = half_right_N1 & begin
            nodes.append(torch.where(half_NK, below + child_NK, first + node_NK))
            seen.append(torch.where(half_NK, child_NK < sizes[level - 1], node_NK < size))
        start = (2 * k + 1) * min(level, clip) + 1
        types += [start + side + 2 * rank for side in range(1 if causal else 2) for rank in range(len(rank_K))]
        left_N1, right_N1 = left_N1 - k, right_N1 + k
        half_left_N1, half_right_N1 = left_N1 % 2 == 0, right_N1 % 2 == 1
        left_N1, right_N1 = left_N1 // 2, right_N1 // 2
        first, below = first + size, first
    seen_NC = torch.cat(seen, 1)
    return Table(torch.where(seen_NC, torch.cat(nodes, 1), 0), seen_NC, torch.tensor(types, device=device))


def span_means(t_BHNE: Tensor, padding_BN: Tensor | None, levels: int) -> tuple[Tensor, Tensor | None]:
    """(B, H, M, E): means of the tokens of each node, level after level; and which nodes (B, M) hold one if padded."""
    rows, _, tokens, _ = t_BHNE.shape
    sum_BHNE = t_BHNE.to(torch.promote_types(t_BHNE.dtype, torch.float32))
    count_BN1 = torch.ones(rows, tokens, 1, dtype=sum_BHNE.dtype, device=t_BHNE.device)
    if padding_BN is not None:
        sum_BHNE = sum_BHNE.masked_fill(padding_BN[:, None, :, None], 0)
        count_BN1 = count_BN1.masked_fill(padding_BN[..., None], 0)
    means, counts = [], []
    for level in range(max(levels, 1)):
        if level:
            sum_BHNE, count_BN1 = in_pairs(sum_BHNE).sum(-2), in_pairs(count_BN1).sum(-2)
        means.append((sum_BHNE / count_BN1.clamp(min=1)[:, None]).to(t_BHNE.dtype))
        counts.append(count_BN1[..., 0])
    return torch.cat(means, 2), None if padding_BN is None else torch.cat(counts, 1) > 0


def in_pairs(t: Tensor) -> Tensor:
    """(..., N / 2, 2, E): two and two, with zeros behind the last one if it is alone."""
    return F.pad(t, (0, 0, 0, t.shape[-2] % 2)).unflatten(-2, (-1, 2))


def attend_nodes(
    q_BHNE: Tensor,
    k_BHME: Tensor,
    v_BHMV: Tensor,
    table: Table,
    seen: Tensor,
    types_TE: Tensor | None,
    dropout: float,
    *,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Each token over its nodes; `seen` is (N, C), or (B, 1, N, C) if padded."""
    k_BHNCE, v_BHNCV = gather_keys(k_BHME, table.node_NC), gather_keys(v_BHMV, table.node_NC)
    if types_TE is not None:
        k_BHNCE = k_BHNCE + types_TE[table.type_C]
    out, lse = attend(q_BHNE[..., None, :], k_BHNCE, v_BHNCV, seen[..., None, :], dropout=dropout, want_lse=want_lse)
    return out[..., 0, :], None if lse is None else lse[..., 0]


class BPLayer(nn.Module):
    """One layer of the BP-Transformer, with norms behind the sums; tokens and spans are updated at the same time.

        nodes = BPLayer.first_nodes(embedded)
        for layer in layers:
            nodes = layer(nodes, tokens, causal=..., padding_BN=...)
        tokens, root = nodes[:, :tokens], nodes[:, -1]

    Args:
        width: D. heads: H. hidden: width of the feed-forward.
        k: K, nodes of each level on each side. clip: levels above it share its types.
        dropout: of attention weights, and of what attention and feed-forward add.

    Raises:
        ValueError: as `BPAttention`.
    """

    def __init__(self, width: int, heads: int, hidden: int, *, k: int = 4, clip: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        size = check_tree(width, heads, k, clip)
        self.heads, self.k, self.clip, self.drop = heads, k, clip, nn.Dropout(dropout)
        self.qkv, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        for weight in (*self.qkv.weight.chunk(3), self.output.weight):
            nn.init.xavier_uniform_(weight)
        self.types_TE = new_types(k, clip, size)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, width)
        )

    @staticmethod
    def first_nodes(x_BND: Tensor) -> Tensor:
        """(B, M, D): the tokens, then a zero for each span, level by level up to the root."""
        spans = sum(level_sizes(x_BND.shape[1], tree_levels(x_BND.shape[1]))[1:])
        return F.pad(x_BND, (0, 0, 0, spans))

    def forward(
        self, nodes_BMD: Tensor, tokens: int, *, causal: bool = False, padding_BN: Tensor | None = None
    ) -> Tensor:
        """New nodes. What nodes without a token hold is of no meaning, and is seen by none.

        Args:
            nodes_BMD: of `first_nodes` or the layer before. tokens: N, how many of the nodes are tokens.
            causal: tokens see nodes of their past alone; a span always sees the tokens in it.
            padding_BN: bool, True = padding.
        """
        q, k, v = self.qkv(nodes_BMD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        drop = self.drop.p if self.training else 0.0
        there_BN = None if padding_BN is None else ~padding_BN
        counts = None if there_BN is None else self._there(there_BN)
        table = context_table(tokens, self.k, self.clip, causal=causal, device=nodes_BMD.device)
        seen = table.seen_NC if counts is None else table.seen_NC & counts[:, None][..., table.node_NC]
        parts = [attend_nodes(q[:, :, :tokens], k, v, table, seen, self.types_TE, drop)[0]]
        first = tokens
        for level, size in list(enumerate(level_sizes(tokens, tree_levels(tokens))))[1:]:
            own_BHM1E = q[:, :, first : first + size, None]
            k_BHMWE, v_BHMWV = (_groups(t[:, :, :tokens], 2**level) for t in (k, v))
            mask = nodes_BMD.new_ones(1, tokens, dtype=torch.bool) if there_BN is None else there_BN
            mask = _groups(mask[:, None, :, None], 2**level).mT
            parts.append(attend(own_BHM1E, k_BHMWE, v_BHMWV, mask, dropout=drop)[0][..., 0, :])
            first += size
        mixed_BMD = torch.cat(parts, 2).transpose(1, 2).flatten(2)
        nodes_BMD = self.attention_norm(nodes_BMD + self.drop(self.output(mixed_BMD)))
        return self.norm(nodes_BMD + self.drop(self.feed_forward(nodes_BMD)))

    def _there(self, there_BN: Tensor) -> Tensor:
        """(B, M): nodes that hold a token, of all levels."""
        levels = [there_BN]
        for _ in range(1, tree_levels(there_BN.shape[1])):
            levels.append(in_pairs(levels[-1][..., None])[..., 0].any(-1))
        return torch.cat(levels, 1)


def tree_levels(tokens: int) -> int:
    """Levels from the tokens to the root."""
    return 1 + max(tokens - 1, 0).bit_length()


def _groups(t_BHNE: Tensor, size: int) -> Tensor:
    """(B, H, N / size, size, E), filled up with zeros."""
    return F.pad(t_BHNE, (0, 0, 0, -t_BHNE.shape[2] % size)).unflatten(2, (-1, size))
