"""`cached evaluate`: scores of a trained run, with its memory as saved, emptied, shuffled, exchanged or made anew.

For text it says in one verdict whether the memory is used, and RUN/evaluation.json and the report show the loss by
place; for documents with a label they show the accuracy by their length.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from cached_transformers.registry import unknown_name

from .arguments import add_weights, numbers_from_one

MEMORY_MODES = ("carry", "reset", "shuffle", "other", "batch")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("evaluate", help="score a run; with its memory kept, emptied or shuffled")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--split", default="test", choices=("train", "validation", "test"))
    parser.add_argument(
        "--average", type=int, metavar="N", help="translation: average the weights of the newest N checkpoints"
    )
    help_memory = "comma-separated: carry (as it is), reset (emptied), shuffle (entries or rows permuted)"
    help_memory += "; of text carry and shuffle give the verdict whether it is used"
    help_memory += ", and of shared caches: other (that of --other), batch (updated by each batch, as in training)"
    parser.add_argument("--memory", default="carry", metavar="MODES", help=help_memory)
    parser.add_argument("--other", type=Path, metavar="RUN", help="run whose caches --memory other takes")
    parser.add_argument(
        "--batch-sizes", metavar="N,N,...", help="rows of the batches of --memory batch (default: those of training)"
    )
    parser.add_argument(
        "--segment-length", type=int, metavar="N", help="text: tokens in a segment (default: the run's)"
    )
    parser.add_argument(
        "--segments",
        metavar="N,N,...",
        help="documents: read so many segments of each at most; those that are made have just so many",
    )
    add_weights(parser, "tested")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one row of scores per way of treating the memory."""
    from cached_transformers.experiments.evaluate import Evaluation
    from cached_transformers.experiments.load import read_run_config
    from cached_transformers.experiments.reports.terminal import open_console, print_scores, print_text_use
    from cached_transformers.experiments.run_outputs import write_evaluation, write_report
    from cached_transformers.files import jsonable
    from cached_transformers.training.progress import Reporter

    chosen = arguments.memory.split(",")
    for mode in chosen:
        if mode not in MEMORY_MODES:
            raise ValueError(unknown_name("memory mode", mode, list(MEMORY_MODES)))
    if ("other" in chosen) != (arguments.other is not None):
        raise ValueError("--memory other takes the caches of --other RUN; give both, or neither")
    if arguments.batch_sizes is not None and "batch" not in chosen:
        raise ValueError(f"--batch-sizes {arguments.batch_sizes} is of --memory batch; give both, or neither")
    folder, split = arguments.folder, arguments.split
    config = read_run_config(folder)
    sizes = [config.training.batch_size]
    if arguments.batch_sizes is not None:
        sizes = numbers_from_one("--batch-sizes", arguments.batch_sizes, "1,64")
    modes = [name for mode in chosen for name in ([f"batch {n}" for n in sizes] if mode == "batch" else [mode])]
    if arguments.segment_length is not None:
        section = dataclasses.replace(config.evaluation, segment_length=arguments.segment_length)
        config = dataclasses.replace(config, evaluation=section)
    lengths = [] if arguments.segments is None else numbers_from_one("--segments", arguments.segments, "1,8,64")
    about = (arguments.checkpoint, split, modes, arguments.other, arguments.average, lengths)
    evaluation = Evaluation(folder, config, *about)
    found = evaluation.score(arguments.device)

    result: dict[str, Any] = {"split": split, "step": found.step, "scores": found.rows, **found.about}
    if found.baselines is not None:
        result["baselines"] = found.baselines
    console = open_console()
    if any("places" in row or "segments" in row for row in found.rows):
        write_evaluation(folder, result)
        write_report(folder, Reporter("", 0, None if arguments.json else console))
    if arguments.json:
        print(json.dumps(jsonable({"run": str(folder), **result}), indent=1, allow_nan=False))
        return 0
    print_scores(f"{folder}: {split} split, step {found.step}", found.rows, console)
    print_text_use(found.rows, found.about, console)
    for name, value in (found.baselines or {}).items():  # names are too long for a column of a narrow terminal
        console.print(f" baseline: {name}, accuracy {value:.2%}", markup=False, soft_wrap=True)
    return 0
