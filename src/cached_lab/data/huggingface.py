"""Data sets of the Hugging Face hub, or saved to disk, through the `datasets` library: whole, or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cached_transformers.extras import require

from .splits import SPLIT_WORDS

SAVED_SHARDS = 64
"""Most shards of a stream over a data set that was saved to disk."""


def load_from_hub(
    dataset: str, config: str | None = None, instead: str = "", streaming: bool = False, needs: str = "train"
) -> dict[str, Any]:
    """Load the splits of a data set, under the names "train", "validation" and "test"; one without splits is "train".

    Args:
        dataset: its name on the hub, or a folder written by `save_to_disk`.
        config: its configuration, if it has any.
        instead: alternative for the error message, e.g. ", or give local files to data.name=text".
        streaming: read files on demand and keep none.
        needs: a split that must exist.

    Raises:
        ImportError: the `datasets` library is not installed.
        ValueError: the data set cannot be loaded, or lacks a split.
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
    if needs not in found:
        raise ValueError(f"{dataset} has no split {needs!r}; it has {', '.join(splits)}")
    if streaming and saved:
        return {name: rows.to_iterable_dataset(num_shards=min(len(rows), SAVED_SHARDS)) for name, rows in found.items()}
    return found


def hub_split(dataset: str, config: str | None, split: str, instead: str) -> Any:
    """Load one split (ValueError: there is none; others as `load_from_hub`)."""
    return load_from_hub(dataset, config, instead, needs=split)[split]


class HubShards:
    """The texts of a streamed split, shard by shard.

    Args:
        rows: an `IterableDataset` of the library. column: of the text. called: name of the split in messages.
        wanted: filter of texts; None takes all texts that are not blank.

    Raises:
        ValueError: the split lacks the column; while reading, a row without text, or files that cannot be read.
    """

    def __init__(self, rows: Any, column: str, called: str, wanted: Callable[[str], bool] | None = None) -> None:
        columns = rows.column_names
        if columns is not None and column not in columns:
            raise ValueError(f"data.column={column!r}: {called} has {', '.join(columns)}")
        self._rows, self._column, self._wanted = rows, column, wanted
        self.names = [f"{called}, shard {number}" for number in range(rows.num_shards)]

    def read(self, shard: int, place: Any = None) -> HubReader:
        rows = self._rows.shard(num_shards=len(self.names), index=shard)
        if place is not None:
            rows.load_state_dict(place)
        return HubReader(rows, self._column, self._wanted, self.names[shard])


class HubReader(Iterator[str]):
    """The texts of one shard; `place` is the library's own state."""

    def __init__(self, rows: Any, column: str, wanted: Callable[[str], bool] | None, name: str) -> None:
        self._rows, self._column, self._wanted, self._name = rows, column, wanted, name
        self._items = iter(rows)

    def __next__(self) -> str:
        while True:
            try:
                row = next(self._items)
            except StopIteration:
                raise
            except Exception as error:  # of file formats, network or disk
                reason = " ".join(str(error).split())[:300]
                raise ValueError(
                    f"{self._name} cannot be read: {type(error).__name__}: {reason}; the same command goes on from the "
                    "last checkpoint once it can"
                ) from error
            text = row.get(self._column)
            if text is not None and not isinstance(text, str):
                raise ValueError(
                    f"{self._name}: a row holds {type(text).__name__} in column {self._column!r}, not text; choose "
                    f"another data.column of {', '.join(row)}"
                )
            if text and text.strip() and (self._wanted is None or self._wanted(text)):
                return text

    def place(self) -> Any:
        return self._rows.state_dict()
