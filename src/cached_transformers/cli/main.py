"""Entry point of the `cached` command: arguments in, exit status out, and the one place where errors become messages.

Exit status: 0 done; 1 failed at run time; 2 bad input; 128 + n stopped by signal n (130 after Ctrl-C).
Set CACHED_DEBUG=1 to see the traceback of an error.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from cached_transformers import __version__
from cached_transformers.training.interruption import Interrupted, Stopped, ended_by_signals

from . import benchmark, compare, detect, evaluate, explain, plot, probe, reproduce, stream, train
from . import list as list_command
from . import translate as translate_command

EXAMPLES = """\
examples:
  cached list memories                                     what there is
  cached explain grc                                       what one of them does, and its options
  cached explain bp_transformer --plot tree.png            which keys each query attends
  cached train digits_vit_grc training.steps=200           train a recipe with one value changed
  cached evaluate runs/digits_vit_grc --memory carry,reset,shuffle
  cached detect runs/coco_mini_mask_rcnn photo.jpg         boxes and masks drawn into images
  cached translate runs/multi30k_en_de_plain < english.txt > german.txt
  cached compare digits_vit_plain --with plain,grc --seeds 3
  cached reproduce table5 --data wikitext-2                a table of the paper, small
  cached reproduce table6 --rows transformer-grc           rows of one that generates its data
  cached plot curves runs/digits_vit_grc                   a figure from what a run recorded
  cached probe grc_stream,transformer_xl --tasks latch     what memories hold
  cached stream runs/demo_text book.txt                    read a text of any length in constant memory
  cached benchmark --help                                  speed and memory
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = argparse.ArgumentParser(
        prog="cached",
        description="Train, compare and look into transformers with a memory.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cached-transformers {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    shown = (list_command, explain, train, evaluate, detect, translate_command)
    for module in (*shown, compare, reproduce, plot, probe, stream, benchmark):
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = build_parser()
    arguments = parse(parser, argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        with ended_by_signals():
            return arguments.run(arguments)
    except BrokenPipeError:  # the reader of a pipe has gone, as in `cached list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, ImportError, FileNotFoundError, OSError, RuntimeError) as error:
        return report(error, 2 if isinstance(error, (ValueError, ImportError, FileNotFoundError)) else 1)
    except Interrupted as stop:
        print(f"{stop}; run the same command again (with --resume auto, the default) to continue", file=sys.stderr)
        return 128 + stop.signal_number
    except Stopped as stop:
        print(f"{stop}; the same command goes on from what was saved, if anything was", file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments, with `key=value` allowed before, between and after options."""
    arguments, rest = parser.parse_known_args(argv)
    stray = [word for word in rest if word.startswith("-") or "=" not in word]
    if stray or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(stray or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def report(error: Exception, status: int) -> int:
    """Print an error for people and pass the exit status on."""
    if os.environ.get("CACHED_DEBUG") == "1":
        traceback.print_exception(error)
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    print(f"error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
