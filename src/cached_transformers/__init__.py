"""cached-transformers: a memory for transformers, one that you have or one of ours.

Names are imported when they are asked for, so that the command line does not wait for what it does not use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .import_hooks import on_import

if TYPE_CHECKING:
    from .integrations.adapters import add_memory, register_adapter, remove_memory
    from .integrations.exchange import replace_attention, restore_attention
    from .integrations.transformers.load import load_pretrained
    from .layers.grc_attention import GRCAttention
    from .memories import LayerMemory, ModelMemory, create_memory
    from .memories.grc import GatedRecurrentCache
    from .memories.parts.shared_cache import commit_caches, hold_caches, reset_caches, resize_caches, shuffle_caches
    from .memories.parts.shared_cache_memory import fold, unfold
    from .models.generation import generate
    from .models.session import Session
    from .models.tuned_state import load_initial_state, remove_initial_state, save_initial_state, tune_initial_state
    from .registry import ATTENTIONS, DATASETS, MEMORIES, MODELS
    from .tasks import create_dataset, create_model
    from .tasks.language.streaming import read_stream
    from .training.carried import CarriedState
    from .training.curriculum import Curriculum
    from .training.pipeline import SegmentPipeline
    from .training.replay import ReplayLoop
    from .training.segments import SegmentLoop

__version__ = "0.1.0"

_NAMES = {
    "integrations.adapters": ("add_memory", "register_adapter", "remove_memory"),
    "integrations.exchange": ("replace_attention", "restore_attention"),
    "integrations.transformers.load": ("load_pretrained",),
    "layers.grc_attention": ("GRCAttention",),
    "memories": ("LayerMemory", "ModelMemory", "create_memory"),
    "memories.grc": ("GatedRecurrentCache",),
    "memories.parts.shared_cache_memory": ("fold", "unfold"),
    "memories.parts.shared_cache": (
        *("commit_caches", "hold_caches", "reset_caches", "resize_caches", "shuffle_caches"),
    ),
    "models.generation": ("generate",),
    "models.session": ("Session",),
    "models.tuned_state": (
        *("load_initial_state", "remove_initial_state", "save_initial_state", "tune_initial_state"),
    ),
    "tasks": ("create_dataset", "create_model"),
    "tasks.language.streaming": ("read_stream",),
    "training.carried": ("CarriedState",),
    "training.curriculum": ("Curriculum",),
    "training.pipeline": ("SegmentPipeline",),
    "training.replay": ("ReplayLoop",),
    "training.segments": ("SegmentLoop",),
}
_REGISTRIES = {"ATTENTIONS": "attentions", "DATASETS": "tasks", "MEMORIES": "memories", "MODELS": "tasks"}
"""Registries, and what fills each."""
_ROOMS = (
    *("attentions", "data", "experiments", "integrations", "layers", "memories", "models", "registry", "seam", "state"),
    *("tasks", "training"),
)
"""Packages and modules that `import cached_transformers` alone gives, too."""
_PLACES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ATTENTIONS",
    "DATASETS",
    "MEMORIES",
    "MODELS",
    "CarriedState",
    "Curriculum",
    "GRCAttention",
    "GatedRecurrentCache",
    "LayerMemory",
    "ModelMemory",
    "ReplayLoop",
    "SegmentLoop",
    "SegmentPipeline",
    "Session",
    "__version__",
    "add_memory",
    "commit_caches",
    "create_dataset",
    "create_memory",
    "create_model",
    "fold",
    "generate",
    "hold_caches",
    "load_initial_state",
    "load_pretrained",
    "read_stream",
    "register_adapter",
    "remove_initial_state",
    "remove_memory",
    "replace_attention",
    "reset_caches",
    "resize_caches",
    "restore_attention",
    "save_initial_state",
    "shuffle_caches",
    "tune_initial_state",
    "unfold",
]


def _later(module: str, function: str | None = None) -> Callable[[], object]:
    """Imports a module of ours when it is called, and calls a function of it."""

    def act() -> object:
        found = importlib.import_module(f"{__name__}.{module}")
        return None if function is None else getattr(found, function)()

    return act


on_import(
    "torchvision",
    before=_later("torchvision_guard", "prepare_torchvision"),
    after=_later("torchvision_guard", "ensure_torchvision"),
)
_AUTO = "transformers.models.auto"
on_import(f"{_AUTO}.configuration_auto", after=_later("integrations.transformers.config"))
on_import(f"{_AUTO}.modeling_auto", after=_later("integrations.transformers.auto", "register_models"))


def __getattr__(name: str) -> Any:
    if name in _REGISTRIES:
        importlib.import_module(f"{__name__}.{_REGISTRIES[name]}")
        value = getattr(importlib.import_module(f"{__name__}.registry"), name)
    elif name in _ROOMS:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _PLACES:
        value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
