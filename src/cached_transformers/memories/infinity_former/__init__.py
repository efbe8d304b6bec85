"""Infinity-former: the memory, and the continuous signal that it keeps."""

from __future__ import annotations

from .infinity_former import InfinityFormer

__all__ = ["InfinityFormer"]
