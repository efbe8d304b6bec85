"""Images of the Hugging Face hub ("huggingface_images"), through the `datasets` library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cached_lab.data.huggingface import load_from_hub
from cached_lab.registries import DATASETS
from cached_transformers.extras import require

from .dataset import EncodedImages


@DATASETS.register("huggingface_images")
@dataclass(kw_only=True, eq=False, repr=False)
class HuggingFaceImages(EncodedImages):
    """Classify the images of any data set of the Hugging Face hub, or of one saved to disk.

    Split names are those of the library (train; validation, valid, val or dev; test); a missing split is dealt from the
    training rows by `validation_fraction` and `test_fraction`. Images are decoded here, so that bad files are treated
    as in the other readers.

    Args:
        dataset: its name, e.g. "uoft-cs/cifar10", or a folder written by `save_to_disk`.
        config: its configuration, if it has any.
        image: column of the images. label: column of the labels; null takes "label", or "fine_label" if there is none.
        test_fraction: share of every class held out if the data set has no split for testing.
        others: see `EncodedImages`.

    Raises:
        ImportError: the `datasets` library is not installed.
        ValueError: unknown data set or column, or one of another kind; hidden labels (-1); an empty split.
    """

    name = "huggingface_images"
    dataset: str
    config: str | None = None
    image: str = "image"
    label: str | None = None
    test_fraction: float = 0.1

    def _load(self) -> tuple[np.ndarray, list[str]]:
        splits = load_from_hub(self.dataset, self.config)
        rows = splits.get(self.split, splits["train"])
        labels, names = self._labels(rows)
        if self.split not in splits or self.split == "train":
            held_out = [split for split in ("validation", "test") if split not in splits]
            chosen = self._dealt(self.dataset, labels, *held_out)
            rows, labels = rows.select(chosen), labels[chosen]
        library = require("datasets", extra="language")
        self._rows = rows.select_columns([self.image]).cast_column(self.image, library.Image(decode=False))
        return labels, names or [f"class {place}" for place in range(int(labels.max()) + 1)]

    def _labels(self, rows: Any) -> tuple[np.ndarray, list[str]]:
        """Labels as integers, and the names of the classes where the data set has them."""
        columns, dataset = list(rows.column_names), self.dataset
        column = self.label or next((name for name in ("label", "fine_label") if name in columns), "label")
        for option, name in (("image", self.image), ("label", column)):
            if name not in columns or (option == "image" and type(rows.features[name]).__name__ != "Image"):
                raise ValueError(f"data.{option}={name!r}: {dataset} holds {rows.features}")
        labels = np.asarray(list(rows[column]))
        if not len(labels) or labels.dtype.kind not in "iu":
            raise ValueError(f"data.label={column!r}: {dataset} holds {rows.features[column]} there, not class numbers")
        if labels.min() < 0:
            hidden = int((labels < 0).sum())
            raise ValueError(f"{dataset}: {hidden} of {len(labels)} labels are hidden (-1); choose another split")
        return labels.astype(np.int64), list(getattr(rows.features[column], "names", None) or [])

    def file(self, index: int) -> str:
        return (self._rows[index][self.image] or {}).get("path") or f"{self.dataset}, {self.split} row {index}"

    def encoded(self, index: int) -> bytes:
        value = self._rows[index][self.image] or {"bytes": b""}
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
