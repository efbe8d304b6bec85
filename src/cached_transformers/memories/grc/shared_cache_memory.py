"""The layer memory of a shared cache: a second attention branch over the cache, mixed per head with the layer's own.

Paper: arXiv:2312.12742, equations 1 and 2. Original implementation: annosubmission/GRC-Cache, core/GRC_Attention.py.

    o_mem = softmax(q k^T / sqrt(F)) v   with q from X's first C = ratio * D channels, k and v from the cache
    o     = sigmoid(lambda_h) o_mem + (1 - sigmoid(lambda_h)) o_self   per head h

In evaluation, keys and values of a constant cache are computed once ("folding").

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width, E head width, F = C / H.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one, shares
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import LayerMemory, Linear, ProjectKV, Query, Reading, Weights
from cached_transformers.linear_maps import input_dtype, plain_weights
from cached_transformers.positions import RelativePositionBias2D, grid_positions
from cached_transformers.state import State

from .equations import plain
from .shared_cache import SharedCache

own_word("token_map", "tokens that are a map of a height and a width")


def cache_width(width: int, heads: int, ratio: float) -> int:
    """C = ratio * width, a positive multiple of the number of heads (else ValueError)."""
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio} must lie in (0, 1]; the paper uses 0.5")
    if width % heads:
        raise ValueError(f"width={width} must be a multiple of heads={heads}")
    result = int(ratio * width + 1e-6)
    if result < heads or result % heads:
        ratios = ", ".join(f"{k * heads / width:g}" for k in range(1, width // heads + 1))
        raise ValueError(
            f"ratio={ratio} gives a cache of {result} channels, which heads={heads} do not divide; "
            f"with width={width} these ratios work: {ratios}"
        )
    return result


class MemoryBranch(nn.Module):
    """Attention of a segment's queries over a cache, and the per-head gate of its result.

    Args:
        width: D. heads: H. cache: C, channels of the cache.
        combine: "pad" (values have F channels per head; the other E - F channels are padded with 0) or "project"
            (values are projected to E channels per head).
        mix: "heads", before a shared output projection, or "outputs", after a projection of its own.
        initial_gate: initial lambda. bias: whether q, k, v have biases. dropout: of the attention weights.
        reduction: module called with (cache, size) that shortens the cache before keys and values (PVT).
        window: (height, width) of a window of tokens and slots, for a relative position bias (Swin).

    Cost in multiply-adds: B N C^2 (queries) + 2 B N M C (attention) + 2 M C^2 (keys, values; per row of the cache).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        cache: int,
        *,
        combine: Literal["pad", "project"] = "pad",
        mix: Literal["heads", "outputs"] = "heads",
        initial_gate: float = 0.0,
        bias: bool = True,
        dropout: float = 0.0,
        reduction: nn.Module | None = None,
        window: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
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
        self.record: Callable[[Tensor, Tensor], None] | None = None
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
        """Equation 1, (B, H, N, F or E), for tokens whose first C channels are `x_BNC`."""
        rows, n = x_BNC.shape[:2]
        q = self.query(x_BNC.flatten(0, 1))  # flat: no copy of a slice of wider tokens
        q_BHNF = q.reshape(rows, n, self.heads, self.cache // self.heads).transpose(1, 2)
        one_cache = k_BHMF.shape[0] == 1 and rows > 1
        # On the CPU the rows become more queries of one row, so that keys are neither copied nor given a gradient B
        # times; a GPU needs the rows to fill its processors.
        as_one_row = one_cache and self.relative_bias is None and not q.is_cuda
        if as_one_row:
            q_BHNF = q.unflatten(-1, (self.heads, -1)).transpose(0, 1)[None]
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
        """Apply the branch's own output projection (mix="outputs")."""
        assert self.projection is not None
        merged = self.projection(o_BHNF.transpose(1, 2).flatten(2))
        return merged.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def shares(self, dtype: torch.dtype, weight_B: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Shares of memory and layer in each head, (H, 1) or (B, 1, H, 1); the memory's is 0 where `weight_B` is 0."""
        ratio = torch.sigmoid(self.gate_H)[:, None]
        ratio = (ratio if weight_B is None else ratio * weight_B[:, None, None, None]).to(dtype)
        return ratio, 1 - ratio

    def blend(self, y_BHNE: Tensor, o_BHNF: Tensor, shares: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Equation 2: sigmoid(lambda) o + (1 - sigmoid(lambda)) y per head, with `shares()` by default."""
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
        mixed_BNHE[..., : o_BHNF.shape[-1]] += o_BNHF * ratio  # `addcmul_` has no rule for torch.vmap
        return mixed_BNHE.transpose(1, 2)

    def blend_and_project(self, y_BHNE: Tensor, o_BHNF: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project the merged mix, (B, N, D); the backward keeps y and o, not their mix."""
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
        # Whole vectors: broadcasting inside a head is far slower on CPUs.
        keep_D = (1 - ratio_H).repeat_interleave(width)
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
        at_least_one("; 0 for a map without class tokens", least=0, prefix=prefix)
        if width % groups:
            raise ValueError(
                f"the positional convolution splits width={width} into {groups} groups, which do not divide it; "
                "choose a ratio of 1 / n or positional_convolution=False"
            )
        self.prefix = prefix
        self.convolution = nn.Conv2d(width, width, 3, padding=1, groups=groups)

    def forward(self, x_BND: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Convolve the map of (height, width) `size` after the class tokens; None for a square."""
        cells = x_BND.shape[1] - self.prefix
        size = size or (math.isqrt(max(cells, 0)),) * 2
        if size[0] * size[1] != cells or cells < 1:
            raise ValueError(
                f"prefix={self.prefix}: the {cells} tokens after it are no map of {size[0]} x {size[1]}; pass "
                "size=(height, width)"
            )
        image = x_BND[:, self.prefix :].transpose(1, 2).unflatten(2, size)
        out = self.convolution(image).flatten(2).transpose(1, 2)
        return F.pad(out, (0, 0, self.prefix, 0)) if self.prefix else out


class _Folded(NamedTuple):
    """Keys and values of a frozen cache; `stamp` identifies their sources, None if no check is wanted."""

    k_BHMF: Tensor
    v_BHMF: Tensor
    stamp: list[tuple[int, int]] | None


class SharedCacheMemory(LayerMemory):
    """A shared cache, attended by a second branch beside the layer's attention.

    Args:
        source: input of the cache's update: the first C channels of the attention's "input" or "output".
        mix: "heads", before the output projection, or "outputs", after separate ones.
    """

    needs = frozenset({"head", "bidirectional"})
    shared = True

    def __init__(
        self,
        cache: SharedCache,
        branch: MemoryBranch,
        *,
        source: Literal["input", "output"] = "input",
        mix: Literal["heads", "outputs"] = "heads",
        convolution: PositionalConvolution | None = None,
    ) -> None:
        super().__init__()
        self.source, self.mix = source, mix
        self.cache, self.branch, self.convolution = cache, branch, convolution
        if convolution is not None:
            self.needs = self.needs | {"token_map"}
        self._folded: _Folded | None = None

    def read(self, state: State, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        if self.source == "output":
            return Reading()
        return Reading(output_BHNE=self._attend_cache(query.x_BND, query))

    def _output(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        if reading.output_BHNE is not None:
            return reading.output_BHNE
        return self._attend_cache(y_BHNE.transpose(1, 2).flatten(2), query)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        if self.mix == "outputs":
            return y_BHNE
        return self.branch.blend(y_BHNE, self._output(y_BHNE, query, reading))

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        if self.mix == "outputs" or weights is None or plain():
            y_BND = super().project(y_BHNE, query, reading, linear, weights)
        else:
            y_BND = self.branch.blend_and_project(y_BHNE, self._output(y_BHNE, query, reading), *weights)
        if self.mix == "outputs":
            o_BHNF = reading.output_BHNE if reading.output_BHNE is not None else self._attend_cache(y_BND, query)
            y_BHNE = y_BND.unflatten(-1, (self.branch.heads, -1)).transpose(1, 2)
            y_BND = self.branch.blend(y_BHNE, self.branch.project(o_BHNF)).transpose(1, 2).flatten(2)
        if self.convolution is not None:
            y_BND = y_BND + self.convolution(query.x_BND, query.size)
        return y_BND

    def _attend_cache(self, source_BND: Tensor, query: Query) -> Tensor:
        """Per-head result of the branch, after updating the cache by `source_BND` in training."""
        x_BNC = query.x_BND[..., : self.cache.width]
        folded = self._constants()
        if folded is not None:
            return self.branch(x_BNC, folded.k_BHMF, folded.v_BHMF)
        source_BNC = x_BNC if source_BND is query.x_BND else source_BND[..., : self.cache.width]
        cache = self.cache(source_BNC, query.padding_BN, query.size)
        return self.branch(x_BNC, *self.branch.keys_values(cache, self.cache.size))

    def _constants(self) -> _Folded | None:
        """Folded keys and values, if there are any and they still hold."""
        folded = self._folded
        if folded is None or self.training or not self.cache.constant_in_evaluation:
            return None
        if folded.stamp is None or plain():
            return folded if folded.stamp is None else None
        if folded.stamp != self._stamp():
            self._folded = None  # adapters merged later may leave weights with the same stamp
            return None
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in self._sources())
        return None if differentiable else folded

    def _fold(self, lasting: bool) -> None:
        with torch.inference_mode(False), torch.no_grad():  # ordinary tensors, which a later graph may hold
            k_BHMF, v_BHMF = self.branch.keys_values(self.cache.cache_MC, self.cache.size)
            stamp = None if lasting else self._stamp()
            self._folded = _Folded(k_BHMF.contiguous(), v_BHMF.contiguous(), stamp)

    def _sources(self) -> list[Tensor]:
        """All tensors from which keys and values are computed."""
        reduction = self.branch.reduction or nn.Identity()
        return [self.cache.cache_MC, *self.branch.key_value.parameters(), *reduction.parameters()]

    def _stamp(self) -> list[tuple[int, int]]:
        """Address and version of the sources."""
        return [(t.data_ptr(), t._version) for t in self._sources()]

    def _watchable(self) -> bool:
        """True if keys and values depend only on plain tensors, which have a version to watch."""
        reduction = self.branch.reduction or nn.Identity()
        known = all(type(m).__module__.startswith(("torch.nn.", "cached_transformers.")) for m in reduction.modules())
        usable = (type(t) in (Tensor, nn.Parameter) and not t.is_meta and not t.is_inference() for t in self._sources())
        return known and plain_weights(self.branch.key_value) is not None and all(usable)

    def fold(self) -> SharedCacheMemory:
        """Make keys and values of the stored cache constants, until `unfold` or `train`; for inference and export.

        `eval()` does this too, for eager inference, and checks at each call that no weight has changed since (a write
        through `.data` leaves no trace). Compiled or exported code uses the constants only after this call.
        """
        if self.training or not self.cache.constant_in_evaluation:
            why = "training=True; call eval() first" if self.training else "attend='sample' runs the gates at each call"
            raise ValueError(f"the cache cannot be folded: {why}")
        self._fold(lasting=True)
        return self

    def unfold(self) -> SharedCacheMemory:
        """Compute keys and values from the cache again at each call."""
        self._folded = None
        return self

    def train(self, mode: bool = True) -> SharedCacheMemory:
        super().train(mode)
        self._folded = None
        if not mode and self.cache.constant_in_evaluation and self._watchable():
            self._fold(lasting=False)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> SharedCacheMemory:
        super()._apply(fn, recurse)
        if self._folded is not None:
            self._fold(lasting=self._folded.stamp is None)
        return self

    def close_gate(self) -> None:
        with torch.no_grad():
            self.branch.gate_H.fill_(-torch.inf)
            for parameter in () if self.convolution is None else self.convolution.parameters():
                parameter.zero_()

    def mixing_ratio(self) -> Tensor:
        """sigmoid(lambda), (H,): the share of the memory in each head; reports call any method of this name."""
        return torch.sigmoid(self.branch.gate_H)

    def record(self, note: Callable[[Tensor, Tensor], None] | None) -> None:
        """Call `note(y_BHNE, o_BHNF)` at each forward, for reports of modules with this and `prefix`; None to stop."""
        self.branch.record = note

    @property
    def prefix(self) -> int:
        """Class tokens before those of the map."""
        return self.cache.prefix


def fold(model: nn.Module) -> nn.Module:
    """Fold every frozen cache of `model` (see `SharedCacheMemory.fold`); return the model."""
    for module in model.modules():
        if isinstance(module, SharedCacheMemory):
            module.fold()
    return model


def unfold(model: nn.Module) -> nn.Module:
    """Undo `fold` in every layer of `model`; return the model."""
    for module in model.modules():
        if isinstance(module, SharedCacheMemory):
            module.unfold()
    return model
