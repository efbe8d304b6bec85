"""Layers: attention with a memory, blocks, position encodings."""

from __future__ import annotations

from cached_transformers.seam.positions import Positions, make_positions

from .attention import Attended, SelfAttention
from .block import Block, ModelOutput, Stack, StackState
from .feed_forward import FeedForward
from .switch import SwitchFeedForward

__all__ = [
    "Attended",
    "Block",
    "FeedForward",
    "ModelOutput",
    "Positions",
    "SelfAttention",
    "Stack",
    "StackState",
    "SwitchFeedForward",
    "make_positions",
]
