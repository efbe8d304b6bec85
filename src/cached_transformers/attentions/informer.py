"""ProbSparse attention of Informer (Zhou, Zhang, Peng, Zhang, Li, Xiong, Zhang 2021, arXiv:2012.07436, algorithm 1;
github.com/zhouhaoyi/Informer2020).

The queries whose attention is furthest from uniform get it; all others get the mean of the values, which is what
uniform attention is.

    M_i = max_s q_i k_s - mean_s q_i k_s over U sampled keys
    out_i = softmax(q_i k^T / sqrt(E)) v for the u queries of largest M, else mean_j v_j
    u = c ceil(ln N), U = c ceil(ln M), at least c, at most all

Cost: N U E + u M (E + V) multiply-adds a head for N queries and M keys.

The causal form leaks, and cannot but leak: whether a query is among the u depends on all queries, and its M on later
keys. It is refused unless `allow_leak=True`.

* Keys are sampled one from each of U equal stretches of the keys that are there, at a place that is drawn once, in a
  buffer; U = M are all keys. (The reference draws with replacement in each call: for each query, shared by rows and
  heads; transformers' Informer, like the paper's algorithm, once for all queries: `sampling`.)
* The mean is over the sampled keys (both codes divide the sum of U by M).
* Padding is in no sample, mean or choice, and u and U are those of the trimmed row. Where queries are as many as keys,
  padding is taken to be of both.
* In the leaking causal form, queries not chosen get the mean of the values up to them (both codes: the sum, which
  grows with the place; `lazy_sum`).

Legend: B rows, H heads, N queries, M keys of context and segment, E key width, V value width, U samples, T = u queries
chosen, D width of a layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import Attention, AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import largest, pick_rows, wide
from .parts.keys import all_keys

POWERS = [math.floor(math.exp(power)) for power in range(22)]
"""ceil(ln n) is the number of those below n, in whole numbers: the same in and out of a graph and on every device."""
STEPS = 2**20
"""Places in a stretch of keys where a sample may lie."""


@ATTENTIONS.register(
    "informer",
    paper="arXiv:2012.07436",
    title="Informer",
    purpose="fewer queries",
    equation="softmax(q k^T / sqrt(E)) v for the u queries of largest max_s q k_s - mean_s q k_s, mean(v) for others",
    order="N ln N",
    cost="N U E + u M (E + V) multiply-adds a head, u = c ceil(ln N), U = c ceil(ln M)",
)
class InformerAttention(Attention):
    """Attention for the few queries that are not content with the mean of the values.

    Args:
        factor: c.
        sampling: one sample of keys for all queries ("shared"), or one for each ("own", which gathers N U E numbers a
            head).
        allow_leak: offer a causal form, in which outputs depend on later tokens through the choice of queries.
        lazy_sum: in that form, queries not chosen get the sum of the values so far, not the mean.
        redraw: new samples in each call in training, from the call's generator.
        dropout: on the weights.

    Raises:
        ValueError: a factor below 1, an unknown sampling, `lazy_sum` without `allow_leak`.
    """

    can = frozenset({"bidirectional", "cross", "context", "exact_padding"})

    jitter_U: Tensor
    stride_U: Tensor
    powers: Tensor

    def __init__(
        self,
        *,
        factor: int = 5,
        sampling: str = "shared",
        allow_leak: bool = False,
        lazy_sum: bool = False,
        redraw: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        at_least_one(factor=factor)
        if sampling not in ("shared", "own"):
            raise ValueError(f"sampling={sampling!r} must be 'shared' or 'own'")
        if lazy_sum and not allow_leak:
            raise ValueError("lazy_sum=True belongs to the causal form, which needs allow_leak=True")
        self.factor, self.sampling, self.lazy_sum, self.redraw = factor, sampling, lazy_sum, redraw
        if allow_leak:
            self.can = self.can | {"causal"}
        # Whole numbers, which a change of dtype leaves alone.
        self.register_buffer("jitter_U", torch.randint(STEPS, (factor * len(POWERS),)))
        self.register_buffer("stride_U", torch.randint(STEPS, (factor * len(POWERS),)))
        self.register_buffer("powers", torch.tensor(POWERS), persistent=False)

    def extra_repr(self) -> str:
        return f"factor={self.factor}, sampling={self.sampling!r}"

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        padding_BN, tokens, queries = call.key_padding_mask, k_BHNE.shape[2], q_BHNE.shape[2]
        there_BN = None if padding_BN is None or tokens != queries else ~padding_BN
        k_BHNE, v_BHNV, seen_BM = all_keys(k_BHNE, v_BHNV, call)
        slots = k_BHNE.shape[2] - tokens
        seen = None if seen_BM is None else seen_BM[:, None, None]
        # A shorter row may need a choice where the longest one needs none.
        if self.share(queries) == queries and there_BN is None:
            if call.causal:
                past_NM = torch.ones(queries, slots + tokens, dtype=torch.bool, device=q_BHNE.device).tril(slots)
                seen = past_NM if seen is None else seen & past_NM
            return AttentionOutput(F.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNV, seen, self.drop))
        place_BHT = self.choose(q_BHNE, k_BHNE, seen_BM, there_BN, call.generator)
        if call.causal:
            past_BHTM = torch.arange(-slots, tokens, device=q_BHNE.device) <= place_BHT[..., None]
            seen = past_BHTM if seen is None else seen & past_BHTM
        q_BHTE = pick_rows(q_BHNE, place_BHT)
        chosen_BHTV = F.scaled_dot_product_attention(q_BHTE, k_BHNE, v_BHNV, seen, self.drop)
        lazy_BHNV = self._lazy(v_BHNV, seen_BM, slots if call.causal else None).expand(-1, -1, queries, -1)
        lazy_BHNV = lazy_BHNV.to(chosen_BHTV.dtype)  # autocast may have changed that of the attention alone
        if there_BN is not None:
            real_BT = torch.arange(place_BHT.shape[2], device=q_BHNE.device) < self._shares(there_BN.sum(1))[:, None]
            chosen_BHTV = torch.where(real_BT[:, None, :, None], chosen_BHTV, pick_rows(lazy_BHNV, place_BHT))
        index_BHTV = place_BHT[..., None].expand(-1, -1, -1, v_BHNV.shape[3])
        return AttentionOutput(lazy_BHNV.scatter(2, index_BHTV, chosen_BHTV))

    def share(self, count: int) -> int:
        """u for a number of queries, or U for a number of keys."""
        return min(self.factor * max(sum(count > power for power in POWERS), 1), count)

    def _shares(self, count_B: Tensor) -> Tensor:
        """The same for the rows of a batch."""
        logarithm_B = (count_B[:, None] > self.powers).sum(1)
        return torch.minimum(self.factor * logarithm_B.clamp(min=1), count_B)

    @torch.no_grad()
    def choose(
        self,
        q_BHNE: Tensor,
        k_BHME: Tensor,
        seen_BM: Tensor | None = None,
        there_BN: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(B, H, T): the queries whose attention is furthest from uniform, the furthest first.

        Args:
            seen_BM: bool, keys that are there; all when None. there_BN: the same of queries; the others come last.
            generator: of samples that are resampled.
        """
        if there_BN is None:
            there_BN = q_BHNE.new_ones(len(q_BHNE), q_BHNE.shape[2], dtype=torch.bool)
        index, used_BU, count_B = self._sample(there_BN, k_BHME.shape[2], seen_BM, generator)
        sampled = pick_rows(k_BHME, index[:, None].expand(-1, k_BHME.shape[1], -1, -1))
        if self.sampling == "shared":
            score_BHNU = q_BHNE @ sampled[:, :, 0].mT
        else:
            score_BHNU = (sampled @ q_BHNE[..., None])[..., 0]
        score_BHNU = wide(score_BHNU)
        used_B11U = used_BU[:, None, None]
        most_BHN = score_BHNU.masked_fill(~used_B11U, -torch.inf).amax(-1)
        mean_BHN = torch.where(used_B11U, score_BHNU, 0).sum(-1) / count_B.clamp(min=1)[:, None, None]
        measure_BHN = (most_BHN - mean_BHN).masked_fill(~there_BN[:, None], -torch.inf)
        return largest(measure_BHN, self.share(q_BHNE.shape[2]))

    def _sample(
        self, queries_BN: Tensor, keys: int, seen_BM: Tensor | None, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys (B, 1 or N, U) that are sampled, which of these count (B, U), and how many do (B)."""
        jitter_U, stride_U = self.jitter_U, self.stride_U
        device, most = jitter_U.device, self.share(keys)
        if self.redraw and self.training:
            shape = (2, len(jitter_U))
            jitter_U, stride_U = torch.randint(STEPS, shape, generator=generator, device=device)
        stretch_U = torch.arange(most, device=device)
        place_BNU = jitter_U[:most].expand(1, 1, -1)
        if self.sampling == "own":  # places are counted without padding
            query_BN1 = (queries_BN.cumsum(1) - 1)[..., None]
            place_BNU = (place_BNU + query_BN1 * (2 * stride_U[:most] + 1)) % STEPS
        there_B = torch.full((len(queries_BN),), keys, device=device) if seen_BM is None else seen_BM.sum(1)
        count_B = self._shares(there_B)
        # The s-th of U stretches of the keys that are there, and a place in it, in whole numbers.
        step_BNU = (stretch_U * STEPS + place_BNU) * there_B[:, None, None]
        index_BNU = step_BNU // (count_B.clamp(min=1)[:, None, None] * STEPS)
        index_BNU = torch.minimum(index_BNU, (there_B - 1).clamp(min=0)[:, None, None])
        if seen_BM is not None:
            order_BM = (~seen_BM).long().argsort(dim=1, stable=True)
            index_BNU = order_BM.gather(1, index_BNU.flatten(1)).view_as(index_BNU)
        return index_BNU, stretch_U < count_B[:, None], count_B

    def _lazy(self, v_BHMV: Tensor, seen_BM: Tensor | None, slots: int | None) -> Tensor:
        """(B, H, 1, V): the mean of the values; with slots of a context, (B, H, N, V) up to each token of the segment.

        Sums are made in float32 or wider.
        """
        dtype = torch.promote_types(v_BHMV.dtype, torch.float32)
        counted_BM11 = torch.ones(1, v_BHMV.shape[2], 1, 1, device=v_BHMV.device, dtype=dtype)
        if seen_BM is not None:
            counted_BM11 = seen_BM[..., None, None].to(dtype)
            v_BHMV = v_BHMV.masked_fill(~seen_BM[:, None, :, None], 0)
        counted_B1M1 = counted_BM11.transpose(1, 2)
        if slots is None:
            total, count = v_BHMV.sum(2, keepdim=True, dtype=dtype), counted_B1M1.sum(2, keepdim=True)
        else:
            total, count = v_BHMV.cumsum(2, dtype=dtype)[:, :, slots:], counted_B1M1.cumsum(2)[:, :, slots:]
            if self.lazy_sum:
                count = torch.ones_like(count)
        return (total / count.clamp(min=1)).to(v_BHMV.dtype)
