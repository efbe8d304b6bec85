"""Cross-entropy per token with label smoothing, from hidden states.

    loss = (1 - s) (L - z_y) + s (L - mean_v z_v),   L = log sum_v exp z_v,   z = h W^T + b

s is spread over all V tokens (arXiv:1512.00567, section 7), as in torch.nn.functional.cross_entropy; fairseq's
`label_smoothed_cross_entropy` spreads it over the other V - 1, which equals this loss with s V / (V - 1).

Only the logits are kept for the backward; probabilities are recomputed from them in chunks of rows. The usual
composition keeps log-probabilities and a gradient of the same size, three times the memory.

Legend: K tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""Target without a loss, as in `torch.nn.functional.cross_entropy`."""
CHUNK = 2**22
"""Logits per chunk; in float32, 16 MiB."""


def token_losses(h_KD: Tensor, head: nn.Linear, targets_K: Tensor, smoothing: float, ignored: int) -> Tensor:
    """(K,) losses in nats, float32 or wider, 0 where the target is `ignored`.

    Args:
        h_KD: hidden states. head: output projection. smoothing: s, in [0, 1).
    """
    if type(head) is not nn.Linear or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        logits_KV = head(h_KD)
        wide = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
        return F.cross_entropy(wide, targets_K, ignore_index=ignored, reduction="none", label_smoothing=smoothing)
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    kind = h_KD.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        h_KD, weight, bias = h_KD.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    out: Tensor = _TokenLosses.apply(h_KD, weight, bias, targets_K, smoothing, ignored)
    return out


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_KD: Tensor, weight: Tensor, bias: Tensor | None, targets_K: Tensor, smoothing: float, ignored: int
    ) -> Tensor:
        with torch.autocast(h_KD.device.type, enabled=False):
            logits_KV = F.linear(h_KD, weight, bias)
        kept_K = targets_K != ignored
        target_K1 = targets_K.where(kept_K, 0)[:, None]
        sums, losses = [], []
        for logits, target_C1 in zip(logits_KV.split(_rows(logits_KV)), target_K1.split(_rows(logits_KV)), strict=True):
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            sum_C1 = wide.logsumexp(-1, keepdim=True)
            expected = wide.gather(1, target_C1)
            if smoothing:
                expected = expected.lerp(wide.mean(-1, keepdim=True), smoothing)
            sums.append(sum_C1)
            losses.append((sum_C1 - expected)[:, 0])
        ctx.save_for_backward(h_KD, weight, logits_KV, torch.cat(sums), target_K1, kept_K)
        ctx.smoothing, ctx.biased = smoothing, bias is not None
        return torch.where(kept_K, torch.cat(losses), 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_K: Tensor) -> tuple[Tensor | None, ...]:
        h_KD, weight, logits_KV, sum_K1, target_K1, kept_K = ctx.saved_tensors
        grad_K1 = torch.where(kept_K, grad_K, 0)[:, None]
        size, s = _rows(logits_KV), ctx.smoothing
        parts = (t.split(size) for t in (logits_KV, sum_K1, target_K1, grad_K1, h_KD))
        d_h, d_bias = [], sum_K1.new_zeros(len(weight)) if ctx.biased else None
        d_weight = torch.zeros_like(weight, dtype=sum_K1.dtype)  # sum over chunks in float32
        for logits, sum_C1, target_C1, grad_C1, h_CD in zip(*parts, strict=True):
            d_logits = (logits.to(sum_C1.dtype) - sum_C1).exp_()
            if s:
                d_logits.sub_(s / logits.shape[1])
            d_logits.scatter_add_(1, target_C1, torch.full_like(sum_C1, s - 1))
            d_logits = d_logits.mul_(grad_C1)
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(logits.dtype)
            d_h.append(d_logits @ weight)
            if d_weight.dtype == weight.dtype:
                d_weight.addmm_(d_logits.mT, h_CD)
            else:
                d_weight += d_logits.mT @ h_CD
        return torch.cat(d_h), d_weight.to(weight.dtype), d_bias, None, None, None


def _rows(logits_KV: Tensor) -> int:
    return max(1, CHUNK // logits_KV.shape[1])


def perplexity(nats: float) -> float:
    """exp of a mean loss in nats; infinite where the result is too large for a float."""
    return math.exp(nats) if nats < 700 else math.inf
