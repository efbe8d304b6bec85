"""What each memory says it costs is what the flop counter counts: multiply-adds on top of the model without it.

The formulas are those of `cached list memories`, with the terms that vanish beside D^2 written out; they stand in
the rows of `CONTRACTS`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contracts import CONTRACTS
from contract.costs import LAYERS, RELATIVE, B, D, F, H, M, N
from torch import nn

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers import create_model
from cached_transformers.registry import MEMORIES

COSTS = {label: row.cost for label, row in CONTRACTS.items() if row.cost is not None}
IMAGE_COSTS = {label: row.image_cost for label, row in CONTRACTS.items() if row.image_cost is not None}


def language_model(memory: Any, model: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocabulary": 7, "width": D, "depth": LAYERS, "heads": H, "feed_forward": F}
    return create_model("language_model", **sizes, memory=memory, **(model or {}))


def per_token(model: nn.Module, segments: int = 30, mode: str = "eval") -> float:
    """Multiply-adds of a token's forward pass, when the memory is full."""
    x_BN = torch.randint(0, 7, (B, N))
    state = model.eval().init_state(B)
    with torch.no_grad():
        for _ in range(segments):
            state = model(x_BN, state).state
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
    ours = {entry.name for entry in MEMORIES if entry.factory.__module__.startswith("cached_transformers.")}
    assert known >= ours >= {"grc", "rmt"}
