"""How much each head takes from its memory: sigma(lambda) per layer and head (arXiv:2312.12742, figure 5)."""

from __future__ import annotations

from torch import nn

from cached_transformers.memories.grc.grc import StreamGRC
from cached_transformers.memories.parts.cached_attention import CachedAttention


def collect_gates(model: nn.Module) -> list[list[float]]:
    """One list of sigma(lambda), head by head, for each layer that has a gated memory, from the first to the last."""
    return [
        m.mixing_ratio().detach().float().tolist()
        for m in model.modules()
        if isinstance(m, CachedAttention | StreamGRC)
    ]
