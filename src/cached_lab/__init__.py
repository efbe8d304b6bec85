"""Experiments with cached-transformers: data, training, probes, reports and the `cached` command.

The library `cached_transformers` is stable; this package may change with any release. Its dependencies come with
`pip install "cached-transformers[lab]"`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .registries import DATASETS
    from .tasks import create_dataset

_NAMES = {"DATASETS": "tasks", "create_dataset": "tasks"}
_ROOMS = ("cli", "data", "experiments", "registries", "tasks", "training")

__all__ = ["DATASETS", "create_dataset"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
