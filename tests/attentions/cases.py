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
        exempt: rule -> why it does not apply. Rules: padding, causal, lse, half, compiled, exact_causal.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, Any] | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)


CASES: dict[str, Case] = {
    # One line each, so that mechanisms can be added side by side.
    "softmax": Case(exact={}),
    # axial
    "bigbird": Case({"block": 4, "random": 1}, exact={"block": 4, "random": 3}),
    # bp_transformer
    # clustered
    # delta_net
    "etc": Case({"radius": 3, "segment": 4}, exact={"segment": None, "clip": None}, exempt={"lse": "labelled keys"}),
    # image_transformer
    # improved_clustered
    # informer
    # linear
    # linformer
    # longformer
    # memory_compressed
    # performer
    # reformer
    # rfa
    # routing
    "sac": Case({"edges": 3, "hidden": 5, "clip": 3}, exact={"edges": 24, "hidden": 5}),
    # set_transformer
    # sinkhorn
    # sparse_transformer
    # star
}


def build(name: str, *, exact: bool = False, seed: int = 0, **more: Any) -> Attention:
    """The mechanism of a case in float64 and evaluation mode, with the same parameters at every call."""
    case = CASES[name]
    options = (case.exact or {}) if exact else case.options
    torch.manual_seed(seed)
    facts = {"width": H * E, "heads": H, "length": LONGEST, "prefix": 0, "index": 0, "depth": 2}
    return create_attention({"name": name, **options, **more}, **facts).double().eval()
