"""Block retrieval: the memory, the scores of blocks, and a store of blocks that grows."""

from __future__ import annotations

from .block_retrieval import BlockRetrieval

__all__ = ["BlockRetrieval"]
