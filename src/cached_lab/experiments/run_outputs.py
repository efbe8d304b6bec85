"""What a run folder gets beside checkpoints and metrics: figures, bad files, scores of an evaluation, the report."""

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
    """Write `gates.json` and, for images, `feature_maps.npz`, when the model has a gated memory."""
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
    """Files that the data sets of all processes have skipped, with what is wrong."""
    own = {file: why for data in datasets for file, why in getattr(data, "bad_found", {}).items()}
    return {file: why for found in processes.gather(own) for file, why in found.items()}


def write_bad_files(folder: Path, found: Mapping[str, str]) -> int:
    """Add files to `bad_files.json`, which holds those of earlier sessions of the run; how many it then names."""
    path = folder / BAD_FILES
    files = {**(_bad_before(path) if path.is_file() else {}), **found}
    if files:
        write_whole(path, json_text({"count": len(files), "files": files}))
    return len(files)


def _bad_before(path: Path) -> dict[str, str]:
    """What `bad_files.json` names; nothing where it is damaged, since it is there to be read by people."""
    try:
        found = json.loads(path.read_bytes())["files"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_evaluation(folder: Path, result: dict[str, Any]) -> None:
    """Write `evaluation.json`: scores by way of treating the memory, and the loss by place in the document."""
    write_whole(folder / "evaluation.json", json_text(result))


def write_report(folder: Path, reporter: Reporter, summary: Mapping[str, Any] | None = None) -> None:
    """Write `report.html`, or say why not; `summary` is what `summary.json` is going to hold, where it is not there."""
    try:
        path = write_run_report(folder, summary)
    except ImportError as error:
        reporter.message(f"no report: {error}")
        return
    reporter.message(f"report: {path}")
