"""A cache whose map is coarser than that of the tokens: squares of them share a slot.

The paper (arXiv:2312.12742) takes a slot for every token. What a GRC cache costs, its gates, its keys and the attention
over it, grows with the slots, so that a map half as high and half as wide costs about a quarter.
"""

from __future__ import annotations

from collections.abc import Sequence

from cached_transformers.checks import at_least_one
from cached_transformers.memories.parts.shared_cache import check_size


def coarser_map(
    length: int, size: Sequence[int] | None, prefix: int, stride: int
) -> tuple[int, tuple[int, int] | None]:
    """Slots and (height, width) of their map, each slot for stride x stride tokens of a map of `size`.

    Args:
        length: tokens, of which the first `prefix` stand before the map and keep slots of their own.

    Raises:
        ValueError: the stride is less than 1, or there is no map whose tokens could share slots.
    """
    at_least_one("; 1 is a slot for every token", stride=stride)
    of_tokens = None if size is None else (int(size[0]), int(size[1]))
    if stride == 1:
        return length, of_tokens
    if of_tokens is None:
        raise ValueError(
            f"stride={stride} lets squares of tokens share a slot, and nothing says that these tokens are a map; give "
            "its size=(height, width), or where they are none fewer slots by length"
        )
    check_size(length, of_tokens, prefix)
    height, width = (-(-side // stride) for side in of_tokens)
    return height * width + prefix, (height, width)


def coarser_reduction(ratio: int, stride: int) -> int:
    """What is left of a spatial reduction by `ratio` for the keys and values of a cache made coarser by `stride`."""
    return max(ratio // max(stride, 1), 1)
