"""What a data set is to the rest of the library: the batch, the protocol, splits, and the majority-class baseline.

Shape legend: B batch, N tokens (padded), C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from cached_transformers.registry import unknown_name

SPLITS = ("train", "validation", "test")
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""Words by which files and folders name a split."""


class Batch(NamedTuple):
    """A collated batch.

    Attributes:
        inputs: images float (B, C, H, W), or tokens long (B, N).
        targets: class indices long (B,).
        padding: bool (B, N), True where a token is padding; None for images.
    """

    inputs: Tensor
    targets: Tensor
    padding: Tensor | None


@runtime_checkable
class Dataset(Protocol):
    """Map-style data set for classification: item i is always the same, unless `augment` is set.

    Attributes:
        classes: number of classes.
        augment: whether `__getitem__` draws from the global random generators of Python, numpy and torch; whoever
            iterates seeds them per item.
    """

    classes: int
    augment: bool

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Tensor, int]: ...

    def collate(self, items: Sequence[tuple[Tensor, int]]) -> Batch: ...

    def describe(self) -> dict[str, object]: ...


class LabelledDataset:
    """Shared by the data sets here: labels known without loading items, and the baselines that follow from them.

    Args:
        name: the registered name.
        split: one of `SPLITS`.
        labels: one class index per item, integers (size,).
        classes: number of classes.
    """

    augment = False

    def __init__(self, name: str, split: str, labels: np.ndarray, classes: int) -> None:
        self.name = name
        self.split = split
        self.labels = np.asarray(labels, dtype=np.int64)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> dict[str, object]:
        """Facts for reports and for building a model; subclasses add the shape of an input."""
        return {"name": self.name, "split": self.split, "size": len(self), "classes": self.classes}

    def baselines(self, train: LabelledDataset) -> dict[str, float]:
        """Accuracies (0..1) on this split of guessers fitted to `train` that learn nothing of the task."""
        return {"majority class": majority_accuracy(train.labels, self.labels)}

    def position(self, index: int) -> int:
        """`index` counted from the start; negative ones count from the end.

        Raises:
            IndexError: out of range. (Iteration by index ends on this error.)
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} items of {self.name!r}")
        return index % len(self)


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


def check_fractions(validation: float, test: float) -> dict[str, float]:
    """The shares of both held-out splits when they lie in [0, 1); otherwise ValueError."""
    return {
        "validation": check_fraction("validation_fraction", validation),
        "test": check_fraction("test_fraction", test),
    }


def majority_accuracy(train_labels: np.ndarray, test_labels: np.ndarray) -> float:
    """Accuracy on `test_labels` of always answering the commonest of `train_labels` (ties: the smallest)."""
    if not len(train_labels) or not len(test_labels):
        raise ValueError("the majority-class baseline needs at least one label on each side")
    return float(np.mean(test_labels == np.bincount(train_labels).argmax()))


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
        ValueError: there are none, or the shares leave nothing for training.
    """
    chosen = stratified_split(labels, fractions, seed)[split]
    if not len(chosen):
        way = "lower the shares" if split == "train" else f"raise {split}_fraction"
        raise ValueError(f"{of}: dealing out {len(labels)} items by {fractions} leaves split {split!r} empty; {way}")
    return chosen
