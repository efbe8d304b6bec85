"""What each memory says it costs is what the flop counter counts: multiply-adds on top of the model without it.

The formulas are those of `cached list memories`, with the terms that vanish beside D^2 written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from cached_transformers.experiments.costs.flops import count_flops
from cached_transformers.registry import MEMORIES
from cached_transformers.tasks import create_model

B, N, D, H, F, LAYERS = 3, 8, 32, 4, 48, 2
"""Rows, tokens of a segment, width, heads, width of the feed-forward, layers; all different from a memory's sizes."""
M, K, R = 20, 5, 4
"""Slots of a memory; neighbours; regions."""
RELATIVE = {"positions": "relative"}


class Cost(NamedTuple):
    """Multiply-adds a token in the whole model, with the memory's options and the model's."""

    options: dict[str, Any]
    formula: Callable[[], float]
    model: dict[str, Any] | None = None


def window(slots: int) -> float:
    """Keys and values of hidden states, scores, values, scores of positions, and the table of these for all rows."""
    return 2 * D * D * slots / N + 3 * slots * D + D * D * slots / (B * N)


def side(slots: int) -> float:
    """A second attention over `slots` vectors, with projections of its own."""
    return 2 * D * D * (1 + slots / N) + 2 * slots * D


def own_positions(slots: int) -> float:
    """What relative positions cost a model without memory, where those of the memory take their place."""
    return D * (N + 1) + D * D / B


def layer(tokens: float) -> float:
    """Projections and feed-forward of one layer, for `tokens` more a token."""
    return tokens * (4 * D * D + 2 * D * F)


def infinity_former(chunk: int = 4, basis: int = 12, samples: int = 10) -> float:
    signal = D * D + 2 * basis * D + 2 * H * basis + 2 * basis * D * D / N
    refits = 2 * (samples + chunk) * basis * D / chunk
    return LAYERS * (window(M + chunk - 1) + signal + refits)


def crtn(topk: int, key_width: int = 24) -> float:
    slots = topk * N
    positions = D * D + H * D * (slots + N) - own_positions(slots)
    summaries = 2 * N * D * key_width / N + R * key_width / N
    return LAYERS * (2 * D * D * slots / N + 2 * slots * D + positions) + summaries


def crtn_by_token(key_width: int = 24) -> float:
    slots = R * N
    attention = window(slots) - slots * D + (R + 1) * (slots + N) * D - N * D
    return LAYERS * attention + (N + 1) * D * key_width + R * key_width


COSTS: dict[str, Cost] = {
    "transformer_xl": Cost({"length": M}, lambda: LAYERS * window(M), RELATIVE),
    "transformer_xl/absolute": Cost({"length": M, "relative": False}, lambda: LAYERS * (2 * D * D * M / N + 2 * M * D)),
    "ernie_doc": Cost({"length": M}, lambda: LAYERS * window(M), RELATIVE),
    "compressive": Cost(
        {"length": M, "compressed": 6, "rate": 2}, lambda: LAYERS * (window(M + 1 + 6) + D * D), RELATIVE
    ),
    "segatron": Cost(
        {"length": M},
        lambda: LAYERS * (2 * D * D * M / N + 2 * M * D + 3 * D * (M + N) + D * D * (M + N) / (B * N)),
    ),
    "infinity_former": Cost({"length": M, "chunk": 4, "basis": 12, "samples": 10}, infinity_former, RELATIVE),
    "memorizing": Cost({"length": M, "k": K}, lambda: M * D + 2 * K * D),
    "crtn": Cost({"segment": N, "regions": R, "topk": 2, "key_width": 24}, lambda: crtn(2), RELATIVE),
    "crtn/compute_first": Cost(
        {"segment": N, "regions": R, "topk": 2, "key_width": 24, "query": "compute_first"},
        lambda: crtn(2) + LAYERS * (layer(1) + 2 * N * D + own_positions(0)),
        RELATIVE,
    ),
    "crtn/token": Cost({"segment": N, "regions": R, "key_width": 24, "scope": "token"}, crtn_by_token, RELATIVE),
    "memory_transformer": Cost({"length": M}, lambda: LAYERS * (layer(M / N) + 2 * D * M * (2 + M / N))),
    "rmt": Cost({"length": M}, lambda: LAYERS * (layer(2 * M / N) + 4 * D * M * (2 + 2 * M / N))),
    "memformer": Cost({"length": M}, lambda: LAYERS * side(M) + side(M)),
    "feedback": Cost(
        {"length": M},
        lambda: LAYERS * (3 * M * D - 2 * N * D - 2 * D * D) + 2 * D * D * (1 + M / N) + 2 * D * D / (B * N),
    ),
    "feedback/separate": Cost(
        {"length": M, "shared_kv": False},
        lambda: LAYERS * (3 * M * D - 2 * N * D + 2 * D * D * M / N + 2 * D * D / (B * N)),
    ),
    "grc_stream": Cost(
        {"length": M, "ratio": 0.5},
        lambda: LAYERS * (D / 2) * (6 * M * D / 2 / N + D / 2 + 2 * M * D / 2 / N + 2 * M),
    ),
    "read_twice": Cost({"slots": M}, lambda: LAYERS * side(M) + D),
}


