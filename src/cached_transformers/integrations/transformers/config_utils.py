"""What the adapters for transformers' layers have in common. Imports nothing of transformers."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from cached_transformers.integrations.hosts import HostAttention, Site

TAKE_MASKS = ("eager", "sdpa")
"""transformers' implementations of attention that a mask of who sees whom can be given to."""


def in_transformers(*classes: str) -> tuple[str, ...]:
    """The full names of classes of transformers' models, each given as "family.Class"."""
    named = []
    for name in classes:
        family, kind = name.split(".")
        named.append(f"transformers.models.{family}.modeling_{family}.{kind}")
    return tuple(named)


def config_of(site: Site) -> Any:
    """The config that the layer was made with; not every layer keeps it."""
    return site.holder("config").config if getattr(site.layer, "config", None) is None else site.layer.config


def first_of(thing: Any, *names: str) -> Any:
    """The first of these attributes that the thing has, and that is not None."""
    return next((found for name in names if (found := getattr(thing, name, None)) is not None), None)


def dropout_of(layer: Any) -> float:
    """Of the layer's attention weights: layers have a number or a module for it, and some tell their config alone."""
    names = ("attention_dropout", "attn_dropout", "dropout")
    value = first_of(layer, *names)
    if value is None:
        value = first_of(getattr(layer, "config", None), "attention_probs_dropout_prob", *names)
    return 0.0 if value is None else float(getattr(value, "p", value))


def softmax_of(site: Site, *, causal: bool = False, bias: bool = False) -> HostAttention:
    """The attention of a layer that looks its implementation up in transformers. Its mask tells the padding, unless a
    `bias` on the logits is part of it."""
    kind = config_of(site)._attn_implementation
    refusal = None
    if kind != "sdpa":
        refusal = (
            f"with attn_implementation={kind!r} there is no scaled_dot_product_attention to exchange; "
            "call model.set_attn_implementation('sdpa') first"
        )
    asks = frozenset({"causal" if causal else "bidirectional", *(("bias",) if bias else ())})
    return HostAttention(asks, dropout_of(site.layer), padding=not bias, refusal=refusal)


def no_masks(kind: str) -> str:
    """Why a model cannot be given a mask, and the way out."""
    return f"attn_implementation={kind!r} takes no masks; call model.set_attn_implementation('sdpa')"


def parameter_names(module: nn.Module) -> list[str]:
    """Of its class's forward, in their order."""
    return [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
