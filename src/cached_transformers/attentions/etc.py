"""ETC, Extended Transformer Construction (Ainslie et al. 2020, arXiv:2004.08483;
github.com/google-research/google-research/tree/master/etcmodel).

Beside the tokens there is a short global sequence. A token sees all of it and the tokens at most r places away; a
global token sees everything; each in one softmax. A learned label gives the relation of a key to a query:

    e_ij = q_i (k_j + a_R(i,j)) / sqrt(E),   R: the distance j - i, clipped to [-k, k], within a sequence;
                                             "of my segment" or "of another one" between the sequences

`ETCLayer` (etc_layer.py) has a global sequence, carried from layer to layer. The core for plain q, k and v has
none: its global keys and values are means over segments of C tokens, and results of global tokens are not read
in the same layer. Its causal form (ours; the paper has an encoder alone) sees the past half of the window and the
segments that are complete.

Cost of the core: N ((E + V) (3 r + G) + (2 k + 3) E) multiply-adds a head, G = N / C; causal 2 r instead of 3 r. The
layer's attention adds G ((E + V) (N + G) + (2 k + 3) E). Labels cost a product with all of them and a look-up, never a
vector for each pair.

Differs from the original: no second, scalar table of labels (the bias of the query projection makes one); padding and
places outside are masked, not lowered by 10000.

Legend: B rows, H heads, N tokens, G global tokens, M keys, E key width, V value width, Q blocks, W tokens of a block,
S keys that a block sees, L labels, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import (
    attend,
    block_places,
    into_blocks,
    one_softmax,
    out_of_blocks,
    product,
    seen_places,
    wide,
    with_neighbours,
    zero_unseen,
)
from .parts.pattern import PatternAttention


class Labels(nn.Module):
    """Learned vectors for the relation of a key to a query: clipped distance, or whether the two share a segment.

    Args:
        heads: H. width: E. clip: k. between: whether there are labels between the two sequences.
    """

    def __init__(self, heads: int, width: int, clip: int, *, between: bool) -> None:
        super().__init__()
        self.clip = clip
        self.distance_HLE = nn.Parameter(torch.empty(heads, 2 * clip + 1, width))
        self.segment_H2E = nn.Parameter(torch.empty(heads, 2, width)) if between else None
        for table in self.parameters():
            nn.init.trunc_normal_(table, std=0.5, a=-1.0, b=1.0)  # the scale of keys, as in the original

    def by_distance(self, q_BHQWE: Tensor, far_WS: Tensor) -> Tensor:
        """(B, H, Q, W, S): q a_R for keys this many places after the queries of each block."""
        labelled_BHQWL = product(q_BHQWE, self.distance_HLE[:, None])
        index_WS = far_WS.clamp(-self.clip, self.clip) + self.clip
        return labelled_BHQWL.gather(-1, index_WS.expand(*labelled_BHQWL.shape[:3], -1, -1))

    def by_segment(self, q_BHNE: Tensor, same_B1NM: Tensor) -> Tensor:
        """(B, H, N, M): q a_own where query and key share a segment, q a_other elsewhere."""
        assert self.segment_H2E is not None
        same, other = product(q_BHNE, self.segment_H2E).split(1, -1)
        return torch.where(same_B1NM, same, other)


def tokens_see(
    qkv: Sequence[Tensor],
    global_kv: Sequence[Tensor],
    labels: Labels | None,
    same_BNG: Tensor,
    seen_BNG: Tensor,
    *,
    radius: int,
    padding_BN: Tensor | None,
    causal: bool = False,
    dropout: float = 0.0,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention to the global keys and the tokens near, and the log-sum-exp if requested.

    Args:
        same_BNG: which global token is that of a token's segment; one row may serve all.
        seen_BNG: which global tokens a token may see; one row and one token may serve all.
    """
    (kg_BHGE, vg_BHGV), (tokens, count) = global_kv, (qkv[0].shape[2], global_kv[0].shape[2])
    size = min(radius, tokens)
    q, k, v = (into_blocks(t, size) for t in qkv)
    blocks = q.shape[2]
    before = int(blocks > 1)
    after = 0 if causal else before
    k, v = (with_neighbours(t, before, after) for t in (k, v))
    query_QW1, key_Q1S = block_places(blocks, size, before, after, q.device)
    far_WS = (key_Q1S - query_QW1)[0]
    near = (far_WS <= (0 if causal else radius)) & (far_WS >= -radius) & seen_places(key_Q1S, tokens, padding_BN)
    near = near if padding_BN is not None else near[None, None]
    remote = into_blocks(seen_BNG[:, None].expand(-1, -1, tokens, -1), size)
    rows = max(len(near), len(remote))
    seen = torch.cat([t.expand(rows, -1, -1, -1, -1) for t in (remote, near)], -1)
    if labels is None:
        # Fused kernels keep no logits, which outweighs a copy of the global keys for each block.
        kg, vg = (t[:, :, None].expand(-1, -1, blocks, -1, -1) for t in global_kv)
        out, lse = attend(q, torch.cat([kg, k], 3), torch.cat([vg, v], 3), seen, dropout=dropout, want_lse=want_lse)
        out = out_of_blocks(out, tokens)
    else:
        scale = 1 / math.sqrt(q.shape[-1])
        q_BHNE, q = wide(qkv[0]) * scale, wide(q) * scale
        remote_BHNG = product(q_BHNE, kg_BHGE)
        remote_BHNG = remote_BHNG + labels.by_segment(q_BHNE, same_BNG[:, None]) if count else remote_BHNG
        local_BHQWS = product(q, k) + labels.by_distance(q, far_WS)
        logits = torch.cat([into_blocks(remote_BHNG, size), local_BHQWS], -1)
        weights, lse = one_softmax(logits, seen, dropout=dropout, want_lse=want_lse)
        far_weights, near_weights = weights.to(v.dtype).split([count, logits.shape[-1] - count], -1)
        out = out_of_blocks(near_weights @ v, tokens) + out_of_blocks(far_weights, tokens) @ vg_BHGV
        out = zero_unseen(out, out_of_blocks(seen.any(-1, keepdim=True), tokens))
    return out, None if lse is None else out_of_blocks(lse, tokens)


