"""Handwritten digits of scikit-learn ("digits"): 1,797 grey images of 8 x 8 pixels, always at hand.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998), the
copy that scikit-learn ships.
"""

from __future__ import annotations

import numpy as np

from cached_transformers.data.base import check_fractions, check_split, items_of_split
from cached_transformers.extras import require
from cached_transformers.registry import DATASETS

from .base import StoredImages


@DATASETS.register("digits")
class Digits(StoredImages):
    """Classify scikit-learn's handwritten digits (8 x 8, grey); split by seed with equal shares of every class.

    Args:
        split: "train", "validation" or "test".
        augment: shift training images by up to one pixel along each axis, at random.
        validation_fraction, test_fraction: shares held out.
        seed: decides which images are held out; training seeds are another matter.

    Raises:
        ValueError: shares that leave nothing to train on, or nothing in this split.
        ImportError: scikit-learn is not installed.
    """

    def __init__(
        self,
        split: str,
        *,
        augment: bool = True,
        validation_fraction: float = 0.15,
        test_fraction: float = 0.15,
        seed: int = 0,
    ) -> None:
        fractions = check_fractions(validation_fraction, test_fraction)
        check_split(split)
        digits = require("sklearn.datasets", extra="data").load_digits()
        train, own = (items_of_split("digits", digits.target, fractions, seed, part) for part in ("train", split))
        # Stored as 0..16; 16 is white.
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]
        seen = images[train] / 255
        super().__init__(
            "digits",
            split,
            images[own],
            digits.target[own],
            class_names=[str(digit) for digit in range(10)],
            mean=[float(seen.mean())],
            std=[float(seen.std())],
            augment=augment,
            shift=1,
            flip=False,
        )
