"""Local attention of the Image Transformer against the definition pair by pair, its limits and its cost."""

from __future__ import annotations

from typing import Any

import pytest
from attentions.agreement import inputs
from attentions.dense import Rule, assert_is_pattern

from cached_transformers.attentions.image_transformer import ImageTransformerAttention

LENGTHS = (1, 3, 8, 13, 24)


def along(causal: bool, block: int, memory: int, prefix: int = 0) -> Rule:
    def sees(h: int, i: int, j: int) -> bool:
        if causal and j > i:
            return False
        if i < prefix or j < prefix:
            return True
        first = (i - prefix) // block * block
        return first - memory <= j - prefix < first + block + (0 if causal else memory)

    return sees


def cells(size: tuple[int, int], block: tuple[int, int], order: str) -> list[tuple[int, int]]:
    """(row, column) of each token of the sequence, by going through the map."""
    raster = [(row, column) for row in range(size[0]) for column in range(size[1])]
    if order == "raster":
        return raster
    return sorted(raster, key=lambda cell: (cell[0] // block[0], cell[1] // block[1], *cell))


def on_map(
    causal: bool, size: tuple[int, int], block: tuple[int, int], memory: tuple[int, int], order: str, prefix: int = 0
) -> Rule:
    cell = cells(size, block, order)

    def sees(h: int, i: int, j: int) -> bool:
        if causal and j > i:
            return False
        if i < prefix or j < prefix:
            return True
        (row, column), (other_row, other_column) = cell[i - prefix], cell[j - prefix]
        top, left = row // block[0] * block[0], column // block[1] * block[1]
        below = 0 if causal else memory[0]
        return (
            top - memory[0] <= other_row < top + block[0] + below
            and left - memory[1] <= other_column < left + block[1] + memory[1]
        )

    return sees


@pytest.mark.parametrize(("block", "memory", "prefix"), [(4, 4, 0), (4, 0, 0), (3, 5, 2), (1, 2, 1), (5, 1, 0)])
def test_along_the_sequence_it_is_the_definition(block: int, memory: int, prefix: int) -> None:
    core = ImageTransformerAttention(block=block, memory=memory, prefix=prefix)
    assert_is_pattern(core, lambda causal: along(causal, block, memory, prefix), LENGTHS)


@pytest.mark.parametrize("order", ["raster", "blocks"])
@pytest.mark.parametrize(
    ("size", "block", "memory", "prefix", "lengths"),
    [
        ((12, 2), (2, 2), (1, 0), 0, LENGTHS),
        ((5, 5), (2, 3), (1, 2), 1, LENGTHS),
        ((2, 13), (1, 2), (1, 1), 0, LENGTHS),
        ((6, 4), (9, 2), (0, 9), 0, LENGTHS),
        ((9, 8), (2, 4), (1, 1), 0, (72, 61)),
        ((9, 8), (3, 2), (1, 1), 0, (72, 61)),
    ],
)
def test_on_the_map_it_is_the_definition(
    order: str, size: Any, block: Any, memory: Any, prefix: int, lengths: Any
) -> None:
    core = ImageTransformerAttention(block=block, memory=memory, size=size, order=order, prefix=prefix)
    assert_is_pattern(core, lambda causal: on_map(causal, size, block, memory, order, prefix), lengths)


def test_a_sequence_longer_than_the_map_is_refused() -> None:
    core = ImageTransformerAttention(block=(2, 2), memory=(1, 1), size=(3, 4))
    with pytest.raises(ValueError, match="13 tokens do not fit the map"):
        core(*inputs(13))
