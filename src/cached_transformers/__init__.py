"""cached-transformers: a memory for transformers, one that you have or one of ours."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
