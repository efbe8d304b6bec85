"""`cached evaluate`: score a run; with its memory kept, emptied, shuffled, exchanged or rebuilt per batch.

For text it gives a verdict on the use of the memory, and RUN/evaluation.json and the report show the loss by place; for
labelled documents they show the accuracy by length.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from cached_transformers.registry import unknown_name

from .arguments import memory_option, numbers_from_one, run_arguments

MEMORY_MODES = ("carry", "reset", "shuffle", "other", "batch")
MODES = (
    "comma-separated: carry (as it is), reset (emptied), shuffle (entries or rows permuted); for shared caches also "
    "other (the cache of --other), batch (updated by each batch, as in training)"
)
ARGUMENTS = (
    *run_arguments("", "tested"),
    ("overrides NAME.option=value*", str, "options of --with-memory"),
    ("--split", ("test", "train", "validation"), "part of the data"),
    ("--average N", int, "translation: average the weights of the newest N checkpoints"),
    ("--memory MODES", "carry", MODES),
    ("--other RUN", Path, "run with the caches for --memory other"),
    ("--batch-sizes N,N,...", str, "rows of the batches of --memory batch (default: as in training)"),
    ("--segment-length N", int, "text: tokens in a segment (default: the run's)"),
    ("--segments N,N,...", str, "documents: read at most N segments of each; generated ones have exactly as many"),
    ("--with-memory MEMORY", str, "text: a memory without weights (streaming_llm, tova, ...) for a model without one"),
    ("--json", bool, "machine-readable output"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print one row of scores per treatment of the memory."""
    from cached_lab.experiments.evaluate import Evaluation
    from cached_lab.experiments.load import read_run_config
    from cached_lab.experiments.reports.run_page import evaluation_blocks
    from cached_lab.experiments.reports.terminal import open_console, show
    from cached_lab.experiments.run_outputs import write_evaluation, write_report
    from cached_lab.training.progress import Reporter
    from cached_transformers.files import jsonable

    folder, split, chosen = arguments.folder, arguments.split, arguments.memory.split(",")
    config = read_run_config(folder)
    if arguments.segment_length is not None:
        section = dataclasses.replace(config.evaluation, segment_length=arguments.segment_length)
        config = dataclasses.replace(config, evaluation=section)
    memory = memory_option(arguments.with_memory, arguments.overrides)
    for mode in chosen:
        if mode not in MEMORY_MODES:
            raise ValueError(unknown_name("memory mode", mode, list(MEMORY_MODES)))
    if "other" in chosen and arguments.other is None:
        raise ValueError("--memory other takes the caches of --other RUN; give both")
    sizes = numbers_from_one("--batch-sizes", arguments.batch_sizes) or [config.training.batch_size]
    modes = [name for mode in chosen for name in ([f"batch {n}" for n in sizes] if mode == "batch" else [mode])]
    lengths = numbers_from_one("--segments", arguments.segments)
    about = (arguments.checkpoint, split, modes, arguments.other, arguments.average, lengths, memory)
    found = Evaluation(folder, config, *about).score(arguments.device)
    result: dict[str, Any] = {} if memory is None else {"memory": memory}
    result |= {"split": split, "step": found.step, "scores": found.rows, **found.about}
    result |= {} if found.baselines is None else {"baselines": found.baselines}
    console = open_console()
    # With another memory it is not the model of the run's report.
    if memory is None and any("places" in row or "segments" in row for row in found.rows):
        write_evaluation(folder, result)
        write_report(folder, Reporter("", 0, None if arguments.json else console))
    if arguments.json:
        print(json.dumps(jsonable({"run": str(folder), **result}), indent=1, allow_nan=False))
    else:
        given = "" if memory is None else f", with {memory['name']}"
        show(console, *evaluation_blocks(f"{folder}: {split} split, step {found.step}{given}", found.rows, result))
    return 0
