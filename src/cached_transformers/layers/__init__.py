"""Layers: attention with a memory, blocks, stacks."""

from __future__ import annotations

from cached_transformers.positions import Positions, make_positions

from .attention import Attended, SelfAttention
from .block import Block
from .feed_forward import FeedForward
from .stack import ModelOutput, Stack, StackState
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
