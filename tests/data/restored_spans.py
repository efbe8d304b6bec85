"""Inverse of T5's span corruption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def restore_spans(inputs: Any, targets: Any, sentinels: Sequence[int], end: int) -> np.ndarray:
    """The text of a source and its target, each up to the first `end`."""
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in until(targets, end):
        if token in sentinels:
            current = spans[token] = []
        else:
            current.append(token)
    return np.array([part for token in until(inputs, end) for part in spans.get(token, [token])], dtype=np.int64)


def until(tokens: Any, end: int) -> list[int]:
    listed = np.asarray(tokens).tolist()
    return listed[: listed.index(end)]
