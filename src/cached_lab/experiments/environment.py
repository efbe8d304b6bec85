"""Circumstances of results: versions, device, date and commit."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device | str) -> dict[str, Any]:
    """Return versions, device and date."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": f"{torch.device(device).type} ({name})",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def machine() -> str:
    """Return cores and processor of this machine: `2 cores, Intel(R) Xeon(R) Processor`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {named[0] if named else platform.processor() or platform.machine()}"


@functools.cache  # a commit made while the process runs is not the code that it runs
def _commit() -> str | None:
    """Return the commit of the source tree; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None
