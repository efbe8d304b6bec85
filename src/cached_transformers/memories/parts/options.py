"""Checks of memories' options, with one message each, and the option of gates that can close.

A sigmoid never is 0: what a memory holds fades by a fixed share with every segment that says nothing. Stretched and
cut, as the hard concrete gates of Louizos, Welling and Kingma 2018 (arXiv:1712.01312) without their noise, it closes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

NO_MEMORY = "; a model without memory takes memory=None"
"""The way out for who asks for a memory of size 0."""


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    """`value`, or a ValueError that names the option and its values."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
    return value


def check_choices(**given: tuple[Any, tuple[Any, ...]]) -> None:
    """Refuse (ValueError) an option that is none of its choices: `option=(value, choices)`; None may be one of them."""
    for name, (value, choices) in given.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def check_positive(**values: float | None) -> None:
    """Refuse (ValueError) numbers that are not above 0 and finite; None passes."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be above 0 and finite")


def check_heads(width: int, heads: int) -> None:
    """Refuse (ValueError) heads that do not share out the width."""
    if heads < 1 or width % heads:
        raise ValueError(f"width={width} must be a positive multiple of heads={heads}")


Gate = Literal["sigmoid", "stretched"]
STRETCH = 0.1
"""By how much a stretched gate reaches beyond 0 and 1 before it is cut."""
CUT = math.log((1 + STRETCH) / STRETCH)
"""The logit at which it is 1; at -CUT it is 0."""


def gated(logits: Tensor, gate: Gate = "sigmoid") -> Tensor:
    """The gate of such logits, from 0 to 1; "stretched" it is 0 up to -CUT and 1 from CUT on."""
    share = logits.sigmoid()
    return (share * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1) if gate == "stretched" else share


def chosen_layers(option: str, layers: Any, depth: int | None, share: float) -> Sequence[int] | None:
    """The layers, counted from 1, that have a memory: one, several, "all", or the one at this share of the depth.

    None where that is any layer.
    """
    if layers == "all" or (layers is None and depth is None):
        return None
    if layers is None and depth is not None:
        return (math.ceil(share * depth),)
    chosen: list[Any] = [layers] if isinstance(layers, int | str) else list(layers)
    last = "" if depth is None else f" to {depth}, the model's last"
    if not chosen or not all(isinstance(n, int) and n >= 1 and (depth is None or n <= depth) for n in chosen):
        raise ValueError(
            f"{option}={layers!r} must be a layer, counted from 1{last}, several of them, or 'all'; None takes the one "
            f"at {share:.2f} of the depth"
        )
    return chosen
