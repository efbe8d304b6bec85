"""Whether a language model uses its memory: what shuffling it costs, with an interval.

    use = loss(shuffle) - loss(carry), in nats a token

Shuffled, each row reads on with the memory of another row: one that the model knows how to read, and that tells nothing
of what came before. An emptied memory ("reset") is no such thing unless training emptied some, too: a model that never
met one may lose much without it, whatever the memory told.

Both ways predict the same tokens, so their losses are paired: by document, or, where there are few of these, by block
of consecutive segments of a row. Tokens of a block depend on each other; blocks do so less, the longer they are.

Legend: B rows, S segments of a row, U documents or blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cached_lab.data.text import TextDataset
from cached_lab.tasks.language.scores import SplitLosses, by_powers
from cached_lab.training.config import RunConfig

from .statistics import ratio_interval

DOCUMENTS = 8
"""The least number of documents that losses are paired by."""
BLOCKS = 32
"""Blocks that the rows are cut into together, at least, where they have as many segments."""


def text_row(losses: SplitLosses, dataset: TextDataset) -> dict[str, Any]:
    """Scores of one way of treating the memory, with lists of the loss by place.

    Lists: "places" in the document, from and to; "quarters" of the segment; "carried", the segments that the row had
    read since it was reset, from and to; each with "tokens" and "loss" (nats a token).
    """
    nats, tokens = losses.quarters.tolist()
    quarters = [
        {"quarter": q, "tokens": int(n), "loss": total / n}
        for q, (total, n) in enumerate(zip(nats, tokens, strict=True), 1)
        if n
    ]
    lists = {"places": by_powers(losses.places), "quarters": quarters, "carried": by_powers(losses.carried)}
    return {**losses.scores(dataset), **lists}


def memory_use(carry: SplitLosses, shuffle: SplitLosses, dataset: TextDataset, shared: bool = False) -> dict[str, Any]:
    """The use of the memory and what follows from its interval.

    Args:
        carry, shuffle: losses of the same split with the memory as it is, and shuffled.
        shared: the memory is a cache of all rows, so that segments read it that follow no other.

    Returns:
        {"verdict": "used" | "not shown" | "harmful", "nats": [mean, low, high], "over", "units", "carried_tokens"},
        and "bits_per_byte" like "nats" where the tokenizer loses nothing. low and high are None for a single unit;
        carried_tokens is the number of tokens whose segment had a memory to read.
    """
    over, sums_U, counts_U = paired_units(carry, shuffle)
    interval = ratio_interval(sums_U.tolist(), counts_U.tolist())
    tokens = carry.carried[1] if shared else carry.carried[1, 1:]
    carried = int(tokens.sum())
    verdict = "not shown"
    if carried and interval.low is not None and interval.high is not None:
        verdict = "used" if interval.low > 0 else "harmful" if interval.high < 0 else verdict
    found: dict[str, Any] = {"verdict": verdict, "nats": list(interval), "over": over, "units": len(counts_U)}
    if dataset.tokenizer.lossless:
        scale = dataset.counts["tokens"] / dataset.counts["bytes"] / math.log(2)
        found["bits_per_byte"] = [None if x is None else scale * x for x in interval]
    return {**found, "carried_tokens": carried}


def paired_units(carry: SplitLosses, shuffle: SplitLosses) -> tuple[str, Tensor, Tensor]:
    """What the losses are paired by, and of each unit the summed difference of its losses and its tokens, (U,)."""
    used_D = carry.documents[1] > 0
    if int(used_D.sum()) >= DOCUMENTS:
        difference_D = (shuffle.documents - carry.documents)[0]
        return "documents", difference_D[used_D], carry.documents[1, used_D]
    rows = carry.segments.shape[1]
    differences, counts = [], []
    for row in range(rows):
        nats_S, tokens_S = (shuffle.segments - carry.segments)[0, row], carry.segments[1, row]
        place_S = torch.nonzero(tokens_S)[:, 0]
        for block in place_S.tensor_split(min(-(-BLOCKS // rows), max(len(place_S), 1))):
            if len(block):
                differences.append(nats_S[block].sum())
                counts.append(tokens_S[block].sum())
    return "blocks of consecutive segments", torch.stack(differences), torch.stack(counts)


def emptied_in_training(dataset: TextDataset, config: RunConfig) -> dict[str, Any]:
    """Whether, and how, training met an empty memory: {"reset_rows", "documents", "trained_on"}."""
    share, documents = config.training.reset_rows, dataset.reset != "never"
    return {"reset_rows": share, "documents": documents, "trained_on": bool(share) or documents}


def about_text(
    losses: Mapping[str, SplitLosses], dataset: TextDataset, config: RunConfig, memory: bool, shared: bool
) -> dict[str, Any]:
    """What an evaluation of a text says beside its scores, each where there is something to say.

    Args:
        losses: by way of treating the memory.
        memory: the model has one. shared: it is a cache of all rows.

    Returns:
        "unknown": the share of unknown words; "use": as `memory_use`, None where the ways that it needs are not among
        those; "reset": as `emptied_in_training`.
    """
    found: dict[str, Any] = {}
    if (share := dataset.unknown_share()) is not None:
        found["unknown"] = share
    if memory:
        asked = {"carry", "shuffle"} <= losses.keys()
        found["use"] = memory_use(losses["carry"], losses["shuffle"], dataset, shared) if asked else None
    if memory and "reset" in losses:
        found["reset"] = emptied_in_training(dataset, config)
    return found
