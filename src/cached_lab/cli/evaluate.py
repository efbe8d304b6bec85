"""`cached evaluate`: scores of a trained run, with its memory as saved, emptied, shuffled, exchanged or made anew.

For text it says in one verdict whether the memory is used, and RUN/evaluation.json and the report show the loss by
place; for documents with a label they show the accuracy by their length. With --output-cache a text is scored without
and with a cache over what the model predicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_transformers.registry import unknown_name

from .arguments import add_weights, numbers_from_one

if TYPE_CHECKING:
    from cached_lab.training.config import RunConfig

MEMORY_MODES = ("carry", "reset", "shuffle", "other", "batch")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("evaluate", help="score a run; with its memory kept, emptied or shuffled")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="NAME.option=value",
        help="options of --output-cache: neural.size, theta, lambda, form (linear, joint), alpha; knn.k, temperature, "
        "lambda, key (feed_forward, last_hidden), dtype, search (exact, Flat, HNSW32, IVF4096,PQ64), probes, folder; "
        "or of --with-memory",
    )
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
    parser.add_argument(
        "--output-cache",
        choices=("neural", "knn"),
        help="text: mix in what followed alike hidden states, in the text read last (neural) or in the training split "
        "(knn, whose datastore is made in RUN/datastore); what is not set is tuned on the validation split",
    )
    parser.add_argument(
        "--with-memory",
        metavar="MEMORY",
        help="text: give a model that was trained without a memory one that has no weights: streaming_llm, tova, h2o, "
        "transformer_xl",
    )
    add_weights(parser, "tested")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one row of scores per way of treating the memory, or without and with a cache over outputs."""
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
    evaluation = Evaluation(folder, config, *about, memory)
    found = evaluation.score(arguments.device)

    result: dict[str, Any] = {} if memory is None else {"memory": memory}
    result |= {"split": split, "step": found.step, "scores": found.rows, **found.about}
    if found.baselines is not None:
        result["baselines"] = found.baselines
    console = open_console()
    if memory is None and any("places" in row or "segments" in row for row in found.rows):  # else it is another model
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
    """The memory that the model is given, and its options. It knows places as the model does: `relative` is off."""
    from cached_lab.experiments.probes.choice import options_of_memories
    from cached_transformers.registry import MEMORIES

    if name is None:
        if overrides:
            raise ValueError(
                f"{overrides[0]!r} is an option of --output-cache or --with-memory, neither of which is given"
            )
        return None
    places = {"relative": False} if "relative" in MEMORIES.entry(name).options else {}
    return {"name": name, **places, **options_of_memories([name], overrides).get(name, {})}


def _in_segments(config: RunConfig, length: int | None) -> RunConfig:
    """The configuration with another length of segments, where one is given."""
    if length is None:
        return config
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, segment_length=length))


def _with_output_cache(arguments: argparse.Namespace) -> int:
    """Print the scores without and with a cache over outputs, its settings, and how long it took."""
    from cached_lab.experiments.load import read_run_config
    from cached_lab.experiments.output_cache import cache_options, evaluate_output_cache
    from cached_lab.experiments.reports.run_page import print_output_cache
    from cached_lab.experiments.reports.terminal import open_console
    from cached_transformers.files import jsonable

    for name, plain in (
        ("memory", "carry"),
        ("other", None),
        ("batch_sizes", None),
        ("segments", None),
        ("with_memory", None),
    ):
        if (value := getattr(arguments, name)) != plain:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} does not go with --output-cache; leave one of them out"
            )
    if arguments.average is not None:
        raise ValueError(f"--average {arguments.average} is for translation; leave it out with --output-cache")
    options = cache_options(arguments.output_cache, arguments.overrides)
    config = _in_segments(read_run_config(arguments.folder), arguments.segment_length)
    about = (arguments.checkpoint, arguments.split, options, arguments.device)
    result = {"run": str(arguments.folder), **evaluate_output_cache(arguments.folder, config, *about)}
    if arguments.json:
        print(json.dumps(jsonable(result), indent=1, allow_nan=False))
    else:
        print_output_cache(result, open_console())
    return 0
