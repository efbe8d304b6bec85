"""GRC attention as one layer (arXiv:2312.12742, Algorithm 1); the mechanism itself is in `memories/grc/grc.py`.

Legend: B rows, N tokens, D model width.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cached_transformers.annotations import checked
from cached_transformers.interfaces.attention import Attention
from cached_transformers.memories.grc.grc import GRC
from cached_transformers.memories.grc.shared_cache_memory import cache_width
from cached_transformers.memories.parts.interpolation import coarser_reduction
from cached_transformers.positions import Positions

from .attention import SelfAttention
from .reduction import SpatialReduction


@checked
class GRCAttention(SelfAttention):
    """Self-attention with a gated recurrent cache, as one drop-in layer: (B, N, D) -> (B, N, D).

    Args:
        width: D. heads: H. length: M, slots of the cache.
        core, positions, norm, bias, dropout: as `SelfAttention`.
        reduction: ratio of the spatial reduction of keys and values in both branches (PVT), less the `stride` of
            the cache; 1 for none.
        grc: further options of `cached_transformers.memories.grc.grc.GRC` (variant, ratio, stride, candidate, ...).

    Example:
        >>> layer = GRCAttention(384, 6, length=197, ratio=0.5)
        >>> y = layer(torch.randn(8, 197, 384)).y_BND
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int,
        *,
        core: Attention | None = None,
        positions: Positions | None = None,
        norm: nn.Module | None = None,
        bias: bool = True,
        reduction: int = 1,
        dropout: float = 0.0,
        **grc: Any,
    ) -> None:
        cache = cache_width(width, heads, grc.get("ratio", 0.5))
        of_slots = coarser_reduction(reduction, grc.get("stride", 1))
        memory = GRC(
            width,
            heads,
            length,
            bias=bias,
            reduction=SpatialReduction(cache, of_slots) if of_slots > 1 else None,
            **grc,
        )
        super().__init__(
            width,
            heads,
            core=core,
            memory=memory,
            positions=positions,
            norm=norm,
            bias=bias,
            reduction=SpatialReduction(width, reduction) if reduction > 1 else None,
            dropout=dropout,
        )
