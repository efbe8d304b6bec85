"""`cached translate RUN < FILE > FILE`: translate line by line, in constant memory and in order.

Each line gives one line. Every batch is written at once, so that a stop leaves whole lines; with --output FILE --resume
the same command continues after them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import IO, Any

from .arguments import add_command, add_run, add_weights, require_file


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        subparsers,
        "translate",
        run,
        "translate lines of text with a trained run",
        description="Reads lines, writes a line for each, in order; an empty line stays empty. The text must look like "
        "the training data: raw, or Moses tokens with blanks between them.",
        epilog="example: cached translate runs/multi30k_en_de_plain < english.txt > german.txt",
    )
    add_run(parser, " of a translation model")
    parser.add_argument("--input", type=Path, metavar="FILE", help="default: standard input")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--resume", action="store_true", help="continue after the lines that --output holds already")
    parser.add_argument("--beams", type=int, metavar="K", help="beams of the search (default: the run's)")
    penalty = "score = log-probability / length ** A (default: the run's)"
    parser.add_argument("--length-penalty", type=float, metavar="A", help=penalty)
    tokens = "tokens of a translation at most (default: twice the source's, and 10)"
    parser.add_argument("--tokens", type=int, metavar="T", help=tokens)
    parser.add_argument("--batch", type=int, metavar="N", help="lines at a time (default: 32; 1 from a terminal)")
    parser.add_argument("--average", type=int, metavar="N", help="average the weights of the newest N checkpoints")
    scores = "put the log-probability and a tab before each translation"
    parser.add_argument("--scores", action="store_true", help=scores)
    add_weights(parser, "tested")


def run(arguments: argparse.Namespace) -> int:
    """Translate."""
    from cached_lab.experiments.load import load_run
    from cached_lab.tasks.translation import lines
    from cached_lab.tasks.translation.translate import check_search
    from cached_lab.training.distributed import pick_device
    from cached_lab.training.run_files import TOKENIZER

    batch = arguments.batch
    if batch is not None and batch < 1:
        raise ValueError(f"--batch {batch} must be at least 1 line")
    if arguments.resume and arguments.output is None:
        raise ValueError("--resume continues a file; give --output FILE")
    if arguments.input is not None:
        require_file(arguments.input, "the text to translate")
    config, loaded, _ = load_run(arguments.folder, arguments.checkpoint, arguments.average)
    model: Any = loaded
    tokenizer = lines.read_tokenizer(arguments.folder / TOKENIZER)
    options: dict[str, Any] = {"begin": tokenizer.begin, "end": tokenizer.end}
    for option in ("beams", "tokens", "length_penalty"):
        given = getattr(arguments, option)
        options[option] = getattr(config.evaluation, option) if given is None else given
    model.to(pick_device(arguments.device)).eval()
    check_search(model, **options)
    done = 0 if not arguments.resume else lines.cut_to_whole_lines(arguments.output)
    if done:
        print(f"continuing after line {done:,} of {arguments.output}", file=sys.stderr)
    with contextlib.ExitStack() as opened:
        source: IO[bytes] = sys.stdin.buffer
        if arguments.input is not None:
            source = opened.enter_context(arguments.input.open("rb"))
        target: IO[bytes] = sys.stdout.buffer
        if arguments.output is not None:
            target = opened.enter_context(arguments.output.open("ab" if arguments.resume else "wb"))
        batch = batch or (1 if source.isatty() else 32)
        numbered = lines.read_lines(source, str(arguments.input or "standard input"), done)
        for texts in lines.translated(model, tokenizer, numbered, batch, options, arguments.scores):
            target.write("".join(f"{text}\n" for text in texts).encode())
            target.flush()
    return 0
