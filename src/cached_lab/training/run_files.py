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


def check_data(checkpoint: Checkpoint, files: Mapping[str, bytes], anyway: bool) -> str | None:
    """Refuse to resume on other data than those of the checkpoint.

    Args:
        files: files made from the current data.
        anyway: accept other data; token ids and classes must still match.

    Returns:
        A message if other data are accepted, or None.

    Raises:
        ValueError: the data, or files made from them, differ.
    """
    stored = checkpoint.training.get("files", {})
    other = [name for name, now in sha256_sums(files).items() if stored.get(name, now) != now]
    if any(name != DATA for name in other):
        raise ValueError(
            f"the data give another {' and '.join(other)} than that of {checkpoint.path}; use another --out, or the "
            "original data"
        )
    if not other:
        return None
    changed = f"the rows or their content are not those of {checkpoint.path} (another {DATA})"
    if anyway:
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
