"""Image models by name in timm: PVT, which timm lacks (arXiv:2102.12122), and timm's models with a cache.

    import cached_transformers.integrations.timm.timm_models
    import timm

    model = timm.create_model("pvt_tiny_grc", num_classes=10, drop_path_rate=0.1)

registers `pvt_tiny`, `pvt_small`, `pvt_medium` and `pvt_large`, with the weights that their authors published, and for
these and every other name in `HOSTS` the model with GRC (`<name>_grc`) and with the attention cache that the paper
compares it with (`<name>_attention_cache`), both with the paper's ratio of 0.5 (arXiv:2312.12742). A cached model takes
the options of timm's plain model, and `memory_options`, e.g. {"variant": "released", "ratio": 0.25}; `pretrained=True`
loads the plain model's weights around an untrained memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights

PVT = {"pvt_tiny": (2, 2, 2, 2), "pvt_small": (3, 4, 6, 3), "pvt_medium": (3, 4, 18, 3), "pvt_large": (3, 8, 27, 3)}
"""Blocks in each stage (table 1 of the paper)."""
HOSTS = (
    *PVT,
    *(f"{kind}_{size}_patch16_224" for kind in ("vit", "deit") for size in ("tiny", "small", "base")),
    *(f"swin_{size}_patch4_window7_224" for size in ("tiny", "small")),
    *(f"pvt_v2_b{size}" for size in range(6)),
)
CACHES = ("grc", "attention_cache")
"""Memories, whose name follows that of the host."""

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
        _register(models, name, functools.partial(_create_pvt, models, name))
    for host in HOSTS:
        for memory in CACHES:
            name = f"{host}_{memory}"
            plain = replace(models.get_pretrained_cfg(host), tag=None, architecture=None)
            default_cfgs.update(models.generate_default_cfgs({name: plain}))
            _register(models, name, functools.partial(_create_cached, models, host, memory))


def _create_pvt(models: Any, name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    features = {"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"}
    options = {"pretrained_filter_fn": published_weights, "feature_cfg": features, "depths": PVT[name], **kwargs}
    return models.build_model_with_cfg(PyramidVisionTransformer, name, pretrained, **options)  # type: ignore[no-any-return]


def _create_cached(
    models: Any, host: str, memory: str, *, memory_options: dict[str, Any] | None = None, **kwargs: Any
) -> nn.Module:
    """The plain model by timm's own function, with a memory; `img_size` of PVTv2 is the size of the caches' maps."""
    options = dict(memory_options or {})
    if "pvt_v2" in host and "img_size" in kwargs:
        side = kwargs.pop("img_size")
        options.setdefault("input_size", (side, side) if isinstance(side, int) else tuple(side))
    return add_memory(models.model_entrypoint(host)(**kwargs), memory, **options)


def _register(models: Any, name: str, create: Callable[..., nn.Module]) -> None:
    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(pretrained=pretrained, **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"timm.create_model({name!r}); see {__name__}."
    globals()[name] = models.register_model(entry)


try:
    register_models()
except ImportError as error:  # without timm nothing asks for these names
    if error.name not in ("timm", "torchvision"):
        raise
