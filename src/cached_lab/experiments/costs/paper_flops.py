"""Cost of an image model as counted here, and as in the tables of the GRC paper.

Paper: "Cached Transformers" (arXiv:2312.12742), tables 1 and 10 and the figure of its repository
(annosubmission/GRC-Cache). Its plain models have the numbers of their own papers, multiply-adds of linear maps,
convolutions and attention products (whai362/PVT, classification/get_flops.py, adds the products by a formula). Its
cached models have, to rounding, only the multiply-adds of linear maps and convolutions: counters by module (fvcore,
mmcv) do not see attention products. So the paper's overhead (`ModelCost.paper_overhead`) is too low;
`ModelCost.overhead` compares full counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.integrations.models import TimmModel

from .flops import count_parameters, flops_by_operator

_PRODUCTS = ("bmm", "baddbmm", "_scaled_dot_product")


class ModelCost(NamedTuple):
    """Parameters, and multiply-adds per image of one forward pass in evaluation.

    Attributes:
        layers: of linear maps and convolutions. products: of queries with keys and weights with values.
    """

    parameters: int
    layers: float
    products: float

    @property
    def total(self) -> float:
        """All multiply-adds."""
        return self.layers + self.products

    def overhead(self, plain: ModelCost) -> float:
        """Return the additional cost over the plain model, both counted in full: 0.1 for 10 %."""
        return self.total / plain.total - 1

    def paper_overhead(self, plain: ModelCost) -> float:
        """Return the additional cost as in the paper: the cached model without its attention products."""
        return self.layers / plain.total - 1


def cost(model: nn.Module, images_BCHW: Tensor) -> ModelCost:
    """Count the cost of `model` for images of this size.

    A cache that does not depend on the images (the default) gives constant keys and values, as in inference;
    `flops.count_flops(..., mode="train")` counts its update.
    """
    layers, products = 0, 0
    for operator, flops in flops_by_operator(model, images_BCHW).items():
        if operator.startswith(_PRODUCTS):
            products += flops
        else:
            layers += flops
    rows = 2 * images_BCHW.shape[0]  # two operations are one multiply-add
    return ModelCost(count_parameters(model), layers / rows, products / rows)


def costs(
    architecture: str, memory_options: dict[str, Any] | None = None, side: int = 224
) -> tuple[ModelCost, ModelCost]:
    """Return the cost of a plain model of timm, or of ours in timm, and of the same with GRC.

    Args:
        architecture: one of `integrations.timm.models.HOSTS`.
        memory_options: of GRC; the paper's tables are explained by {"variant": "released"}.
        side: of the square image, in pixels.
    """
    plain = TimmModel(architecture).model
    cached = TimmModel(architecture, memory={"name": "grc", **(memory_options or {})}).model
    image = torch.zeros(1, 3, side, side)
    return cost(plain, image), cost(cached, image)
