"""Attention cores; importing this package imports every file in it, which registers what the file defines."""

from __future__ import annotations

import importlib
import pkgutil

from .base import Attention, AttentionOutput
from .softmax import SoftmaxAttention

__all__ = ["Attention", "AttentionOutput", "SoftmaxAttention"]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
