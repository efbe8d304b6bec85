"""Putting memory tokens round a segment: their positions, their padding, and who sees whom in a causal model.

Legend: B rows, N tokens, F memory tokens in front, K after, L = F + N + K, D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Tokens

from .options import NO_MEMORY, one_of


def check_tokens(length: int, mask: str, cache: int = 0) -> None:
    """Refuse fewer than one memory token, cached tokens below 0 and an unknown mask (ValueError)."""
    at_least_one(" memory token" + NO_MEMORY, length=length)
    at_least_one("; 0 for no cache", least=0, cache=cache)
    one_of("mask", mask, ("full", "causal"))


def carried_norm(norm: str, width: int) -> Callable[[Tensor], Tensor]:
    """Norm for what leaves the last layer and comes back: blocks with norms after the sums have applied one already.

    Without one it is no module, which adapters for modules named `norm` would take for theirs.
    """
    return nn.LayerNorm(width) if one_of("norm", norm, ("pre", "post")) == "pre" else as_it_is


def as_it_is(x: Tensor) -> Tensor:
    """Return the tensor."""
    return x


def surround(tokens: Tokens, front_BFD: Tensor | None, back_BKD: Tensor | None = None) -> Tokens:
    """The tokens [front, segment, back], (B, L, ...).

    The segment's tokens keep their positions; memory tokens are at the places right before the first and right after
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

    Otherwise order decides: the segment sees the tokens before it and its own past, the tokens after it see everything.
    """
    place_L = torch.arange(front + tokens + back, device=device)
    block_L = (place_L >= front).long() + (place_L >= front + tokens).long()
    same_LL = (block_L[:, None] == block_L) & (block_L != 1)
    return (place_L[:, None] >= place_L) | same_LL
