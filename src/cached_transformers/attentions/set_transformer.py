"""Set Transformer (Lee, Lee, Kim, Kosiorek, Choi, Teh 2019, arXiv:1810.00825; github.com/juho-lee/set_transformer).

Blocks for sets, in which a few learned inducing points attend the set, and the set attends them:

    MAB(X, Y):  O = Q + softmax(Q K^T / sqrt(D)) V in every head,   Q = X W_q, K = Y W_k, V = Y W_v
                MAB = LN(O' + relu(O' W_o)),   O' = LN(O);   both norms only where asked for
    SAB(X) = MAB(X, X),   ISAB(X) = MAB(X, MAB(I, X)),   PMA(X) = MAB(S, X),   I and S learned

The blocks have their own projections and residual sums, so they can be used by themselves. The registered
attention is the induced attention in the middle of ISAB, on projected queries, keys and values:

    out = softmax(q K_I^T / sqrt(E)) softmax(I k^T / sqrt(E)) v,   I and K_I learned for each head

Cost of the registered core: P (N + M) (E + V) multiply-adds a head for P points, P M E more with `induced_keys`. Of
MAB with N queries of width A and M keys of width C: D (N A + 2 M C + N D + 2 N M), which is that of SAB with N = M;
ISAB has two with P points (P and M, N and P), PMA one with P seeds as queries.

* As in the authors' code: logits are divided by sqrt(D) of the whole width, not of a head, and the residual adds the
  projected query (the paper's equation adds X itself). The paper's PMA applies a feed-forward layer to X first, the
  code does not: `feed_forward`.
* The core has no residual sum, so the keys K_I that the points show the queries would not depend on the set:
  `induced_keys` adds softmax(I k^T / sqrt(E)) k to them, as the residual form of MAB(I, X) does.
* Every output depends on the whole set, so there is no causal form. Nothing here knows an order of tokens.
* The keys of a memory are members of the set that the points attend.

Legend: B rows, H heads, N queries, M keys, E key width, V value width, P points or seeds, D width of a block, A width
of its queries, C width of its keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.attention import Attention, AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.keys import all_keys
from .parts.sizes import head_width


@ATTENTIONS.register(
    "set_transformer",
    paper="arXiv:1810.00825",
    title="Set Transformer",
    purpose="fewer keys",
    equation="softmax(q K_I^T / sqrt(E)) softmax(I k^T / sqrt(E)) v",
    order="N P, P inducing points",
    cost="P (N + M) (E + V) multiply-adds a head; P M E more with induced_keys",
)
class InducedAttention(Attention):
    """A few learned points attend the keys, and the queries attend the points.

    Args:
        width: of all heads together. heads: H.
        points: P.
        induced_keys: the keys of the points depend on the keys of the segment, too.
        dropout: on the weights of both steps.

    Raises:
        ValueError: fewer than one point; a width that is no multiple of the heads.
    """

    can = frozenset({"bidirectional", "cross", "context", "exact_padding"})

    def __init__(
        self, width: int, heads: int, *, points: int = 32, induced_keys: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__(dropout=dropout)
        size = head_width(width, heads)
        _check_points(points)
        self.induced_keys = induced_keys
        # As wide apart as keys of unit variance: points that are alike would stay alike for long.
        self.points_HPE, self.keys_HPE = (nn.Parameter(torch.randn(heads, points, size)) for _ in range(2))

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        k_BHNE, v_BHNV, seen_BM = all_keys(k_BHNE, v_BHNV, call)
        seen_B11M = None if seen_BM is None else seen_BM[:, None, None]
        points_BHPE, keys_BHPE = (t.expand(len(k_BHNE), -1, -1, -1) for t in (self.points_HPE, self.keys_HPE))
        # One pass over the set gives both summaries.
        content_BHMT = torch.cat([k_BHNE, v_BHNV], 3) if self.induced_keys else v_BHNV
        summary_BHPT = F.scaled_dot_product_attention(
            points_BHPE, k_BHNE, content_BHMT, attn_mask=seen_B11M, dropout_p=self.drop
        )
        if self.induced_keys:
            extra_BHPE, summary_BHPT = summary_BHPT.tensor_split([k_BHNE.shape[3]], 3)
            keys_BHPE = keys_BHPE + extra_BHPE
        return AttentionOutput(F.scaled_dot_product_attention(q_BHNE, keys_BHPE, summary_BHPT, dropout_p=self.drop))


class MAB(nn.Module):
    """Multihead attention block: the queries of one set attend another.

    Args:
        query_width: A. key_width: C. width: D, of the result. heads: H.
        norm: LayerNorm after both residual sums.

    Raises:
        ValueError: the width is no multiple of the heads.
    """

    def __init__(self, query_width: int, key_width: int, width: int, heads: int, *, norm: bool = False) -> None:
        super().__init__()
        head_width(width, heads)
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(w, width) for w in (query_width, key_width, key_width))
        self.output = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) if norm else nn.Identity() for _ in range(2))

    def forward(self, x_BNA: Tensor, y_BMC: Tensor, padding_BM: Tensor | None = None) -> Tensor:
        """(B, N, D). `padding_BM`: bool, True = no member of the set y; x may be (1, N, A) for all rows."""
        q_BND, k_BMD, v_BMD = self.query(x_BNA), self.key(y_BMC), self.value(y_BMC)
        seen_B11M = None if padding_BM is None else ~padding_BM[:, None, None]
        q_BHNE, k_BHME, v_BHME = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q_BND, k_BMD, v_BMD))
        read_BHNE = F.scaled_dot_product_attention(
            q_BHNE.expand(len(y_BMC), -1, -1, -1),
            k_BHME,
            v_BHME,
            attn_mask=seen_B11M,
            scale=1 / math.sqrt(q_BND.shape[-1]),
        )
        o_BND = self.norms[0](q_BND + read_BHNE.transpose(1, 2).flatten(2))
        out_BND: Tensor = self.norms[1](o_BND + F.relu(self.output(o_BND)))
        return out_BND


class SAB(nn.Module):
    """Self-attention block: a set attends itself. Arguments as of `MAB`; `in_width` is of the set."""

    def __init__(self, in_width: int, width: int, heads: int, *, norm: bool = False) -> None:
        super().__init__()
        self.block = MAB(in_width, in_width, width, heads, norm=norm)

    def forward(self, x_BNA: Tensor, padding_BN: Tensor | None = None) -> Tensor:
        """(B, N, D)."""
        out_BND: Tensor = self.block(x_BNA, x_BNA, padding_BN)
        return out_BND


class ISAB(nn.Module):
    """Induced self-attention block: points attend the set, and the set attends what they found.

    Args:
        points: P. Others as of `SAB`.

    Raises:
        ValueError: fewer than one point; a width that is no multiple of the heads.
    """

    def __init__(self, in_width: int, width: int, heads: int, points: int = 32, *, norm: bool = False) -> None:
        super().__init__()
        self.points_1PD = _points(points, width)
        self.inner = MAB(width, in_width, width, heads, norm=norm)
        self.outer = MAB(in_width, width, width, heads, norm=norm)

    def forward(self, x_BNA: Tensor, padding_BN: Tensor | None = None) -> Tensor:
        """(B, N, D)."""
        out_BND: Tensor = self.outer(x_BNA, self.inner(self.points_1PD, x_BNA, padding_BN))
        return out_BND


class PMA(nn.Module):
    """Pooling by multihead attention: learned seeds attend the set, and are its summary.

    Args:
        seeds: P, vectors of the summary.
        feed_forward: relu(X W + b) of the set first, as in the paper (not in the authors' code).
        Others as of `MAB`.

    Raises:
        ValueError: fewer than one seed; a width that is no multiple of the heads.
    """

    def __init__(
        self, width: int, heads: int, seeds: int = 1, *, feed_forward: bool = False, norm: bool = False
    ) -> None:
        super().__init__()
        self.seeds_1PD = _points(seeds, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, width), nn.ReLU()) if feed_forward else nn.Identity()
        self.block = MAB(width, width, width, heads, norm=norm)

    def forward(self, x_BND: Tensor, padding_BN: Tensor | None = None) -> Tensor:
        """(B, P, D)."""
        out_BPD: Tensor = self.block(self.seeds_1PD, self.feed_forward(x_BND), padding_BN)
        return out_BPD


def _points(count: int, width: int) -> nn.Parameter:
    _check_points(count)
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(1, count, width)))


def _check_points(count: int) -> None:
    if count < 1:
        raise ValueError(f"{count} points or seeds: there must be at least 1 that attends the set")
