"""cached-transformers: a memory for transformers, one that you have or one of ours."""

from __future__ import annotations

from .integrations.adapters import add_memory, register_adapter, remove_memory
from .layers.grc_attention import GRCAttention
from .memories import create_memory
from .memories.cached_attention import fold, unfold
from .memories.gated_recurrent_cache import GatedRecurrentCache
from .memories.shared_cache import (
    commit_caches,
    hold_caches,
    reset_caches,
    resize_caches,
    shuffle_caches,
)
from .models import create_model
from .registry import ATTENTIONS, DATASETS, MEMORIES, MODELS

__version__ = "0.1.0"
__all__ = [
    "ATTENTIONS",
    "DATASETS",
    "MEMORIES",
    "MODELS",
    "GRCAttention",
    "GatedRecurrentCache",
    "__version__",
    "add_memory",
    "commit_caches",
    "create_memory",
    "create_model",
    "fold",
    "hold_caches",
    "register_adapter",
    "remove_memory",
    "reset_caches",
    "resize_caches",
    "shuffle_caches",
    "unfold",
]
