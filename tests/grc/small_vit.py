"""A small vision transformer with a shared cache for the tests of this folder: 5 tokens of 16 channels, two layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cached_transformers import GRCAttention, create_model
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.attention_cache import AttentionCache
from cached_transformers.memories.grc.shared_cache import caches

# Every kind of shared cache: all are held to the same rules.
KINDS: dict[str, dict[str, Any]] = {
    "algorithm1": {"variant": "algorithm1"},
    "released": {"variant": "released"},
    "attention": {"name": "attention_cache"},
    "store": {"name": "attention_cache", "update": "store"},
}
kinds = pytest.mark.parametrize("options", list(KINDS.values()), ids=list(KINDS))


def cached_layer(width: int, heads: int, length: int, *, name: str = "grc", **options: Any) -> SelfAttention:
    """One attention layer with a shared cache."""
    if name == "grc":
        return GRCAttention(width, heads, length, **options)
    return SelfAttention(width, heads, memory=AttentionCache(width, heads, length, **options))


def small_vit(*, depth: int = 2, **grc: Any) -> nn.Module:
    """The same weights at every call; `name` is that of the memory."""
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "channels": 1, "classes": 3, "width": 16, "heads": 2, "feed_forward": 32}
    return create_model("vision_transformer", **sizes, depth=depth, memory={"name": "grc", **grc})


def images(seed: int = 0, rows: int = 4) -> Tensor:
    return torch.randn(rows, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def stored(model: nn.Module) -> list[Tensor]:
    """Copies of the buffers as they are, without committing anything."""
    return [cache.cache_MC.clone() for cache in caches(model)]


def settled(model: nn.Module) -> list[Tensor]:
    """Return the caches as after a commit of the pending proposals, without committing them."""
    return [torch.where(c._fresh, c._proposal_MC, c.cache_MC) for c in caches(model)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def step(model: nn.Module, x: Tensor, rate: float = 0.1) -> list[Tensor]:
    """One step of plain SGD; returns the gradients."""
    model.zero_grad()
    model(x).outputs.square().mean().backward()
    found = gradients(model)
    with torch.no_grad():
        for parameter, grad in zip(model.parameters(), found, strict=True):
            parameter -= rate * grad
    return found
