"""What several commands have in common: arguments, conditions on them, and the command as it was given."""

from __future__ import annotations

import argparse
import shlex
import sys


def add_recipe(parser: argparse.ArgumentParser, changes: str, several: bool = False) -> None:
    """A recipe and changes to it; `changes` says of what. `several`: there may be more, with commas between them."""
    more = "; several with commas between them" if several else ""
    parser.add_argument("recipe", help=f"a path, or a name from `cached list recipes`{more}")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=changes)


def add_weights(parser: argparse.ArgumentParser, checkpoint: str = "best", device: str = "auto") -> None:
    """Which weights of a run are taken, and where they compute; the values are the defaults."""
    names, why = ("tested|best", ", the one of the summary") if checkpoint == "tested" else ("best", "")
    parser.add_argument(
        "--checkpoint", default=checkpoint, metavar=f"{names}|last|PATH", help=f"default: {checkpoint}{why}"
    )
    listed = "auto, cpu, cuda or cuda:N" if device == "auto" else "cpu, cuda or cuda:N"
    parser.add_argument("--device", default=device, help=listed)


def refuse_below_one(arguments: argparse.Namespace, *names: str) -> None:
    """Require numbers from 1 on, or none (ValueError)."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")


def refuse_too_many_seeds(count: int) -> None:
    """Refuse (ValueError) more trainings than anyone can wait for, before a list of them fills the memory."""
    if count > 100_000:
        raise ValueError(f"--seeds {count} must be at most 100,000 trainings of each kind")


def whole_numbers(text: str) -> list[int]:
    """Whole numbers with commas between them; none where something else stands there."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return []


def numbers_from_one(option: str, text: str, example: str) -> list[int]:
    """Whole numbers from 1 on with commas between them (ValueError)."""
    numbers = whole_numbers(text)
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{option} {text!r} must be whole numbers from 1 on with commas between them, e.g. {example}")
    return numbers


def command_line() -> str:
    """The command as it was given, for the record."""
    return shlex.join(["cached", *sys.argv[1:]])
