"""Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, eq. 1), by PyTorch's fused kernels.

out = softmax(q k^T / sqrt(E) + bias) v. A query that sees no key gives 0. By FlexAttention positions need no bias:
logits by distance are looked up where the pairs are made.

Cost: N (M + N) (E + V) multiply-adds a head and row; memory O(N V) with the fused kernels.

Legend: B rows, H heads, N tokens, W of these, M keys of a context, L = M + N, E key width, V value width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import none_true
from cached_transformers.interfaces.attention import Attention, AttentionOutput, Call
from cached_transformers.interfaces.memory import Context
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import product
from .parts.flex import Everything, flex_attend, lengths_of, shown
from .parts.kernels import FlexKernel, takes_flex
from .parts.keys import visible, with_context


@ATTENTIONS.register(
    "softmax",
    paper="arXiv:1706.03762",
    title="Attention Is All You Need",
    purpose="exact attention",
    equation="softmax(q k^T / sqrt(E) + bias) v",
    order="N^2",
    cost="2 N (M + N) E multiply-adds a head; memory O(N) with fused kernels",
)
class SoftmaxAttention(Attention):
    """Exact softmax attention through scaled_dot_product_attention.

    Args:
        kernel: "plain", "flex" (FlexAttention, refused where it cannot), or "auto", which leaves to the fused kernels
            what has neither bias nor padding nor a context.
    """

    can = frozenset({"causal", "bidirectional", "cross", "bias", "context", "exact_padding", "lse", "weights"})
    steps_from = "keys"

    def __init__(self, *, dropout: float = 0.0, kernel: FlexKernel = "plain") -> None:
        super().__init__(dropout=dropout)
        self.kernel = kernel

    def looks_up(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor) -> bool:
        return takes_flex(self.kernel, q_BHNE, k_BHNE, v_BHNV, self.drop)

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        context = call.context
        # The fused kernels' own causal flag is the fastest path, but it knows no context and no further mask.
        plain = all(given is None for given in (context, call.key_padding_mask, call.bias_BHNM, call.distances_BHNK))
        if not (plain and self.kernel == "auto") and self.looks_up(q_BHNE, k_BHNE, v_BHNV):
            everything = shown(Everything(), lengths_of(q_BHNE, k_BHNE, call))
            return flex_attend(q_BHNE, k_BHNE, v_BHNV, call, everything)
        k_BHNE, v_BHNV = with_context(k_BHNE, v_BHNV, context)
        bias_BHNM, learns = call.bias_BHNM, call.bias_BHNM is not None and call.bias_BHNM.requires_grad
        if bias_BHNM is not None and learns and not (self.drop or call.want_lse) and written_out(q_BHNE):
            mask = visible(q_BHNE, k_BHNE, call.causal, call.key_padding_mask, context, None)
            return AttentionOutput(attend_with_bias(q_BHNE, k_BHNE, v_BHNV, mask, bias_BHNM))
        mask = None
        if not plain or call.want_lse:
            mask = visible(q_BHNE, k_BHNE, call.causal, call.key_padding_mask, context, bias_BHNM)
        out = F.scaled_dot_product_attention(
            q_BHNE,
            k_BHNE,
            v_BHNV,
            attn_mask=None if plain else mask,
            dropout_p=self.drop,
            is_causal=call.causal and plain,
        )
        return AttentionOutput(out, log_sum_exp(q_BHNE, k_BHNE, mask) if call.want_lse else None)


def written_out(q_BHNE: Tensor) -> bool:
    """Return whether `attend_with_bias` is the faster one: where no fused kernel has a gradient for a bias."""
    eager_cpu = q_BHNE.device.type == "cpu" and not torch.compiler.is_compiling()
    return eager_cpu and not torch.is_autocast_enabled("cpu") and q_BHNE.dtype in (torch.float32, torch.float64)


def attend_with_bias(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, seen: Tensor | None, bias_BHNM: Tensor) -> Tensor:
    """scaled_dot_product_attention with a bias that learns, and with a third of its passes over the logits.

    Args:
        seen: bool, True = visible; None for all.
    """
    hidden = None if seen is None else _hidden(seen, q_BHNE.dtype)
    return _WrittenOut.apply(q_BHNE, k_BHNE, v_BHNV, hidden, bias_BHNM)[0]  # type: ignore[no-any-return]


class _WrittenOut(torch.autograd.Function):
    """Attention and its weights, with gradients in the order of their inputs, which autograd's own lack."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor]:
        logits = (q / math.sqrt(q.shape[-1])) @ k.mT
        logits += bias
        if hidden is not None:
            logits += hidden
        least = torch.finfo(logits.dtype).min
        none_BHN1 = logits.clamp_(min=least).amax(-1, keepdim=True) == least
        weights = logits.softmax(-1)
        if not none_true(none_BHN1):
            weights.masked_fill_(none_BHN1, 0)
        return weights @ v, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:3], output[1])
        ctx.bias = inputs[4].shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, weights_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        if grad is not None:
            weights_grad = grad @ v.mT if weights_grad is None else grad @ v.mT + weights_grad
        assert weights_grad is not None
        logits_grad = torch._softmax_backward_data(weights_grad, weights, -1, weights.dtype)
        scale, v_grad = math.sqrt(q.shape[-1]), None if grad is None else weights.mT @ grad
        return (logits_grad @ k) / scale, logits_grad.mT @ (q / scale), v_grad, None, logits_grad.sum_to_size(ctx.bias)


