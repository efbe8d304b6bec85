"""Training tasks: classification, documents, language, translation, pretraining and detection.

Importing this package registers every data set, and the detectors among the models.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cached_lab.registries import DATASETS

__all__ = ["DATASETS", "create_dataset"]

for _module in (
    "classification.images.small_images",
    "classification.images.class_folders",
    "classification.images.image_shards",
    "classification.listops.datasets",
    "detection.coco",
    "detection.detector",
    "documents.labelled",
    "documents.planted",
    "documents.reordered",
    "language.datasets",
    "language.facts_in_books",
    "language.hub_stream",
    "pretraining.datasets",
    "translation.datasets",
):
    import_module(f"{__name__}.{_module}")


def create_dataset(name: str, split: str, **kwargs: Any) -> Any:
    """The data set registered as `name`.

    Args:
        name: "listops", "digits", "wikitext2", ... (`DATASETS.names()` lists them), or one registered elsewhere.
        split: "train", "validation" or "test".
        **kwargs: options of the data set; its class documents them.

    Raises:
        ValueError: unknown name, split or option (with a suggestion), or an option out of range.
        FileNotFoundError: the files are not at `path`.
    """
    return DATASETS.create(name, split=split, **kwargs)
