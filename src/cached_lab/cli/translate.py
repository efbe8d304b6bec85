"""`cached translate RUN < FILE > FILE`: translate line by line, in constant memory and in order.

One line out for each line in. What was translated is written after each batch, so that a stop leaves whole lines
behind; with --output FILE --resume the same command goes on behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import IO, Any

from .arguments import add_weights


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "translate",
        help="translate lines of text with a trained run",
        description="Reads lines, writes a line for each, in order; an empty line stays empty. Text is to look as the "
        "training data did: raw, or Moses tokens with blanks between them.",
        epilog="example: cached translate runs/multi30k_en_de_plain < english.txt > german.txt",
    )
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder of a translation model")
    parser.add_argument("--input", type=Path, metavar="FILE", help="default: standard input")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--resume", action="store_true", help="go on behind the lines that --output holds already")
    parser.add_argument(
        "--beams", type=int, metavar="K", help="continuations that the search keeps (default: the run's)"
    )
    parser.add_argument(
        "--length-penalty", type=float, metavar="A", help="score = log-probability / length ** A (default: the run's)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="T", help="tokens of a translation at most (default: twice the source's, and 10)"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="lines at a time (default: 32; 1 from a terminal)")
    parser.add_argument("--average", type=int, metavar="N", help="average the weights of the newest N checkpoints")
    parser.add_argument(
        "--scores", action="store_true", help="put the log-probability and a tab before each translation"
    )
    add_weights(parser, "tested")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Translate."""
    from cached_lab.experiments.load import load_run
    from cached_lab.tasks.translation import lines
    from cached_lab.training.distributed import pick_device
    from cached_lab.training.run_files import TOKENIZER

    batch = arguments.batch
    if batch is not None and batch < 1:
        raise ValueError(f"--batch {batch} must be at least 1 line")
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume goes on with a file; give --output FILE")
    if arguments.input is not None and not arguments.input.is_file():
        raise FileNotFoundError(f"{arguments.input} is not a file; give the text that is to be translated")
    config, model, _ = load_run(arguments.folder, arguments.checkpoint, arguments.average)
    tokenizer = lines.read_tokenizer(arguments.folder / TOKENIZER)
    options: dict[str, Any] = {}
    for option in ("beams", "tokens", "length_penalty"):
        given = getattr(arguments, option)
        options[option] = getattr(config.evaluation, option) if given is None else given
    model.to(pick_device(arguments.device)).eval()
    lines.check_search(model, **options)
    done = 0 if not arguments.resume else lines.cut_to_whole_lines(arguments.output)
    name = "standard input" if arguments.input is None else str(arguments.input)
    if done:
        print(f"going on behind line {done:,} of {arguments.output}", file=sys.stderr)
    with contextlib.ExitStack() as opened:
        source: IO[bytes] = sys.stdin.buffer
        if arguments.input is not None:
            source = opened.enter_context(arguments.input.open("rb"))
        target: IO[bytes] = sys.stdout.buffer
        if arguments.output is not None:
            target = opened.enter_context(arguments.output.open("ab" if arguments.resume else "wb"))
        if batch is None:
            batch = 1 if source.isatty() else 32
        numbered = lines.read_lines(source, name, done)
        for texts in lines.translated(model, tokenizer, numbered, batch, options, arguments.scores):
            target.write("".join(f"{text}\n" for text in texts).encode())
            target.flush()
    return 0
