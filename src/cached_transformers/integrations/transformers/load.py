"""Load models of transformers with the memory they were saved with: `load_pretrained`, Auto classes and pipelines.

`add_memory` notes its arguments in the config, and `save_pretrained` (`hub.py`) stores the memory's weights and caches
among the model's own, and the config inside one of type "cached_transformers": without this package transformers
refuses it by that name, and does not load the host without its memory.

Importing this module registers the type with transformers.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.layers.initial_state import PLACE as INITIAL_STATE
from cached_transformers.models.published import PublishedModel, is_ours
from cached_transformers.models.state_tuning import begin_with

try:
    from transformers.configuration_utils import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
except ImportError:  # of use only with transformers, but imported without it
    PretrainedConfig = object


class CachedConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of a model with a memory.

    Args:
        host_type: its model type in transformers.
        host: the host's own config, as it would be saved, with the arguments of `add_memory` in `cached_transformers`.
    """

    model_type = "cached_transformers"

    def __init__(self, host_type: str = "", host: dict[str, Any] | None = None, **others: Any) -> None:
        self.host_type, self.host = host_type, dict(host or {})
        super().__init__(**others)

    def host_config(self) -> Any:
        """The host's config, of its own class.

        Raises:
            ValueError: transformers does not know the type of the host.
        """
        if self.host_type not in CONFIG_MAPPING:
            raise ValueError(
                f"host_type={self.host_type!r}: this transformers does not know the host of the model with a memory"
            )
        return CONFIG_MAPPING[self.host_type].from_dict(self.host)


if PretrainedConfig is not object:
    AutoConfig.register(CachedConfig.model_type, CachedConfig, exist_ok=True)


def register_models() -> None:
    """Register `CachedConfig` with each of transformers' Auto classes."""
    autos = importlib.import_module("transformers.models.auto.modeling_auto")
    for auto in vars(autos).values():
        if isinstance(auto, type) and getattr(auto, "_model_mapping", None) is not None and hasattr(auto, "register"):
            auto.register(CachedConfig, _maker(auto), exist_ok=True)


def _maker(auto: Any) -> type:
    """The class that an Auto class calls; it returns the host, of the host's own class."""

    class WithMemory:
        config_class = CachedConfig

        @classmethod
        def from_pretrained(cls, name: str, *args: Any, config: CachedConfig, **options: Any) -> Any:
            host = config.host_config()
            return load_pretrained(name, _class_of(auto, host), config=host, **options)

        @classmethod
        def _from_config(cls, config: CachedConfig, **options: Any) -> Any:
            host = config.host_config()
            return add_memory(_class_of(auto, host)._from_config(host, **options), **host.cached_transformers)

    return WithMemory


def _class_of(auto: Any, host: Any) -> Any:
    """The class that an Auto class has for a host; of several the one that was saved."""
    if type(host) not in auto._model_mapping:
        raise ValueError(
            f"{auto.__name__} has no class for a host of type {host.model_type!r}; it was saved by a "
            f"{', '.join(host.architectures or ['model'])}"
        )
    found = auto._model_mapping[type(host)]
    if not isinstance(found, list | tuple):
        return found
    return next((kind for kind in found if kind.__name__ in (host.architectures or ())), found[0])


def load_pretrained(name: str, cls: Any = None, **options: Any) -> Any:
    """Load a model of transformers with its memory; or a model of this package from a folder of its own.

    Args:
        name: folder that `save_pretrained` wrote, or a repository of the Hugging Face hub (of a model of transformers;
            for this package's models, `LanguageModel.from_pretrained`).
        cls: class of the model; None for the one that was saved.
        options: passed on to `cls.from_pretrained` (dtype, device_map, revision, ...).

    Returns:
        The model, in evaluation mode as `from_pretrained` gives it.

    Raises:
        ValueError: no memory was saved with it, or the memory's weights are missing.
    """
    if is_ours(Path(name)):
        return PublishedModel.from_pretrained(name)
    transformers = require("transformers", extra="language")
    keys = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    hub: dict[str, Any] = {key: options[key] for key in keys if key in options}
    config = options.get("config") or transformers.AutoConfig.from_pretrained(name, **hub)
    if isinstance(config, CachedConfig):
        config = config.host_config()
    options["config"] = config
    record = getattr(config, "cached_transformers", None)
    if not record:
        raise ValueError(
            f"{name} was saved without a memory; load it by transformers' from_pretrained, and add one by add_memory"
        )
    if cls is None:
        saved = (getattr(config, "architectures", None) or ["?"])[0]
        cls = getattr(transformers, saved, None)
        if cls is None:
            raise ValueError(f"{name} was saved by a class {saved}, which transformers does not have; give cls=...")
    with _quiet(transformers):  # it would report our weights as unexpected
        model, found = cls.from_pretrained(name, output_loading_info=True, **options)
    plain = set(model.state_dict())
    add_memory(model, **record)
    if any(f"{INITIAL_STATE}." in key for key in found["unexpected_keys"]):
        begin_with(model, model.init_memory_state(1))  # of the shapes of the state to be loaded
    wanted = set(model.state_dict()) - plain
    stored = _read(transformers, name, model, wanted, hub)
    missing = sorted(wanted - stored.keys())
    if missing:
        raise ValueError(
            f"{name} names the memory {record['memory']['name']!r} in its config, but holds no {missing[0]} "
            f"({len(missing)} tensors are missing): it was saved by a model whose memory was not loaded; load it by "
            f"{cls.__name__}.from_pretrained and add a new one by add_memory"
        )
    model.load_state_dict(stored, strict=False)
    _report(name, model, found, wanted)
    return model.eval()


def _report(name: str, model: Any, found: dict[str, Any], wanted: set[str]) -> None:
    """Warn of the host's own weights, as transformers would."""
    ours = {other for key in wanted for other in _spellings(model, key)}
    for what, keys in (
        ("not used by this model", set(found["unexpected_keys"]) - ours),
        ("not stored, and newly initialised", set(found["missing_keys"])),
    ):
        if keys:
            warnings.warn(f"{name}: {', '.join(sorted(keys))}: {what}", stacklevel=3)


def _spellings(model: Any, key: str) -> tuple[str, ...]:
    """Names under which a weight may be stored: with the prefix of the model around the body, or without; and by the
    names of published checkpoints, to which `save_pretrained` goes back (ViT)."""
    prefix, published = f"{model.base_model_prefix}.", _published(model, key)
    return tuple(name for own in (key, published) for name in (own, prefix + own, own.removeprefix(prefix)))


def _published(model: Any, key: str) -> str:
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # this transformers saves by the names that its models have
        return key
    stored: dict[str, Tensor] = revert_weight_conversion(model, {key: torch.empty(0)})
    return next(iter(stored))


def _read(transformers: Any, name: str, model: nn.Module, wanted: set[str], hub: dict[str, Any]) -> dict[str, Tensor]:
    """The wanted tensors, by the names that the model has for them."""
    cached_file = transformers.utils.cached_file
    quiet = {"_raise_exceptions_for_missing_entries": False, **hub}
    index = cached_file(name, "model.safetensors.index.json", **quiet)
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    stored: dict[str, Tensor] = {}
    for part in names:
        path = cached_file(name, part, **quiet)
        if path is None:
            raise ValueError(f"{name} holds no {part}; memories are saved as safetensors, by save_pretrained(folder)")
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            for key in wanted - stored.keys():
                spelling = next((s for s in _spellings(model, key) if s in there), None)
                if spelling is not None:
                    stored[key] = file.get_tensor(spelling)
    return stored


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
