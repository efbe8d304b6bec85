"""`cached evaluate`: scores of a trained run, with its memory as saved, emptied, shuffled, exchanged or made anew.

If emptying the memory costs nothing, the model does not use it: that is the question `--memory` answers. For text it is
emptied before each segment, or exchanged between rows, and RUN/evaluation.json and the report show the loss by place in
the document. A cache that all rows share can also be that of another run (`other`), or be updated by each batch as in
training (`batch`), which shows how far training and evaluation, and batches of different sizes, differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from cached_transformers.experiments.build import build_dataset
from cached_transformers.experiments.intervals import with_intervals
from cached_transformers.experiments.load import load_run, read_categories, read_run_config
from cached_transformers.experiments.reports.detection_report import COLUMNS
from cached_transformers.experiments.reports.wording import MISSING, Metric
from cached_transformers.experiments.run_outputs import write_evaluation, write_report
from cached_transformers.registry import unknown_name
from cached_transformers.tasks.detection.task import check_categories, evaluate_detector
from cached_transformers.tasks.kinds import baselines, task_name
from cached_transformers.tasks.language.task import evaluate_language
from cached_transformers.tasks.translation.task import evaluate_pairs
from cached_transformers.training.config import RunConfig
from cached_transformers.training.distributed import World, in_world
from cached_transformers.training.metrics import jsonable
from cached_transformers.training.progress import Reporter
from cached_transformers.training.run_files import check_tokenizer

MEMORY_MODES = ("carry", "reset", "shuffle", "other", "batch")
OF_SHARED_CACHES = ("other", "batch")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("evaluate", help="score a run; with its memory kept, emptied or shuffled")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--split", default="test", choices=("train", "validation", "test"))
    parser.add_argument(
        "--checkpoint",
        default="tested",
        metavar="tested|best|last|PATH",
        help="default: tested, the one of the summary",
    )
    parser.add_argument(
        "--average", type=int, metavar="N", help="translation: average the weights of the newest N checkpoints"
    )
    help_memory = "comma-separated: carry (as it is), reset (emptied), shuffle (entries or rows permuted)"
    help_memory += ", and of shared caches: other (that of --other), batch (updated by each batch, as in training)"
    parser.add_argument("--memory", default="carry", metavar="MODES", help=help_memory)
    parser.add_argument("--other", type=Path, metavar="RUN", help="run whose caches --memory other takes")
    parser.add_argument(
        "--batch-sizes", metavar="N,N,...", help="rows of the batches of --memory batch (default: those of training)"
    )
    parser.add_argument(
        "--segment-length", type=int, metavar="N", help="text: tokens in a segment (default: the run's)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one row of scores per way of treating the memory."""
    modes = arguments.memory.split(",")
    for mode in modes:
        if mode not in MEMORY_MODES:
            raise ValueError(unknown_name("memory mode", mode, list(MEMORY_MODES)))
    if ("other" in modes) != (arguments.other is not None):
        raise ValueError("--memory other takes the caches of --other RUN; give both, or neither")
    if arguments.batch_sizes is not None and "batch" not in modes:
        raise ValueError(f"--batch-sizes {arguments.batch_sizes} is of --memory batch; give both, or neither")
    config = read_run_config(arguments.folder)
    sizes = _sizes(arguments.batch_sizes) if arguments.batch_sizes is not None else [config.training.batch_size]
    modes = [name for mode in modes for name in ([f"batch {n}" for n in sizes] if mode == "batch" else [mode])]
    if arguments.segment_length is not None:
        section = dataclasses.replace(config.evaluation, segment_length=arguments.segment_length)
        config = dataclasses.replace(config, evaluation=section)
    rows, step, guessers = score(
        arguments.folder,
        config,
        arguments.checkpoint,
        arguments.split,
        modes,
        arguments.device,
        arguments.other,
        arguments.average,
    )
    result = {"run": str(arguments.folder), "split": arguments.split, "step": step, "scores": rows}
    if guessers is not None:
        result["baselines"] = guessers
    if any("places" in row for row in rows):
        write_evaluation(arguments.folder, {key: value for key, value in result.items() if key != "run"})
        write_report(arguments.folder, Reporter("", 0, None if arguments.json else Console()))
    if arguments.json:
        print(json.dumps(jsonable(result), indent=1, allow_nan=False))
        return 0
    title = f"{arguments.folder}: {arguments.split} split, step {step}"
    console = Console(highlight=False)
    console.print(precision_table(title, rows) if "box_ap" in rows[0] else score_table(title, rows))
    for name, value in rows[0].items():
        if name.endswith("_signature"):
            console.print(f" {name.removesuffix('_signature')}: {value}", markup=False, soft_wrap=True)
    for name, value in (guessers or {}).items():  # names are too long for a column of a narrow terminal
        console.print(f" baseline: {name}, accuracy {value:.2%}", markup=False, soft_wrap=True)
    return 0


