"""The recipes of published language models build models of the published size (without memory for their weights)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from cached_lab.resources import recipes_folder
from cached_transformers import create_model

WORDS = 267_735
"""Words of WikiText-103's training split, with <unk>, and the end of a line."""


def build(recipe: str) -> Any:
    section = yaml.safe_load((recipes_folder() / f"{recipe}.yaml").read_text(encoding="utf-8"))["model"]
    with torch.device("meta"):
        return create_model(**section, vocabulary=WORDS)


def count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layer(d: int, f: int) -> int:
    """q, k, v, W_r, W_o without biases; two linear maps with; two norms."""
    return 5 * d * d + 2 * d * f + f + d + 4 * d


def test_transformer_xl_base_has_the_151107538_parameters_of_its_published_log() -> None:
    model = build("lm_wikitext103_xl_base")
    assert count(model) == 151_107_538
    # That log counts the layers apart; it leaves out u and v, 2 x 410 numbers that all layers share.
    assert count(model.stack) - 2 * 410 == 41_066_400 == 16 * layer(410, 2100)


def test_transformer_xl_large_has_285_million_parameters() -> None:
    """No exact number is published; this one follows from the sizes in the published script.

    The 257M of the paper's table are neither all of them nor those of the layers; 16 layers would give 257.9M.
    """
    model = build("lm_wikitext103_xl_large")
    sizes = {1024: 20_000, 256: 20_000, 64: 160_000, 16: WORDS - 200_000}
    words = sum(width * words for width, words in sizes.items())
    projections = sum(1024 * width for width in sizes)
    softmax = WORDS + 3 * 1024 + 3 + 1024 * 1024  # biases, the clusters' own rows, the one projection that is not tied
    layers = 18 * (layer(1024, 4096) + 2 * 1024)  # with u and v of each
    assert count(model) == words + projections + softmax + layers == 285_205_322
    assert layers == count(model.stack) == 245_569_536
    assert words + projections + softmax + layers * 16 // 18 == 257_919_818


@pytest.mark.parametrize("recipe", ["lm_wikitext103_xl_base", "lm_wikitext103_xl_large"])
def test_the_width_of_a_head_and_what_is_tied(recipe: str) -> None:
    model = build(recipe)
    large = recipe.endswith("large")
    assert model.stack.blocks[0].attention.positions.head_width == (64 if large else 41)
    first, last = (model.stack.blocks[i].attention.positions for i in (0, -1))
    assert (first.content_bias is last.content_bias) is not large
    assert all(a is b for a, b in zip(model.head.weights, model.embedding.weights, strict=True))
    tied = [a is b for a, b in zip(model.head.projections, model.embedding.projections, strict=True)]
    assert tied == ([False, True, True, True] if large else [])
