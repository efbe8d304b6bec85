"""Whether a run goes on with what it began with: the data, and the files that were made of them.

The run folder holds `data.json`, with rows and a hash of each split. A checkpoint holds the SHA-256 of that file and of
the others that a task writes (a tokenizer, the classes of a detector), and its own checksums answer for these. So
neither other data nor an exchanged file goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cached_lab.data.samples import described

from .checkpoint import Checkpoint

DATA = "data.json"
"""File in a run folder with rows and a hash of each split of the data."""
FORMAT = 1


def data_file(splits: Mapping[str, Any]) -> dict[str, bytes]:
    """The file that tells these data from others, by its name; a split that is None is not used."""
    told = {split: described(dataset) for split, dataset in splits.items() if dataset is not None}
    return {DATA: json.dumps({"format": FORMAT, **told}, indent=1).encode()}


def sums(files: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of files, by name, for a checkpoint."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def refuse_other_data(checkpoint: Checkpoint, files: Mapping[str, bytes], folder: Path, anyway: bool) -> str | None:
    """Refuse to go on from a checkpoint with other data than it was trained on.

    Args:
        files: what is made of the data now. folder: of the run. anyway: other data, but not other token ids or classes,
            are what is wanted.

    Returns:
        What is other in the data, if that is wanted.

    Raises:
        ValueError: the data, or what is made of them, are other; the message says in what.
    """
    stored, other = checkpoint.training.get("files", {}), None
    for name, now in sums(files).items():
        if stored.get(name, now) == now:
            continue
        if name == DATA:
            other = f"the data are not those of {checkpoint.path} ({_difference(folder, stored[DATA], files[DATA])})"
            continue
        raise ValueError(
            f"the data give another {name} than that of {checkpoint.path}; use another --out, or the data that the run "
            "began with"
        )
    if other is None or anyway:
        return other
    raise ValueError(
        f"{other}; use the data that the run began with, or another --out, or go on with these all the same by "
        "--resume anyway"
    )


def refuse_exchanged(folder: Path, checkpoint: Checkpoint) -> None:
    """Refuse a run folder whose files are not those that belong to a checkpoint (ValueError).

    `data.json` is for people, and whoever loads a model has no data to compare it with.
    """
    for name, wanted in checkpoint.training.get("files", {}).items():
        file = folder / name
        if name != DATA and file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != wanted:
            raise ValueError(
                f"{file} is damaged, or not that of {checkpoint.path} (its checksum differs); put it back, or remove "
                "it and carry out the run's `cached train` again, which writes it anew"
            )


def _difference(folder: Path, stored: str, now: bytes) -> str:
    """In what splits differ, as far as `data.json` still says what they were."""
    try:
        content = (folder / DATA).read_bytes()
    except OSError:
        content = b""
    if hashlib.sha256(content).hexdigest() != stored:
        return "rows or content"
    before, after = json.loads(content), json.loads(now)
    told = []
    for split in ("train", "validation", "test"):
        a, b = before.get(split, {}), after.get(split, {})
        if a.get("size") != b.get("size"):
            told.append(f"{split}: {a.get('size', 'no')} rows then, {b.get('size', 'no')} now")
        elif a != b:
            told.append(f"{split}: as many rows, other content")
    return "; ".join(told)
