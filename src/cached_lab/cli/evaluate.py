"""`cached evaluate`: score a trained run with its memory kept, emptied, shuffled, exchanged or rebuilt per batch.

For text it gives a verdict on the use of the memory, and RUN/evaluation.json and the report show the loss by place; for
labelled documents they show the accuracy by length. With --output-cache a text is scored without and with a cache over
the model's outputs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_transformers.registry import unknown_name

from .arguments import add_command, add_run, add_weights, numbers_from_one

if TYPE_CHECKING:
    from cached_lab.training.config import RunConfig

MEMORY_MODES = ("carry", "reset", "shuffle", "other", "batch")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(subparsers, "evaluate", run, "score a run; with its memory kept, emptied or shuffled")
    add_run(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="NAME.option=value",
        help="options of --output-cache: neural.size, theta, lambda; knn.k, temperature, lambda, key (feed_forward, "
        "last_hidden), dtype; or of --with-memory",
    )
    parser.add_argument("--split", default="test", choices=("train", "validation", "test"))
    average = "translation: average the weights of the newest N checkpoints"
    parser.add_argument("--average", type=int, metavar="N", help=average)
    modes = "comma-separated: carry (as it is), reset (emptied), shuffle (entries or rows permuted); for text carry "
    modes += "and shuffle give the verdict on its use; for shared caches also other (that of --other), batch (updated "
    modes += "by each batch, as in training)"
    parser.add_argument("--memory", default="carry", metavar="MODES", help=modes)
    parser.add_argument("--other", type=Path, metavar="RUN", help="run with the caches for --memory other")
    sizes = "rows of the batches of --memory batch (default: those of training)"
    parser.add_argument("--batch-sizes", metavar="N,N,...", help=sizes)
    length = "text: tokens in a segment (default: the run's)"
    parser.add_argument("--segment-length", type=int, metavar="N", help=length)
    segments = "documents: read at most this many segments of each; generated ones have exactly as many"
    parser.add_argument("--segments", metavar="N,N,...", help=segments)
    parser.add_argument(
        "--output-cache",
        choices=("neural", "knn"),
        help="text: mix in the tokens that followed similar hidden states, in the latest text (neural) or the training "
        "split (knn, with a datastore in RUN/datastore); options without a value are tuned on the validation split",
    )
    parser.add_argument(
        "--with-memory",
        metavar="MEMORY",
        help="text: give a model trained without a memory one that has no weights: streaming_llm, tova, h2o, "
        "transformer_xl",
    )
    add_weights(parser, "tested")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(arguments: argparse.Namespace) -> int:
    """Print one row of scores per treatment of the memory, or without and with a cache over outputs."""
    from cached_lab.experiments.evaluate import Evaluation
    from cached_lab.experiments.load import read_run_config
    from cached_lab.experiments.reports.run_page import print_scores, print_text_use
    from cached_lab.experiments.reports.terminal import open_console
    from cached_lab.experiments.run_outputs import write_evaluation, write_report
    from cached_lab.training.progress import Reporter
    from cached_transformers.files import jsonable

    if arguments.output_cache is not None:
        return _with_output_cache(arguments)
    memory = _memory(arguments.with_memory, arguments.overrides)
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
    config = _in_segments(config, arguments.segment_length)
    lengths = [] if arguments.segments is None else numbers_from_one("--segments", arguments.segments, "1,8,64")
    about = (arguments.checkpoint, split, modes, arguments.other, arguments.average, lengths)
    found = Evaluation(folder, config, *about, memory).score(arguments.device)

    result: dict[str, Any] = {} if memory is None else {"memory": memory}
    result |= {"split": split, "step": found.step, "scores": found.rows, **found.about}
    if found.baselines is not None:
        result["baselines"] = found.baselines
    console = open_console()
    # With another memory it is not the model of the run's report.
    if memory is None and any("places" in row or "segments" in row for row in found.rows):
        write_evaluation(folder, result)
        write_report(folder, Reporter("", 0, None if arguments.json else console))
    if arguments.json:
        print(json.dumps(jsonable({"run": str(folder), **result}), indent=1, allow_nan=False))
        return 0
    given = "" if memory is None else f", with {memory['name']}"
    print_scores(f"{folder}: {split} split, step {found.step}{given}", found.rows, console)
    print_text_use(found.rows, found.about, console)
    for name, value in (found.baselines or {}).items():  # names are too long for a column of a narrow terminal
        console.print(f" baseline: {name}, accuracy {value:.2%}", markup=False, soft_wrap=True)
    return 0


def _memory(name: str | None, overrides: list[str]) -> dict[str, Any] | None:
    """The memory for --with-memory and its options; `relative` is off, so that positions stay the model's."""
    from cached_lab.experiments.probes.choice import options_of_memories
    from cached_transformers.registry import MEMORIES

    if name is None:
        if overrides:
            raise ValueError(f"{overrides[0]!r} is an option of --output-cache or --with-memory; give one of them")
        return None
    places = {"relative": False} if "relative" in MEMORIES.entry(name).options else {}
    return {"name": name, **places, **options_of_memories([name], overrides).get(name, {})}


def _in_segments(config: RunConfig, length: int | None) -> RunConfig:
    if length is None:
        return config
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, segment_length=length))


def _with_output_cache(arguments: argparse.Namespace) -> int:
    """Print the scores without and with a cache over outputs, its settings, and its time."""
    from cached_lab.experiments.load import read_run_config
    from cached_lab.experiments.reports.run_page import print_output_cache
    from cached_lab.experiments.reports.terminal import open_console
    from cached_lab.output_caches.evaluation import cache_options, evaluate_output_cache
    from cached_transformers.files import jsonable

    for name in ("memory", "other", "batch_sizes", "segments", "with_memory", "average"):
        value = getattr(arguments, name)
        if value != ("carry" if name == "memory" else None):
            option = f"--{name.replace('_', '-')} {value}"
            raise ValueError(f"{option} does not go with --output-cache; leave one of them out")
    options = cache_options(arguments.output_cache, arguments.overrides)
    config = _in_segments(read_run_config(arguments.folder), arguments.segment_length)
    about = (arguments.checkpoint, arguments.split, arguments.output_cache, options, arguments.device)
    result = {"run": str(arguments.folder), **evaluate_output_cache(arguments.folder, config, *about)}
    if arguments.json:
        print(json.dumps(jsonable(result), indent=1, allow_nan=False))
    else:
        print_output_cache(result, open_console())
    return 0
