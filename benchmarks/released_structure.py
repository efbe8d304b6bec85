"""The structure of the released GRC code on timm's layers, as a reference for timing.

Original implementation: annosubmission/GRC-Cache, core/GRC_Attention.py. Gates per sample on concatenated inputs, a
second attention with its own projections and keys per sample, a mix of zero-padded outputs, a grouped convolution.

Legend: B rows, N tokens, D width, C cache width, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.layers.reduction import SpatialReduction


class ReleasedStructure(nn.Module):
    """Wrap a timm attention layer: self branch of the host, then cache, memory branch and convolution."""

    cache_MC: Tensor

    def __init__(
        self, host: nn.Module, width: int, heads: int, size: tuple[int, int], prefix: int, reduction: int
    ) -> None:
        super().__init__()
        cache = width // 2
        self.host, self.width, self.heads, self.cache, self.size, self.prefix = host, width, heads, cache, size, prefix
        self.update, self.reset, self.add = (nn.Linear(2 * cache, cache) for _ in range(3))
        self.norm = nn.LayerNorm(cache)
        self.query, self.projection = nn.Linear(cache, cache), nn.Linear(cache, cache)
        self.key_value = nn.Linear(cache, 2 * cache)
        self.reduction = SpatialReduction(cache, reduction) if reduction > 1 else None
        self.gate_H = nn.Parameter(torch.full((heads,), -1.0))
        self.convolution = nn.Conv2d(width, width, 3, padding=1, groups=cache)
        self.register_buffer("cache_MC", torch.zeros(size[0] * size[1] + prefix, cache))

    def forward(self, x_BND: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows, n, _ = x_BND.shape
        y = self.host(x_BND, *args, **kwargs)
        cache = self.cache_MC.expand(rows, -1, -1)
        both = torch.cat([cache, y[..., : self.cache]], -1)
        u, r = torch.sigmoid(self.update(both)), torch.sigmoid(self.reset(both))
        candidate = self.norm(F.gelu(self.add(torch.cat([r * cache, y[..., : self.cache]], -1))))
        cache = u * candidate + (1 - u) * cache
        if self.training:
            self.cache_MC = cache.mean(0).detach()
        source = cache if self.reduction is None else self.reduction(cache, self.size)
        q = self.query(x_BND[..., : self.cache]).view(rows, n, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(source).view(rows, source.shape[1], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        o = self.projection((weights @ v).transpose(1, 2).reshape(rows, n, self.cache)).view(rows, n, self.heads, -1)
        padded = torch.cat([o, torch.zeros_like(o)], -1)
        ratio = torch.sigmoid(self.gate_H)[:, None]
        mixed = (ratio * padded + (1 - ratio) * y.view(rows, n, self.heads, -1)).flatten(2)
        image = x_BND[:, self.prefix :].transpose(1, 2).reshape(rows, self.width, *self.size)
        local = self.convolution(image).flatten(2).transpose(1, 2)
        return mixed + F.pad(local, (0, 0, self.prefix, 0))


def add_released_structure(model: nn.Module) -> nn.Module:
    """Wrap every attention layer of a timm ViT or PVTv2."""
    for name, layer in list(model.named_modules()):
        if not name.endswith(".attn"):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if hasattr(layer, "qkv"):
            width, prefix, reduction = layer.qkv.in_features, int(model.num_prefix_tokens), 1  # type: ignore[union-attr, arg-type]
            size = tuple(model.patch_embed.grid_size)  # type: ignore[union-attr, arg-type]
        else:
            width, prefix = int(layer.dim), 0  # type: ignore[arg-type]
            reduction = layer.sr.kernel_size[0] if layer.sr is not None else 1  # type: ignore[union-attr, index]
            stage = int(name.split("stages.")[1].split(".")[0])
            size = (56 >> stage, 56 >> stage)
        parent.attn = ReleasedStructure(layer, width, int(layer.num_heads), size, prefix, reduction)  # type: ignore[arg-type]
    return model
