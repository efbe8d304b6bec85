"""Attention mechanisms. Importing this package imports every file in it, which registers its attentions.

Every registered attention is exported under its class name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cached_transformers.interfaces.attention import Attention, AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.pattern import PatternAttention

__all__ = ["Attention", "AttentionOutput", "AttentionSpec", "Call", "PatternAttention", "create_attention"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The registered classes, to type checkers, which find them typed in their own files."""


AttentionSpec = str | Mapping[str, Any]
"""Name of an attention, or {"name": ..., option: value}; "preset" names options that go together."""


def create_attention(attention: AttentionSpec, **facts: Any) -> Attention:
    """Build an attention core.

    `facts` are the model's properties (width, heads, length, prefix, size, causal, index, depth,
    dropout); a core that has such an option gets it, unless the user set it.

    Raises:
        ValueError: unknown name or option, a missing option, or the core's own constraints.
    """
    if not isinstance(attention, str) and not (isinstance(attention, Mapping) and "name" in attention):
        raise ValueError(f"attention={attention!r} must be a name, or have a 'name' beside its options")
    spec = {"name": attention} if isinstance(attention, str) else dict(attention)
    name = spec.pop("name")
    # An attention without a model may get its sizes with its name.
    facts |= {key: spec.pop(key) for key in ATTENTIONS.given if key in spec and key not in facts}
    spec = ATTENTIONS.with_preset(name, spec)
    ATTENTIONS.check(name, spec)
    entry = ATTENTIONS.entry(name)
    given = {k: v for k, v in facts.items() if k in entry.options and k not in spec}
    missing = [n for n, p in entry.options.items() if p.default is p.empty and n not in given and n not in spec]
    if missing:
        raise ValueError(
            f"attention {name!r} needs {', '.join(missing)}, which this model does not know; "
            f"give it as {{'name': {name!r}, {missing[0]!r}: ...}}"
        )
    core: Attention = entry.build(**given, **spec)
    return core


_registered = ATTENTIONS.import_files(__name__, __path__)
globals().update(_registered)
__all__ += _registered
