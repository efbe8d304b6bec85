"""The batch, the data set and the majority-class baseline of classification.

Shape legend: B batch, N tokens (padded), C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .samples import Sample


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


class LabelledDataset:
    """Base class of map-style data: labels known without loading items, and the baselines that follow from them.

    Item i is always the same, unless `augment` is set: `__getitem__` then draws from the global random generators of
    Python, numpy and torch, which the loader seeds per item.

    Args:
        name: the registered name.
        split: one of `SPLITS`.
        labels: one class index per item, integers (size,).
        classes: number of classes.

    Raises:
        ValueError: a label outside the classes.
    """

    augment = False

    def __init__(self, name: str, split: str, labels: np.ndarray, classes: int) -> None:
        self.name, self.split, self.classes = name, split, classes
        self.labels = np.asarray(labels, dtype=np.int64)
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < classes:
            found = f"from {self.labels.min()} to {self.labels.max()}"
            raise ValueError(f"{name}, {split}: labels reach {found}, and must lie in 0..{classes - 1}")

    def __len__(self) -> int:
        return len(self.labels)

    def describe(self) -> dict[str, object]:
        """Facts for reports and for building a model; subclasses add the shape of an input."""
        return {"name": self.name, "split": self.split, "size": len(self), "classes": self.classes}

    def samples(self) -> Iterator[Sample]:
        """Content that identifies the data (`data/samples.py`); subclasses add the inputs."""
        yield self.labels

    def baselines(self, train: LabelledDataset) -> dict[str, float]:
        """Accuracy (0..1) on this split of always answering the commonest label of `train` (ties: the smallest)."""
        if not len(train) or not len(self):
            raise ValueError("the majority-class baseline needs at least one label on each side")
        return {"majority class": float(np.mean(self.labels == np.bincount(train.labels).argmax()))}

    def position(self, index: int) -> int:
        """Return `index` counted from the start; negative ones count from the end (IndexError: out of range)."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} items of {self.name!r}")
        return index % len(self)
