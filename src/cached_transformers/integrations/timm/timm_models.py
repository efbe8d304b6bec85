"""Image models by name in timm: PVT (which timm lacks), and timm's models with a cache.

    import cached_transformers.integrations.timm.timm_models
    import timm

    model = timm.create_model("pvt_tiny_grc", num_classes=10, drop_path_rate=0.1)

registers and builds `pvt_tiny`, `pvt_small`, `pvt_medium`, `pvt_large`, and for these and every other name in `HOSTS`
the model with GRC (`<name>_grc`) and with the attention cache that the paper compares it with
(`<name>_attention_cache`), both with the paper's ratio of 0.5 (arXiv:2312.12742). A cached model takes the options of
timm's plain model (`img_size`, `num_classes`, `in_chans`, `features_only`, `drop_path_rate`, ...), and two more:

- `memory_options`: options of the memory, e.g. {"variant": "released", "ratio": 0.25}.
- `img_size` for PVTv2, too, where it sets the size of the caches; images of other sizes are interpolated to it.

`pretrained=True` loads weights of a cached model, from `pretrained_cfg_overlay={"file": ...}` or a folder of timm's;
none are published. Weights of a plain model load in the same ways, and by `checkpoint_path`; the memory is then
untrained, and a warning says so. Published ones: `add_memory(timm.create_model("pvt_tiny", pretrained=True))`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.memories.grc.shared_cache import SharedCache
from cached_transformers.memories.parts.interpolation import interpolate
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights

PVT = {"pvt_tiny": (2, 2, 2, 2), "pvt_small": (3, 4, 6, 3), "pvt_medium": (3, 4, 18, 3), "pvt_large": (3, 8, 27, 3)}
"""Blocks in each stage (arXiv:2102.12122, table 1)."""

HOSTS = (
    *PVT,
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "deit_tiny_patch16_224",
    "deit_small_patch16_224",
    "deit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swin_small_patch4_window7_224",
    "pvt_v2_b0",
    "pvt_v2_b1",
    "pvt_v2_b2",
    "pvt_v2_b3",
    "pvt_v2_b4",
    "pvt_v2_b5",
)
CACHES = ("grc", "attention_cache")
"""Memories, whose name follows that of the host."""

default_cfgs: dict[str, Any] = {}
"""timm's settings of each model: input size, normalisation, source of the weights."""


@functools.cache
def register_models() -> tuple[str, ...]:
    """Register the models in timm; importing this module does so. Returns their names.

    Raises:
        ImportError: timm is not installed.
    """
    models: Any = require("timm.models", extra="vision")
    plain = {
        name: {
            "url": f"https://github.com/whai362/PVT/releases/download/v2/{name}.pth",
            "crop_pct": 0.9,
            "first_conv": "patch_embed1.proj",
            "classifier": "head",
            "license": "apache-2.0",
        }
        for name in PVT
    }
    default_cfgs.update(models.generate_default_cfgs(plain))
    for name in PVT:
        _register(name, functools.partial(_create_pvt, name))
    for host in HOSTS:
        known = models.get_pretrained_cfg(host)
        nowhere = replace(known, url=None, hf_hub_id=None, custom_load=False, tag=None, architecture=None)
        for memory in CACHES:
            name = f"{host}_{memory}"
            default_cfgs.update(models.generate_default_cfgs({name: nowhere}))
            _register(name, functools.partial(_create_cached, name, host, memory))
    return tuple(name for name in default_cfgs)


def _register(name: str, create: Callable[..., nn.Module]) -> None:
    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(pretrained=pretrained, **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"timm.create_model({name!r}); see {__name__}."
    globals()[name] = require("timm.models", extra="vision").register_model(entry)


def _create_pvt(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    model: nn.Module = require("timm.models", extra="vision").build_model_with_cfg(
        PyramidVisionTransformer,
        name,
        pretrained,
        pretrained_filter_fn=published_weights,
        feature_cfg={"out_indices": kwargs.pop("out_indices", (0, 1, 2, 3)), "feature_cls": "getter"},
        **{"depths": PVT[name], **kwargs},
    )
    return model


def _create_cached(
    name: str,
    host: str,
    memory: str,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: Any = None,
    memory_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """The plain model by timm's own function, with its memory, and pretrained weights."""
    models: Any = require("timm.models", extra="vision")
    cfg = models.resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay).to_dict()
    kwargs.pop("pretrained_model_args", None)  # of a saved model; timm has put them among the others
    options = dict(memory_options or {})
    if "pvt_v2" in host and "img_size" in kwargs:
        side = kwargs.pop("img_size")
        options.setdefault("input_size", (side, side) if isinstance(side, int) else tuple(side))

    def build(**more: Any) -> nn.Module:
        plain = models.model_entrypoint(host)(pretrained=False, pretrained_cfg=cfg, **more)
        cached = add_memory(plain, memory, **options)
        cached.register_load_state_dict_pre_hook(_take_plain_weights)
        return cached

    model = build(**kwargs)
    if not pretrained:
        return model
    whole = model
    if kwargs.get("features_only"):  # weights are of the whole model, whose parts have other names here
        kept = {k: v for k, v in kwargs.items() if k not in ("features_only", "out_indices", "feature_cls")}
        whole = build(**{**kept, "num_classes": 0})
    models.load_pretrained(
        whole,
        pretrained_cfg=cfg,
        num_classes=getattr(whole, "num_classes", kwargs.get("num_classes", 1000)),
        in_chans=kwargs.get("in_chans", 3),
        filter_fn=functools.partial(_cached_weights, pvt=host in PVT),
        strict=True,
        cache_dir=cache_dir,
    )
    if whole is not model:
        weights = {_flat(key): value for key, value in whole.state_dict().items()}
        model.load_state_dict({key: weights[_flat(key)] for key in model.state_dict()})
    return model


def _take_plain_weights(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let weights of the plain model leave the memory as it is, with a warning: a hook before weights are loaded."""
    names = [name for name in model.state_dict() if "memory" in name.split(".")]
    if any(prefix + name in state for name in names):
        return
    warnings.warn(
        f"these are weights of a {type(model).__name__} without memory; the memory is untrained, train it",
        stacklevel=2,
    )
    own = model.state_dict()
    state.update({prefix + name: own[name] for name in names})


def _flat(key: str) -> str:
    """A parameter's name, the same in all of timm's feature extractors: model.stages.0.x is stages_0.x."""
    return key.removeprefix("model.").replace(".", "_")


def _cached_weights(state: dict[str, Any], model: nn.Module, pvt: bool) -> dict[str, Any]:
    """A saved cached model's weights, with square caches (and PVT's positions) interpolated to those of `model`."""
    state = published_weights(state, model) if pvt else dict(state.get("model", state))
    for name, module in model.named_modules():
        key = f"{name}.cache_MC"
        if isinstance(module, SharedCache) and key in state:
            state[key] = _resized_cache(state[key], module)
    return state


def _resized_cache(stored_MC: Tensor, cache: SharedCache) -> Tensor:
    cells = stored_MC.shape[0] - cache.prefix
    side = int(max(cells, 0) ** 0.5 + 0.5)
    if stored_MC.shape[0] == cache.length or cache.size is None or side < 1 or side * side != cells:
        return stored_MC  # fits, or the cache itself refuses it with the way out
    square, mode = (side, side), cache.interpolation
    return interpolate(stored_MC[None], cache.length, mode, size=square, to_size=cache.size, prefix=cache.prefix)[0]


try:
    register_models()
except ImportError as error:  # without timm nothing asks for these names
    if error.name not in ("timm", "torchvision"):
        raise
