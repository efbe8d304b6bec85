"""GRC's equations: `recall`, `mix`, `new_cache` as printed; layers run `gate_update` and `mean_gate_update`.

Paper: "Cached Transformers: Improving Transformers with Differentiable Memory Cache" (arXiv:2312.12742), equations 1-5.
Original implementation: annosubmission/GRC-Cache, core/GRC_Attention.py. Equations 1 and 2 run in
`shared_cache_memory.py`; tests compare the running code with the printed form.

Legend: B rows, N tokens, M slots, H heads, E head width, C cache width, F = C / H. Rows of the fused weights: update,
reset, candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.memories.parts.options import Gate, gated

Candidate = Literal["norm", "tanh", "affine"]
StreamCandidate = Literal["norm", "tanh", "affine", "copy"]
Norm = tuple[Tensor, Tensor, float] | None
Linear = Callable[[Tensor], Tensor]


def recall(q_BHNF: Tensor, k_BHMF: Tensor, v_BHMF: Tensor) -> Tensor:
    """Equation 1: o_mem, (B, H, N, F); q of the tokens' first C channels, k and v of the cache."""
    logits_BHNM = q_BHNF @ k_BHMF.mT / math.sqrt(q_BHNF.shape[-1])
    return torch.softmax(logits_BHNM, -1) @ v_BHMF


def mix(o_mem_BHNE: Tensor, o_self_BHNE: Tensor, lambda_H: Tensor) -> Tensor:
    """Equation 2, (B, H, N, E): each head has its own ratio. Narrower values are padded with 0."""
    ratio_H11 = torch.sigmoid(lambda_H)[:, None, None]
    return ratio_H11 * o_mem_BHNE + (1 - ratio_H11) * o_self_BHNE


def new_cache(s_BMC: Tensor, cache_BMC: Tensor, W_u: Linear, W_r: Linear, W_c: Linear) -> Tensor:
    """Equations 3-5: the cache per row, (B, M, C), which Algorithm 1 then averages over the rows.

    Args:
        s_BMC: the first C channels of the tokens, interpolated to the slots.
        W_u, W_r, W_c: maps from 2 C to C channels; W_c includes the candidate's norm, if any.
    """
    update = torch.sigmoid(W_u(torch.cat([s_BMC, cache_BMC], -1)))
    reset = torch.sigmoid(W_r(torch.cat([s_BMC, cache_BMC], -1)))
    candidate = W_c(torch.cat([s_BMC, reset * cache_BMC], -1))
    return (1 - update) * cache_BMC + update * candidate


class GateWeights(NamedTuple):
    """Fused weights (3C, C) on the tokens, with bias (3C,), and on the cache; the candidate's LayerNorm or None.

    Those of the candidate "copy" have the first C rows only.
    """

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


def gate_update(
    s_BMC: Tensor, cache: Tensor, weights: GateWeights, candidate: StreamCandidate, *, update_gate: Gate = "sigmoid"
) -> Tensor:
    """`new_cache` with fused weights, (B, M, C), in the dtype of `cache`, which is (M, C) for all rows or (B, M, C).

    The candidate "copy" is `s_BMC` itself; its weights are those of the update gate only.
    """
    width = s_BMC.shape[-1]
    if candidate == "copy":
        logits = F.linear(s_BMC, weights.tokens, weights.bias)
        u = gated(logits + F.linear(cache.to(logits.dtype), weights.cache), update_gate).to(cache.dtype)
        return torch.lerp(cache.expand_as(u), s_BMC.to(cache.dtype), u)
    u, r, z = F.linear(s_BMC, weights.tokens, weights.bias).split(width, -1)
    held = cache.to(u.dtype)
    cu, cr = F.linear(held, weights.cache[: 2 * width]).split(width, -1)
    u, r = gated(u + cu, update_gate), torch.sigmoid(r + cr)
    c = candidate_of(z + F.linear(r * held, weights.cache[2 * width :]), candidate, weights.norm)
    return torch.lerp(cache.expand_as(c), c.to(cache.dtype), u.to(cache.dtype))


