"""The attention-based cache that GRC is compared with (arXiv:2312.12742): a shared cache without gates.

There is no code for it, and the text does not say how it is kept for images. So all but the update is GRC's: S =
interpolate(X, M) of the first C channels, one cache K of M slots for all rows and steps, the branch, the mix.

    update="attention":  K_t = mean_B LayerNorm(K_{t-1} + W_o softmax(q k^T / sqrt(F)) v),
                         q = W_q [S, K_{t-1}],  k, v = W_kv [K_{t-1}; S]  (2 M of them)
    update="store":      K_t = mean_B S;  rows read K_{t-1}, as Transformer-XL reads the last segment

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width, F = C / H.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.registry import MEMORIES

from .grc.shared_cache import SharedCache, Sync
from .grc.shared_cache_memory import MemoryBranch, SharedCacheMemory, cache_width
from .parts.interpolation import Interpolation


class AttendedCache(SharedCache):
    """A shared cache whose slots attend the last cache and the slots of new tokens. Parameters: 5 C^2 + 6 C."""

    def __init__(
        self, width: int, length: int, heads: int, *, attend: Literal["mean", "sample"] = "mean", **others: Any
    ) -> None:
        super().__init__(width, length, attend=attend, **others)
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.query_cache = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        for linear in (self.query, self.query_cache, self.key_value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def update(self, s_BMC: Tensor, cache_MC: Tensor) -> Tensor:
        held_MC = cache_MC.to(s_BMC.dtype)
        q_BMC = self.query(s_BMC) + self.query_cache(held_MC)
        of_slots, of_cache = self.key_value(s_BMC), self.key_value(held_MC)
        k, v = torch.cat([of_cache.expand_as(of_slots), of_slots], 1).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q_BMC, k, v))
        news_BMC = self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        weight, bias = (t.to(cache_MC.dtype) for t in (self.norm.weight, self.norm.bias))
        return F.layer_norm(cache_MC + news_BMC.to(cache_MC.dtype), (self.width,), weight, bias, self.norm.eps)


class StoredCache(SharedCache):
    """A shared cache that holds the slots of the last step's tokens; rows read it before it is replaced."""

    def __init__(self, width: int, length: int, **others: Any) -> None:
        super().__init__(width, length, attend="stored", **others)

    def update(self, s_BMC: Tensor, cache_MC: Tensor) -> Tensor:
        return s_BMC.detach().to(cache_MC.dtype)  # stored slots are detached, and so is their computation


@MEMORIES.register(
    "attention_cache",
    paper="arXiv:2312.12742",
    title="Cached Transformers",
    carries="a cache that attention updates, of all rows",
    purpose="a cache for images and encoders",
    equations="K_t = mean_B LayerNorm(K + attention of S over [K; S]), or S with update='store';  "
    "o = sigmoid(lambda) o_mem + ...",
    state="one cache (M, ratio * D) for all rows and steps, a buffer of the layer",
    cost="multiply-adds per row and layer, N = M: (5 + 5 / B) N C^2 + 6 N^2 C in training, N C^2 + 2 N^2 C folded",
    reach="all earlier training steps, with update='store' the last one; the same for all rows",
    gradient="through K_t within the step, into the update and tokens; K_{t-1} is a constant",
)
class AttentionCache(SharedCacheMemory):
    """Shared cache updated by attention, or by nothing, instead of GRC's gates; the comparison of the GRC paper.

    Args:
        width: D, of the layer. heads: H.
        length: M, slots.
        update: "attention", or "store" for the tokens of the last step as they are.
        ratio: C / D.
        attend: "mean", all rows read the batch mean of the update, or "sample", each reads its own, in evaluation too.
            A stored cache is always read as it was.
        initial_gate: lambda at the start.
        interpolation, size, prefix, sync: see `SharedCache`.
        combine, bias, dropout, reduction, window: see `MemoryBranch`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
        update: Literal["attention", "store"] = "attention",
        ratio: float = 0.5,
        attend: Literal["mean", "sample"] = "mean",
        combine: Literal["pad", "project"] = "pad",
        interpolation: Interpolation = "nearest",
        size: tuple[int, int] | None = None,
        prefix: int = 0,
        initial_gate: float = 0.0,
        sync: Sync = "broadcast",
        bias: bool = True,
        dropout: float = 0.0,
        reduction: nn.Module | None = None,
        window: tuple[int, int] | None = None,
    ) -> None:
        c = cache_width(width, heads, ratio)
        if update == "store" and attend != "mean":
            raise ValueError(
                f"attend={attend!r} reads the update of each row, and update='store' reads none before the next step; "
                "leave attend out, or take update='attention'"
            )
        slots: dict[str, Any] = {"interpolation": interpolation, "prefix": prefix, "sync": sync}
        slots["size"] = tuple(size) if size is not None else None
        attends = update == "attention"
        cache = AttendedCache(c, length, heads, attend=attend, **slots) if attends else StoredCache(c, length, **slots)
        reads: dict[str, Any] = {"combine": combine, "initial_gate": initial_gate, "reduction": reduction}
        super().__init__(cache, MemoryBranch(width, heads, c, bias=bias, dropout=dropout, window=window, **reads))
