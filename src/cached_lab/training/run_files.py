"""The files of a run folder beside checkpoints and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIG = "config.yaml"
"""File in a run folder with its configuration."""
TOKENIZER = "tokenizer.json"
"""File in a run folder with the tokenizer of a language model or of a translation model."""
TRANSLATIONS = "translations.txt"
"""File in a run folder with sources, references and translations of the test split."""
BAD_FILES = "bad_files.json"
"""File in a run folder that names the data files which were skipped, with what was wrong; absent if there are none."""
CATEGORIES = "categories.json"
"""File in a run folder with the ids and names of a detector's classes."""


def check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Refuse to go on with a run whose token ids meant other text (ValueError)."""
    path = folder / TOKENIZER
    if path.is_file() and path.read_bytes() != tokenizer.dump():
        raise ValueError(
            f"{path} is another tokenizer than that of the data now; use another --out, or fetch the data again that "
            f"the run began with (or set data.tokenizer={path}, where the data take a file)"
        )
