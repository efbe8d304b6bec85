"""Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, eq. 1), by PyTorch's fused kernels.

out = softmax(q k^T / sqrt(E) + bias) v. A query that sees no key gives 0.
Cost: 2 B H N (M + N) (E + V) multiply-adds counted as two operations each; memory O(B H N V) with the fused kernels.

Legend: B rows, H heads, N tokens, M keys of a context, E key width, V value width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..memories.base import Context
from ..registry import ATTENTIONS
from .base import Attention, AttentionOutput


@ATTENTIONS.register(
    "softmax",
    paper="arXiv:1706.03762",
    equation="softmax(q k^T / sqrt(E) + bias) v",
    cost="4 B H N (M + N) E FLOPs, O(N) memory with fused kernels",
)
class SoftmaxAttention(Attention):
    """Exact softmax attention through scaled_dot_product_attention."""

    accepts_context = True
    supports_causal = True
    supports_cross = True
    supports_bias = True
    exact_padding = True
    gives_lse = True

    def attend(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        v_BHNV: Tensor,
        *,
        causal: bool,
        key_padding_mask: Tensor | None,
        context: Context | None,
        bias_BHNM: Tensor | None,
        x_BND: Tensor | None,
        generator: torch.Generator | None,
    ) -> AttentionOutput:
        if context is not None:
            rows = k_BHNE.shape[0]
            k_BHNE = torch.cat([context.k_BHME.expand(rows, -1, -1, -1), k_BHNE], 2)
            v_BHNV = torch.cat([context.v_BHME.expand(rows, -1, -1, -1), v_BHNV], 2)
        # The kernel's own causal flag is the fastest path, but it knows no context and no further mask.
        plain = context is None and key_padding_mask is None and bias_BHNM is None
        mask = None if plain else visible(q_BHNE, k_BHNE, causal, key_padding_mask, context, bias_BHNM)
        out = F.scaled_dot_product_attention(
            q_BHNE,
            k_BHNE,
            v_BHNV,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and plain,
        )
        return AttentionOutput(out)

    def log_sum_exp(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        *,
        causal: bool = False,
        key_padding_mask: Tensor | None = None,
        context: Context | None = None,
        bias_BHNM: Tensor | None = None,
    ) -> Tensor:
        """As in `Attention`, from logits made once more (N (M + N) E multiply-adds): the fused kernels keep none.

        Float32 or wider. A query that sees no key gets the lowest finite number, whose gradient is finite too.
        """
        if context is not None:
            k_BHNE = torch.cat([context.k_BHME.expand(len(k_BHNE), -1, -1, -1), k_BHNE], 2)
        mask = visible(q_BHNE, k_BHNE, causal, key_padding_mask, context, bias_BHNM)
        logits_BHNM = q_BHNE @ k_BHNE.mT / math.sqrt(q_BHNE.shape[-1])
        logits_BHNM = logits_BHNM.to(torch.promote_types(logits_BHNM.dtype, torch.float32))
        lowest = torch.finfo(logits_BHNM.dtype).min
        if mask is not None and mask.dtype == torch.bool:
            logits_BHNM = logits_BHNM.masked_fill(~mask, lowest)
        elif mask is not None:
            logits_BHNM = torch.where(mask == -torch.inf, lowest, logits_BHNM + mask)
        return logits_BHNM.logsumexp(-1)


def visible(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    context: Context | None,
    bias_BHNM: Tensor | None,
) -> Tensor | None:
    """Mask for scaled_dot_product_attention over [context, segment]: bool (True = visible), or additive with a bias."""
    n, total = q_BHNE.shape[2], k_BHNE.shape[2]
    slots = 0 if context is None else context.k_BHME.shape[2]
    mask = None
    if causal:
        mask = torch.ones(n, total, dtype=torch.bool, device=q_BHNE.device).tril(slots)[None, None]
    if key_padding_mask is not None:
        keep = F.pad(~key_padding_mask, (slots, 0), value=True)[:, None, None]
        mask = keep if mask is None else mask & keep
    if context is not None:
        keep = F.pad(context.valid_BM, (0, total - slots), value=True)[:, None, None]
        mask = keep if mask is None else mask & keep
    if bias_BHNM is None:
        return mask
    bias_BHNM = bias_BHNM.to(q_BHNE.dtype)
    return bias_BHNM if mask is None else bias_BHNM.masked_fill(~mask, -torch.inf)
