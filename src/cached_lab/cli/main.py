"""Entry point of the `cached` command: arguments in, exit status out, and the one place where errors become messages.

Exit status: 0 done; 1 failed at run time; 2 bad input; 70 a mistake of this package; 128 + n stopped by signal n (130
after Ctrl-C). With --debug, or CACHED_DEBUG=1, the traceback of an error is shown.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from cached_lab.training.interruption import Interrupted, RunFailed, Stopped, ended_by_signals
from cached_transformers import __version__
from cached_transformers.registry import unknown_name

from . import (
    benchmark,
    compare,
    completion,
    convert,
    detect,
    evaluate,
    explain,
    generate,
    leaderboard,
    plan,
    plot,
    probe,
    reproduce,
    stream,
    train,
)
from . import list as list_command
from . import translate as translate_command

EXAMPLES = """\
examples:
  cached list memories                                     what there is
  cached explain grc                                       what one of them does, and its options
  cached explain bp_transformer --plot tree.png            which keys each query attends
  cached train digits_vit_grc training.steps=200           train a recipe with one value changed
  cached plan imagenet_pvt_small_grc --gpus 8              whether it fits, in which pieces, for how long
  cached evaluate runs/digits_vit_grc --memory carry,reset,shuffle
  cached detect runs/coco_mini_mask_rcnn photo.jpg         boxes and masks drawn into images
  cached translate runs/multi30k_en_de_plain < english.txt > german.txt
  cached compare digits_vit_plain --with plain,grc --seeds 3
  cached reproduce table5 --data wikitext-2                a table of the paper, small
  cached reproduce table6 --rows transformer-grc           rows of one that generates its data
  cached plot curves runs/digits_vit_grc                   a figure from what a run recorded
  cached probe grc_stream,transformer_xl --tasks latch     what memories hold
  cached leaderboard --quick --jobs 2                      all memories beside each other, with what they cost
  cached stream runs/demo_text book.txt                    read a text of any length in constant memory
  cached generate runs/demo_text --prompt "It was"         what follows, printed while it is written
  cached convert runs/demo_text                            weights as one .safetensors file, whole
  cached benchmark --help                                  speed and memory
"""


LONGEST = 4000
"""Characters of a message; a library that lists all it knows takes more."""
MISTAKE = 70
"""EX_SOFTWARE of sysexits.h."""
LESS_MEMORY = (
    "lower training.batch_size (or raise training.accumulate), training.segment_length, the model's width or depth, or "
    "the length of its memory"
)
NO_ROOM = ("t allocate memory", "not enough memory", "Storage size calculation overflowed", "multiplication overflow")
"""What torch says when a tensor does not fit."""


class _Parser(argparse.ArgumentParser):
    """A parser whose messages suggest the nearest name, and do not repeat an endless argument."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(None, unknown_name(_called(action), value, [str(c) for c in action.choices]))

    def error(self, message: str) -> NoReturn:
        super().error(cut(message))


def _called(action: argparse.Action) -> str:
    """What an argument is called in a message."""
    if action.dest == "command":
        return "command"
    return "/".join(action.option_strings) or str(action.metavar or action.dest)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = _Parser(
        prog="cached",
        description="Train, compare and look into transformers with a memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cached-transformers {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    shown = (list_command, explain, train, evaluate, detect, translate_command)
    others = (plan, compare, reproduce, plot, probe, leaderboard, stream, generate, convert, benchmark, completion)
    for module in (*shown, *others):
        module.add_parser(subparsers)
    what = "show the traceback of an error, as CACHED_DEBUG=1 does"
    parser.add_argument("--debug", action="store_true", help=what)
    for command in subparsers.choices.values():  # without a default, which would undo what stands before the command
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=what)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    debug = os.environ.get("CACHED_DEBUG") == "1"
    try:
        parser = build_parser()
        arguments = parse(parser, argv)
        debug |= arguments.debug
        if arguments.command is None:
            parser.print_help()
            return 0
        with ended_by_signals():
            return arguments.run(arguments)  # type: ignore[no-any-return]
    except BrokenPipeError:  # the reader of a pipe has gone, as in `cached list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Interrupted as stop:
        print(f"{stop}; run the same command again (with --resume auto, the default) to continue", file=sys.stderr)
        return 128 + stop.signal_number
    except Stopped as stop:
        print(f"{stop}; the same command goes on from what was saved, if anything was", file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        return report(error, debug)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, with `key=value` allowed before, between and after options."""
    arguments, rest = parser.parse_known_args(argv)
    stray = [word for word in rest if word.startswith("-") or "=" not in word]
    if stray or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(stray or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def report(error: Exception, debug: bool = False) -> int:
    """Print an error for people, and give the exit status that says whose it is."""
    if debug:
        traceback.print_exception(error)
    status, message = verdict(error)
    if status == MISTAKE:
        kept = "above" if debug else written_traceback(error)
        message = (
            f"this is a mistake of cached-transformers, not yours: {type(error).__name__}: {one_line(message)}; "
            f"please report it with the traceback ({kept})"
        )
    print(f"error: {cut(message)}", file=sys.stderr)
    return status


def cut(message: str) -> str:
    """A message that is not longer than a screen or two."""
    return message if len(message) <= LONGEST else f"{message[:LONGEST]} ... (cut)"


def verdict(error: Exception) -> tuple[int, str]:
    """Exit status and message: what messages are raised for, what a machine may lack, and whatever nobody foresaw."""
    message = str(error)
    if isinstance(error, MemoryError) or out_of_memory(error):
        return 1, f"out of memory ({one_line(message) or 'of the process'}); {LESS_MEMORY}"
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, (ValueError, ImportError, FileNotFoundError)):
        return 2, message
    if isinstance(error, (OSError, RunFailed)):
        return 1, message
    origin = type(error).__module__
    if origin.startswith(("torch._dynamo", "torch._inductor")):
        return 1, f"torch.compile failed ({one_line(message)}); train without it (training.compile=false)"
    if type(error).__name__ == "AcceleratorError" or "gloo/transport" in message or origin == "torch.distributed":
        return 1, f"the device or another process failed: {one_line(message)}"
    return MISTAKE, message


def out_of_memory(error: Exception) -> bool:
    """Whether torch, or numpy in its place, could not allocate a tensor, or not even number its elements."""
    message = str(error)
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError" or any(words in message for words in NO_ROOM)
    )


def written_traceback(error: Exception) -> str:
    """Where the traceback of an error was written; the traceback itself where no file can be."""
    text = "".join(traceback.format_exception(error))
    try:
        handle, path = tempfile.mkstemp(prefix="cached_error_", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return text
    return path


def one_line(message: str) -> str:
    """The first line of a message, cut where it is long."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return first if len(first) <= 300 else f"{first[:300]} ..."


if __name__ == "__main__":
    sys.exit(main())
