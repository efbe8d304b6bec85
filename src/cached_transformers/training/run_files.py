"""The files of a run folder beside checkpoints and metrics: their names, and how they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .checkpoint import write_durably
from .metrics import jsonable

TOKENIZER = "tokenizer.json"
"""File in a run folder with the tokenizer of a language model or of a translation model."""
TRANSLATIONS = "translations.txt"
"""File in a run folder with sources, references and translations of the test split."""
BAD_FILES = "bad_files.json"
"""File in a run folder that names the data files which were skipped, with what was wrong; absent if there are none."""
CATEGORIES = "categories.json"
"""File in a run folder with the ids and names of a detector's classes."""


def json_text(value: Any) -> bytes:
    """The value as JSON, with null in place of numbers that JSON does not know."""
    return json.dumps(jsonable(value), indent=1).encode()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    write_durably(temporary, content)
    temporary.replace(path)


def check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Refuse to go on with a run whose token ids meant other text (ValueError)."""
    path = folder / TOKENIZER
    if path.is_file() and path.read_bytes() != tokenizer.dump():
        raise ValueError(
            f"{path} is another tokenizer than that of the data now; use another --out, or fetch the data again that "
            f"the run began with (or set data.tokenizer={path}, where the data take a file)"
        )
