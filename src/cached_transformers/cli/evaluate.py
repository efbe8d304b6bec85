"""`cached evaluate`: scores of a trained run, with its memory as saved, emptied, or shuffled.

If emptying the caches costs nothing, the model does not use them: that is the question `--memory` answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from cached_transformers.config import RunConfig
from cached_transformers.registry import unknown_name
from cached_transformers.training.distributed import world
from cached_transformers.training.metrics import evaluate, jsonable
from cached_transformers.training.run import build_dataset, load_run

MEMORY_MODES = ("carry", "reset", "shuffle")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("evaluate", help="score a run; with its memory kept, emptied or shuffled")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--split", default="test", choices=("train", "validation", "test"))
    parser.add_argument("--checkpoint", default="best", metavar="best|last|PATH", help="default: best")
    help_memory = "comma-separated: carry (as saved), reset (emptied), shuffle (entries permuted)"
    parser.add_argument("--memory", default="carry", metavar="MODES", help=help_memory)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one row of scores per way of treating the memory."""
    modes = arguments.memory.split(",")
    for mode in modes:
        if mode not in MEMORY_MODES:
            raise ValueError(unknown_name("memory mode", mode, list(MEMORY_MODES)))
    rows, step = score(arguments.folder, arguments.checkpoint, arguments.split, modes, arguments.device)
    result = {"run": str(arguments.folder), "split": arguments.split, "step": step, "scores": rows}
    if arguments.json:
        print(json.dumps(jsonable(result), indent=1, allow_nan=False))
        return 0
    table = Table(title=f"{arguments.folder}: {arguments.split} split, step {step}", title_justify="left", box=None)
    for column in ("memory", "accuracy", "loss (nats)"):
        table.add_column(column, justify="left" if column == "memory" else "right")
    for row in rows:
        table.add_row(row["memory"], f"{row['accuracy']:.2%}", f"{row['loss']:.4f}")
    Console(highlight=False).print(table)
    return 0


def score(folder: Path, checkpoint: str, split: str, modes: list[str], device: str) -> tuple[list[dict[str, Any]], int]:
    """Accuracy and loss of a run's checkpoint for each memory mode, and the step of the checkpoint."""
    rows = []
    with world(device) as processes:
        config, _, _ = load_run(folder, checkpoint)
        dataset = build_dataset(config, split)
        for mode in modes:
            config, model, step = load_run(folder, checkpoint)
            treat_memory(model.to(processes.device), mode, config)
            size = config.training.evaluation_batch_size or config.training.batch_size
            rows.append({"memory": mode, **evaluate(model, dataset, processes, size)})
    return rows, step


def treat_memory(model: nn.Module, mode: str, config: RunConfig) -> None:
    """Keep, empty, or shuffle the caches of a model, in place; the shuffle depends on `training.seed` alone.

    Raises:
        ValueError: the model has no cache to empty or shuffle.
    """
    if mode == "carry":
        return
    from cached_transformers.memories.shared_cache import reset_caches, shuffle_caches

    if mode == "reset":
        reset_caches(model)
    else:
        shuffle_caches(model, torch.Generator().manual_seed(config.training.seed))
