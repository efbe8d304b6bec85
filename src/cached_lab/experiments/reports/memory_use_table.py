"""What an evaluation says of the use of a memory on text: the verdict in a sentence, and the losses by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .formatting import Metric

VERDICTS = {
    "used": "the memory is used",
    "not shown": "no use of the memory can be shown",
    "harmful": "the memory is harmful",
}
LOSS = Metric("loss")


def use_sentence(use: Mapping[str, Any]) -> str:
    """The verdict with its numbers, of what `memory_use` found."""
    begin = VERDICTS[use["verdict"]]
    if not use["carried_tokens"]:
        return (
            f"{begin}: no segment follows another of its document, so that no memory is carried; take a shorter "
            "--segment-length, or data.reset=never"
        )
    mean, low, high = use["nats"]
    words = f"{begin}: shuffled, it changes the loss by {LOSS.difference(mean)} nats a token"
    if low is None:
        return f"{words}; a single one of {use['over']} gives no interval"
    words += f", 95 % interval {LOSS.interval(low, high, signed=True)} over {use['units']} {use['over']}"
    if "bits_per_byte" in use:
        mean, low, high = use["bits_per_byte"]
        words += f"; {LOSS.difference(mean)} bits per byte {LOSS.interval(low, high, signed=True)}"
    return words


def reset_sentence(reset: Mapping[str, Any]) -> str:
    """What the row of an emptied memory is worth, of what `emptied_in_training` found."""
    ways = [f"in a share of {reset['reset_rows']:g} of the rows at each step (training.reset_rows)"]
    ways = ways if reset["reset_rows"] else []
    ways += ["where a document begins (data.reset)"] if reset["documents"] else []
    if ways:
        return f"reset: an empty memory; trained on: yes, {' and '.join(ways)}"
    return "reset: an empty memory; trained on: no (training.reset_rows=0), so that its loss is no measure of use"


def place_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: the loss at each quarter of a segment, and by the segments read before, a column for each way.

    Args:
        rows: of `text_row`, with "memory". Beside "carry" and "shuffle" stands their difference.
    """
    modes = [row["memory"] for row in rows]
    pair = ["use"] if {"carry", "shuffle"} <= set(modes) else []
    lines = []
    for kind, words in (("quarters", _quarter), ("carried", _segments)):
        for parts in zip(*(row[kind] for row in rows), strict=True):
            loss = {mode: part["loss"] for mode, part in zip(modes, parts, strict=True)}
            cells = [words(parts[0]), f"{parts[0]['tokens']:,}", *(f"{value:.4f}" for value in loss.values())]
            lines.append(cells + [LOSS.difference(loss["shuffle"] - loss["carry"]) for _ in pair])
    return ["place", "tokens", *modes, *pair], lines


def _quarter(part: Mapping[str, Any]) -> str:
    return f"quarter {part['quarter']} of the segment"


def _segments(part: Mapping[str, Any]) -> str:
    first, last = part["from"], part["to"]
    return f"{first} segments read before" if first == last else f"{first:,} to {last:,} segments"
