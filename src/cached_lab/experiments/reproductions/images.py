"""Common rows of the tables of image classifiers: backbones plain and cached, with controls.

The paper's cached models differ from the plain ones in a cache, a positional convolution in every layer (in the
released code only) and more operations. The controls are the plain backbone with the same convolution, and the plain
backbone with feed-forward layers widened to the training cost of the cached one. GRC comes in both forms, `released`
and `paper` (Algorithm 1, without the convolution).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

    def plain(self) -> TableRow:
        """No memory."""
        return self.row("", None)

    def released(self) -> TableRow:
        """GRC as in the released code."""
        against = (self.name, f"{self.name}-convolution", f"{self.name}-wider")
        return self.row("released", {"variant": "released"}, against=against)

    def algorithm(self) -> TableRow:
        """GRC as in the paper's text: no convolution."""
        return self.row("paper", {"variant": "algorithm1"}, against=(self.name,))

    def convolution(self) -> TableRow:
        """No cache, only the convolution."""
        return self.row("convolution", {"name": "convolution"}, against=(self.name,))

    def wider(self) -> TableRow:
        """No memory, and feed-forward layers widened to the cost of the cached row."""
        return self.row("wider", None, matched=f"{self.name}-released")

    def rows(self) -> list[TableRow]:
        """Return all rows."""
        return [self.plain(), self.released(), self.algorithm(), self.convolution(), self.wider()]


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


def image_table(
    summary: str,
    rows: Callable[[str], Sequence[TableRow]],
    recipes: Mapping[str, str],
    files: Mapping[str, str] = FILES,
) -> Reproduction:
    """Return a table of image classifiers, with controls at equal operations and scores by cache mode."""
    return Reproduction(summary=summary, recipes=recipes, files=files, paper=rows, protocol=protocol, cache_use=True)


def section_words(section: Mapping[str, Any]) -> str:
    """Write a section of a model with its options, as `name(option=value)`."""
    shown = [f"{key}={value}" for key, value in section.items() if key != "name"]
    return f"{section['name']}({', '.join(shown)})" if shown else str(section["name"])


def _rounded(value: Any) -> str:
    if isinstance(value, Sequence):
        return f"[{', '.join(_rounded(item) for item in value)}]"
    return f"{value:.4g}"
