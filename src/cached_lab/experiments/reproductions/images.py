"""Tables 1, 2, 8 and 10: image classifiers, each backbone plain, cached, and with controls that the paper lacks.

The paper's cached models differ from the plain ones in a cache, a positional convolution in every layer (in the
released code only) and more operations. The controls are the plain backbone with the same convolution, and the plain
backbone with feed-forward layers widened to the training cost of the cached one. GRC comes in both forms, `released`
and `paper` (Algorithm 1, without the convolution).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cached_lab.training.config import RunConfig

from .base import Reproduction, TableRow


@dataclass(frozen=True)
class Backbone:
    """An image model without its memory.

    Attributes:
        name: of its plain row, and the prefix of its other rows' names.
        recipe: its own recipe; None for the table's.
        options: model options beside the recipe's: the width of feed-forward layers, for a wider control.
    """

    name: str
    recipe: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def row(self, suffix: str, memory: Mapping[str, Any] | None, **facts: Any) -> TableRow:
        """Return a row of this backbone.

        Args:
            suffix: of its name; empty for the plain one.
            memory: None, or changes to the recipe's memory section; with a "name", another memory with the recipe's
                ratio.
        """

        def model(recipe: RunConfig) -> dict[str, Any]:
            given = grc_options(recipe)
            section = {**self.options, **recipe.model}
            if memory is None:
                return {**section, "memory": None}
            if "name" in memory:
                return {**section, "memory": {"ratio": given.get("ratio", 0.5), **memory}}
            return {**section, "memory": {**given, **memory}}

        name = f"{self.name}-{suffix}" if suffix else self.name
        return TableRow(name, model, backbone=self.name, recipe=self.recipe, **facts)

    def rows(self) -> list[TableRow]:
        """Return the plain backbone, GRC as in the released code and as in the paper's text, and both controls."""
        name = self.name
        return [
            self.row("", None),
            self.row("released", {"variant": "released"}, against=(name, f"{name}-convolution", f"{name}-wider")),
            self.row("paper", {"variant": "algorithm1"}, against=(name,)),
            self.row("convolution", {"name": "convolution"}, against=(name,)),
            self.row("wider", None, matched=f"{name}-released"),
        ]


def grc_options(recipe: RunConfig, rows_do: str = "set its variant or take it out") -> dict[str, Any]:
    """Return the memory section of the recipe.

    Args:
        rows_do: the change that the rows make to it, for the message.

    Raises:
        ValueError: it is not GRC with its options.
    """
    memory = recipe.model.get("memory")
    if not isinstance(memory, Mapping) or memory.get("name") != "grc":
        raise ValueError(
            f"model.memory={memory!r} must be GRC with its options; rows {rows_do}, so change "
            "model.memory.ratio and the like only"
        )
    return dict(memory)


SMALL = {"vit": Backbone("vit"), "pvt_v2": Backbone("pvt_v2", recipe="table1_small_pvt_v2")}
"""Backbones of the small scale: the vision transformer of the table's recipe, and a PVTv2 with its own recipe."""

_PVT = {"mlp_ratios": [8, 8, 4, 4]}
PAPER = {
    "vit_small": Backbone("vit_small", recipe="imagenet_vit_small_grc", options={"mlp_ratio": 4.0}),
    "pvt_tiny": Backbone("pvt_tiny", recipe="imagenet_pvt_tiny_grc", options=_PVT),
    "pvt_small": Backbone("pvt_small", recipe="imagenet_pvt_small_grc", options=_PVT),
    "pvt_medium": Backbone("pvt_medium", recipe="imagenet_pvt_medium_grc", options=_PVT),
    "swin_tiny": Backbone("swin_tiny", recipe="imagenet_swin_tiny_grc", options={"mlp_ratio": 4.0}),
    "pvt_v2_b2": Backbone("pvt_v2_b2", recipe="imagenet_pvt_v2_b2_grc", options=_PVT),
    "pvt_v2_b3": Backbone("pvt_v2_b3", recipe="imagenet_pvt_v2_b3_grc", options=_PVT),
    "pvt_v2_b4": Backbone("pvt_v2_b4", recipe="imagenet_pvt_v2_b4_grc", options=_PVT),
}
"""Backbones of the paper's scale, each with its recipe for ImageNet."""
FILES = {"small": "CIFAR-10 (binary version)", "paper": "ImageNet-1k"}
"""Content of the data folder at each scale."""


