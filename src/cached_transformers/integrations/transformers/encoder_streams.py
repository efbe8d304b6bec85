"""How encoders of transformers carry a state for each row. Imports nothing of transformers.

Legend: B rows, N tokens, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from cached_transformers.integrations.hosts import Site, Stream

from .add_stateful_memory import add_stream_memory
from .config_utils import config_of, first_of

Split = Callable[..., Any]


def text_stream(site: Site, sources: tuple[nn.Module, ...] = (), split: Split | None = None) -> Stream:
    """Of an encoder of texts.

    Args:
        sources: modules whose outputs, in this order, `split` turns into queries, keys and values; none of them where
            the layer has a projection each.
    """
    body: Any = site.holder("embeddings")
    embeddings = getattr(body, "embeddings", None)
    if split is None:
        sources, split = _separate(site)
    entrance: tuple[nn.Module, ...] = ()
    if embeddings is not None:  # some are narrower than the layers
        mapped = getattr(getattr(body, "encoder", None), "embedding_hidden_mapping_in", None)
        widened = (getattr(body, "embeddings_project", None), mapped)
        entrance = (embeddings, *(module for module in widened if module is not None))
    return Stream(
        add=add_stream_memory,
        block=site.block(),
        sources=tuple((module,) for module in sources),
        split=split,
        longest=_places(embeddings),
        offers=frozenset({"state", "tokens_round"} if entrance else ()),
        causal=False,
        entrance=entrance,
    )


def image_stream(site: Site, surrounds: bool) -> Stream:
    """Of an encoder of images.

    Args:
        surrounds: whether tokens of a memory may stand round those of an image.
    """
    embeddings: Any = getattr(site.holder("embeddings"), "embeddings", None)
    surrounds = surrounds and embeddings is not None
    sources, split = _separate(site)
    return Stream(
        add=add_stream_memory,
        block=site.block(),
        sources=tuple((module,) for module in sources),
        split=split,
        offers=frozenset({"state", "tokens_round"} if surrounds else ()),
        causal=False,
        cuts=False,
        entrance=(embeddings,) if surrounds else (),
    )


def _separate(site: Site) -> tuple[tuple[nn.Module, ...], Split]:
    """A projection each for queries, keys and values, which their families name alike."""

    def found(layer: Any) -> tuple[Any, ...]:
        return tuple(
            first_of(layer, part, f"{part[0]}_proj", f"{part[0]}_lin", f"{part}_proj", part[0])
            for part in ("query", "key", "value")
        )

    sources = found(site.layer)
    if None in sources:  # DINOv2 before transformers 5.18 keeps them in a module of its own
        sources = found(site.layer.attention)
    return sources, partial(_split, int(config_of(site).num_attention_heads))


def _split(heads: int, q_BND: Tensor, k_BND: Tensor, v_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q_BND, k_BND, v_BND))
    return q, k, v


def in_blocks(heads: int, qkv_BNL: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, H, N, E) of one projection that gives all queries, all keys, all values."""
    return qkv_BNL.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def by_heads(heads: int, qkv_BNL: Tensor) -> tuple[Tensor, ...]:
    """The same of one that gives the query, key and value of one head behind those of another."""
    return qkv_BNL.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4).unbind(0)


def _places(embeddings: Any) -> int | None:
    """Tokens that there are positions for; None where they are not looked up in a table."""
    table = getattr(embeddings, "position_embeddings", None)
    if not isinstance(table, nn.Embedding) or not getattr(embeddings, "position_biased_input", True):
        return None
    padding: int | None = getattr(embeddings, "padding_idx", None)  # from behind which some count
    return table.num_embeddings - (0 if padding is None else padding + 1)
