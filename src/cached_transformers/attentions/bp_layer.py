"""A layer of the BP-Transformer (Ye et al. 2019, arXiv:1911.04070; github.com/yzh119/BPT), with states of the spans.

Tokens attend their nodes of the tree (see bp_transformer.py); at the same time each span attends all tokens in it:

    s_m <- softmax(q_m K_m^T / sqrt(E)) V_m,  K_m the keys of the tokens in span m
    h <- LN(h + W_o s),  h <- LN(h + FFN(h)),  states of spans start at 0

The original also adds one type to all keys of a span, which changes no weight; it is left out.

Cost: N (S + log2(2 N)) (E + V) + N T E multiply-adds a head, S as in bp_transformer.py; projections and feed-forward
run over 2 N nodes.

Legend: B rows, H heads, N tokens, M nodes (of a level, or of all laid end to end), W tokens of a span, T types, E key
width, V value width, D = H E model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .bp_transformer import attend_levels, check_tree, in_pairs, level_sizes, new_types, reach
from .parts.building_blocks import attend, into_blocks


class BPLayer(nn.Module):
    """One layer of the BP-Transformer, post-norm; tokens and spans are updated at the same time.

        nodes = BPLayer.first_nodes(embedded)
        for layer in layers:
            nodes = layer(nodes, tokens, causal=..., padding_BN=...)
        tokens, root = nodes[:, :tokens], nodes[:, -1]

    Args:
        width: D. heads: H. hidden: width of the feed-forward.
        k: K, nodes of each level on each side. clip: levels above it share its types.
        dropout: of attention weights, and of what attention and feed-forward add.

    Raises:
        ValueError: as in `BPAttention`.
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
        """New nodes; nodes without a token are never attended.

        Args:
            nodes_BMD: from `first_nodes` or the previous layer. tokens: N, number of nodes that are tokens.
            causal: tokens see only nodes of their past; a span always sees its tokens.
            padding_BN: bool, True = padding.
        """
        q, k, v = self.qkv(nodes_BMD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        drop = self.drop.p if self.training else 0.0
        sizes = level_sizes(tokens, tree_levels(tokens))
        there_BM = None if padding_BN is None else self._there(~padding_BN)
        there_BN = nodes_BMD.new_ones(1, tokens, dtype=torch.bool) if padding_BN is None else ~padding_BN
        nearby = reach(tokens, self.k, self.clip, causal=causal, device=nodes_BMD.device)
        pairs = list(zip(*(t.split(sizes, 2) for t in (k, v)), strict=True))[: len(nearby.levels)]
        parts = [attend_levels(q[:, :, :tokens], pairs, there_BM, nearby, self.types_TE, drop)[0]]
        for level, q_BHME in list(enumerate(q.split(sizes, 2)))[1:]:
            k_BHMWE, v_BHMWV = (into_blocks(t[:, :, :tokens], 2**level) for t in (k, v))
            inside = into_blocks(there_BN[:, None, :, None], 2**level).mT
            parts.append(attend(q_BHME[..., None, :], k_BHMWE, v_BHMWV, inside, dropout=drop)[0][..., 0, :])
        mixed_BMD = torch.cat(parts, 2).transpose(1, 2).flatten(2)
        nodes_BMD = self.attention_norm(nodes_BMD + self.drop(self.output(mixed_BMD)))
        return self.norm(nodes_BMD + self.drop(self.feed_forward(nodes_BMD)))

    @staticmethod
    def _there(there_BN: Tensor) -> Tensor:
        """(B, M): nodes that hold a token."""
        levels = [there_BN]
        for _ in range(1, tree_levels(there_BN.shape[1])):
            levels.append(in_pairs(levels[-1][..., None])[..., 0].any(-1))
        return torch.cat(levels, 1)


def tree_levels(tokens: int) -> int:
    """Levels from the tokens to the root."""
    return 1 + max(tokens - 1, 0).bit_length()
