"""Gated recurrent cache (arXiv:2312.12742): the equations, the cache, and its two memories."""

from __future__ import annotations

from .grc import GRC, GatedRecurrentCache
from .stream import StreamGRC

__all__ = ["GRC", "GatedRecurrentCache", "StreamGRC"]
