"""`cached translate`: translate lines of text with a trained run, in constant memory and in order.

Each line gives one line; the text must look like the training data: raw, or Moses tokens with blanks between them.
Every batch is written at once, so that a stop leaves whole lines; with --output FILE --resume the same command
continues after them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import IO, Any

from .arguments import refuse_below_one, require_file, run_arguments

ARGUMENTS = (
    *run_arguments(" of a translation model", "tested"),
    ("--input FILE", Path, "default: standard input"),
    ("--output FILE", Path, "default: standard output"),
    ("--resume", bool, "continue after the lines that --output holds already"),
    ("--beams K", int, "beams of the search (default: the run's)"),
    ("--length-penalty A", float, "score = log-probability / length ** A (default: the run's)"),
    ("--tokens T", int, "tokens of a translation at most (default: twice the source's, and 10)"),
    ("--batch N", int, "lines at a time (default: 32; 1 from a terminal)"),
    ("--average N", int, "average the weights of the newest N checkpoints"),
    ("--scores", bool, "put the log-probability and a tab before each translation"),
)


def run(arguments: argparse.Namespace) -> int:
    """Translate."""
    from cached_lab.experiments.load import load_run
    from cached_lab.tasks.translation import lines
    from cached_lab.tasks.translation.translate import check_search
    from cached_lab.training.distributed import pick_device
    from cached_lab.training.run_files import TOKENIZER

    refuse_below_one(arguments, "batch")
    if arguments.input is not None:
        require_file(arguments.input, "the text to translate")
    config, loaded, _ = load_run(arguments.folder, arguments.checkpoint, arguments.average)
    model: Any = loaded
    tokenizer = lines.read_tokenizer(arguments.folder / TOKENIZER)
    given = {option: getattr(arguments, option) for option in ("beams", "tokens", "length_penalty")}
    options: dict[str, Any] = {o: getattr(config.evaluation, o) if x is None else x for o, x in given.items()}
    options |= {"begin": tokenizer.begin, "end": tokenizer.end}
    model.to(pick_device(arguments.device)).eval()
    check_search(model, **options)
    done = lines.cut_to_whole_lines(arguments.output) if arguments.resume else 0
    if done:
        print(f"continuing after line {done:,} of {arguments.output}", file=sys.stderr)
    with contextlib.ExitStack() as opened:
        source: IO[bytes] = sys.stdin.buffer
        if arguments.input is not None:
            source = opened.enter_context(arguments.input.open("rb"))
        target: IO[bytes] = sys.stdout.buffer
        if arguments.output is not None:
            target = opened.enter_context(arguments.output.open("ab" if arguments.resume else "wb"))
        batch = arguments.batch or (1 if source.isatty() else 32)
        numbered = lines.read_lines(source, str(arguments.input or "standard input"), done)
        for texts in lines.translated(model, tokenizer, numbered, batch, options, arguments.scores):
            target.write("".join(f"{text}\n" for text in texts).encode())
            target.flush()
    return 0
