"""Training, validation and test: what files call them, and how items are dealt to them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from cached_transformers.registry import unknown_name

SPLITS = ("train", "validation", "test")
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""Words by which files and folders name a split."""


def check_split(split: str) -> str:
    """`split` itself when it is one of `SPLITS`; otherwise ValueError with a suggestion."""
    if split not in SPLITS:
        raise ValueError(unknown_name("split", split, list(SPLITS)))
    return split


def check_fraction(name: str, fraction: float) -> float:
    """`fraction` itself when it lies in [0, 1); otherwise ValueError."""
    if not 0 <= fraction < 1:
        raise ValueError(f"{name}={fraction} must lie in [0, 1); it is the share of items held out, e.g. 0.1")
    return fraction


def named_split(stem: str, folders: Sequence[str]) -> str | None:
    """The split that a file's name (without suffixes) or one of its folders names; None where they name none."""
    for split, words in SPLIT_WORDS.items():
        in_name = re.fullmatch(rf"(.*[._-])?({'|'.join(words)})([._-].*)?", stem, re.IGNORECASE)
        if in_name or any(folder.lower() in words for folder in folders):
            return split
    return None


def stratified_split(labels: np.ndarray, fractions: dict[str, float], seed: int) -> dict[str, np.ndarray]:
    """Deal items to splits so that each split holds its share of every class.

    Args:
        labels: class index of each item, integers (size,).
        fractions: share of each held-out split; the rest goes to "train".
        seed: decides which items; the same everywhere for the same numpy stream.

    Returns:
        Sorted item indices of each split, "train" included; disjoint, and together everything.

    Raises:
        ValueError: the shares leave nothing for training.
    """
    if sum(fractions.values()) >= 1:
        raise ValueError(f"the held-out shares {fractions} must add up to less than 1, or nothing is left to train on")
    generator = np.random.Generator(np.random.PCG64(seed))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*fractions, "train")}
    order = np.argsort(labels, kind="stable")
    _, starts = np.unique(labels[order], return_index=True)
    for of_one_class in np.split(order, starts[1:]):
        rest = generator.permutation(of_one_class)
        counts = {name: round(share * len(rest)) for name, share in fractions.items()}
        for name, count in counts.items():
            parts[name].append(rest[:count])
            rest = rest[count:]
        parts["train"].append(rest)
    return {name: np.sort(np.concatenate(pieces)) for name, pieces in parts.items()}


def items_of_split(of: object, labels: np.ndarray, fractions: dict[str, float], seed: int, split: str) -> np.ndarray:
    """Indices of the items that `stratified_split` deals to one split; `of` is what an error calls the whole.

    Raises:
        ValueError: there are none, the shares leave nothing for training, or a negative seed.
    """
    if seed < 0:
        raise ValueError(f"data.seed={seed} must not be negative")
    chosen = stratified_split(labels, fractions, seed)[split]
    if not len(chosen):
        way = "lower the shares" if split == "train" else f"raise {split}_fraction"
        raise ValueError(f"{of}: dealing out {len(labels)} items by {fractions} leaves split {split!r} empty; {way}")
    return chosen
