"""Cache-based recurrent transformer network: the memory, its store of segments, and the summaries that address them."""

from __future__ import annotations

from .crtn import CRTN

__all__ = ["CRTN"]
