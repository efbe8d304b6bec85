"""The memory branch of GRC attention: attention over the cache, the per-head mix, and the released code's convolution.

Paper: arXiv:2312.12742, equations 1-2. Original implementation: annosubmission/GRC-Cache, core/GRC_Attention.py.

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width, E head width, F = C / H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import shares
from cached_transformers.interfaces.linear_maps import input_dtype
from cached_transformers.interfaces.positions import RelativePositionBias2D, grid_positions

from .options import one_of


class MemoryBranch(nn.Module):
    """Attention of the queries of a segment over a cache, and the per-head ratio by which its result is mixed in.

    Args:
        width: D. heads: H. cache: C, channels of the cache.
        combine: "pad" (values have F channels a head, the other E - F channels of the head see zeros) or "project"
            (values are projected to E channels a head).
        mix: "heads", before a shared output projection, or "outputs", after a projection of the branch's own.
        initial_gate: lambda at the start. bias: whether q, k, v have biases. dropout: of the attention weights.
        reduction: module called with (cache, size) that shortens the cache before keys and values (PVT).
        window: (height, width) of a window of tokens and slots, for a relative position bias of the branch's own
        (Swin).

    Cost in multiply-adds: B N C^2 (queries) + 2 B N M C (attention) + 2 M C^2 (keys, values; per row of the cache).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        cache: int,
        *,
        combine: Literal["pad", "project"],
        mix: Literal["heads", "outputs"],
        initial_gate: float,
        bias: bool,
        dropout: float,
        reduction: nn.Module | None,
        window: tuple[int, int] | None,
    ) -> None:
        super().__init__()
        one_of("combine", combine, ("pad", "project"))
        if combine == "project" and mix == "outputs":
            raise ValueError("combine='project' needs mix='heads': after the output projections the widths are fixed")
        shares(dropout=dropout)
        self.heads, self.cache, self.dropout = heads, cache, dropout
        value = width if combine == "project" else cache
        self.query = nn.Linear(cache, cache, bias=bias)
        self.key_value = nn.Linear(cache, cache + value, bias=bias)
        self.projection = nn.Linear(cache, cache) if mix == "outputs" else None
        self.reduction = reduction
        self.relative_bias = RelativePositionBias2D(window, heads) if window is not None else None
        self.record: Callable[[Tensor, Tensor], None] | None = None  # sees what is mixed; for plots
        self.gate_H = nn.Parameter(torch.full((heads,), float(initial_gate)))
        for linear in (self.query, self.key_value, self.projection):
            if linear is not None:
                nn.init.trunc_normal_(linear.weight, std=0.02)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def keys_values(self, cache: Tensor, size: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Cache (M, C) or (B, M, C) to keys (1 or B, H, M, F) and values (1 or B, H, M, F or E)."""
        cache_BMC = cache if cache.dim() == 3 else cache[None]
        cache_BMC = cache_BMC.to(input_dtype(self.key_value))
        if self.reduction is not None:
            cache_BMC = self.reduction(cache_BMC, size)
        k, v = self.key_value(cache_BMC).split([self.cache, self.key_value.out_features - self.cache], -1)
        return k.unflatten(-1, (self.heads, -1)).transpose(1, 2), v.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x_BNC: Tensor, k_BHMF: Tensor, v_BHMF: Tensor) -> Tensor:
        """(B, H, N, F or E): what the tokens read, whose first C channels are `x_BNC`.

        Raises:
            ValueError: there is a window, and tokens and slots are not as many as it has.
        """
        rows, n = x_BNC.shape[:2]
        q = self.query(x_BNC.flatten(0, 1)).unflatten(0, (rows, n))  # flat: no copy of a slice of wider tokens
        q_BHNF = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        one_cache = k_BHMF.shape[0] == 1 and rows > 1
        # One cache for all rows: on the CPU the rows become more queries of one row, so that keys are neither copied
        # nor given a gradient B times; a GPU needs the rows to fill its processors, and takes expanded keys without a
        # copy.
        as_one_row = one_cache and self.relative_bias is None and not q.is_cuda
        if as_one_row:
            q_BHNF = q.flatten(0, 1).unflatten(-1, (self.heads, -1)).transpose(0, 1)[None]
        elif one_cache:
            k_BHMF, v_BHMF = (t.expand(rows, -1, -1, -1) for t in (k_BHMF, v_BHMF))
        bias = None
        if self.relative_bias is not None:
            grid = grid_positions(self.relative_bias.window, x_BNC.device)
            bias = self.relative_bias.bias(None, grid, grid).to(q_BHNF.dtype)
            if bias.shape[-2:] != (n, k_BHMF.shape[2]):
                raise ValueError(
                    f"window={list(self.relative_bias.window)} is of {bias.shape[-1]} tokens, but {n} tokens read "
                    f"{k_BHMF.shape[2]} slots; leave it out: a host with windows (Swin) gives its own"
                )
        out = F.scaled_dot_product_attention(
            q_BHNF,
            k_BHMF.to(q_BHNF.dtype),
            v_BHMF.to(q_BHNF.dtype),
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
        )
        if as_one_row:
            out = out[0].transpose(0, 1).unflatten(0, (rows, n)).transpose(1, 2)
        return out

    def project(self, o_BHNF: Tensor) -> Tensor:
        """The branch's own output projection (mix="outputs")."""
        assert self.projection is not None
        merged = self.projection(o_BHNF.transpose(1, 2).flatten(2))
        return merged.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def shares(self, dtype: torch.dtype, weight_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """sigmoid(lambda), and what it leaves, (H, 1) or (B, 1, H, 1): what the memory has of each head, and the layer.

        The memory has nothing in rows where `weight_B` is 0.
        """
        ratio = torch.sigmoid(self.gate_H)[:, None]
        ratio = (ratio if weight_B is None else ratio * weight_B[:, None, None, None]).to(dtype)
        return ratio, 1 - ratio

    def blend(self, y_BHNE: Tensor, o_BHNF: Tensor, shares: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """sigmoid(lambda) o + (1 - sigmoid(lambda)) y per head; `shares` are those of `shares()` when None."""
        if self.record is not None:
            self.record(y_BHNE, o_BHNF)
        ratio, rest = self.shares(y_BHNE.dtype) if shares is None else shares  # against (B, N, H, E)
        if ratio.dtype != y_BHNE.dtype:  # opened outside of autocast
            ratio = ratio.to(y_BHNE.dtype)
            rest = 1 - ratio
        y_BNHE, o_BNHF = y_BHNE.transpose(1, 2), o_BHNF.to(y_BHNE.dtype).transpose(1, 2)
        if torch.is_grad_enabled():
            return (y_BNHE * rest + F.pad(o_BNHF, (0, y_BHNE.shape[-1] - o_BHNF.shape[-1])) * ratio).transpose(1, 2)
        mixed_BNHE = y_BNHE * rest
        mixed_BNHE[..., : o_BHNF.shape[-1]] += o_BNHF * ratio
        return mixed_BNHE.transpose(1, 2)

    def blend_and_project(self, y_BHNE: Tensor, o_BHNF: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output projection of the merged mix, (B, N, D); keeps y and o for the backward, not their mix."""
        if self.record is not None:
            self.record(y_BHNE, o_BHNF)
        kind = y_BHNE.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        y, o = (t.transpose(1, 2).to(dtype) for t in (y_BHNE, o_BHNF))
        ratio_H = torch.sigmoid(self.gate_H).to(dtype)
        out = _BlendAndProject.apply(y, o, ratio_H, weight.to(dtype), None if bias is None else bias.to(dtype))
        return out  # type: ignore[no-any-return]


class _BlendAndProject(torch.autograd.Function):
    """linear(ratio * o + (1 - ratio) * y); recomputing the mix costs two passes, keeping it B N D numbers."""

    @staticmethod
    def _blend(y_BNHE: Tensor, o_BNHF: Tensor, ratio_H: Tensor) -> Tensor:
        width, memory = y_BNHE.shape[-1], o_BNHF.shape[-1]
        keep_D = (1 - ratio_H).repeat_interleave(
            width
        )  # whole vectors: broadcasting inside a head is far slower on CPUs
        mixed_BND = y_BNHE.flatten(2) * keep_D
        part = mixed_BND.unflatten(-1, (-1, width))[..., :memory]
        part.addcmul_(o_BNHF, ratio_H[:, None].expand(-1, memory).contiguous())
        return mixed_BND.flatten(0, 1)

    @staticmethod
    def forward(
        ctx: Any, y_BNHE: Tensor, o_BNHF: Tensor, ratio_H: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        with torch.autocast(y_BNHE.device.type, enabled=False):
            ctx.save_for_backward(y_BNHE, o_BNHF, ratio_H, weight)
            ctx.biased = bias is not None
            out = F.linear(_BlendAndProject._blend(y_BNHE, o_BNHF, ratio_H), weight, bias)
            return out.unflatten(0, y_BNHE.shape[:2])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor | None, ...]:
        y_BNHE, o_BNHF, ratio_H, weight = ctx.saved_tensors
        with torch.autocast(y_BNHE.device.type, enabled=False):
            heads, width = y_BNHE.shape[2:]
            memory = o_BNHF.shape[-1]
            grad = grad_BND.flatten(0, 1)
            dweight = grad.T @ _BlendAndProject._blend(y_BNHE, o_BNHF, ratio_H)
            dmixed = grad @ weight
            dpart = dmixed.view_as(y_BNHE)[..., :memory]
            do = dpart * ratio_H[:, None].expand(-1, memory).contiguous()
            from_o = (dpart * o_BNHF).sum((0, 1, 3))
            from_y = (dmixed * y_BNHE.flatten(2).flatten(0, 1)).sum(0).view(heads, width).sum(1)
            dy = dmixed.mul_((1 - ratio_H).repeat_interleave(width)).view_as(y_BNHE)
            return dy, do, from_o - from_y, dweight, grad.sum(0) if ctx.biased else None


class PositionalConvolution(nn.Module):
    """Grouped 3 x 3 convolution of the token map, D channels in C groups; class tokens get zeros (released code)."""

    def __init__(self, width: int, groups: int, prefix: int = 0) -> None:
        super().__init__()
        if width % groups:
            raise ValueError(
                f"the positional convolution splits width={width} into {groups} groups, which do not divide it; "
                "choose a ratio of 1 / n or positional_convolution=False"
            )
        self.prefix = prefix
        self.convolution = nn.Conv2d(width, width, 3, padding=1, groups=groups)

    def forward(self, x_BND: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Args: `size` is the (height, width) of the map behind the class tokens; None for a square."""
        cells = x_BND.shape[1] - self.prefix
        size = size or (int(cells**0.5), int(cells**0.5))
        if size[0] * size[1] != cells:
            raise ValueError(f"{cells} tokens are no map of {size[0]} x {size[1]}; pass size=(height, width)")
        image = x_BND[:, self.prefix :].transpose(1, 2).unflatten(2, size)
        out = self.convolution(image).flatten(2).transpose(1, 2)
        return F.pad(out, (0, 0, self.prefix, 0)) if self.prefix else out
