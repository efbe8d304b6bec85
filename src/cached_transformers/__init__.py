"""cached-transformers: a memory for transformers, one that you have or one of ours."""

from __future__ import annotations

from .data import create_dataset
from .integrations.adapters import add_memory, register_adapter, remove_memory
from .integrations.exchange import replace_attention, restore_attention
from .integrations.load import load_pretrained
from .layers.grc_attention import GRCAttention
from .memories import LayerMemory, ModelMemory, create_memory
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
from .models.generation import generate
from .registry import ATTENTIONS, DATASETS, MEMORIES, MODELS
from .training.curriculum import Curriculum
from .training.replay import ReplayLoop
from .training.segments import SegmentLoop
from .training.streaming import read_stream

__version__ = "0.1.0"
__all__ = [
    "ATTENTIONS",
    "DATASETS",
    "MEMORIES",
    "MODELS",
    "Curriculum",
    "GRCAttention",
    "GatedRecurrentCache",
    "LayerMemory",
    "ModelMemory",
    "ReplayLoop",
    "SegmentLoop",
    "__version__",
    "add_memory",
    "commit_caches",
    "create_dataset",
    "create_memory",
    "create_model",
    "fold",
    "generate",
    "hold_caches",
    "load_pretrained",
    "read_stream",
    "register_adapter",
    "remove_memory",
    "replace_attention",
    "reset_caches",
    "resize_caches",
    "restore_attention",
    "shuffle_caches",
    "unfold",
]
