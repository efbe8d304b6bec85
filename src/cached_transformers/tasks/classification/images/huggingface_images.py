"""Images of the Hugging Face hub ("huggingface_images"), through the `datasets` library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cached_transformers.data.base import SPLIT_WORDS, check_fractions, check_split, items_of_split
from cached_transformers.data.decoding import BadFile
from cached_transformers.data.hub import load_from_hub
from cached_transformers.extras import require
from cached_transformers.registry import DATASETS

from .base import BadFiles, EncodedImages, check_view


@DATASETS.register("huggingface_images")
class HuggingFaceImages(EncodedImages):
    """Classify the images of any data set of the Hugging Face hub, or of one saved to disk.

    Split names are those that the library uses (train; validation, valid, val or dev; test); what the data set lacks is
    dealt from its training rows by `validation_fraction` and `test_fraction`. Images are decoded by this library, so
    that bad ones are handled as elsewhere.

    Args:
        split: "train", "validation" or "test".
        dataset: its name, e.g. "uoft-cs/cifar10", or the folder that `save_to_disk` wrote.
        config: its configuration, if it has any.
        image: column of the images. label: column of the labels; null takes "label", or "fine_label" if there is none.
        image_size: height and width of an input in pixels.
        augment: shift by up to an eighth of the size and mirror training images at random.
        augmentation: options of `Augmentation`, in place of that.
        crop_ratio, interpolation: of evaluation; see `ImageFolder`.
        validation_fraction, test_fraction: shares held out where the data set has no such split.
        seed: decides which rows are held out.
        bad_files: "stop" at an image that cannot be decoded, or "skip" it.

    Raises:
        ImportError: the `datasets` library is not installed.
        ValueError: unknown data set or column, or one of another kind; labels that are hidden (-1); an empty split.
    """

    def __init__(
        self,
        split: str,
        *,
        dataset: str,
        config: str | None = None,
        image: str = "image",
        label: str | None = None,
        image_size: int = 224,
        augment: bool = True,
        augmentation: Mapping[str, Any] | None = None,
        crop_ratio: float | None = None,
        interpolation: str = "bicubic",
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
        bad_files: BadFiles = "stop",
    ) -> None:
        check_view(image_size, 3, crop_ratio, interpolation, bad_files)
        fractions = check_fractions(validation_fraction, test_fraction)
        check_split(split)
        self.dataset = dataset
        loaded = load_from_hub(dataset, config)
        present = {own: name for own, words in SPLIT_WORDS.items() for name in loaded if name in words}
        if "train" not in present:
            raise ValueError(f"{dataset} has no training split; it has {', '.join(loaded)}")
        rows = loaded[present.get(split, present["train"])]
        column = _label_column(dataset, rows, image, label)
        labels, names = _labels(dataset, rows, column)
        if split not in present or split == "train":
            shares = {name: share for name, share in fractions.items() if name not in present}
            chosen = items_of_split(dataset, labels, shares, seed, split)
            rows, labels = rows.select(chosen), labels[chosen]
        library = require("datasets", extra="language")
        self._image, self._rows = image, rows.select_columns([image]).cast_column(image, library.Image(decode=False))
        size = max(len(names), int(labels.max()) + 1)
        super().__init__(
            "huggingface_images",
            split,
            labels,
            class_names=names or [f"class {place}" for place in range(size)],
            image_size=image_size,
            augment=augment,
            augmentation=augmentation,
            crop_ratio=crop_ratio,
            interpolation=interpolation,
            bad_files=bad_files,
        )

    def encoded(self, index: int) -> tuple[bytes, object]:
        value = self._rows[index][self._image]
        name = (value or {}).get("path") or f"{self.dataset}, {self.split} row {index}"
        if value is None:
            raise BadFile(name, "the row holds no image")
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes(), name


def _label_column(dataset: str, rows: Any, image: str, label: str | None) -> str:
    columns = list(rows.column_names)
    column = label or next((name for name in ("label", "fine_label") if name in columns), "label")
    for option, name in (("image", image), ("label", column)):
        if name not in columns:
            raise ValueError(f"data.{option}={name!r}: {dataset} has {', '.join(columns)}")
    if type(rows.features[image]).__name__ != "Image":
        raise ValueError(f"data.image={image!r}: {dataset} holds {rows.features[image]} there, not images")
    return column


def _labels(dataset: str, rows: Any, column: str) -> tuple[np.ndarray, list[str]]:
    """Labels as whole numbers, and the names of the classes where the data set knows them."""
    labels = np.asarray(list(rows[column]))
    if not len(labels) or labels.dtype.kind not in "iu":
        raise ValueError(f"data.label={column!r}: {dataset} holds {rows.features[column]} there, not class numbers")
    if labels.min() < 0:
        hidden = int((labels < 0).sum())
        raise ValueError(f"{dataset}: {hidden} of {len(labels)} labels are hidden (-1); choose another split")
    return labels.astype(np.int64), list(getattr(rows.features[column], "names", None) or [])