def plain() -> bool:
    """True where torch compiles, exports or transforms (`torch.func`) the code, which then uses public operators."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def mean_gate_update(
    s_BMC: Tensor,
    cache_MC: Tensor,
    weights: GateWeights,
    candidate: Candidate,
    weight_B: Tensor | None = None,
    spread_BMN: Tensor | None = None,
) -> Tensor:
    """Mean over rows of `gate_update`, (M, C); with `weight_B` (bool) over the marked rows only.

    `cache_MC` is a constant: no gradient flows into it. When no row is marked the cache is returned unchanged. With
    `spread_BMN`, a constant, `s_BMC` are N tokens, and spread_BMN @ s_BMC the slots.
    """
    if weight_B is None:
        share_B = s_BMC.new_full((s_BMC.shape[0],), 1 / s_BMC.shape[0], dtype=cache_MC.dtype)
    else:
        share_B = weight_B.to(cache_MC.dtype) / weight_B.sum().clamp(min=1)
    if plain():  # the compiler decides by itself what to recompute
        s_BMC = s_BMC if spread_BMN is None else spread_BMN @ s_BMC
        change = gate_update(s_BMC, cache_MC, weights, candidate) - cache_MC
        return cache_MC + torch.einsum("b,bmc->mc", share_B, change)
    kind = s_BMC.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weights.tokens.dtype
    norm_weight, norm_bias, eps = weights.norm or (None, None, 0.0)
    fused = (t.to(dtype) for t in (s_BMC, weights.tokens, weights.bias, weights.cache))
    spread_BMN = None if spread_BMN is None else spread_BMN.to(dtype)
    result = _MeanGateUpdate.apply(*fused, norm_weight, norm_bias, eps, cache_MC, share_B, candidate, spread_BMN)
    return result  # type: ignore[no-any-return]


class _MeanGateUpdate(torch.autograd.Function):
    """Mean update with an analytic backward, in 4 B M C^2 + 2 M C^2 multiply-adds, twice that backward.

    The backward keeps the two gates and the candidate's logits and recomputes the rest, which needs no matrix product.
    With fewer tokens than slots, maps are applied before tokens are spread over the slots, which commutes.
    """

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
        spread_BMN: Tensor | None,
    ) -> Tensor:
        with torch.autocast(s_BMC.device.type, enabled=False):
            width = s_BMC.shape[-1]
            held_MC = cache_MC.to(s_BMC.dtype)
            of_cache = F.linear(held_MC, w_cache[: 2 * width], bias[: 2 * width])
            if spread_BMN is None:
                u, r, z = (s_BMC.new_empty(s_BMC.shape) for _ in range(3))
            else:
                u, r, z = (torch.bmm(spread_BMN, part) for part in F.linear(s_BMC, w_tokens).split(width, -1))
                z.add_(bias[2 * width :])
            norm = None if norm_weight is None or norm_bias is None else (norm_weight, norm_bias, eps)
            new_MC = cache_MC.clone()
            for rows, slots in _blocks(u):
                ub, rb, zb = u[rows, slots], r[rows, slots], z[rows, slots]
                if spread_BMN is None:
                    # For a slice of wider tokens this is a view, which the products accept.
                    tokens = s_BMC[rows, slots].flatten(0, 1)
                    torch.mm(tokens, w_tokens[:width].T, out=ub.view(-1, width))
                    torch.mm(tokens, w_tokens[width : 2 * width].T, out=rb.view(-1, width))
                    torch.addmm(bias[2 * width :], tokens, w_tokens[2 * width :].T, out=zb.view(-1, width))
                ub.add_(of_cache[slots, :width]).sigmoid_()
                rb.add_(of_cache[slots, width:]).sigmoid_()
                zb.view(-1, width).addmm_((rb * held_MC[slots]).flatten(0, 1), w_cache[2 * width :].T)
                change = (candidate_of(zb, candidate, norm).to(cache_MC.dtype) - cache_MC[slots]).mul_(ub)
                change.mul_(share_B[rows, None, None])
                new_MC[slots].add_(change[0] if change.shape[0] == 1 else change.sum(0))
            kept = (s_BMC, w_tokens, w_cache, norm_weight, norm_bias, held_MC, share_B, u, r, z, spread_BMN)
            ctx.save_for_backward(*kept)
            ctx.candidate, ctx.eps = candidate, eps
            return new_MC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_MC: Tensor) -> tuple[Tensor | None, ...]:
        s_BMC, w_tokens, w_cache, norm_weight, norm_bias, held_MC, share_B, u, r, z, spread_BMN = ctx.saved_tensors
        with torch.autocast(s_BMC.device.type, enabled=False):
            width, dtype = s_BMC.shape[-1], s_BMC.dtype
            wide = torch.promote_types(dtype, torch.float32)  # sums over blocks need the digits
            ds_BMC = s_BMC.new_empty(s_BMC.shape) if ctx.needs_input_grad[0] else None
            dmaps = None if spread_BMN is None else s_BMC.new_zeros(*s_BMC.shape[:2], 3 * width)
            dw_tokens, dw_candidate = (w_cache.new_zeros(n * width, width, dtype=wide) for n in (3, 1))
            dbias, dof_cache = (s_BMC.new_zeros(*n, dtype=wide) for n in ((3 * width,), (len(held_MC), 2 * width)))
            dnorm: list[Tensor | None] = [None, None]
            for rows, slots in _blocks(u):
                held = held_MC[slots]
                ub, rb = u[rows, slots], r[rows, slots]
                forgotten = rb * held
                row_grad = (grad_MC[slots] * share_B[rows, None, None]).to(dtype)
                c, dz, *dn = _candidate_backward(
                    z[rows, slots], row_grad * ub, ctx.candidate, norm_weight, norm_bias, ctx.eps
                )
                dforgotten = (dz.flatten(0, 1) @ w_cache[2 * width :]).view_as(dz)
                d = dz.new_empty(*dz.shape[:-1], 3 * width)  # gradients of update, reset and candidate logits
                du, dr, dc = d.split(width, -1)
                torch.ops.aten.sigmoid_backward.grad_input((c - held).mul_(row_grad), ub, grad_input=du)
                torch.ops.aten.sigmoid_backward.grad_input(dforgotten.mul_(held), rb, grad_input=dr)
                dc.copy_(dz)
                flat = d.flatten(0, 1)
                dof_cache[slots].add_(d[0, :, : 2 * width] if d.shape[0] == 1 else d[..., : 2 * width].sum(0))
                _add_product(dw_candidate, dz.flatten(0, 1).T, forgotten.flatten(0, 1))
                dbias.add_(flat.sum(0))
                dnorm = [
                    new if old is None or new is None else old.add_(new) for old, new in zip(dnorm, dn, strict=True)
                ]
                if dmaps is not None:
                    dmaps[rows].baddbmm_(spread_BMN[rows, slots].mT, d)
                    continue
                _add_product(dw_tokens, flat.T, s_BMC[rows, slots].flatten(0, 1))
                if ds_BMC is not None:
                    torch.mm(flat, w_tokens, out=ds_BMC[rows, slots].view(-1, width))
            if dmaps is not None:
                _add_product(dw_tokens, dmaps.flatten(0, 1).T, s_BMC.flatten(0, 1))
                ds_BMC = dmaps @ w_tokens
            dw_cache = torch.cat([dof_cache.to(dtype).T @ held_MC, dw_candidate.to(dtype)])
            return ds_BMC, dw_tokens.to(dtype), dbias.to(dtype), dw_cache, *dnorm, None, None, None, None, None


# A CPU works in blocks of _BLOCK numbers above LARGE numbers, so that the gates stay in its cache. Measured; one
# product of everything is faster below.
LARGE, _BLOCK = 1 << 19, 1 << 17


def _blocks(s_BMC: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of rows and slots: everything at once; for large inputs on a CPU some rows, or part of one row."""
    rows, slots, width = s_BMC.shape
    if s_BMC.device.type != "cpu" or rows * slots * width <= LARGE:
        yield slice(0, rows), slice(0, slots)
        return
    together = max(_BLOCK // (slots * width), 1)
    part = slots if together > 1 else max(_BLOCK // width, 1)
    for row in range(0, rows, together):
        for slot in range(0, slots, part):
            yield slice(row, row + together), slice(slot, slot + part)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


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
