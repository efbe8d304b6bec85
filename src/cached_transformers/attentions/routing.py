"""Routing Transformer's attention within clusters (Roy, Saffar, Vaswani, Grangier 2020, arXiv:2003.05997;
github.com/google-research/google-research/tree/master/routing_transformer).

Queries and keys, as unit vectors, are routed by their products with centroids mu that follow them by k-means:

    not causal:  Q_c = the W queries, K_c = the W keys with the largest mu_c . q^, mu_c . k^;
                 out_i = softmax over the keys of all K_c with i in Q_c
    causal:      c(i) = argmax_c mu_c . (q^_i + k^_i);  out_i = softmax over the last W keys j <= i with c(j) = c(i)
    training:    mu <- unit(decay mu + (1 - decay) unit(sum of the q^ and k^ nearest to mu)),
                 loss beta ||q^ - mu||^2 + beta ||k^ - mu||^2, as a mean

Cost: not causal 2 N C E + C W^2 (E + V + C) multiply-adds a head, the last C only where C > 1 and `combine="softmax"`;
causal N C E + 2 N W (E + V), for N filled up to W (N alone where it is at most W). Training adds 2 N C E.

What differs from the original, and why:
- Which W tokens are nearest depends on the whole sequence, so that the published causal form lets later tokens change
  earlier outputs (`allow_leak`). Here each token has one cluster: the one nearest to its query and key together. The
  original shares queries and keys in causal models; with tied projections c(i) is the same as there.
- A token in several clusters has one softmax over the union of their keys, each counted once, and so a log-sum-exp;
  `combine="mean"` is the mean of one softmax per cluster. A query that is nowhere among the nearest gives 0.
- Vectors have length 1, where the original normalises their mean and variance, and centroids are kept at length 1: the
  largest product is the nearest one then. A mean over both kinds of vectors takes the place of half of each.
- Padding is never among the nearest, and never counted.

Legend: B rows, H heads, N tokens, E key width, V value width, C clusters, W tokens of a cluster, Q blocks, S keys that
a block sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import (
    attend,
    block_places,
    into_blocks,
    largest,
    out_of_blocks,
    pick_rows,
    wide,
    with_neighbours,
)
from .parts.pattern import PatternAttention
from .parts.sizes import head_width


@ATTENTIONS.register(
    "routing",
    paper="arXiv:2003.05997",
    title="Routing Transformer",
    purpose="keys chosen by content",
    equation="softmax over the keys of the own clusters of online k-means; causal: the last W of the nearest cluster",
    order="N sqrt(N)",
    cost="2 N C E + C W^2 (E + V + C), causal N C E + 2 N W (E + V) multiply-adds a head for C clusters of W tokens",
)
class RoutingAttention(PatternAttention):
    """Attention within clusters that follow queries and keys by online k-means.

    In training a call moves the centroids to the inputs of the call before it, and `eval()` to the last call's; where
    a call is repeated in a backward pass (activation checkpointing, reversible layers) it moves and counts nothing, and
    routes as it did. Several segments that are checkpointed under one backward pass need update="manual", and
    `update_centroids` after each step. The centroids should stay in float32: half precision cannot add a thousandth.
    Processes of one training job share them where their wrapper broadcasts buffers, or by `synchronise`.

    Args:
        width: D; heads: H. They fix the size of the centroids, which are drawn once.
        clusters: C; the root of `length` when None. window: W; length / C when None. length: of the longest segment,
            for these two alone.
        combine: "softmax" over the keys of all clusters of a token, or the "mean" of one softmax each, which has no
            log-sum-exp and takes no context of a memory.
        decay: share of the centroids that stays at each update. commitment: beta; 0 for no auxiliary loss.
        update: "forward", or "manual".
        synchronise: updates sum over the processes of the default group; all of them must make the same calls.
        allow_leak: the published causal form, in which later tokens change what earlier ones see.

    Raises:
        ValueError: sizes below 1, shares outside [0, 1], unknown names, or no `length` where it is needed.
    """

    can = PatternAttention.can | {"causal"}

    centroids_HCE: Tensor
    sums_HCE: Tensor
    counts_HC: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        clusters: int | None = None,
        window: int | None = None,
        *,
        length: int | None = None,
        combine: str = "softmax",
        decay: float = 0.999,
        commitment: float = 1e-4,
        update: str = "forward",
        synchronise: bool = False,
        allow_leak: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        if length is None and (clusters is None or window is None):
            raise ValueError("sizes of clusters depend on the length of a segment; give clusters and window, or length")
        at_least_one(clusters=clusters, window=window, length=length)
        clusters = max(1, round(math.sqrt(length or 1))) if clusters is None else clusters
        size = head_width(width, heads)
        if combine not in ("softmax", "mean"):
            raise ValueError(f"combine={combine!r} must be 'softmax' or 'mean'")
        if update not in ("forward", "manual"):
            raise ValueError(f"update={update!r} must be 'forward' or 'manual'")
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay={decay} must lie in [0, 1]; 1 leaves the centroids where they are")
        if commitment < 0.0:
            raise ValueError(f"commitment={commitment} must be at least 0, which is no auxiliary loss")
        self.clusters, self.window = clusters, window or -(-(length or 1) // clusters)
        self.combine, self.decay, self.commitment = combine, decay, commitment
        if combine == "mean":
            self.can = self.can - {"context", "lse"}
        self.when, self.synchronise, self.allow_leak = update, synchronise, allow_leak
        drawn = F.normalize(torch.randn(heads, clusters, size), dim=-1)
        self.register_buffer("centroids_HCE", drawn)
        self.register_buffer("sums_HCE", torch.zeros_like(drawn))
        self.register_buffer("counts_HC", torch.zeros(heads, clusters))

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        if self.training and self.when == "forward" and not _repeated_in_backward():
            self.update_centroids()
        there_BN = call.key_padding_mask
        there_BN = torch.ones_like(q_BHNE[:, 0, :, 0], dtype=torch.bool) if there_BN is None else ~there_BN
        strict = call.causal and not self.allow_leak
        # In half precision products with centroids come out equal, or in another order.
        with torch.autocast(q_BHNE.device.type, enabled=False):
            unit_q, unit_k = (_unit(t) for t in (q_BHNE, k_BHNE))
            centroids_HEC = self.centroids_HCE.to(unit_q.dtype).mT
            routed = [(unit_q + unit_k).detach()] if strict else [unit_q.detach(), unit_k.detach()]
            near = [t @ centroids_HEC for t in routed]
        near_q, near_k = near[0], near[-1]
        if strict:
            result = self._last_of_cluster(q_BHNE, k_BHNE, v_BHNV, near_q.argmax(-1), there_BN, call)
        else:
            result = self._nearest(q_BHNE, k_BHNE, v_BHNV, (near_q, near_k), there_BN, call)
        if not self.training:
            return result
        cluster_BHM = torch.cat([near_q.argmax(-1), near_k.argmax(-1)], 2)
        return result._replace(auxiliary_loss=self._learn(torch.cat([unit_q, unit_k], 2), cluster_BHM, there_BN))

    def _nearest(
        self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, near_BHNC: Sequence[Tensor], there_BN: Tensor, call: Call
    ) -> AttentionOutput:
        """Each cluster among the tokens nearest to its centroid."""
        rows, heads, tokens, clusters = near_BHNC[0].shape
        size = min(self.window, tokens)
        absent_B1N1 = ~there_BN[:, None, :, None]
        query_BHCW, key_BHCW = (largest(near.masked_fill(absent_B1N1, -torch.inf).mT, size) for near in near_BHNC)
        q_BHCWE = pick_rows(q_BHNE, query_BHCW)
        k_BHCWE, v_BHCWV = (pick_rows(t, key_BHCW) for t in (k_BHNE, v_BHNV))
        seen = pick_rows(there_BN[:, None].expand(-1, heads, -1), key_BHCW)[..., None, :]
        if call.causal:
            seen = seen & (query_BHCW[..., None] >= key_BHCW[..., None, :])
        union = self.combine == "softmax"
        if union and clusters > 1:
            # A pair that is together in several clusters is seen in the first of them.
            members = [
                near.new_zeros(near.shape).scatter_(2, chosen.mT, 1.0)
                for near, chosen in zip(near_BHNC, (query_BHCW, key_BHCW), strict=True)
            ]
            earlier_C1C = torch.ones(clusters, clusters, dtype=members[0].dtype, device=q_BHNE.device).tril(-1)[:, None]
            query_in, key_in = (pick_rows(t, at) for t, at in zip(members, (query_BHCW, key_BHCW), strict=True))
            seen = seen & ((query_in * earlier_C1C) @ key_in.mT == 0)
        out, lse = attend(q_BHCWE, k_BHCWE, v_BHCWV, seen, dropout=self.drop, want_lse=union)
        place_BHM = query_BHCW.flatten(2)
        at_BHMV = place_BHM[..., None].expand(-1, -1, -1, v_BHNV.shape[-1])
        out_BHMV = out.flatten(2, 3).to(near_BHNC[0].dtype)
        total_BHN = out_BHMV.new_zeros(rows, heads, tokens)
        if lse is None:
            weight_BHM = torch.ones_like(out_BHMV[..., 0])
        else:
            lse_BHM = lse.flatten(2)
            top_BHN = torch.full_like(total_BHN, torch.finfo(lse.dtype).min)
            top_BHN = top_BHN.scatter_reduce(2, place_BHM, lse_BHM.detach(), "amax")
            weight_BHM = (lse_BHM - pick_rows(top_BHN, place_BHM)).exp()
        total_BHN = total_BHN.scatter_add(2, place_BHM, weight_BHM)
        sums_BHNV = out_BHMV.new_zeros(v_BHNV.shape).scatter_add(2, at_BHMV, weight_BHM[..., None] * out_BHMV)
        found_BHN = total_BHN > 0
        total_BHN = torch.where(found_BHN, total_BHN, 1.0)
        out_BHNV = (sums_BHNV / total_BHN[..., None]).to(v_BHNV.dtype)
        return AttentionOutput(out_BHNV, top_BHN + total_BHN.log() if call.want_lse else None)

    def _last_of_cluster(
        self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, cluster_BHN: Tensor, there_BN: Tensor, call: Call
    ) -> AttentionOutput:
        """Each token among the last of its cluster: tokens sorted by cluster, and windows along that order."""
        tokens = q_BHNE.shape[2]
        size = min(self.window, tokens)
        cluster_BHN = torch.where(there_BN[:, None], cluster_BHN, self.clusters)
        order_BHN = cluster_BHN.argsort(dim=-1, stable=True)
        place_BHN = torch.arange(tokens, device=order_BHN.device).expand_as(order_BHN)
        rank_BHN = torch.zeros_like(order_BHN).scatter(2, order_BHN, place_BHN)
        kind = into_blocks(pick_rows(cluster_BHN, order_BHN)[..., None], size)
        q, k, v = (into_blocks(pick_rows(t, order_BHN), size) for t in (q_BHNE, k_BHNE, v_BHNV))
        before = int(tokens > size)
        query_QW1, key_Q1S = block_places(q.shape[2], size, before, 0, q.device)
        kind_of_key = with_neighbours(kind, before, 0).mT
        seen = (kind == kind_of_key) & (kind_of_key < self.clusters)
        seen = seen & (key_Q1S >= 0) & (key_Q1S <= query_QW1) & (query_QW1 - key_Q1S < size)
        k, v = (with_neighbours(t, before, 0) for t in (k, v))
        out, lse = attend(q, k, v, seen, dropout=self.drop, want_lse=call.want_lse)
        out_BHNV = pick_rows(out_of_blocks(out, tokens), rank_BHN)
        return AttentionOutput(out_BHNV, None if lse is None else pick_rows(lse.flatten(2), rank_BHN))

    def _learn(self, unit_BHME: Tensor, cluster_BHM: Tensor, there_BN: Tensor) -> Tensor | None:
        """The loss that draws queries and keys to their centroids, which follow them."""
        there_BM = there_BN.repeat(1, 2)
        centroids = self.centroids_HCE.to(unit_BHME.dtype)
        head_H1 = torch.arange(len(centroids), device=centroids.device)[:, None]
        loss = None
        if self.commitment:
            apart_BHM = (unit_BHME - centroids[head_H1, cluster_BHM]).square().mean(-1)
            counted_BHM = there_BM[:, None].expand_as(apart_BHM)
            loss = self.commitment * (apart_BHM * counted_BHM).sum() / counted_BHM.sum().clamp(min=1)
        if self.decay < 1.0 and not _repeated_in_backward():
            with torch.no_grad():
                sums_HCE, counts_HC = self._statistics(unit_BHME.detach(), cluster_BHM, there_BM)
                self.sums_HCE += sums_HCE
                self.counts_HC += counts_HC
        return loss

    def train(self, mode: bool = True) -> RoutingAttention:
        """Set the mode like nn.Module.train; leaving training moves the centroids to the last inputs."""
        if self.training and not mode and self.when == "forward":
            self.update_centroids()
        return super().train(mode)

    def _statistics(self, unit_BHME: Tensor, cluster_BHM: Tensor, there_BM: Tensor) -> tuple[Tensor, Tensor]:
        """Sum (H, C, E) and number (H, C) of the vectors of each cluster; a product, as adding up in place is not
        reproducible on every device."""
        chosen_BHMC = F.one_hot(cluster_BHM, self.clusters) * there_BM[:, None, :, None]
        chosen_BHMC = chosen_BHMC.to(unit_BHME.dtype)
        return (chosen_BHMC.mT @ unit_BHME).sum(0), chosen_BHMC.sum((0, 2))

    @torch.no_grad()
    def update_centroids(self) -> None:
        """Move the centroids to the inputs since the last move; call it after each step with update="manual"."""
        if self.synchronise and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.sums_HCE)
            torch.distributed.all_reduce(self.counts_HC)
        moved = self.decay * self.centroids_HCE + (1 - self.decay) * F.normalize(self.sums_HCE, dim=-1)
        moved = torch.where(self.counts_HC[..., None] > 0, F.normalize(moved, dim=-1), self.centroids_HCE)
        self.centroids_HCE.copy_(moved)
        self.sums_HCE.zero_()
        self.counts_HC.zero_()

    @torch.no_grad()
    def fit(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        iterations: int = 10,
        generator: torch.Generator | None = None,
    ) -> None:
        """Begin with centroids by k-means over these queries and keys (drawn ones may be far from all of them)."""
        unit_BHME = _unit(torch.cat([q_BHNE, k_BHNE], 2))
        there_BM = torch.ones_like(unit_BHME[:, 0, :, 0], dtype=torch.bool)
        if key_padding_mask is not None:
            there_BM = ~key_padding_mask.repeat(1, 2)
        vectors_HXE = unit_BHME.transpose(0, 1)[:, there_BM]
        if vectors_HXE.shape[1] < self.clusters:
            raise ValueError(
                f"{vectors_HXE.shape[1]} vectors cannot begin clusters={self.clusters}; give a longer batch"
            )
        drawn = torch.randperm(vectors_HXE.shape[1], generator=generator)[: self.clusters]
        centroids = vectors_HXE[:, drawn.to(vectors_HXE.device)]
        for _ in range(iterations):
            sums, counts = self._statistics(unit_BHME, (unit_BHME @ centroids.mT).argmax(-1), there_BM)
            centroids = torch.where(counts[..., None] > 0, F.normalize(sums, dim=-1), centroids)
        self.centroids_HCE.copy_(centroids)


def _unit(t: Tensor) -> Tensor:
    return F.normalize(wide(t), dim=-1)


def _repeated_in_backward() -> bool:
    """True inside a backward pass, where activation checkpointing repeats the forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
