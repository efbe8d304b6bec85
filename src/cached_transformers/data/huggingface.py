"""Data sets of the Hugging Face hub, or saved to disk, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cached_transformers.extras import require

from .splits import SPLIT_WORDS


def load_from_hub(dataset: str, config: str | None = None, instead: str = "") -> Mapping[str, Any]:
    """The splits of a data set under the library's names; one that has none is all "train".

    Args:
        dataset: its name on the hub, or the folder that `save_to_disk` wrote.
        config: its configuration, if it has any.
        instead: what else an error should offer, e.g. ", or give local files to data.name=text".

    Raises:
        ImportError: the `datasets` library is not installed.
        ValueError: it cannot be loaded.
    """
    library = require("datasets", extra="language")
    folder = Path(dataset).expanduser()
    try:
        saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
        loaded = library.load_from_disk(str(folder)) if saved else library.load_dataset(dataset, config)
    except Exception as error:  # the library raises a wide choice: no network, no such name, no such configuration
        raise ValueError(
            f"data.dataset={dataset!r} cannot be loaded: {error}; check the name, or fetch it once on a machine with a "
            f"network and keep its cache (HF_HOME) or what save_to_disk writes{instead}"
        ) from error
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def hub_split(dataset: str, config: str | None, split: str, instead: str) -> Any:
    """Rows of one split, under any of its usual names; arguments and errors are those of `load_from_hub`.

    Raises:
        ValueError: the data set has no such split.
    """
    loaded = load_from_hub(dataset, config, instead)
    names = [name for name in loaded if name in SPLIT_WORDS[split]]
    if not names:
        raise ValueError(f"{dataset} has no split {split!r}; it has {', '.join(loaded)}")
    return loaded[names[0]]
