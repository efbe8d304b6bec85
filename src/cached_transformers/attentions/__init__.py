"""Attention cores; importing this package imports every file in it, which registers what the file defines."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from cached_transformers.registry import ATTENTIONS
from cached_transformers.seam.attention import Attention, AttentionOutput, Call

from .parts.pattern import PatternAttention
from .softmax import SoftmaxAttention

__all__ = ["Attention", "AttentionOutput", "Call", "PatternAttention", "SoftmaxAttention", "create_attention"]

AttentionSpec = str | Mapping[str, Any]
"""Name of an attention, or {"name": ..., option: value}."""


def create_attention(attention: AttentionSpec, **known: Any) -> Attention:
    """Build an attention core.

    `known` holds what the model knows about itself (width, heads, length, prefix, size, causal, index, depth,
    dropout); a core that has such an option gets it, unless the user set it.

    Raises:
        ValueError: unknown name or option, a needed option that nobody gave, or the core's own constraints.
    """
    spec = {"name": attention} if isinstance(attention, str) else dict(attention)
    if "name" not in spec:
        raise ValueError(f"attention {attention!r} must be a name, or have a 'name' beside its options")
    name = spec.pop("name")
    entry = ATTENTIONS.entry(name)
    ATTENTIONS.check(name, spec)
    facts = {k: v for k, v in known.items() if k in entry.options and k not in spec}
    missing = [n for n, p in entry.options.items() if p.default is p.empty and n not in facts and n not in spec]
    if missing:
        raise ValueError(
            f"attention {name!r} needs {', '.join(missing)}, which this model does not know; "
            f"give it as {{'name': {name!r}, {missing[0]!r}: ...}}"
        )
    core: Attention = entry.factory(**facts, **spec)
    return core


for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
