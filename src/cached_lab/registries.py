"""Registries of the lab, beside those of the library in `cached_transformers.registry`."""

from __future__ import annotations

from typing import Any

from cached_transformers.registry import ATTENTIONS, MEMORIES, MODELS, Registry

DATASETS: Registry[Any] = Registry("dataset")
PROBES: Registry[Any] = Registry("probe task")
OBJECTIVES: Registry[Any] = Registry("objective")

LISTED: dict[str, Registry[Any]] = {
    "memories": MEMORIES,
    "attentions": ATTENTIONS,
    "models": MODELS,
    "datasets": DATASETS,
    "objectives": OBJECTIVES,
    "probes": PROBES,
}
"""Registries that `cached list` and `cached explain` read, by the word of the command line."""
