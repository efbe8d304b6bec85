"""Files of a run folder beside checkpoints and metrics: figures, bad files, scores of an evaluation, the report."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from cached_lab.tasks.kinds import task_of
from cached_lab.training.distributed import World
from cached_lab.training.metrics import untouched
from cached_lab.training.progress import Reporter
from cached_lab.training.run_files import BAD_FILES
from cached_transformers.files import json_text, write_whole

from .reports.collect import collect_feature_maps, collect_gates
from .reports.run_page import write_run_report

MAPPED_IMAGES = 8
"""Images whose feature maps a run keeps."""


def write_figures(model: nn.Module, dataset: Any, folder: Path, processes: World) -> None:
    """Write `gates.json` and, for images, `feature_maps.npz`, if the model has a gated memory."""
    with untouched(model):
        gates = collect_gates(model)
        if not gates:
            return
        write_whole(folder / "gates.json", json_text({"layers": gates}))
        images = task_of(dataset).images(dataset, MAPPED_IMAGES)
        if images is None:
            return
        maps = collect_feature_maps(model, images.to(processes.device))
    if maps is not None:
        arrays = {key: np.asarray(value) for key, value in maps.items()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        write_whole(folder / "feature_maps.npz", buffer.getvalue())


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
