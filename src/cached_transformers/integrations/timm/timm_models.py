"""PVT by name in timm, which lacks it (arXiv:2102.12122).

    import cached_transformers.integrations.timm.timm_models
    import timm

    model = add_memory(timm.create_model("pvt_tiny", num_classes=10, drop_path_rate=0.1), "grc")

registers `pvt_tiny`, `pvt_small`, `pvt_medium` and `pvt_large`, with the weights that their authors published.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from cached_transformers.extras import require
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights

PVT = {"pvt_tiny": (2, 2, 2, 2), "pvt_small": (3, 4, 6, 3), "pvt_medium": (3, 4, 18, 3), "pvt_large": (3, 8, 27, 3)}
"""Blocks in each stage (table 1 of the paper)."""

default_cfgs: dict[str, Any] = {}
"""timm's settings of each model: input size, normalisation, source of the weights."""


@functools.cache
def register_models() -> None:
    """Register the models in timm; importing this module does so.

    Raises:
        ImportError: timm is not installed.
    """
    models: Any = require("timm.models", extra="vision")
    for name in PVT:
        url = f"https://github.com/whai362/PVT/releases/download/v2/{name}.pth"
        cfg = {"url": url, "crop_pct": 0.9, "first_conv": "patch_embed1.proj", "classifier": "head"}
        default_cfgs.update(models.generate_default_cfgs({name: {**cfg, "license": "apache-2.0"}}))
        _register(models, name)


def _register(models: Any, name: str) -> None:
    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        model: nn.Module = models.build_model_with_cfg(
            PyramidVisionTransformer,
            name,
            pretrained,
            pretrained_filter_fn=published_weights,
            feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
            **{"depths": PVT[name], **kwargs},
        )
        return model

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"timm.create_model({name!r}); see {__name__}."
    globals()[name] = models.register_model(entry)


try:
    register_models()
except ImportError as error:  # without timm nothing asks for these names
    if error.name not in ("timm", "torchvision"):
        raise
