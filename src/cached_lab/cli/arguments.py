"""Declaration of commands and options, checks of their values, and the command line for the record."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

Argument = tuple[str, Any, str]
"""Name and metavar, kind, and help; see `add_arguments`."""


NEEDS = {
    "plot": [("images layers", "kind", "fig4", "on fig4")],
    "probe": [
        ("solved recall far rows no_ceiling compile", "train_distance", "", "with --train-distance"),
        ("distance", "train_distance", "None", "without --train-distance"),
    ],
    "evaluate": [
        ("other", "memory", "other", "with --memory other"),
        ("batch_sizes", "memory", "batch", "with --memory batch"),
    ],
    "explain": [("overrides tokens draws", "plot", "", "with --plot")],
    "chat": [("top_k top_p seed", "temperature", "", "with --temperature")],
    "ask": [("top_k top_p seed", "temperature", "", "with --temperature")],
    "generate": [("length_penalty", "beams", "", "with --beams")],
    "translate": [("resume", "output", "", "with --output FILE")],
}
"""By command: options, the option that they belong to, the value that it must have ("": any but its default), and that
condition in words."""


def add_command(subparsers: Any, module: Any, example: str) -> None:
    """Add the subcommand of a module: its docstring is the help, and it has `ARGUMENTS` and `run`."""
    name = module.__name__.rpartition(".")[2]
    parser = subparsers.add_parser(
        name,
        help=module.__doc__.partition(": ")[2].partition("\n")[0],
        description=module.__doc__,
        epilog=f"example: cached {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, *module.ARGUMENTS)
    parser.set_defaults(run=module.run, parser=parser)


def add_arguments(parser: argparse.ArgumentParser, *rows: Argument) -> None:
    """Add arguments and options; a metavar may end with "+", "*" or "?", for several values or none.

    A kind is a type (no default; bool for a flag), a default (its type is the option's), or a tuple of choices, the
    first of them the default.
    """
    for names, kind, text in rows:
        name, _, metavar = names.partition(" ")
        more: dict[str, Any] = {"help": text.replace("%", "%%"), "metavar": metavar.rstrip("+*?") or None}
        if metavar.endswith(("+", "*", "?")):
            more["nargs"] = metavar[-1]
        if kind is bool:
            more = {"help": text, "action": "store_true"}
        elif isinstance(kind, tuple):
            more |= {"choices": [choice for choice in kind if choice is not None], "default": kind[0]}
        elif isinstance(kind, type):
            more["type"] = kind
        else:
            more |= {"type": type(kind), "default": kind, "help": f"{more['help']} (default: {kind})"}
        parser.add_argument(name, **more)


def recipe_arguments(changes: str) -> tuple[Argument, ...]:
    """A recipe and changes to it."""
    recipe = ("recipe RECIPE", str, "a path, or a name from `cached list recipes`")
    return recipe, ("overrides key=value*", str, changes)


def run_arguments(kind: str = "", checkpoint: str = "best", device: str = "auto") -> tuple[Argument, ...]:
    """The folder of a run, its checkpoint and the device, with their defaults."""
    checkpoints = "best, last, the path of a step folder, or tested (that of the summary, averaged if it is)"
    return (
        ("folder RUN", Path, f"a run folder{kind}"),
        ("--checkpoint NAME", checkpoint, checkpoints),
        ("--device NAME", device, "auto, cpu, cuda or cuda:N"),
    )


def memory_option(name: str | None, overrides: list[str], options: str = "--with-memory") -> dict[str, Any] | None:
    """Return the memory of --with-memory and its options; `relative` is off, so that positions stay the model's.

    Raises:
        ValueError: an unknown memory or option, or overrides that belong to none of `options`.
    """
    from cached_lab.experiments.pretrained import without_positions
    from cached_lab.experiments.probes.settings import options_of_memories

    if name is None:
        if overrides:
            raise ValueError(f"{overrides[0]!r} is an option of {options}, which is missing")
        return None
    return without_positions({"name": name, **options_of_memories([name], overrides).get(name, {})})


def refuse_unused(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options without the option that they belong to, by `NEEDS` (ValueError)."""
    for options, other, word, way in NEEDS.get(arguments.command, ()):
        for name in options.split():
            value, needed = getattr(arguments, name), getattr(arguments, other)
            met = word in str(needed).split(",") if word else needed != parser.get_default(other)
            if value and value != parser.get_default(name) and not met:
                told = " ".join(map(str, value if isinstance(value, list) else [value]))
                option = told if name == "overrides" else f"--{name.replace('_', '-')} {told}"
                raise ValueError(f"{option}: it has an effect {way} only; change one of them")


def refuse_below_one(arguments: argparse.Namespace, *names: str) -> None:
    """Require numbers of at least 1, or None (ValueError)."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")


def refuse_too_many_seeds(count: int) -> None:
    """Refuse (ValueError) a number of trainings whose list would fill the memory."""
    if count > 100_000:
        raise ValueError(f"--seeds {count} must be at most 100,000 trainings of each kind")


def numbers_from_one(option: str, text: str | None) -> list[int]:
    """Whole numbers of at least 1, separated by commas (ValueError); empty for None."""
    parts = [] if text is None else text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} {text!r} must be whole numbers from 1 on with commas between them, e.g. 1,64")
    return list(map(int, parts))


def require_file(path: Path, purpose: str) -> None:
    """Require an existing file (FileNotFoundError)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give {purpose}")


def command_line() -> str:
    """The command, for the record."""
    return shlex.join(["cached", *sys.argv[1:]])
