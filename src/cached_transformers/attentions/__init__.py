"""Attention cores; importing this package registers them all."""

from __future__ import annotations

from .base import Attention, AttentionOutput
from .softmax import SoftmaxAttention

__all__ = ["Attention", "AttentionOutput", "SoftmaxAttention"]
