"""What has to be said about each attention mechanism for the battery that runs over all that are registered.

A mechanism is tested by being registered; its row here gives it sizes that suit short sequences, options with which it
is exact attention, and the rules that it is exempt from, each with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cached_transformers.attentions import Attention, create_attention

B, H, E, LONGEST = 2, 2, 6, 24
"""Rows, heads, key width, and tokens of the longest sequence."""
LENGTHS = (1, 3, 8, 13, 24)
"""Shorter than a block of 4, a multiple of it, and not."""


@dataclass(frozen=True)
class Case:
    """One mechanism.

    Attributes:
        options: for short sequences: blocks of 4 tokens, windows of a few.
        exact: options with which it is softmax attention for up to 24 tokens; None where there is no such limit.
        exempt: rule -> why it does not apply. Rules: padding, ties, causal, lse, half, compiled, exact_causal; and of
            the contract of memories: padding_in_front, precision (its outputs are near those of another one), bptt.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, Any] | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)


PLACED = {"padding_in_front": "padding fills cells of its map"}
CHOOSES = {"precision": "chooses keys: what is nearly equal, and equal tokens, come in another order"}

CASES: dict[str, Case] = {
    # One line each, so that mechanisms can be added side by side.
    "softmax": Case(exact={}),
    "axial": Case({"columns": 4, "prefix": 1}, exact={"columns": 48}),
    "bigbird": Case({"block": 4, "random": 1}, exact={"block": 4, "random": 3}),
    "bp_transformer": Case(
        options={"k": 1},
        exact={"k": 24, "types": False},
        exempt={"lse": "the key of a span is a mean and no token's own"},
    ),
    "clustered": Case({"clusters": 4}, exact={"clusters": 24}),
    "delta_net": Case({"chunk": 4}),
    "etc": Case(
        {"radius": 3, "segment": 4, "clip": 2},
        exact={"radius": 24, "segment": None, "clip": None},
        exempt={"lse": "weights are of labelled keys and of means over segments"},
    ),
    "image_transformer": Case(
        {"block": (2, 3), "memory": (1, 2), "size": (4, 7), "prefix": 1},
        exact={"block": 24, "memory": 0},
        exempt=PLACED,
    ),
    "gated_delta": Case({"chunk": 4}),
    "improved_clustered": Case({"clusters": 4, "topk": 3}, exact={"clusters": 4, "topk": 24}),
    "informer": Case({"factor": 1, "sampling": "own"}, exact={"factor": 24}),
    "linear": Case({"chunk": 4}),
    "linformer": Case({"slots": 4, "sharing": "none"}, exempt={"lse": "its softmax is over slots, not keys"}),
    "longformer": Case({"window": 4, "dilation": (1, 2), "prefix": 1, "global_tokens": (9,)}, exact={"window": 48}),
    "memory_compressed": Case({"local": 2}, exact={"rate": 1}, exempt={"lse": "its softmax is over slots, not keys"}),
    "performer": Case({"features": 16, "chunk": 4}),
    "reformer": Case(
        {"chunk": 4, "buckets": 4}, exempt={"lse": "its keys are the queries, as unit vectors; own test", **CHOOSES}
    ),
    "rfa": Case({"features": 64, "chunk": 4}),
    "routing": Case(
        {"clusters": 3, "window": 4, "update": "manual"},
        exact={"clusters": 1, "window": 24},
        exempt={"bptt": "its auxiliary loss is of all tokens", **CHOOSES},
    ),
    "sac": Case(
        {"edges": 3, "hidden": 5, "clip": 3, "learn": "straight_through"},
        exact={"edges": 24, "hidden": 5},
        exempt={"ties": "a product of matrices scores equal tokens apart by a rounding, by their place", **CHOOSES},
    ),
    "set_transformer": Case({"points": 4}),
    "sinkhorn": Case({"block": 4}, {"block": 12}, {"lse": "sorted keys are means of keys; own test"}),
    "sparse_transformer": Case({"stride": 4, "pattern": "fixed", "summary": 2, "prefix": 1}, exact={"stride": 48}),
    "star": Case(
        exact={"radius": 24, "embedding": False, "relay": False},
        exempt={"lse": "the relay's key is a mean of keys and no token's own"},
    ),
}


def build(name: str, *, exact: bool = False, seed: int = 0, **more: Any) -> Attention:
    """The mechanism of a case in float64 and evaluation mode, with the same parameters at every call."""
    case = CASES[name]
    options = (case.exact or {}) if exact else case.options
    torch.manual_seed(seed)
    facts = {"width": H * E, "heads": H, "length": LONGEST, "prefix": 0, "index": 0, "depth": 2}
    return create_attention({"name": name, **options, **more}, **facts).double().eval()
