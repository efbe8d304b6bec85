"""Memory-compressed attention (Liu, Saleh, Pot, Goodrich, Sepassi, Kaiser, Shazeer 2018, arXiv:1801.10198, section
4.2.3; github.com/tensorflow/tensor2tensor, github.com/lucidrains/memory-compressed-attention).

A convolution whose stride is its kernel makes one slot of each c neighbouring keys, and of their values; every query
has a softmax over the slots.

    K~_b = W [K_cb ... K_cb+c-1],   V~ likewise,   out = softmax(q K~^T / sqrt(E)) V~;
    causal: query i sees slot b if its last token is not later, cb + c - 1 <= i

Cost: M (E^2 + V^2) + N M (E + V) / c multiply-adds a head for N queries and M keys (M H (E^2 + V^2) with the full
convolution), and 2 N W (E + V) for a local branch of W tokens, at least 128 (3 N W where it is not causal).

* The first c - 1 queries of a causal segment see no slot and get 0, unless there is a learned null key (lucidrains), or
  a local branch: the last W tokens as keys of their own in the same softmax, instead of the paper's separate layers of
  local attention.
* Slots are made of the tokens that are there, one after the other, so that padding shifts none. Missing tokens of
  the last one are 0 before the convolution. (Lucidrains pads on the left, so that the slots move with the length, and
  its masks hide all but the null key.)
* The convolution starts as the mean, so that a slot is a mean key (lucidrains: at random).
* One softmax with the keys of a memory; the log-sum-exp is that of the slots' (and local keys') logits.

Legend: B rows, H heads, N queries, M keys, E key width, V value width, S slots, C = rate, Q blocks, W tokens of a block
of the local branch, G groups of heads that a convolution mixes, F = inputs and O = outputs of one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, block_places, into_blocks, seen_places, with_neighbours
from .parts.pattern import PatternAttention, in_sequence
from .parts.sizes import head_width

BLOCK = 128
"""Fewest queries that share a copy of the slots in a local branch."""


class Compression(nn.Module):
    """Convolution over tokens whose stride is its kernel: one slot of each `rate` tokens; the mean at first.

    Args:
        heads: H. width: of a head. rate: C.
        full: mixes the channels of all heads; else each head has its own.
    """

    def __init__(self, heads: int, width: int, rate: int, *, full: bool) -> None:
        super().__init__()
        self.rate, self.full = rate, full
        mean_FO = torch.eye(width).repeat(rate, 1) / rate
        weight = torch.block_diag(*[mean_FO] * heads)[None] if full else mean_FO.repeat(heads, 1, 1)
        self.weight_GFO = nn.Parameter(weight)
        self.bias_GO = nn.Parameter(torch.zeros(weight.shape[0], weight.shape[2]))

    def forward(self, t_BHME: Tensor) -> Tensor:
        """(B, H, S, E); the last slot may be of fewer tokens, and of zeros."""
        heads, width = t_BHME.shape[1], t_BHME.shape[3]
        if heads * width * self.rate != self.weight_GFO.shape[:2].numel():
            raise ValueError(
                f"{heads} heads of {width} channels came, but the convolution was made for "
                f"{self.weight_GFO.shape[:2].numel() // self.rate} channels in all; give width, heads and value_width"
            )
        t_BHSF = into_blocks(t_BHME, self.rate).flatten(3)
        if not self.full:
            return torch.einsum("bhsf,hfo->bhso", t_BHSF, self.weight_GFO) + self.bias_GO[:, None]
        slots_BSO = t_BHSF.transpose(1, 2).flatten(2) @ self.weight_GFO[0] + self.bias_GO[0]
        return slots_BSO.unflatten(2, (heads, width)).transpose(1, 2)


@ATTENTIONS.register(
    "memory_compressed",
    paper="arXiv:1801.10198",
    title="Memory-compressed attention",
    purpose="fewer keys",
    equation="softmax(q conv(K)^T / sqrt(E)) conv(V), stride C",
    order="N^2 / C, C tokens a slot",
    cost="M (E^2 + V^2) + N M (E + V) / C multiply-adds a head, M H (E^2 + V^2) with a full convolution",
)
class MemoryCompressedAttention(PatternAttention):
    """Softmax over keys and values that a strided convolution has made fewer.

    Args:
        width: of all heads together. heads: H.
        rate: C, tokens of a slot.
        grouping: a convolution for each head ("heads"), or one over all channels ("full").
        local: W, the last tokens (itself included, and as many later ones where it is not causal) that a query sees as
            they are, beside the slots; 0 for none.
        null: a learned key and value, 0 at first, that every query sees.
        value_width: V; that of the keys when None.
        dropout: on the weights.

    Raises:
        ValueError: a rate below 1, a window below 0, an unknown grouping, a width that is no multiple of the heads;
            with a local branch, other keys than queries.
    """

    can = PatternAttention.can | {"causal", "cross"}

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rate: int = 3,
        grouping: str = "heads",
        local: int = 0,
        null: bool = False,
        value_width: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout)
        size = head_width(width, heads)
        at_least_one(" token a slot; 1 compresses nothing", rate=rate)
        at_least_one("; None is width / heads", value_width=value_width)
        at_least_one(" tokens; 0 leaves the local branch out", least=0, local=local)
        if grouping not in ("heads", "full"):
            raise ValueError(f"grouping={grouping!r} must be 'heads' or 'full'")
        self.rate, self.local = rate, local
        if local:
            self.can = self.can - {"cross"}
        sizes = (size, value_width or size)
        self.keys, self.values = (Compression(heads, size, rate, full=grouping == "full") for size in sizes)
        self.null_HE, self.null_HV = (nn.Parameter(torch.zeros(heads, s)) if null else None for s in sizes)

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        padding_BN = call.key_padding_mask
        k_BHSE, v_BHSV = self.keys(k_BHNE), self.values(v_BHNV)
        seen = self._seen_slots(q_BHNE, k_BHSE, padding_BN, call.causal)
        if self.null_HE is not None and self.null_HV is not None:
            k_BHSE, v_BHSV = (
                torch.cat([null[:, None].expand(len(t), -1, -1, -1), t], 2)
                for null, t in ((self.null_HE, k_BHSE), (self.null_HV, v_BHSV))
            )
            if seen is not None:
                anything = True if padding_BN is None else ~padding_BN.all(1)[:, None, None, None]
                seen = F.pad(seen, (1, 0), value=True) & anything
        if self.local:
            return self._with_local((q_BHNE, k_BHNE, v_BHNV), (k_BHSE, v_BHSV), seen, call)
        return AttentionOutput(*attend(q_BHNE, k_BHSE, v_BHSV, seen, dropout=self.drop, want_lse=call.want_lse))

    def _seen_slots(self, q_BHNE: Tensor, k_BHSE: Tensor, padding_BN: Tensor | None, causal: bool) -> Tensor | None:
        """(B or 1, 1, N, S): slots that hold a token at all, none of them later than the query; None for all."""
        queries, slots = q_BHNE.shape[2], k_BHSE.shape[2]
        first_S, seen = torch.arange(slots, device=q_BHNE.device) * self.rate, None
        if causal:
            seen = (first_S + self.rate - 1 <= torch.arange(queries, device=q_BHNE.device)[:, None])[None, None]
        if padding_BN is None:
            return seen
        there_B1NS = (first_S < (~padding_BN).sum(1)[:, None])[:, None, None].expand(-1, -1, queries, -1)
        return there_B1NS if seen is None else there_B1NS & seen

    def _with_local(
        self, qkv: tuple[Tensor, Tensor, Tensor], slots: tuple[Tensor, Tensor], seen: Tensor | None, call: Call
    ) -> AttentionOutput:
        """One softmax over the slots and the tokens of the window, in blocks that have both as their keys.

        Slots are repeated for each block, which are therefore not smaller than `BLOCK`.
        """
        q_BHNE, tokens = qkv[0], qkv[0].shape[2]
        size, after = min(max(self.local, BLOCK), tokens), 0 if call.causal else 1
        q_BHQWE, k_BHQWE, v_BHQWV = (into_blocks(t, size) for t in qkv)
        blocks = q_BHQWE.shape[2]
        k_BHQSE, v_BHQSV = (
            torch.cat([made[:, :, None].expand(-1, -1, blocks, -1, -1), with_neighbours(t, 1, after)], 3)
            for made, t in zip(slots, (k_BHQWE, v_BHQWV), strict=True)
        )
        query, key = block_places(blocks, size, 1, after, q_BHNE.device)
        distance_QWS = query - key
        near = (distance_QWS < self.local) & (distance_QWS > (-1 if call.causal else -self.local))
        near = near & seen_places(key, tokens, call.key_padding_mask)
        near = near.view((1,) * (5 - near.dim()) + near.shape)
        if seen is None:
            seen = near.new_ones(1, 1, 1, slots[0].shape[2])
        seen = F.pad(seen.expand(-1, -1, tokens, -1), (0, 0, 0, -tokens % size)).unflatten(2, (blocks, size))
        both = torch.cat([t.expand(max(len(seen), len(near)), -1, -1, -1, -1) for t in (seen, near)], 4)
        out, lse = attend(q_BHQWE, k_BHQSE, v_BHQSV, both, dropout=self.drop, want_lse=call.want_lse)
        return in_sequence(out, lse, tokens)
