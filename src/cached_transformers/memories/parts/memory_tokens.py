"""Putting memory tokens round a segment: their positions, their padding, and who sees whom in a causal model.

Legend: B rows, N tokens, F memory tokens in front, K behind, L = F + N + K, D model width, P position channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.memories.transformer_xl import TransformerXL
from cached_transformers.seam.memory import ProjectKV, Query, Reading, Tokens

from .rows import Rows


def check_tokens(length: int, mask: str) -> None:
    """Refuse a number of memory tokens below 1 and an unknown mask (ValueError)."""
    if length < 1:
        raise ValueError(f"length={length} must be at least 1 memory token; a model without memory takes memory=None")
    if mask not in ("full", "causal"):
        raise ValueError(f"mask={mask!r} must be 'full' or 'causal'")


def check_cache(cache: int) -> None:
    """Refuse a number of cached tokens below 0 (ValueError)."""
    if cache < 0:
        raise ValueError(f"cache={cache} must be a number of tokens, or 0 for no cache")


CACHE_NEEDS = TransformerXL.needs
"""What memory tokens need beside a cache."""


class CacheBeforeTokens(TransformerXL):
    """A Transformer-XL cache whose tokens stand before the memory tokens that are in front of the segment.

    Args:
        width: D. heads: H. length: cached tokens.
        front, back: memory tokens in front of the segment and behind it.
        read_by_all: whether memory tokens see the cache; the segment's tokens do.
    """

    def __init__(self, width: int, heads: int, length: int, *, front: int, back: int, read_by_all: bool) -> None:
        super().__init__(width, heads, length, relative=False)
        self.front, self.back, self.read_by_all = front, back, read_by_all

    def read(self, state: Rows, query: Query, project_kv: ProjectKV | None) -> Reading:
        context = super().read(state, query, project_kv).context
        assert context is not None
        visible_BHNM = None
        if not self.read_by_all:
            tokens = query.x_BND.shape[1]
            place_L = torch.arange(tokens, device=query.x_BND.device)
            inside_L = (place_L >= self.front) & (place_L < tokens - self.back)
            visible_BHNM = inside_L[:, None].expand(-1, context.k_BHME.shape[2])[None, None]
        positions_BMP = context.positions_BMP - self.front
        return Reading(context._replace(positions_BMP=positions_BMP, consecutive=False, visible_BHNM=visible_BHNM))


def carried_norm(norm: str, width: int) -> nn.Module:
    """Norm for what leaves the last layer and comes back: blocks with norms behind the sums have applied one already.

    Raises:
        ValueError: `norm` is neither "pre" nor "post".
    """
    if norm not in ("pre", "post"):
        raise ValueError(f"norm={norm!r} must be 'pre' or 'post', as in the model")
    return nn.LayerNorm(width) if norm == "pre" else nn.Identity()


def surround(tokens: Tokens, front_BFD: Tensor | None, back_BKD: Tensor | None = None) -> Tokens:
    """The tokens [front, segment, back], (B, L, ...).

    The segment's tokens keep their positions; memory tokens stand at the places right before the first and right behind
    the last of them that is no padding, and are no padding themselves.
    """
    x_BND, positions_BNP, padding_BN = tokens[:3]
    first_B1P, last_B1P = _ends(positions_BNP, padding_BN)
    front, back = (0 if t is None else t.shape[1] for t in (front_BFD, back_BKD))
    ahead, behind = (torch.arange(k, device=x_BND.device)[:, None] for k in (front, back))
    x_BLD = torch.cat([t.to(x_BND.dtype) for t in (front_BFD, x_BND, back_BKD) if t is not None], 1)
    positions_BLP = torch.cat([first_B1P - front + ahead, positions_BNP, last_B1P + 1 + behind], 1)
    if padding_BN is not None:
        padding_BN = F.pad(padding_BN, (front, back), value=False)
    return Tokens(x_BLD, positions_BLP, padding_BN)


def _ends(positions_BNP: Tensor, padding_BN: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, 1, P): positions of the first and of the last token that is no padding."""
    if padding_BN is None:
        return positions_BNP[:, :1], positions_BNP[:, -1:]
    padded_BN1 = padding_BN[..., None]
    low, high = positions_BNP.amin(1, keepdim=True), positions_BNP.amax(1, keepdim=True)
    first_B1P = torch.where(padded_BN1, high, positions_BNP).amin(1, keepdim=True)
    return first_B1P, torch.where(padded_BN1, low, positions_BNP).amax(1, keepdim=True)


def visible_round(front: int, tokens: int, back: int, device: torch.device) -> Tensor:
    """(L, L) bool: what each token of [front, segment, back] sees when memory tokens see the whole of their own block.

    Otherwise order decides: the segment sees what is in front and its own past, what is behind sees everything.
    """
    place_L = torch.arange(front + tokens + back, device=device)
    block_L = (place_L >= front).long() + (place_L >= front + tokens).long()
    same_LL = (block_L[:, None] == block_L) & (block_L != 1)
    return (place_L[:, None] >= place_L) | same_LL
