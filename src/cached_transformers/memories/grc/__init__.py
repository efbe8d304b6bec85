"""Gated recurrent cache (arXiv:2312.12742): the equations, the cache, and the two memories made of it."""

from __future__ import annotations

from .gated_recurrent_cache import GatedRecurrentCache
from .grc import GRC, StreamGRC

__all__ = ["GRC", "GatedRecurrentCache", "StreamGRC"]
