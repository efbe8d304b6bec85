"""One update of a gated recurrent cache as pure functions (arXiv:2312.12742, equations 3-5).

`gate_update` gives every row its own new cache. `mean_gate_update` gives their batch mean; it is the same mathematics
with two savings: the products that involve the cache alone are done once per batch, and the backward keeps only the
two gates and the candidate's logits of each row (3 B M C numbers beside the input), recomputing what costs no matrix
product.

Cost in multiply-adds: 4 B M C^2 + 2 M C^2 forward, twice that backward.

Legend: B rows, M slots, C channels. Rows of the fused weights: update, reset, candidate.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Candidate = Literal["norm", "tanh", "affine"]
Norm = tuple[Tensor, Tensor, float] | None


class GateWeights(NamedTuple):
    """Fused weights (3C, C) on the tokens, with bias (3C,), and on the cache; the candidate's LayerNorm or None."""

    tokens: Tensor
    bias: Tensor
    cache: Tensor
    norm: Norm


def candidate_of(z: Tensor, candidate: Candidate, norm: Norm) -> Tensor:
    """f(z): the identity, tanh, or LayerNorm(GELU(z))."""
    if candidate == "affine":
        return z
    if candidate == "tanh":
        return torch.tanh(z)
    assert norm is not None
    return F.layer_norm(F.gelu(z), z.shape[-1:], norm[0].to(z.dtype), norm[1].to(z.dtype), norm[2])


def gate_update(s_BMC: Tensor, cache: Tensor, weights: GateWeights, candidate: Candidate) -> Tensor:
    """New cache of each row, (B, M, C), in the dtype of `cache`.

    Args:
        s_BMC: tokens, interpolated to the slots.
        cache: (M, C) shared by all rows, or (B, M, C).
    """
    width = s_BMC.shape[-1]
    u, r, z = F.linear(s_BMC, weights.tokens, weights.bias).split(width, -1)
    known = cache.to(u.dtype)
    cu, cr = F.linear(known, weights.cache[: 2 * width]).split(width, -1)
    u, r = torch.sigmoid(u + cu), torch.sigmoid(r + cr)
    c = candidate_of(z + F.linear(r * known, weights.cache[2 * width :]), candidate, weights.norm)
    return torch.lerp(cache.expand_as(c), c.to(cache.dtype), u.to(cache.dtype))


def mean_gate_update(
    s_BMC: Tensor, cache_MC: Tensor, weights: GateWeights, candidate: Candidate, weight_B: Tensor | None = None
) -> Tensor:
    """Mean over rows of `gate_update`, (M, C); with `weight_B` (bool) over the marked rows only.

    `cache_MC` is a constant: no gradient flows into it. When no row is marked the cache is returned unchanged.
    """
    if weight_B is None:
        share_B = s_BMC.new_full((s_BMC.shape[0],), 1 / s_BMC.shape[0], dtype=cache_MC.dtype)
    else:
        share_B = weight_B.to(cache_MC.dtype) / weight_B.sum().clamp(min=1)
    if torch.compiler.is_compiling():  # the compiler decides by itself what to recompute
        change = gate_update(s_BMC, cache_MC, weights, candidate) - cache_MC
        return cache_MC + torch.einsum("b,bmc->mc", share_B, change)
    kind = s_BMC.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.tokens.dtype
    norm_weight, norm_bias, eps = weights.norm or (None, None, 0.0)
    fused = (t.to(dtype) for t in (s_BMC, weights.tokens, weights.bias, weights.cache))
    result = _MeanGateUpdate.apply(*fused, norm_weight, norm_bias, eps, cache_MC, share_B, candidate)
    return result  # type: ignore[no-any-return]


