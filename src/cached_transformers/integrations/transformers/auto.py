"""transformers' Auto classes and pipelines load what `save_pretrained` of a model with a memory wrote."""

from __future__ import annotations

import importlib
from typing import Any

from cached_transformers.integrations.adapters import add_memory

from .config import CachedConfig
from .load import load_pretrained


def register_models() -> None:
    """Tell each of transformers' Auto classes how such a model is made."""
    autos = importlib.import_module("transformers.models.auto.modeling_auto")
    for auto in vars(autos).values():
        if isinstance(auto, type) and getattr(auto, "_model_mapping", None) is not None and hasattr(auto, "register"):
            auto.register(CachedConfig, _maker(auto), exist_ok=True)


def _maker(auto: Any) -> type:
    """What an Auto class calls; it returns the host, of the host's own class."""

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