def language_model(memory: Any, model: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocabulary": 7, "width": D, "depth": LAYERS, "heads": H, "feed_forward": F}
    return create_model("language_model", **sizes, memory=memory, **(model or {}))


def per_token(model: nn.Module, segments: int = 30, mode: str = "eval") -> float:
    """Multiply-adds of a token's forward pass, when the memory is full."""
    x_BN = torch.randint(0, 7, (B, N))
    state = model.init_state(B)
    with torch.no_grad():
        for _ in range(segments):
            state = model.eval()(x_BN, state).state
    return count_flops(model, x_BN, state, mode=mode) / 2 / B / N


@pytest.mark.parametrize("label", COSTS)
def test_a_token_costs_what_the_formula_says(label: str) -> None:
    cost = COSTS[label]
    memory = {"name": label.partition("/")[0], **cost.options}
    counted = per_token(language_model(memory, cost.model)) - per_token(language_model(None, cost.model), 1)
    assert counted == pytest.approx(cost.formula(), rel=1e-9)


def test_the_loss_of_a_compression_costs_what_the_formula_says() -> None:
    rate = 2
    options = {"length": M, "compressed": 6, "rate": rate}
    trained, evaluated = (
        per_token(language_model({"name": "compressive", **options}, RELATIVE), mode=mode) for mode in ("train", "eval")
    )
    assert trained - evaluated == pytest.approx(LAYERS * (2 * D * D + 2 * N * D) * (1 + 1 / rate), rel=1e-9)


TOKENS, C = 17, 16
"""Tokens of an image, its class token among them, which is as many as the cache has slots; and its channels."""
READ = TOKENS * C * C + 2 * TOKENS * TOKENS * C
"""Queries, scores and values."""
ONCE = TOKENS * C * C / B
"""One product of the cache with a matrix, which serves all rows."""
IMAGE_COSTS: dict[str, tuple[dict[str, Any], float, float]] = {
    "grc": ({}, READ + 4 * TOKENS * C * C + 4 * ONCE, READ),
    "attention_cache": ({}, READ + 4 * TOKENS * C * C + 4 * TOKENS * TOKENS * C + 5 * ONCE, READ),
    "attention_cache/store": ({"update": "store"}, READ + 2 * ONCE, READ),
    "convolution": ({}, 9 * (TOKENS - 1) * D / 0.5, 9 * (TOKENS - 1) * D / 0.5),
}
"""Options, and multiply-adds a row and layer in training and in evaluation."""


@pytest.mark.parametrize("label", IMAGE_COSTS)
def test_an_image_costs_what_the_formula_says(label: str) -> None:
    def per_row(memory: Any, mode: str) -> float:
        torch.manual_seed(0)
        sizes = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 3, "width": D, "depth": LAYERS, "heads": H}
        model = create_model("vision_transformer", **sizes, feed_forward=F, memory=memory)
        return count_flops(model, torch.randn(B, 1, 8, 8), mode=mode) / 2 / B / LAYERS

    options, *formulas = IMAGE_COSTS[label]
    for mode, formula in zip(("train", "eval"), formulas, strict=True):
        counted = per_row({"name": label.partition("/")[0], **options}, mode) - per_row(None, mode)
        assert counted == pytest.approx(formula, rel=1e-9), mode


def test_each_memory_has_a_formula() -> None:
    known = {label.partition("/")[0] for label in (*COSTS, *IMAGE_COSTS)}
    assert known >= {name for name in MEMORIES.names() if not name.startswith("example")}
