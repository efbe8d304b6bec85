"""Entry point of the `cached` command: parse arguments, run a command, turn errors into messages.

Exit status: 0 done; 1 failed at run time; 2 bad input; 70 a bug of this package; 128 + n stopped by signal n (130 after
Ctrl-C). With CACHED_DEBUG=1 all errors show their traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from cached_lab.training.interruption import Interrupted, RunFailed, Stopped, ended_by_signals
from cached_transformers import __version__
from cached_transformers.registry import unknown_name

from .arguments import add_command, refuse_unused

EXAMPLES = {
    "list": "memories                                     names of one kind",
    "explain": "grc                                       its equations, cost and options",
    "train": "digits_vit_grc training.steps=200           train a recipe with one value changed",
    "evaluate": "runs/digits_vit_grc --memory carry,reset,shuffle",
    "detect": "runs/coco_mini_mask_rcnn photo.jpg         draw boxes and masks into images",
    "translate": "runs/multi30k_en_de_plain < english.txt > german.txt",
    "plan": "imagenet_pvt_small_grc --gpus 8              memory of a training",
    "compare": "digits_vit_plain --with plain,grc --seeds 3",
    "reproduce": "table5 --data wikitext-2                a table of the paper, small",
    "plot": "curves runs/digits_vit_grc                   a figure of a run's records",
    "probe": "grc_stream,transformer_xl --tasks latch     test what memories hold",
    "leaderboard": "--jobs 2                              all memories with their costs",
    "stream": "runs/demo_text book.txt                    read a text of any length in constant memory",
    "generate": 'runs/demo_text --prompt "It was"         continue a text, token by token',
    "chat": "smollm2 --state talk.safetensors             talk with a pretrained decoder",
    "ask": "smollm2 --context book.txt < questions.txt    read a text once, answer questions",
    "read": "smollm2 book.txt --tokens 16384              long texts and pass keys, with each memory",
    "fetch": "smollm2                                     a pretrained model, for generate and others",
    "convert": "runs/demo_text                            weights as one .safetensors file",
    "recommend": "--task text --host llama --bytes 2M     the memory for a need, with its proof",
    "benchmark": "--help                                  speed and memory",
}
"""All commands, a module of this package each, with an example."""
LONGEST = 4000
"""Characters of a message; a library that lists all valid names takes more."""
BUG = 70
"""EX_SOFTWARE of sysexits.h."""
LESS_MEMORY = (
    "lower training.batch_size (or raise training.accumulate), training.segment_length, the model's width or depth, or "
    "the length of its memory"
)
NO_ROOM = ("t allocate memory", "not enough memory", "Storage size calculation overflowed", "multiplication overflow")
"""Parts of torch's messages for a tensor that does not fit."""
LAB_MODULES = ("rich", "scipy", "yaml")


class CachedParser(argparse.ArgumentParser):
    """A parser that suggests the nearest name and shortens endless arguments."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            named = "/".join(action.option_strings) or str(action.metavar or action.dest)
            name = "command" if action.dest == "command" else named
            raise argparse.ArgumentError(None, unknown_name(name, value, [str(c) for c in action.choices]))

    def error(self, message: str) -> NoReturn:
        head, _, names = message.partition("the following arguments are required: ")
        lacking = [a for a in self._actions if not head and a.required and a.metavar in names.split(", ")]
        told = "; ".join(f"{a.metavar} is missing: {a.help}" for a in lacking if a.nargs not in ("*", "?"))
        super().error(_shortened(told or message))


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    parser = CachedParser(
        prog="cached",
        description="Train, compare and examine transformers with a memory.",
        epilog="examples:\n" + "\n".join(f"  cached {name} {example}" for name, example in EXAMPLES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cached-transformers {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, example in EXAMPLES.items():
        module = importlib.import_module(f".{name}", __package__)  # here, so that `main` names a package that lacks
        if hasattr(module, "add_parser"):
            module.add_parser(subparsers)
        else:
            add_command(subparsers, module, example)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        parser = build_parser()
        arguments = parse(parser, argv)
        if arguments.command is None:
            parser.print_help()
            return 0
        with ended_by_signals():
            refuse_unused(arguments, getattr(arguments, "parser", parser))
            return arguments.run(arguments)  # type: ignore[no-any-return]
    except BrokenPipeError:  # the reader of a pipe has gone, as in `cached list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (Interrupted, Stopped) as stop:
        print(f"{stop}; the same command continues from its last save, if any", file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        return report(error)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments, with `key=value` allowed before, between and after options."""
    arguments, rest = parser.parse_known_args(argv)
    stray = [word for word in rest if word.startswith("-") or "=" not in word]
    if stray or (rest and not hasattr(arguments, "overrides")):
        parser = getattr(arguments, "parser", parser)
        if word := next((word for word in stray if word.startswith("--")), ""):
            known = [name for name in parser._option_string_actions if name not in ("-h", "--help")]
            parser.error(unknown_name("option", word.partition("=")[0], known))
        parser.error(f"unrecognized arguments: {' '.join(stray or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def report(error: Exception) -> int:
    """Print an error's message, for a bug after its traceback, and return its exit status."""
    status, message = verdict(error)
    if status == BUG or os.environ.get("CACHED_DEBUG") == "1":
        traceback.print_exception(error)
    if status == BUG:
        bug = "this is a bug of cached-transformers; please report it with the traceback above"
        message = f"{bug}: {type(error).__name__}: {_first_line(message)}"
    print(f"error: {_shortened(message)}", file=sys.stderr)
    return status


def verdict(error: Exception) -> tuple[int, str]:
    """Exit status and message of an error."""
    message, origin, kind = str(error), type(error).__module__, type(error).__name__
    no_room = kind == "OutOfMemoryError" or any(words in message for words in NO_ROOM)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and no_room):
        return 1, f"out of memory ({_first_line(message) or 'of the process'}); {LESS_MEMORY}"
    lacking = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if lacking in LAB_MODULES:
        return 2, f'{lacking} is not installed; the `cached` command needs: pip install "cached-transformers[lab]"'
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, StopIteration) or "raised StopIteration" in message:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return 1, f"the data or the task ended too early, at {where.filename}:{where.lineno}; batches must be endless"
    if isinstance(error, (ValueError, ImportError, FileNotFoundError)):
        return 2, message
    if isinstance(error, (OSError, RunFailed)):
        return 1, message
    if origin.startswith(("torch._dynamo", "torch._inductor")):
        return 1, f"torch.compile failed ({_first_line(message)}); train without it (training.compile=false)"
    if kind == "AcceleratorError" or "gloo/transport" in message or origin == "torch.distributed":
        return 1, f"the device or another process failed: {_first_line(message)}"
    return BUG, message


def _shortened(message: str, longest: int = LONGEST) -> str:
    return message if len(message) <= longest else f"{message[:longest]} ... (cut)"


def _first_line(message: str) -> str:
    return _shortened(next((line.strip() for line in message.splitlines() if line.strip()), ""), 300)


if __name__ == "__main__":
    sys.exit(main())
