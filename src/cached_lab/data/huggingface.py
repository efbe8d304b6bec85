"""Data sets of the Hugging Face hub, or saved to disk, through the `datasets` library: whole, or as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cached_transformers.extras import require

from .splits import SPLIT_WORDS

SAVED_SHARDS = 64
"""Most shards of a stream over a data set that was saved to disk."""


def load_from_hub(
    dataset: str, config: str | None = None, instead: str = "", streaming: bool = False
) -> dict[str, Any]:
    """Load the splits of a data set, under the names "train", "validation" and "test"; one without splits is "train".

    Args:
        dataset: its name on the hub, or a folder written by `save_to_disk`.
        config: its configuration, if it has any.
        instead: alternative for the error message, e.g. ", or give local files to data.name=text".
        streaming: read files on demand and keep none.

    Raises:
        ImportError: the `datasets` library is not installed.
        ValueError: the data set cannot be loaded, or has no training split.
    """
    library = require("datasets", extra="language")
    folder = Path(dataset).expanduser()
    try:
        saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
        if saved:
            loaded = library.load_from_disk(str(folder))
        else:
            loaded = library.load_dataset(dataset, config, **({"streaming": True} if streaming else {}))
    except Exception as error:  # the library raises many kinds: no network, unknown name, unknown configuration
        raise ValueError(
            f"data.dataset={dataset!r} cannot be loaded: {error}; check the name, or fetch it once on a machine with a "
            f"network and keep its cache (HF_HOME) or what save_to_disk writes{instead}"
        ) from error
    splits = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    found = {split: splits[name] for split, words in SPLIT_WORDS.items() for name in splits if name in words}
    if "train" not in found:
        raise ValueError(f"{dataset} has no split 'train'; it has {', '.join(splits)}")
    if streaming and saved:
        return {name: rows.to_iterable_dataset(num_shards=min(len(rows), SAVED_SHARDS)) for name, rows in found.items()}
    return found
