"""Helpers of the adapters for transformers' layers: config, dropout, and positions for the keys of a memory.

Most layers rotate keys, by `StoredStates.turn`. The angles of slots and tokens are made together, since schemes that
scale them by the furthest position (dynamic, LongRoPE) then scale both alike. Others lower their logits, by
`StoredStates.slope`. Imports nothing of transformers.

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

from cached_transformers.integrations.hosts import Adapter, HostAttention, Site, StoredStates, register_adapter
from cached_transformers.positions import ALiBiPositions, RotaryPositions

TAKE_MASKS = ("eager", "sdpa")
"""transformers' implementations of attention that take an attention mask."""

MORE = (
    "its logits are more than products of queries and keys (learned sinks, queries scaled by position), so that only "
    "eager attention gives the weights; call model.set_attn_implementation('eager')"
)
"""Reason why the weights of a layer cannot be computed beside it."""

ROTARY = ("rotary_emb", "pos_emb")
"""Names of a model's module of rotary positions."""

CACHES = ("cache", "past_key_values", "layer_past")
"""Names of the keyword by which a layer gets its KV cache; the first from transformers 5.24 on."""


def adapts(families: str, suffix: str = "Attention") -> Callable[[Adapter], Adapter]:
    """`register_adapter` for layers of transformers: "family.Name family.Name", each name without the suffix."""
    return register_adapter(*classes_of(families, suffix))


def classes_of(families: str, suffix: str = "") -> list[str]:
    """The full names of such classes."""
    pairs = [name.split(".") for name in families.split()]
    return [f"transformers.models.{family}.modeling_{family}.{name}{suffix}" for family, name in pairs]


def config_of(site: Site) -> Any:
    """The config that the layer was made with; not every layer keeps it."""
    return site.holder("config").config if getattr(site.layer, "config", None) is None else site.layer.config


def first_of(thing: Any, *names: str) -> Any:
    """The first of these attributes that the thing has, and that is not None."""
    return next((found for name in names if (found := getattr(thing, name, None)) is not None), None)


def parameter_names(module: nn.Module) -> list[str]:
    """Parameters of the forward of the module's class, in order."""
    return [name for name in inspect.signature(type(module).forward).parameters if name != "self"]


def softmax_of(site: Site, *, causal: bool = False, bias: bool = False) -> HostAttention:
    """The attention of a layer that looks its implementation up in transformers.

    Args:
        bias: the layer's mask holds a bias on the logits, so that it does not give the padding.
    """
    kind = config_of(site)._attn_implementation
    refusal = None
    if kind != "sdpa":
        refusal = (
            f"with attn_implementation={kind!r} there is no scaled_dot_product_attention to exchange; "
            "call model.set_attn_implementation('sdpa') first"
        )
    asks = frozenset({"causal" if causal else "bidirectional", *(("bias",) if bias else ())})
    return HostAttention(asks, _dropout(site.layer), padding=not bias, refusal=refusal)


def _dropout(layer: Any) -> float:
    """Dropout of the attention weights: a number or a module of the layer, or an entry of its config."""
    names = ("attention_dropout", "attn_dropout", "dropout")
    value = first_of(layer, *names)
    if value is None:
        value = first_of(getattr(layer, "config", None), "attention_probs_dropout_prob", *names)
    return 0.0 if value is None else float(getattr(value, "p", value))


def no_masks(kind: str) -> str:
    """Message for an attention that takes no mask."""
    return f"attn_implementation={kind!r} takes no masks; call model.set_attn_implementation('sdpa')"