def _hidden(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Minus infinity where nothing is seen, to be added for all heads; masked_fill takes six times as long."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)


def log_sum_exp(q_BHNE: Tensor, k_BHNE: Tensor, mask: Tensor | None) -> Tensor:
    """(B, H, N): log-sum-exp of each query's logits, recomputed (N (M + N) E multiply-adds): fused kernels keep none.

    Float32 or wider. A query that sees no key gets the lowest finite number, whose gradient is finite too.

    Args:
        mask: of `visible`, over the keys of context and segment.
    """
    logits_BHNM, seen = _logits(q_BHNE, k_BHNE, mask)
    if seen is not None:
        logits_BHNM = logits_BHNM.masked_fill(~seen, torch.finfo(logits_BHNM.dtype).min)
    return logits_BHNM.logsumexp(-1)


@torch.no_grad()
def key_weights(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    context: Context | None,
    bias_BHNM: Tensor | None,
    columns_BW: Tensor | None = None,
) -> Tensor:
    """(B, H, W, M + N): weight of each key of context and segment; not a number where a query does not see the key.

    Padding asks nothing. The fused kernels keep no weights, so these cost B H W (M + N) E multiply-adds and as many
    numbers as there are weights. Arguments as of `Attention.forward`; `columns_BW` are the queries, None for all.
    """
    if context is not None:
        k_BHNE = torch.cat([context.k_BHME.expand(k_BHNE.shape[0], -1, -1, -1), k_BHNE], 2)
    mask = visible(q_BHNE, k_BHNE, causal, key_padding_mask, context, bias_BHNM)
    return weights_of(q_BHNE, k_BHNE, mask, key_padding_mask, columns_BW)


@torch.no_grad()
def weights_of(
    q_BHNE: Tensor,
    k_BHLE: Tensor,
    mask: Tensor | None,
    padding_BN: Tensor | None,
    columns_BW: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    """(B, H, W, L): `key_weights` under a mask as of `visible`.

    Args:
        cap: limits the logits before the mask, by tanh.
    """
    asks_B1N1 = None if padding_BN is None else ~padding_BN[:, None, :, None]
    if columns_BW is not None:
        index_B1W1, n = columns_BW[:, None, :, None], q_BHNE.shape[2]
        q_BHNE = q_BHNE.take_along_dim(index_B1W1, 2)
        mask = None if mask is None else mask.expand(-1, -1, n, -1).take_along_dim(index_B1W1, 2)
        asks_B1N1 = None if asks_B1N1 is None else asks_B1N1.take_along_dim(index_B1W1, 2)
    logits_BHWL, seen = _logits(q_BHNE, k_BHLE, mask, cap)
    if seen is not None and asks_B1N1 is None:
        hidden_BHWL = _hidden(seen, logits_BHWL.dtype)
        weights_BHWL = logits_BHWL.add_(hidden_BHWL).softmax(-1)
        return weights_BHWL.add_(hidden_BHWL * 0)  # not a number where it is infinite
    seen_BHWL = torch.ones_like(logits_BHWL, dtype=torch.bool) if seen is None else seen.expand_as(logits_BHWL)
    if asks_B1N1 is not None:
        seen_BHWL = seen_BHWL & asks_B1N1
    weights_BHWL = logits_BHWL.masked_fill_(~seen_BHWL, -torch.inf).softmax(-1)
    return weights_BHWL.masked_fill_(~seen_BHWL, torch.nan)


def _logits(
    q_BHNE: Tensor, k_BHNE: Tensor, mask: Tensor | None, cap: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Logits (B, H, N, M), float32 or wider, with the bias if the mask of `visible` is one; and who sees whom."""
    logits_BHNM = product(q_BHNE, k_BHNE) / math.sqrt(q_BHNE.shape[-1])
    if cap is not None:
        logits_BHNM = cap * (logits_BHNM / cap).tanh()
    if mask is None or mask.dtype == torch.bool:
        return logits_BHNM, mask
    return logits_BHNM + mask, mask > -torch.inf
