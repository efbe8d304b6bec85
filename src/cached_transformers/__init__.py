"""cached-transformers: memory for PyTorch transformers, in your model or in ours.

Names are imported on first use, so that the command line starts quickly.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .import_hooks import on_import

if TYPE_CHECKING:
    from .integrations.adapters import add_memory, register_adapter, remove_memory
    from .integrations.memory_files import load_memory, save_memory
    from .integrations.models import create_model
    from .integrations.replace_attention import replace_attention, restore_attention
    from .integrations.transformers.export import export_cache
    from .integrations.transformers.load import load_pretrained
    from .layers.grc_attention import GRCAttention
    from .loops.curriculum import Curriculum
    from .loops.distillation import Teacher
    from .loops.replay import ReplayLoop
    from .loops.segments import SegmentLoop
    from .loops.stateful import CarriedState
    from .loops.streaming import read_stream
    from .memories import LayerMemory, ModelMemory, create_memory
    from .memories.grc import GatedRecurrentCache
    from .memories.grc.shared_cache import commit_caches, hold_caches, reset_caches, resize_caches, shuffle_caches
    from .memories.grc.shared_cache_memory import fold, unfold
    from .models.generation import generate
    from .models.session import Session, compact
    from .models.state_tuning import load_initial_state, remove_initial_state, save_initial_state, tune_initial_state
    from .registry import ATTENTIONS, MEMORIES, MODELS

__version__ = "0.1.0"

_NAMES = {
    "integrations.adapters": ("add_memory", "register_adapter", "remove_memory"),
    "integrations.memory_files": ("load_memory", "save_memory"),
    "integrations.models": ("create_model",),
    "integrations.replace_attention": ("replace_attention", "restore_attention"),
    "integrations.transformers.export": ("export_cache",),
    "integrations.transformers.load": ("load_pretrained",),
    "layers.grc_attention": ("GRCAttention",),
    "loops.curriculum": ("Curriculum",),
    "loops.distillation": ("Teacher",),
    "loops.replay": ("ReplayLoop",),
    "loops.segments": ("SegmentLoop",),
    "loops.stateful": ("CarriedState",),
    "loops.streaming": ("read_stream",),
    "memories": ("LayerMemory", "ModelMemory", "create_memory"),
    "memories.grc": ("GatedRecurrentCache",),
    "memories.grc.shared_cache_memory": ("fold", "unfold"),
    "memories.grc.shared_cache": (
        *("commit_caches", "hold_caches", "reset_caches", "resize_caches", "shuffle_caches"),
    ),
    "models.generation": ("generate",),
    "models.session": ("Session", "compact"),
    "models.state_tuning": (
        *("load_initial_state", "remove_initial_state", "save_initial_state", "tune_initial_state"),
    ),
}
_REGISTRIES = {"ATTENTIONS": "attentions", "MEMORIES": "memories", "MODELS": "integrations.models"}
"""Registries, and what fills each."""
_ROOMS = ("attentions", "integrations", "interfaces", "layers", "loops", "memories", "models", "registry", "state")
"""Packages and modules that `import cached_transformers` alone gives, too."""
_PLACES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ATTENTIONS",
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
    "Session",
    "Teacher",
    "__version__",
    "add_memory",
    "commit_caches",
    "compact",
    "create_memory",
    "create_model",
    "export_cache",
    "fold",
    "generate",
    "hold_caches",
    "load_initial_state",
    "load_memory",
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
    "save_memory",
    "shuffle_caches",
    "tune_initial_state",
    "unfold",
]


def _later(module: str, function: str | None = None) -> Callable[[], object]:
    """Return a function that imports a module of this package and calls a function of it."""

    def act() -> object:
        found = importlib.import_module(f"{__name__}.{module}")
        return None if function is None else getattr(found, function)()

    return act


on_import(
    "torchvision",
    before=_later("torchvision_guard", "prepare_torchvision"),
    after=_later("torchvision_guard", "ensure_torchvision"),
)
on_import("transformers.configuration_utils", after=_later("integrations.hub", "patch_configs"))
on_import("transformers.modeling_utils", after=_later("integrations.transformers.load", "patch_models"))
on_import("peft.peft_model", after=_later("integrations.peft_models", "patch_adapters"))


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