def stored(
    site: Site, turn: Callable[..., Tensor] | None = None, slope: Callable[..., Tensor | None] | None = None
) -> StoredStates:
    """The `StoredStates` of a layer.

    Args:
        turn, slope: see `StoredStates`; `turned` when there is neither, and the layer gets positions.
    """
    parameters = inspect.signature(type(site.layer).forward).parameters
    rotary: Any = None
    if turn is None and slope is None and "position_embeddings" in parameters:
        place = next((name for name in ROTARY if hasattr(site.holder(name), name)), ROTARY[0])
        rotary = getattr(site.holder(place), place)
    if rotary is not None:  # Granite 4 and OLMo Hybrid may have no positions
        # The function of the file of the layer's class, or of a class above.
        files = (sys.modules[kind.__module__] for kind in type(site.layer).__mro__)
        rotate = next(file.apply_rotary_pos_emb for file in files if hasattr(file, "apply_rotary_pos_emb"))
        turn = partial(turned, rotate)
    scaled = "llama_4_scaling_beta" in (getattr(config_of(site), "rope_parameters", None) or {})
    return StoredStates(
        first_of(site.parent(), "input_layernorm", "ln_attn", "ln_1", "operator_norm", "norm"),
        turn or unturned,
        rotary,
        slope,
        next(name for name in CACHES if name in parameters),
        MORE if scaled or hasattr(site.layer, "sinks") else "",
    )


def turned(
    rotate: Callable[..., Any], layer: Any, rotary: Any, k_BGME: Tensor, positions_BL: Tensor, x_BND: Tensor
) -> Tensor:
    """Keys rotated by the layer's own function, perhaps only in their first channels."""
    slots = k_BGME.shape[2]
    kinds = (layer.config.layer_types[layer.layer_idx],) if hasattr(rotary, "layer_types") else ()
    cos_BME, sin_BME = (t[:, :slots] for t in rotary(x_BND, positions_BL, *kinds))
    width = getattr(layer, "rotary_ndims", k_BGME.shape[-1])
    first = k_BGME[..., :width]
    first = rotate(first[:, :1], first, cos_BME, sin_BME)[1]
    return first if width == k_BGME.shape[-1] else torch.cat([first, k_BGME[..., width:]], -1)


def turned_in_pairs(layer: Any, rotary: Any, k_BGME: Tensor, positions_BL: Tensor, x_BND: Tensor) -> Tensor:
    """Keys rotated in pairs of neighbouring channels: GPT-J's table of angles has none of the past."""
    slots, width = k_BGME.shape[2], layer.rotary_dim or k_BGME.shape[-1]
    first = RotaryPositions(width).rotate(k_BGME[..., :width], positions_BL[:, :slots, None])
    return torch.cat([first, k_BGME[..., width:]], -1)


def unturned(layer: Any, rotary: Any, k_BGME: Tensor, positions_BL: Tensor, x_BND: Tensor) -> Tensor:
    """Keys of a layer without positions."""
    return k_BGME


def lowered(layer: Any, call: dict[str, Any], positions_BM: Tensor) -> None:
    """Extend BLOOM's alibi, a number for each head and key, (B * H, 1, K), of the keys' positions."""
    slots_BHM = _slopes(layer, positions_BM)
    call["alibi"] = torch.cat([slots_BHM.flatten(0, 1)[:, None].to(call["alibi"].dtype), call["alibi"]], -1)


def lowered_by_mask(layer: Any, call: dict[str, Any], positions_BM: Tensor) -> Tensor:
    """Extend Falcon's alibi, (B, H, 1, K), which is divided by the root of the head's width and in the mask as well."""
    slots_BH1M = _slopes(layer, positions_BM)[:, :, None].to(call["alibi"].dtype)
    call["alibi"] = torch.cat([slots_BH1M, call["alibi"]], -1)
    return slots_BH1M * layer.inv_norm_factor  # type: ignore[no-any-return]


def _slopes(layer: Any, positions_BM: Tensor) -> Tensor:
    """(B, H, M)."""
    return ALiBiPositions(layer.num_heads).slopes.to(positions_BM.device)[:, None] * positions_BM[:, None]


def in_blocks(heads: int, groups: int, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, N, E), keys and values (B, G, N, E) of one projection: all queries, all keys, all values."""
    parts_BHNE = qkv_BNL.unflatten(-1, (heads + 2 * groups, -1)).transpose(1, 2)
    q, k, v = parts_BHNE.split_with_sizes([heads, groups, groups], 1)
    return q, k, v


def by_groups(heads: int, groups: int, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of one projection: the queries of each group side by side with their key and value."""
    share = heads // groups
    parts_BNGSE = qkv_BNL.unflatten(-1, (groups, share + 2, -1)).split([share, 1, 1], -2)
    q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in parts_BNGSE)
    return q, k, v
