"""Training, validation and test: their names in files, and the stratified deal of items to them."""

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
"""Names of a split in files and folders."""


def check_split(split: str) -> str:
    """Return `split` if it is one of `SPLITS` (ValueError otherwise, with a suggestion)."""
    if split not in SPLITS:
        raise ValueError(unknown_name("split", split, list(SPLITS)))
    return split


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse (ValueError) a value outside `choices`."""
    if value not in choices:
        raise ValueError(f"{option}={value!r} must be one of {', '.join(map(repr, choices))}")


def check_fraction(name: str, fraction: float) -> float:
    """Return `fraction` if it lies in [0, 1) (ValueError otherwise)."""
    if not 0 <= fraction < 1:
        raise ValueError(f"{name}={fraction} must lie in [0, 1); it is the share of items held out, e.g. 0.1")
    return fraction


def named_split(stem: str, folders: Sequence[str]) -> str | None:
    """The split in a file's name (without suffixes) or in the name of one of its folders; None without one."""
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
        seed: of the deal, which is the same on every machine.

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
    """Indices of the items that `stratified_split` deals to one split; `of` names the data in errors.

    Raises:
        ValueError: the split is empty, the shares leave nothing for training, or the seed is negative.
    """
    if seed < 0:
        raise ValueError(f"data.seed={seed} must not be negative")
    chosen = stratified_split(labels, fractions, seed)[split]
    if not len(chosen):
        way = "lower the shares" if split == "train" else f"raise {split}_fraction"
        raise ValueError(f"{of}: dealing out {len(labels)} items by {fractions} leaves split {split!r} empty; {way}")
    return chosen
