"""Clustered and improved clustered attention (Vyas, Katharopoulos, Fleuret 2020, arXiv:2007.04825;
github.com/idiap/fast-transformers).

Queries are put into C clusters; attention is computed for the mean query of each. The improved form then goes back to
the query itself for the K keys that its cluster weighs most:

    Q_c = mean of the queries in c,   A_c = softmax(Q_c k^T / sqrt(E)),   out_i = A_c v for i in c
    improved: T = the K largest of A_c, m = their sum,
    out_i = m softmax_T(q_i k_T^T / sqrt(E)) v_T + (sum of A_cj v_j over j not in T)

Clusters are found in Hamming space: a bit is the side of a random plane on which a query lies (`planes`, a buffer), and
Lloyd's algorithm takes the nearest centroid and then the majority of each bit. Both steps are products of matrices of
-1 and 1. The assignment has no gradient, the means have one.

Cost, for N queries, M keys, R bits and T iterations: N R E + (2 T - 1) N C R + N C E + C M (E + V) multiply-adds a
head. When improved, (N + C W) K (E + V) more: queries are laid out in blocks of W = ceil(N / C) of one cluster each,
for which (N / W + C) K (E + V) numbers a head are gathered.

* Everything is the same at every call: the first centroids are those of queries evenly spaced over the row (reference:
  of the first C queries), an empty cluster takes the query that is farthest from its centroid (reference: a random
  code, which is farther from all queries than any of them), and planes are kept (reference: drawn in each call; here
  with `redraw`, in training). The numbers in the products are small integers, so results do not depend on rounding.
* A row of at most C queries has one of its own for each: exact attention. The improved form is exact with K >= M, too.
* Padding takes no part in clusters or sums. Where queries are not the keys, all queries take part.
* A mean of queries sees everything that one of them sees, so there is no causal form; the reference's causal improved
  form puts queries together, and chooses keys, with the future in sight.

Legend: B rows, H heads, N queries, M keys, E key width, V value width, C clusters, R bits, K best keys,
Q blocks of W queries of one cluster.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import Attention, AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, largest, pick_rows, product
from .parts.hamming import lloyd
from .parts.keys import all_keys
from .parts.sizes import head_width

SeenKeys = tuple[Tensor, Tensor, Tensor | None]
"""All keys (B, H, M, E) and values, and which of them are there, (B, 1, 1, M); None where all of them are."""


@ATTENTIONS.register(
    "clustered",
    paper="arXiv:2007.04825",
    title="Clustered attention",
    purpose="fewer queries",
    equation="softmax(Q_c k^T / sqrt(E)) v, Q_c the mean of the query's cluster",
    order="N C, C clusters",
    cost="N R E + (2 T - 1) N C R + N C E + C M (E + V) multiply-adds a head, R bits, T iterations",
)
class ClusteredAttention(Attention):
    """Each query gets the attention of its cluster's mean query.

    Args:
        width: of all heads together. heads: H.
        clusters: C. bits: R, of a hash. iterations: T, assignments of queries to clusters.
        hash_bias: planes do not pass through the origin, so that the distance of hashes is that of queries rather than
            the angle between them.
        redraw: new planes in each call in training, from the call's generator.
        dropout: on the weights.

    Raises:
        ValueError: fewer than one cluster, bit or iteration; a width that is no multiple of the heads.
    """

    can = frozenset({"bidirectional", "cross", "context", "exact_padding"})

    planes_RE: Tensor
    offsets_R: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        clusters: int = 100,
        bits: int = 32,
        iterations: int = 10,
        hash_bias: bool = True,
        redraw: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        size = head_width(width, heads)
        at_least_one(clusters=clusters, bits=bits, iterations=iterations)
        self.clusters, self.iterations, self.hash_bias, self.redraw = clusters, iterations, hash_bias, redraw
        self.register_buffer("planes_RE", torch.randn(bits, size))
        self.register_buffer("offsets_R", torch.randn(bits) * hash_bias)

    def extra_repr(self) -> str:
        return f"clusters={self.clusters}, bits={len(self.planes_RE)}, iterations={self.iterations}"

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        k_BHME, v_BHMV, seen_BM = all_keys(k_BHNE, v_BHNV, call)
        seen_B11M = None if seen_BM is None else seen_BM[:, None, None]
        queries = q_BHNE.shape[2]
        if queries <= self.clusters:
            return AttentionOutput(
                F.scaled_dot_product_attention(q_BHNE, k_BHME, v_BHMV, attn_mask=seen_B11M, dropout_p=self.drop)
            )
        padding_BN = call.key_padding_mask
        there_BN = None if padding_BN is None or k_BHNE.shape[2] != queries else ~padding_BN
        index_BHN = self.assign(q_BHNE, there_BN, call.generator)
        member_BHNC = F.one_hot(index_BHN, self.clusters).to(q_BHNE.dtype)
        if there_BN is not None:
            member_BHNC = member_BHNC * there_BN[:, None, :, None]
        # Half precision cannot count beyond 2048.
        count_BHC = member_BHNC.sum(2, dtype=torch.promote_types(q_BHNE.dtype, torch.float32))
        share_BHNC = (member_BHNC / count_BHC.clamp(min=1)[:, :, None]).to(q_BHNE.dtype)
        means_BHCE = share_BHNC.mT @ q_BHNE
        return AttentionOutput(self._of_clusters(q_BHNE, means_BHCE, index_BHN, (k_BHME, v_BHMV, seen_B11M)))

    def _of_clusters(self, q_BHNE: Tensor, means_BHCE: Tensor, index_BHN: Tensor, keys: SeenKeys) -> Tensor:
        """(B, H, N, V) from the means and the clusters of the queries."""
        k_BHME, v_BHMV, seen_B11M = keys
        out_BHCV = F.scaled_dot_product_attention(means_BHCE, k_BHME, v_BHMV, attn_mask=seen_B11M, dropout_p=self.drop)
        return pick_rows(out_BHCV, index_BHN)

    @torch.no_grad()
    def assign(
        self, q_BHNE: Tensor, there_BN: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """(B, H, N): the cluster of each query.

        Args:
            there_BN: bool, queries that take part; others get the nearest cluster. All of them when None.
            generator: of planes that are resampled.
        """
        planes_RE, offsets_R = self.planes_RE, self.offsets_R
        if self.redraw and self.training:
            planes_RE, offsets_R = (
                torch.randn(t.shape, generator=generator, device=t.device, dtype=t.dtype)
                for t in (planes_RE, offsets_R)
            )
            offsets_R = offsets_R * self.hash_bias
        bits_BHNR = q_BHNE @ planes_RE.to(q_BHNE.dtype).T > -offsets_R.to(q_BHNE.dtype)
        with torch.autocast(q_BHNE.device.type, enabled=False):  # counts of bits stay exact
            index_BHN = lloyd(bits_BHNR, self.clusters, self.iterations, there_BN)
        if there_BN is None:
            return index_BHN
        # A padded row equals the trimmed row, whose queries would each be a cluster if it were that short.
        rank_BN, alone_B = there_BN.cumsum(1) - 1, there_BN.sum(1) <= self.clusters
        return torch.where(alone_B[:, None, None], rank_BN.clamp(0, self.clusters - 1)[:, None], index_BHN)


@ATTENTIONS.register(
    "improved_clustered",
    paper="arXiv:2007.04825",
    title="Clustered attention",
    purpose="fewer queries",
    equation="m softmax_T(q k_T^T / sqrt(E)) v_T + sum_(j not in T) A_cj v_j, T the K best keys of the cluster, "
    "m = sum_T A_c",
    order="N (C + K), C clusters, K best keys",
    cost="that of clustered + (N + C W) K (E + V) multiply-adds a head, W = ceil(N / C)",
)
class ImprovedClusteredAttention(ClusteredAttention):
    """Clustered attention in which a query weighs the best keys of its cluster itself.

    Args:
        topk: K. Others as of `ClusteredAttention`.

    Raises:
        ValueError: fewer than one key, and as of `ClusteredAttention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        clusters: int = 100,
        topk: int = 32,
        bits: int = 32,
        iterations: int = 10,
        hash_bias: bool = True,
        redraw: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            width,
            heads,
            clusters=clusters,
            bits=bits,
            iterations=iterations,
            hash_bias=hash_bias,
            redraw=redraw,
            dropout=dropout,
        )
        at_least_one(" key; attention 'clustered' does without", topk=topk)
        self.topk = topk

    def _of_clusters(self, q_BHNE: Tensor, means_BHCE: Tensor, index_BHN: Tensor, keys: SeenKeys) -> Tensor:
        k_BHME, v_BHMV, seen_B11M = keys
        logits_BHCM = product(means_BHCE, k_BHME) / math.sqrt(q_BHNE.shape[-1])
        if seen_B11M is not None:
            logits_BHCM = logits_BHCM.masked_fill(~seen_B11M, torch.finfo(logits_BHCM.dtype).min)
        weights_BHCM = logits_BHCM.softmax(-1)
        if seen_B11M is not None:
            weights_BHCM = torch.where(seen_B11M, weights_BHCM, 0)
        # A weight may be 0 in float32; missing entries come after it.
        ranked_BHCM = weights_BHCM if seen_B11M is None else weights_BHCM.masked_fill(~seen_B11M, -1)
        key_BHCK = largest(ranked_BHCM, self.topk)
        best_BHCK = weights_BHCM.gather(-1, key_BHCK)
        rest_BHCM = weights_BHCM.scatter(-1, key_BHCK, 0)
        rest_BHCV = F.dropout(rest_BHCM, self.drop, self.drop > 0).to(v_BHMV.dtype) @ v_BHMV
        best_BHNV = self._of_queries(q_BHNE, index_BHN, key_BHCK, keys)
        mass_BHC1 = best_BHCK.sum(-1, keepdim=True).to(v_BHMV.dtype)
        # The rest and the mass in one look-up.
        rest_BHNV, mass_BHN1 = pick_rows(torch.cat([rest_BHCV, mass_BHC1], 3), index_BHN).split([v_BHMV.shape[3], 1], 3)
        return mass_BHN1 * best_BHNV + rest_BHNV

    def _of_queries(self, q_BHNE: Tensor, index_BHN: Tensor, key_BHCK: Tensor, keys: SeenKeys) -> Tensor:
        """(B, H, N, V): attention of each query to the best keys of its cluster.

        Queries are laid out in blocks of one cluster each, so that keys are gathered for blocks, not for queries. The
        clusters fill N // W + C blocks of W at most, whatever their sizes.
        """
        (k_BHME, v_BHMV, seen_B11M), tokens = keys, q_BHNE.shape[2]
        size = -(-tokens // self.clusters)
        clusters_C = torch.arange(self.clusters, device=q_BHNE.device)
        blocks_Q = torch.arange(tokens // size + self.clusters, device=q_BHNE.device)
        order_BHN = index_BHN.argsort(dim=-1, stable=True)
        sorted_BHN = index_BHN.gather(2, order_BHN)
        first_BHC = torch.searchsorted(sorted_BHN, clusters_C.expand(*index_BHN.shape[:2], -1).contiguous())
        count_BHC = torch.cat([first_BHC[..., 1:], torch.full_like(first_BHC[..., :1], tokens)], -1) - first_BHC
        end_BHC = ((count_BHC + size - 1) // size).cumsum(-1)
        start_BHC = end_BHC - (count_BHC + size - 1) // size
        # Place of the query that is the n-th in order: blocks of earlier clusters, then its rank in its own.
        rank_BHN = torch.arange(tokens, device=q_BHNE.device) - first_BHC.gather(2, sorted_BHN)
        slot_BHN = start_BHC.gather(2, sorted_BHN) * size + rank_BHN
        slot_BHN = torch.empty_like(slot_BHN).scatter(2, order_BHN, slot_BHN)
        # An empty slot holds the first query; its result there is unused.
        query_BHS = slot_BHN.new_zeros(*slot_BHN.shape[:2], len(blocks_Q) * size)
        query_BHS = query_BHS.scatter(2, slot_BHN, torch.arange(tokens, device=q_BHNE.device).expand_as(slot_BHN))
        q_BHQWE = pick_rows(q_BHNE, query_BHS).unflatten(2, (-1, size))
        cluster_BHQ = torch.searchsorted(end_BHC, blocks_Q.expand(*index_BHN.shape[:2], -1).contiguous(), right=True)
        key_BHQK = pick_rows(key_BHCK, cluster_BHQ.clamp(max=self.clusters - 1))
        seen_BHQ1K = None
        if seen_B11M is not None:
            seen_BHQ1K = seen_B11M.expand(-1, *key_BHQK.shape[1:3], -1).gather(3, key_BHQK)[:, :, :, None]
        k_BHQKE, v_BHQKV = pick_rows(k_BHME, key_BHQK), pick_rows(v_BHMV, key_BHQK)
        out_BHQWV, _ = attend(q_BHQWE, k_BHQKE, v_BHQKV, seen_BHQ1K, dropout=self.drop)
        return pick_rows(out_BHQWV.flatten(2, 3), slot_BHN)
