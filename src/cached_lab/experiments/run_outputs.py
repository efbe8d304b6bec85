"""Files of a run folder beside checkpoints and metrics: gates, bad files, scores of an evaluation, the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from cached_lab.training.distributed import World
from cached_lab.training.progress import Reporter
from cached_lab.training.run_files import BAD_FILES
from cached_transformers.files import json_text, write_whole

from .reports.collect import collect_gates
from .reports.run_page import write_run_report


def write_gates(model: nn.Module, folder: Path) -> None:
    """Write `gates.json` if the model has a gated memory."""
    if gates := collect_gates(model):
        write_whole(folder / "gates.json", json_text({"layers": gates}))


def bad_files(processes: World, *datasets: Any) -> dict[str, str]:
    """Gather the files that the data sets of all processes skipped, with the reasons."""
    own = {file: why for data in datasets for file, why in getattr(data, "bad_found", {}).items()}
    return {file: why for found in processes.gather(own) for file, why in found.items()}


def write_bad_files(folder: Path, found: Mapping[str, str]) -> int:
    """Add files to the `bad_files.json` of earlier sessions of the run; return the number of files in it."""
    path, before = folder / BAD_FILES, {}
    if path.is_file():
        try:
            before = dict(json.loads(path.read_bytes())["files"])
        except (ValueError, KeyError, TypeError, RecursionError):
            before = {}  # damaged; it is information for people only
    files = {**before, **found}
    if files:
        write_whole(path, json_text({"count": len(files), "files": files}))
    return len(files)


def write_evaluation(folder: Path, result: dict[str, Any]) -> None:
    """Write `evaluation.json`: scores by memory mode, and the loss by position in the document."""
    write_whole(folder / "evaluation.json", json_text(result))


def write_report(folder: Path, reporter: Reporter, summary: Mapping[str, Any] | None = None) -> None:
    """Write `report.html`, or say why not; `summary` is the future content of a missing `summary.json`."""
    try:
        reporter.message(f"report: {write_run_report(folder, summary)}")
    except ImportError as error:
        reporter.message(f"no report: {error}")
