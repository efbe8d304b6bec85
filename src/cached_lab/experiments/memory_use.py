"""Use of the memory by a language model: the cost of shuffling it, with an interval.

    use = loss(shuffle) - loss(carry), in nats per token

Shuffled, each row continues with the memory of another row: valid for the model, but without its own past. An emptied
memory ("reset") is a fair comparison only if training emptied some too: an untrained state may cost much by itself.

Both modes predict the same tokens, so their losses are paired: by document, or for few documents by block of
consecutive segments of a row. Blocks depend on each other less, the longer they are.

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
"""Fewest documents for pairing by document."""
BLOCKS = 32
"""Fewest blocks of all rows together, if they have as many segments."""


def text_row(losses: SplitLosses, dataset: TextDataset) -> dict[str, Any]:
    """Return scores of one memory mode, with lists of the loss by position.

    Lists: "places" in the document, from and to; "quarters" of the segment; "carried", segments since the row's last
    reset, from and to; each with "tokens" and "loss" (nats per token).
    """
    parts = enumerate(zip(*losses.quarters.tolist(), strict=True), 1)
    quarters = [{"quarter": q, "tokens": int(n), "loss": total / n} for q, (total, n) in parts if n]
    lists = {"places": by_powers(losses.places), "quarters": quarters, "carried": by_powers(losses.carried)}
    return {**losses.scores(dataset), **lists}


def memory_use(carry: SplitLosses, shuffle: SplitLosses, dataset: TextDataset, shared: bool = False) -> dict[str, Any]:
    """Return the use of the memory with a verdict from its interval.

    Args:
        carry, shuffle: losses of the same split with the memory as it is, and shuffled.
        shared: the memory is a cache of all rows, which the first segments read too.

    Returns:
        {"verdict": "used" | "not shown" | "harmful", "nats": [mean, low, high], "over", "units", "carried_tokens"},
        and "bits_per_byte" like "nats" for a lossless tokenizer. low and high are None for a single unit;
        carried_tokens counts the tokens whose segment had a memory to read.
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
    """Return the kind of paired units, and for each unit the summed difference of losses and its tokens, (U,)."""
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
    """Return the empty memories that training had: {"reset_rows", "documents", "trained_on"}."""
    share, documents = config.training.reset_rows, dataset.reset != "never"
    return {"reset_rows": share, "documents": documents, "trained_on": bool(share) or documents}


def about_text(
    losses: Mapping[str, SplitLosses], dataset: TextDataset, config: RunConfig, memory: bool, shared: bool
) -> dict[str, Any]:
    """Return facts of an evaluation of text beside its scores.

    Args:
        losses: by memory mode. memory: the model has one. shared: it is a cache of all rows.

    Returns:
        "unknown": the share of unknown words, if there can be any; "use": of `memory_use`, None without both of its
        modes; "reset": `emptied_in_training`, if that mode is scored.
    """
    found: dict[str, Any] = {}
    if (unknown := dataset.tokenizer.unknown) is not None:
        found["unknown"] = float((dataset.tokens == unknown).mean())
    if memory:
        both = {"carry", "shuffle"} <= losses.keys()
        found["use"] = memory_use(losses["carry"], losses["shuffle"], dataset, shared) if both else None
        found |= {"reset": emptied_in_training(dataset, config)} if "reset" in losses else {}
    return found
