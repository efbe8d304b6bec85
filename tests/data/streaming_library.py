"""A stand-in for the streaming reader of JSON lines of the `datasets` library, for tests where it is not installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class StandIn:
    """An `IterableDataset`: rows of files, one shard per file."""

    column_names = ("text",)

    def __init__(self, files: list[Path]) -> None:
        self.files, self._row = files, 0

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> StandIn:
        return StandIn(self.files[index::num_shards])

    def state_dict(self) -> dict[str, Any]:
        return {"examples_iterable": {"row": self._row}, "epoch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = state["examples_iterable"]["row"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = [row for file in self.files for row in file.read_text(encoding="utf-8").splitlines()]
        for row in rows[self._row :]:
            self._row += 1
            yield json.loads(row)


def load_dataset(folder: str, config: str | None = None, streaming: bool = False) -> dict[str, StandIn]:
    """The splits of a folder of files like `train-00000.jsonl`."""
    assert streaming and config is None
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no data in {folder}")
    names = dict.fromkeys(file.stem.partition("-")[0] for file in files)
    return {name: StandIn([f for f in files if f.stem.startswith(name)]) for name in names}


def write_shards(folder: Path, counts: dict[str, int], shards: int = 4) -> Path:
    """Documents of very different lengths, some of them blank."""
    folder.mkdir()
    for split, count in counts.items():
        for shard in range(shards if split == "train" else 1):
            name = f"{split}-{shard:05}.jsonl"
            texts = [f"{split} {shard}.{i} " + "abc de " * (i * i % 13) for i in range(count + shard)]
            rows = [json.dumps({"text": text}) for text in [texts[0], " ", *texts[1:]]]
            (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder
