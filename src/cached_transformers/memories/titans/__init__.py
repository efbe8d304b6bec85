"""Titans: the neural memory, and the two places where it is beside attention."""

from __future__ import annotations

from .titans import Titans

__all__ = ["Titans"]
