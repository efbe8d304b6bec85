"""The paper's costs: its plain models counted in full, its cached ones without the products of attention.

Counters by module (fvcore, mmcv) do not see attention products, so the paper's overhead is too low.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from integrations.hosts import library
from torch import Tensor, nn

from cached_lab.experiments.costs.flops import count_flops, flops_by_operator
from cached_transformers.integrations.models import TimmModel

VIT, SWIN = "vit_small_patch16_224", "swin_tiny_patch4_window7_224"
PAPER = {
    # (model, ratio): the paper's plain and cached cost in 10^9 multiply-adds, and by how much ours may differ
    (VIT, 0.5): (4.6, 5.13, 0.005),
    ("pvt_tiny", 0.125): (1.9, 1.93, 0.005),
    ("pvt_tiny", 0.25): (1.9, 1.96, 0.01),
    ("pvt_tiny", 0.5): (1.9, 2.15, 0.005),
    ("pvt_tiny", 1.0): (1.9, 2.97, 0.005),
    ("pvt_small", 0.5): (3.8, 4.29, 0.005),
}
LARGER = {
    ("pvt_medium", 0.5): (6.7, 7.61, 0.04),
    (SWIN, 0.5): (4.5, 5.15, 0.03),
    ("pvt_v2_b2", 0.5): (4.0, 4.51, 0.02),
    ("pvt_v2_b3", 0.5): (6.9, 7.81, 0.08),
    ("pvt_v2_b4", 0.5): (10.1, 11.57, 0.02),
}


class ModelCost(NamedTuple):
    """Multiply-adds per image: of linear maps and convolutions, and of attention's two products."""

    layers: float
    products: float

    @property
    def total(self) -> float:
        return self.layers + self.products

    def overhead(self, plain: ModelCost) -> float:
        return self.total / plain.total - 1

    def paper_overhead(self, plain: ModelCost) -> float:
        return self.layers / plain.total - 1


def cost(model: nn.Module, images: Tensor) -> ModelCost:
    counts, rows = flops_by_operator(model, images), 2 * len(images)  # two operations are one multiply-add
    products = sum(n for name, n in counts.items() if name.startswith(("bmm", "baddbmm", "_scaled_dot_product")))
    return ModelCost((sum(counts.values()) - products) / rows, products / rows)


@functools.cache
def plain_cost(architecture: str) -> ModelCost:
    return cost(TimmModel(architecture).model, torch.zeros(1, 3, 224, 224))


def costs(architecture: str, memory_options: dict[str, Any] | None = None) -> tuple[ModelCost, ModelCost]:
    cached = TimmModel(architecture, memory={"name": "grc", **(memory_options or {})}).model
    return plain_cost(architecture), cost(cached, torch.zeros(1, 3, 224, 224))


@pytest.fixture(autouse=True)
def _timm() -> None:
    library("timm")


def check(architecture: str, ratio: float, numbers: tuple[float, float, float]) -> tuple[ModelCost, ModelCost]:
    plain_published, cached_published, tolerance = numbers
    plain, cached = costs(architecture, {"variant": "released", "ratio": ratio})
    assert plain.total / 1e9 == pytest.approx(plain_published, abs=0.05)  # they print one digit
    assert cached.layers / 1e9 == pytest.approx(cached_published, abs=tolerance + 1e-9)
    assert cached.total / 1e9 > cached_published + 2 * tolerance  # the products of attention are not in their number
    assert cached.overhead(plain) > cached.paper_overhead(plain)
    return plain, cached


@pytest.mark.parametrize("case", PAPER, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_numbers_of_the_paper(case: tuple[str, float]) -> None:
    check(*case, PAPER[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGER, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_numbers_of_the_paper_for_larger_models(case: tuple[str, float]) -> None:
    check(*case, LARGER[case])


def test_vit_small_by_hand() -> None:
    """Per layer: gates 6 C^2 M, queries C^2 N, keys and values 2 C^2 M, projection C^2 N, products 2 N M C,
    convolution 9 (D / C) D on the map; 12 layers, N = M = 197 tokens, C = D / 2."""
    plain, cached = costs(VIT, {"variant": "released"})
    d, c, n = 384, 192, 197
    layers, products = 12 * (10 * c * c * n + 9 * d // c * d * (n - 1)), 12 * 2 * n * n * c
    assert cached.layers - plain.layers == layers
    assert cached.products - plain.products == products
    assert plain.products == 12 * 2 * n * n * d
    assert cached.overhead(plain) == pytest.approx(0.2319, abs=1e-4)  # the paper prints 11.5 %
    assert cached.paper_overhead(plain) == pytest.approx(0.115, abs=1e-3)


def test_kinds_of_operations_add_up_and_inference_costs_less() -> None:
    from cached_transformers.models.pvt import PyramidVisionTransformer

    model, images = PyramidVisionTransformer(64, depths=(1, 1, 1, 1)), torch.randn(3, 3, 64, 64)
    by_operator = flops_by_operator(model, images)
    assert sum(by_operator.values()) == count_flops(model, images)
    assert set(by_operator) <= {"bmm", "addmm", "mm", "convolution"}
    one, three = cost(model, images[:1]), cost(model, images)
    assert one == three  # per image
    assert 2 * 3 * three.total == count_flops(model, images)
    # Folded: queries C^2 N and products 2 N M C per layer, nothing else.
    plain, cached = costs(VIT)
    c, n = 192, 197
    assert cached.layers - plain.layers == 12 * c * c * n
    assert cached.products - plain.products == 12 * 2 * n * n * c
    assert cached.overhead(plain) == pytest.approx(0.058, abs=1e-3)
