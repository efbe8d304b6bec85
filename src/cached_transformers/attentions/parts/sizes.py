"""Sizes that a core is made with: what several of them refuse."""

from __future__ import annotations


def head_width(width: int, heads: int) -> int:
    """E, the width of each head.

    Raises:
        ValueError: the heads cannot share the width.
    """
    if heads < 1 or width % heads:
        raise ValueError(f"width={width} must be a positive multiple of heads={heads}, which share it")
    return width // heads