def protocol(config: RunConfig) -> str:
    """Describe a row in a line: model, memory with its options, feed-forward."""
    model = config.model
    parts = [str(model.get("architecture", model["name"]))]
    if model.get("memory") is not None:
        parts.append(section_words(model["memory"]))
    widths = [f"{key} {_rounded(model[key])}" for key in ("feed_forward", "mlp_ratio", "mlp_ratios") if key in model]
    return ", ".join([" + ".join(parts), *widths])


def section_words(section: Mapping[str, Any]) -> str:
    """Write a section of a model with its options, as `name(option=value)`."""
    shown = [f"{key}={value}" for key, value in section.items() if key != "name"]
    return f"{section['name']}({', '.join(shown)})" if shown else str(section["name"])


def _rounded(value: Any) -> str:
    if isinstance(value, Sequence):
        return f"[{', '.join(_rounded(item) for item in value)}]"
    return f"{value:.4g}"


def attention_rows(backbone: Backbone) -> list[TableRow]:
    """Return the rows of Table 2: those of `Backbone.rows`, and an attention-based cache "as in Transformer-XL".

    There is no code for the paper's, so there are two interpretations (`memories/attention_cache.py`): `attention`, a
    cache whose slots attend to the tokens, and `store`, the unchanged tokens of the last step. Both lack the released
    code's convolution, so `paper` is compared with them.
    """
    name = backbone.name
    plain, released, paper, *controls = backbone.rows()
    others = [
        backbone.row(update, {"name": "attention_cache", "update": update}, against=(name,))
        for update in ("attention", "store")
    ]
    paper = dataclasses.replace(paper, against=(name, *(row.name for row in others)))
    return [plain, *others, paper, released, *controls]


def ratio_rows(backbone: Backbone) -> list[TableRow]:
    """Return the rows of Table 10: the plain backbone, and for each share of the channels GRC and both controls.

    In the released code the positional convolution has as many groups as the cache has channels, so the smallest cache
    comes with the largest convolution; each share therefore has its own controls.
    """
    rows = [backbone.row("", None)]
    for ratio in (0.125, 0.25, 0.5, 1.0):
        share, convolution, wider = f"r={ratio:g}", f"r={ratio:g}-convolution", f"r={ratio:g}-wider"
        against = (backbone.name, *(f"{backbone.name}-{control}" for control in (convolution, wider)))
        rows += [
            backbone.row(share, {"variant": "released", "ratio": ratio}, against=against),
            backbone.row(convolution, {"name": "convolution", "ratio": ratio}),
            backbone.row(wider, None, matched=f"{backbone.name}-{share}"),
        ]
    return rows


def _table(
    summary: str, small: Sequence[TableRow], paper: Sequence[TableRow], recipes: tuple[str, str], files: Any = FILES
) -> Reproduction:
    rows, by_scale = {"small": small, "paper": paper}, dict(zip(("small", "paper"), recipes, strict=True))
    return Reproduction(summary, by_scale, files, rows.__getitem__, protocol, cache_use=True)


TABLES = {
    "table1": _table(
        "images: backbones plain, with GRC, with only its convolution, and plain at equal operations",
        [row for backbone in SMALL.values() for row in backbone.rows()],
        [row for backbone in PAPER.values() for row in backbone.rows()],
        ("table1_small", "imagenet_vit_small_grc"),
    ),
    "table2": _table(
        "images: no cache, an attention-based cache (as in Transformer-XL), and GRC, in a vision transformer",
        attention_rows(SMALL["vit"]),
        attention_rows(PAPER["vit_small"]),
        ("table2_small", "imagenet_vit_small_grc"),
    ),
    # The cache of a shifted-window layer is one window, the mean over all windows of all images.
    "table8": _table(
        "images, many classes: Swin plain, with GRC, with only its convolution, and plain at equal operations",
        Backbone("swin").rows(),
        Backbone("swin_tiny", recipe="imagenet22k_swin_tiny_grc", options={"mlp_ratio": 4.0}).rows(),
        ("table8_small", "imagenet22k_swin_tiny_grc"),
        {"small": "Tiny-ImageNet (64 or 32 pixels)", "paper": "ImageNet-22k (a tar for each class)"},
    ),
    # A PVT of the small scale, the paper's backbone, hardly learns.
    "table10": _table(
        "images: the share of the channels that the cache has, from none to all",
        ratio_rows(Backbone("pvt_v2")),
        ratio_rows(PAPER["pvt_tiny"]),
        ("table10_small", "imagenet_pvt_tiny_grc"),
    ),
}
"""Tables by name. The paper trains each pair once, on ImageNet (Table 8: ImageNet-22k, then fine-tuned on ImageNet-1k
by `imagenet22k_swin_tiny_grc_finetune`). The small scale is CIFAR-10 or Tiny-ImageNet with small models."""