class _MeanGateUpdate(torch.autograd.Function):
    """Analytic backward of the mean update; see the file's docstring for what is kept and what recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        s_BMC: Tensor,
        w_tokens: Tensor,
        bias: Tensor,
        w_cache: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        eps: float,
        cache_MC: Tensor,
        share_B: Tensor,
        candidate: Candidate,
    ) -> Tensor:
        with torch.autocast(s_BMC.device.type, enabled=False):
            width = s_BMC.shape[-1]
            known_MC = cache_MC.to(s_BMC.dtype)
            shared = F.linear(known_MC, w_cache[: 2 * width], bias[: 2 * width])
            tokens = s_BMC.flatten(0, 1)  # of a slice of wider tokens this is a view, which the products take as it is
            shape = s_BMC.shape
            u = (tokens @ w_tokens[:width].T).view(shape).add_(shared[:, :width]).sigmoid_()
            r = (tokens @ w_tokens[width : 2 * width].T).view(shape).add_(shared[:, width:]).sigmoid_()
            z = F.linear(tokens, w_tokens[2 * width :], bias[2 * width :])
            z = z.addmm_((r * known_MC).flatten(0, 1), w_cache[2 * width :].T).view_as(u)
            ctx.save_for_backward(s_BMC, w_tokens, w_cache, norm_weight, norm_bias, known_MC, share_B, u, r, z)
            ctx.candidate, ctx.eps = candidate, eps
            norm = None if norm_weight is None or norm_bias is None else (norm_weight, norm_bias, eps)
            change = (candidate_of(z, candidate, norm).to(cache_MC.dtype) - cache_MC).mul_(u)
            return torch.einsum("b,bmc->mc", share_B, change).add_(cache_MC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor | None, ...]:
        s_BMC, w_tokens, w_cache, norm_weight, norm_bias, known_MC, share_B, u, r, z = ctx.saved_tensors
        with torch.autocast(s_BMC.device.type, enabled=False):
            width, dtype = s_BMC.shape[-1], s_BMC.dtype
            forgotten = r * known_MC
            row_grad = (grad_MC * share_B[:, None, None]).to(dtype)
            c, dz, *dnorm = _candidate_backward(z, row_grad * u, ctx.candidate, norm_weight, norm_bias, ctx.eps)
            dforgotten = (dz.flatten(0, 1) @ w_cache[2 * width :]).view_as(dz)
            d = s_BMC.new_empty(*s_BMC.shape[:-1], 3 * width)  # gradients of update, reset and candidate logits
            du, dr, dc = d.split(width, -1)
            torch.ops.aten.sigmoid_backward.grad_input((c - known_MC).mul_(row_grad), u, grad_input=du)
            torch.ops.aten.sigmoid_backward.grad_input(dforgotten.mul_(known_MC), r, grad_input=dr)
            dc.copy_(dz)
            flat, tokens = d.flatten(0, 1), s_BMC.flatten(0, 1)
            shared = d[..., : 2 * width].sum(0)
            dw_cache = torch.cat([shared.T @ known_MC, dz.flatten(0, 1).T @ forgotten.flatten(0, 1)])
            ds = (flat @ w_tokens).view_as(s_BMC) if ctx.needs_input_grad[0] else None
            return ds, flat.T @ tokens, flat.sum(0), dw_cache, *dnorm, None, None, None, None


def _candidate_backward(
    z: Tensor, grad: Tensor, candidate: Candidate, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The candidate f(z), and the gradients of z and of the LayerNorm's weight and bias, by PyTorch's own operators."""
    aten = torch.ops.aten
    if candidate == "affine":
        return z, grad, None, None
    if candidate == "tanh":
        c = torch.tanh(z)
        return c, aten.tanh_backward(grad, c), None, None
    assert weight is not None and bias is not None
    shape, active = z.shape[-1:], F.gelu(z)
    c, mean, scale = torch.native_layer_norm(active, shape, weight.to(z.dtype), bias.to(z.dtype), eps)
    dactive, dweight, dbias = aten.native_layer_norm_backward(
        grad, active, shape, mean, scale, weight.to(z.dtype), bias.to(z.dtype), [True, True, True]
    )
    return c, aten.gelu_backward(dactive, z), dweight.to(weight.dtype), dbias.to(bias.dtype)
