"""How layers of transformers' decoders give positions to keys that a memory brings. Imports nothing of transformers.

Most turn keys: a `Stored.turn`. Angles of slots and tokens are made together, since schemes that scale them by the
furthest place (dynamic, LongRoPE) then scale both alike. Others lower their logits: a `Stored.slope`.

Legend: B rows, M slots, N tokens, L = M + N, K keys of the layer's own, H heads, G heads of keys, E head width, D model
width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.integrations.hosts import Site, Stored
from cached_transformers.positions import ALiBiPositions, RotaryPositions

from .config_utils import first_of

CACHES = ("past_key_values", "layer_past")
"""Keywords by which a layer is handed its cache."""


def stored(
    site: Site, turn: Callable[..., Tensor] | None = None, slope: Callable[..., Tensor | None] | None = None
) -> Stored:
    """How a layer attends hidden states of earlier segments.

    Args:
        turn, slope: as of `Stored`; `turned` when there is neither.
    """
    parameters = inspect.signature(type(site.layer).forward).parameters
    rotary: Any = None
    if turn is None and slope is None:
        turn, rotary = partial(turned, _turning(site.layer)), site.holder("rotary_emb").rotary_emb
    return Stored(
        first_of(site.parent(), "input_layernorm", "ln_attn", "ln_1"),
        turn or unturned,
        rotary,
        slope,
        next(name for name in CACHES if name in parameters),
    )


def _turning(layer: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function by which the layer turns queries and keys: that of the file of its class, or of a class above."""
    files = (sys.modules[kind.__module__] for kind in type(layer).__mro__)
    return next(file.apply_rotary_pos_emb for file in files if hasattr(file, "apply_rotary_pos_emb"))  # type: ignore[no-any-return]


def turned(
    turn: Callable[..., tuple[Tensor, Tensor]],
    layer: Any,
    rotary: Any,
    k_BGME: Tensor,
    places_BL: Tensor,
    x_BND: Tensor,
) -> Tensor:
    """Keys turned by the layer's own function for it, perhaps in their first channels alone."""
    slots = k_BGME.shape[2]
    kinds = (_kind(layer),) if hasattr(rotary, "layer_types") else ()
    cos_BME, sin_BME = (t[:, :slots] for t in rotary(x_BND, places_BL, *kinds))
    width = getattr(layer, "rotary_ndims", k_BGME.shape[-1])
    first = k_BGME[..., :width]
    first = turn(first[:, :1], first, cos_BME, sin_BME)[1]
    return first if width == k_BGME.shape[-1] else torch.cat([first, k_BGME[..., width:]], -1)


def _kind(layer: Any) -> str:
    """Which of several rotations is the layer's."""
    return layer.config.layer_types[layer.layer_idx]  # type: ignore[no-any-return]


def turned_in_pairs(layer: Any, rotary: Any, k_BGME: Tensor, places_BL: Tensor, x_BND: Tensor) -> Tensor:
    """Keys of which neighbouring channels are turned: GPT-J looks angles up in a table, which has none of the past."""
    slots, width = k_BGME.shape[2], layer.rotary_dim or k_BGME.shape[-1]
    first = RotaryPositions(width).rotate(k_BGME[..., :width], places_BL[:, :slots, None])
    return torch.cat([first, k_BGME[..., width:]], -1)


def unturned(layer: Any, rotary: Any, k_BGME: Tensor, places_BL: Tensor, x_BND: Tensor) -> Tensor:
    """Keys of a layer without positions."""
    return k_BGME


def lowered(layer: Any, call: dict[str, Any], places_BM: Tensor) -> None:
    """BLOOM's alibi, a number for each head and key, (B * H, 1, K), from the keys' places alone."""
    slots_BHM = _slopes(layer, places_BM)
    call["alibi"] = torch.cat([slots_BHM.flatten(0, 1)[:, None].to(call["alibi"].dtype), call["alibi"]], -1)


def lowered_by_mask(layer: Any, call: dict[str, Any], places_BM: Tensor) -> Tensor:
    """Falcon's alibi, (B, H, 1, K), which is divided by the root of the head's width and in the mask as well."""
    slots_BH1M = _slopes(layer, places_BM)[:, :, None].to(call["alibi"].dtype)
    call["alibi"] = torch.cat([slots_BH1M, call["alibi"]], -1)
    return slots_BH1M * layer.inv_norm_factor  # type: ignore[no-any-return]


def _slopes(layer: Any, places_BM: Tensor) -> Tensor:
    """(B, H, M)."""
    return ALiBiPositions(layer.num_heads).slopes.to(places_BM.device)[:, None] * places_BM[:, None]