def score_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """A row of scores per way of treating the memory."""
    left_out = ("_interval", "_signature")
    columns = [name for name in rows[0] if name not in ("memory", "places") and not name.endswith(left_out)]
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("memory")
    for name in columns:
        table.add_column("loss (nats)" if name == "loss" else name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(row["memory"], *(shown(row, column) for column in columns))
    return table


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--batch-sizes {text!r} must be whole numbers from 1 on with commas between them, e.g. 1,64")
    return sizes


def precision_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Average precisions: a row per way of treating the memory, and kind (box, mask)."""
    table = Table(title=title, title_justify="left", box=None)
    for name in ("memory", "kind"):
        table.add_column(name)
    for name in COLUMNS.values():
        table.add_column(name, justify="right")
    for row in rows:
        for kind in ("box", "mask"):
            if f"{kind}_ap" in row:
                table.add_row(row["memory"], kind, *(shown(row, f"{kind}_{part}") for part in COLUMNS))
    return table


def shown(row: dict[str, Any], column: str) -> str:
    """One score as text: shares in per cent, an accuracy with the interval that its rows leave."""
    value = row[column]
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return MISSING
    if not Metric(column).percent:
        return f"{value:.4f}"
    low, high = row.get(f"{column}_interval") or (None, None)
    return f"{value:.2%} {Metric(column).interval(low, high)}".rstrip()


def score(
    folder: Path,
    config: RunConfig,
    checkpoint: str,
    split: str,
    modes: list[str],
    device: str,
    other: Path | None = None,
    average: int | None = None,
) -> tuple[list[dict[str, Any]], int, dict[str, float] | None]:
    """Scores of a run's checkpoint for each memory mode, for text with the loss by place; the step; the baselines."""

    def scores(processes: World) -> tuple[list[dict[str, Any]], int, dict[str, float] | None]:
        rows: list[dict[str, Any]] = []
        dataset = build_dataset(config, split)
        task = task_name(dataset)
        text, detection, pairs = (task == name for name in ("language", "detection", "translation"))
        if average is not None and not pairs:
            raise ValueError(f"--average {average} is for translation, not {dataset.name!r}")
        if pairs:
            check_tokenizer(folder, dataset.tokenizer)
        if detection:
            check_categories([record["name"] for record in read_categories(folder)], dataset)
        if config.evaluation.segment_length and not text:
            raise ValueError(f"--segment-length {config.evaluation.segment_length} is for text, not {dataset.name!r}")
        if not text and not detection and not pairs:
            rows, step = score_shared(folder, config, checkpoint, dataset, modes, processes, other)
            return rows, step, fitted_baselines(config, dataset)
        refused = [mode for mode in modes if mode.split()[0] in OF_SHARED_CACHES]
        if refused:
            raise ValueError(
                f"--memory {refused[0]!r} is of caches that all rows of a classifier share; take carry, reset"
            )
        for mode in modes:
            _, model, step = load_run(folder, checkpoint, average)
            model.to(processes.device)
            if pairs:
                if mode != "carry" and not has_caches(model):
                    raise ValueError(f"--memory {mode}: the model of {folder} has no cache to {mode}; take carry")
                treat_memory(model, mode, config)
                scores_of, _ = evaluate_pairs(model, dataset, processes, config, None)
                rows.append({"memory": mode, **scores_of})
                continue
            if detection:
                treat_memory(model, mode, config)
                size = config.training.evaluation_batch_size or config.training.batch_size
                rows.append({"memory": mode, **evaluate_detector(model, dataset, processes, size)})
                continue
            if has_caches(model):
                treat_memory(model, mode, config)
            section = dataclasses.replace(config.evaluation, memory=mode)  # type: ignore[arg-type]
            values, places = evaluate_language(
                model, dataset, processes, dataclasses.replace(config, evaluation=section)
            )
            rows.append({"memory": mode, **values, "places": places})
        return rows, step, None

    return in_world(device, scores)


def score_shared(
    folder: Path,
    config: RunConfig,
    checkpoint: str,
    dataset: Any,
    modes: list[str],
    processes: World,
    other: Path | None,
) -> tuple[list[dict[str, Any]], int]:
    """Scores of a classifier for each way of treating its shared caches, and the step.

    Raises:
        ValueError: the model has no cache to treat so.
    """
    from cached_transformers.experiments.cache_use.scores import score_cache_use
    from cached_transformers.memories.parts.shared_cache import caches

    _, model, step = load_run(folder, checkpoint)
    found = list(caches(model))
    for mode in modes:
        if mode.split()[0] in OF_SHARED_CACHES and not found:
            raise ValueError(f"--memory {mode.split()[0]}: the model of {folder} has no shared cache")
        if mode.startswith("batch ") and any(cache.attend != "mean" for cache in found):
            raise ValueError(
                "--memory batch is of caches whose batch mean is read in training; this model's rows read "
                f"{found[0].attend!r}, which is the same in evaluation"
            )
    theirs = None if other is None else load_run(other, checkpoint)[1]
    size = config.training.evaluation_batch_size or config.training.batch_size
    settings = config.training
    rows = score_cache_use(
        lambda: load_run(folder, checkpoint)[1],
        dataset,
        modes,
        processes,
        size,
        settings.seed,
        theirs,
        settings.workers,
    )
    return [{"memory": row.pop("mode"), **with_intervals(row)} for row in rows], step


def fitted_baselines(config: RunConfig, dataset: Any) -> dict[str, float] | None:
    """Scores of the guessers, fitted to the training rows; None where these are not there any more."""
    try:
        train = build_dataset(config, "train")
    except FileNotFoundError:
        return None
    return baselines(config, train, dataset)


def has_caches(model: nn.Module) -> bool:
    """Whether the model has caches that all rows share, beside the states of streams."""
    return any(getattr(module, "shared", False) is True for module in model.modules())


def treat_memory(model: nn.Module, mode: str, config: RunConfig) -> None:
    """Keep, empty, or shuffle the caches of a model, in place; the shuffle depends on `training.seed` alone.

    Raises:
        ValueError: the model has no cache to empty or shuffle.
    """
    if mode == "carry":
        return
    from cached_transformers.memories.parts.shared_cache import reset_caches, shuffle_caches

    if mode == "reset":
        reset_caches(model)
    else:
        shuffle_caches(model, torch.Generator().manual_seed(config.training.seed))
