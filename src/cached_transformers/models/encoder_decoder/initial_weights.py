"""Initial weights of encoder-decoders: fairseq's, T5's, or normal weights of one deviation.

Original implementations: facebookresearch/fairseq (models/transformer, modules/multihead_attention), mesh_tensorflow as
google-research/text-to-text-transfer-transformer uses it.

Legend: D model width, H heads, E head width, F hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, ModelMemory
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.decoder_block import CausalAttention, CrossAttention
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.positions import BucketedPositions
from cached_transformers.registry import unknown_name

from ..initial_weights import initialise

M = TypeVar("M", bound=nn.Module)


def initialise_weights(model: nn.Module, tables: Sequence[Tensor], init: str | float) -> None:
    """Initialise weights; memories keep their own, biases are zero.

    Args:
        model: an encoder-decoder. tables: weights of source embedding, target embedding and head, (tokens, D).
        init: "fairseq": Xavier-uniform maps (queries, keys and values as one map), embeddings
            N(0, 1 / D). "t5": see `initialise_as_t5`. A number: maps and embeddings N(0, init^2).

    Raises:
        ValueError: another name, or a number that is not positive.
    """
    number = isinstance(init, int | float)
    if (number and not 0 < init < math.inf) or (not number and init not in ("fairseq", "t5")):  # type: ignore[operator]
        known = "a positive deviation of normal weights"
        raise ValueError(f"{unknown_name('init', init, ['fairseq', 't5'])}, or {known}")
    initialise(model)
    if isinstance(init, str):
        for table in tables:
            nn.init.normal_(table, std=table.shape[1] ** -0.5)
        for cross in _own(model, CrossAttention):
            for linear in (cross.query, cross.key_value):
                bound = math.sqrt(6 / (linear.in_features + 3 * cross.query.out_features))
                nn.init.uniform_(linear.weight, -bound, bound)
    else:
        for weight in (*(linear.weight for linear in _own(model, nn.Linear)), *tables):
            nn.init.normal_(weight, std=init)
    if init == "t5":
        initialise_as_t5(model, tables)


def initialise_as_t5(model: nn.Module, tables: Sequence[Tensor]) -> None:
    """T5's weights: queries N(0, 1 / (D E)), keys, values and the first map of the feed-forward N(0, 1 / D), output
    projections N(0, 1 / (H E)), the second map N(0, 1 / F), embeddings N(0, 1), tables of positions N(0, 1 / D).

    The queries' deviation holds the 1 / sqrt(E) that `attention_scale=1` leaves out.
    """
    attentions: list[SelfAttention | CausalAttention] = [*_own(model, SelfAttention), *_own(model, CausalAttention)]
    for attention in attentions:
        _attention_as_t5([*attention.qkv.weight.chunk(3)], attention.output, attention.heads)
    for cross in _own(model, CrossAttention):
        _attention_as_t5([cross.query.weight, *cross.key_value.weight.chunk(2)], cross.output, cross.heads)
    for positionwise in _own(model, FeedForward):
        for linear in (positionwise.enter, positionwise.leave):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    for table in tables:
        nn.init.normal_(table)
    for positions in _own(model, BucketedPositions):
        nn.init.normal_(positions.table, std=tables[0].shape[1] ** -0.5)


def _attention_as_t5(parts: list[Tensor], output: nn.Module, heads: int) -> None:
    for index, weight in enumerate(parts):
        inner, width = weight.shape
        nn.init.normal_(weight.detach(), std=(width * inner // heads if index == 0 else width) ** -0.5)
    assert isinstance(output, nn.Linear)
    nn.init.normal_(output.weight, std=output.in_features**-0.5)


def _own(model: nn.Module, kind: type[M]) -> Iterator[M]:
    """Modules of a kind, outside memories."""
    memories = [m for m in model.modules() if isinstance(m, LayerMemory | ModelMemory)]
    skip = {id(part) for memory in memories for part in memory.modules()}
    return (m for m in model.modules() if isinstance(m, kind) and id(m) not in skip)
