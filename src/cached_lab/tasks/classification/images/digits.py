"""Handwritten digits of scikit-learn ("digits"): 1,797 grey images of 8 x 8 pixels, without a download.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998), as
shipped with scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cached_lab.data.splits import items_of_split
from cached_lab.registries import DATASETS
from cached_transformers.extras import require

from .dataset import StoredImages


@DATASETS.register("digits")
@dataclass(kw_only=True, eq=False, repr=False)
class Digits(StoredImages):
    """Classify scikit-learn's handwritten digits (8 x 8, grey); split by seed with equal shares of every class.

    Training images are shifted by up to one pixel, and not mirrored.

    Args:
        validation_fraction, test_fraction: shares held out.
        others: see `ImageDataset`.

    Raises:
        ValueError: shares that leave nothing to train on, or nothing in this split.
        ImportError: scikit-learn is not installed.
    """

    name, channels, shift, flip = "digits", 1, 1, False
    validation_fraction: float = 0.15
    test_fraction: float = 0.15

    def _read(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        digits = require("sklearn.datasets", extra="data").load_digits()
        shares = {"validation": self.validation_fraction, "test": self.test_fraction}
        train = items_of_split("digits", digits.target, shares, self.seed, "train")
        chosen = self._dealt("digits", digits.target, *shares)
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]  # stored as 0..16
        seen = images[train] / 255
        self.mean, self.std = [float(seen.mean())], [float(seen.std())]
        return images[chosen], digits.target[chosen], [str(digit) for digit in range(10)]