@ATTENTIONS.register(
    "etc",
    paper="arXiv:2004.08483",
    title="ETC",
    purpose="near tokens and a few that all see",
    equation="softmax over q_i (k_j + a_R(i,j)) / sqrt(E), |i - j| <= r, and all global keys: means over segments",
    order="N (r + N / C)",
    cost="about N (3 r + N / C) (E + V) multiply-adds a head",
)
class ETC(PatternAttention):
    """Sliding window and the means of all segments as global keys, with labels of relative position.

    Args:
        width: D. heads: H.
        radius: r, tokens seen on either side.
        segment: C, tokens after each global key; None for no global keys.
        clip: k, the largest distance with a label of its own; None for no labels.
        dropout: share of the weights to drop in training.

    Raises:
        ValueError: radius, segment or clip below 1.
    """

    can = PatternAttention.can | {"causal"}

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        radius: int = 84,
        segment: int | None = 16,
        clip: int | None = 12,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        check_sizes(radius, clip)
        at_least_one(" token; None leaves the global keys out", segment=segment)
        self.radius, self.segment = radius, segment
        self.labels = None if clip is None else Labels(heads, width // heads, clip, between=segment is not None)

    def summary(self, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Global keys and values, whose they are (1, N, G), and who may see them (B or 1, N or 1, G)."""
        tokens, padding_BN, device = k_BHNE.shape[2], call.key_padding_mask, k_BHNE.device
        if self.segment is None:
            none_11G = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)
            return k_BHNE[:, :, :0], v_BHNV[:, :, :0], none_11G, none_11G
        if padding_BN is None:
            padding_BN = torch.zeros(1, tokens, dtype=torch.bool, device=device)
        count_B1G1 = into_blocks((~padding_BN)[:, None, :, None], self.segment).sum(3)
        kg, vg = (into_blocks(t, self.segment).sum(3) / count_B1G1.clamp(min=1) for t in (k_BHNE, v_BHNV))
        token_N1, segment_G = torch.arange(tokens, device=device)[:, None], torch.arange(kg.shape[2], device=device)
        seen_BNG = count_B1G1[..., 0] > 0
        if call.causal:
            seen_BNG = seen_BNG & ((segment_G + 1) * self.segment <= token_N1 + 1)
        return kg, vg, (token_N1 // self.segment == segment_G)[None], seen_BNG

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        kg_BHGE, vg_BHGV, same_1NG, seen_BNG = self.summary(k_BHNE, v_BHNV, call)
        out, lse = tokens_see(
            (q_BHNE, k_BHNE, v_BHNV),
            (kg_BHGE, vg_BHGV),
            self.labels,
            same_1NG,
            seen_BNG,
            radius=self.radius,
            padding_BN=call.key_padding_mask,
            causal=call.causal,
            dropout=self.drop,
            want_lse=call.want_lse,
        )
        return AttentionOutput(out, lse)


def check_sizes(radius: int, clip: int | None) -> None:
    """Refuse what no window and no table of labels can have."""
    at_least_one(" token on either side", radius=radius)
    at_least_one(" token; None leaves the labels out", clip=clip)
