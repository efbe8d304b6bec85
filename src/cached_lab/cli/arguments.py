"""Arguments that several commands share, checks of their values, and the command line for the record."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_command(
    subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, **more: Any
) -> argparse.ArgumentParser:
    """Add a subcommand; `more` is passed to its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, **more)
    parser.set_defaults(run=run)
    return parser


def add_recipe(parser: argparse.ArgumentParser, changes: str) -> None:
    """Add a recipe and changes to it."""
    parser.add_argument("recipe", help="a path, or a name from `cached list recipes`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=changes)


def add_run(parser: argparse.ArgumentParser, kind: str = "") -> None:
    """Add the folder of a run."""
    parser.add_argument("folder", metavar="RUN", type=Path, help=f"a run folder{kind}")


def add_weights(parser: argparse.ArgumentParser, checkpoint: str = "best", device: str = "auto") -> None:
    """Add the checkpoint of a run and the device; the values are the defaults."""
    names, which = ("tested|best", ", the one of the summary") if checkpoint == "tested" else ("best", "")
    parser.add_argument(
        "--checkpoint", default=checkpoint, metavar=f"{names}|last|PATH", help=f"default: {checkpoint}{which}"
    )
    listed = "auto, cpu, cuda or cuda:N" if device == "auto" else "cpu, cuda or cuda:N"
    parser.add_argument("--device", default=device, help=listed)


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


def whole_numbers(text: str) -> list[int]:
    """Whole numbers separated by commas; empty for any other text."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        return []


def numbers_from_one(option: str, text: str, example: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas (ValueError)."""
    numbers = whole_numbers(text)
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{option} {text!r} must be whole numbers from 1 on with commas between them, e.g. {example}")
    return numbers


def require_file(path: Path, purpose: str) -> None:
    """Require an existing file (FileNotFoundError)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; give {purpose}")


def command_line() -> str:
    """The command, for the record."""
    return shlex.join(["cached", *sys.argv[1:]])
