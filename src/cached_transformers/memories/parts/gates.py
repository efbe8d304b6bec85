"""Gates that can close, so that what is kept outlives any number of segments.

A sigmoid never is 0: what a memory holds fades by a fixed share with every segment that says nothing, and is gone after
the inverse of that share. Stretched and cut, as the hard concrete gates of Louizos, Welling and Kingma 2018
(arXiv:1712.01312) without their noise, it closes.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

Gate = Literal["sigmoid", "stretched"]
GATES = ("sigmoid", "stretched")
STRETCH = 0.1
"""By how much a stretched gate reaches beyond 0 and 1 before it is cut."""
CUT = math.log((1 + STRETCH) / STRETCH)
"""The logit at which it is 1; at -CUT it is 0."""


def gated(logits: Tensor, gate: Gate = "sigmoid") -> Tensor:
    """The gate of such logits, from 0 to 1; "stretched" it is 0 up to -CUT and 1 from CUT on."""
    share = logits.sigmoid()
    return (share * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1) if gate == "stretched" else share
