"""Files of a run folder, and checks that they and the data belong to a checkpoint.

`data.json` holds rows and a hash of each split. A checkpoint holds the SHA-256 of that file and of the other files of
the task (a tokenizer, classes of a detector), so that neither other data nor an exchanged file goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cached_lab.data.samples import described

from .checkpoint import Checkpoint

CONFIG = "config.yaml"
"""Configuration."""
TOKENIZER = "tokenizer.json"
"""Tokenizer of a language model or a translation model."""
TRANSLATIONS = "translations.txt"
"""Sources, references and translations of the test split."""
BAD_FILES = "bad_files.json"
"""Skipped data files with reasons; absent without any."""
CATEGORIES = "categories.json"
"""Ids and names of a detector's classes."""
DATA = "data.json"
"""Rows and a hash of each split of the data."""
FORMAT = 1


def data_file(splits: Mapping[str, Any]) -> dict[str, bytes]:
    """Return `data.json` by its name; splits that are None are left out."""
    told = {split: described(dataset) for split, dataset in splits.items() if dataset is not None}
    return {DATA: json.dumps({"format": FORMAT, **told}, indent=1).encode()}


def sha256_sums(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of files by name."""
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def check_data(checkpoint: Checkpoint, files: Mapping[str, bytes], folder: Path, anyway: bool) -> str | None:
    """Refuse to resume on other data than those of the checkpoint.

    Args:
        files: files made from the current data. folder: run folder.
        anyway: accept other data; token ids and classes must still match.

    Returns:
        A description of accepted differences, or None.

    Raises:
        ValueError: the data, or files made from them, differ.
    """
    stored, changed = checkpoint.training.get("files", {}), None
    for name, now in sha256_sums(files).items():
        if stored.get(name, now) == now:
            continue
        if name != DATA:
            raise ValueError(
                f"the data give another {name} than that of {checkpoint.path}; use another --out, or the original data"
            )
        changed = f"the data are not those of {checkpoint.path} ({_difference(folder, stored[DATA], files[DATA])})"
    if changed is None or anyway:
        return changed
    raise ValueError(f"{changed}; use the original data, or another --out, or continue on these by --resume anyway")


def refuse_exchanged(folder: Path, checkpoint: Checkpoint) -> None:
    """Refuse a run folder whose files do not belong to a checkpoint (ValueError); `data.json` is not checked."""
    for name, wanted in checkpoint.training.get("files", {}).items():
        file = folder / name
        if name != DATA and file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != wanted:
            raise ValueError(
                f"{file} is damaged, or not that of {checkpoint.path} (its checksum differs); put it back, or remove "
                "it and run the run's `cached train` again, which writes it"
            )


def check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Refuse to resume a run with another tokenizer (ValueError)."""
    path = folder / TOKENIZER
    if path.is_file() and path.read_bytes() != tokenizer.dump():
        raise ValueError(
            f"{path} is not the tokenizer of the data now; use another --out, or fetch the original data again "
            f"(or set data.tokenizer={path}, if the data take a file)"
        )


def _difference(folder: Path, stored: str, now: bytes) -> str:
    """Describe the difference between two `data.json`, as far as the old one is still in the folder."""
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
