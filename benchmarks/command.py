"""The part that all scripts share: common options, and results as a Markdown table and JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cached_lab.experiments.environment import environment
from cached_lab.experiments.reports.formatting import environment_text
from cached_lab.experiments.reports.markdown import table
from cached_transformers.files import write_whole

Measurement = dict[str, Any]
"""One row: names and values; times are `Ratio`s."""


@dataclasses.dataclass
class Result:
    """Measurements of one script.

    Attributes:
        text: the tables as Markdown.
        settings: options that change the numbers.
        status: exit status of the command.
    """

    rows: Sequence[Measurement]
    text: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    status: int = 0

    def write(self, path: Path) -> None:
        """Write FILE.json and FILE.md."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": self.settings, "rows": self.rows}
        write_whole(path, (json.dumps(content, indent=2, default=dataclasses.asdict) + "\n").encode())
        write_whole(path.with_suffix(".md"), f"{self.text}\n".encode())


def parser_of(script: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a script, which has a `measure` and may have `add_options`."""
    prog = f"cached benchmark {Path(str(script.__file__)).stem}"
    parser = argparse.ArgumentParser(prog=prog, description=(script.__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=positive, default=11, help="counted rounds (default: 11)")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads (default: 1, the least noisy)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--output", "--out", type=Path, metavar="FILE.json", help="also write FILE.json and FILE.md")
    if hasattr(script, "add_options"):
        script.add_options(parser)
    return parser


def main(script: ModuleType, argv: Sequence[str] | None = None) -> int:
    """Run a script: measure, print the table and write the files."""
    options = parser_of(script).parse_args(argv)
    if options.device is None:
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; take --device cpu")
    torch.set_num_threads(options.threads)
    result: Result = script.measure(options)
    result.settings = {**environment(options.device), "rounds": options.rounds, **result.settings}
    result.text = f"{result.text}\n\n{environment_text(dict(result.settings))}"
    if options.output is not None:
        result.write(options.output)
    print(result.text)
    return result.status


def columns_table(rows: Iterable[Measurement], columns: Mapping[str, Callable[[Measurement], str]]) -> str:
    """Write rows as a Markdown table of named columns."""
    return table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def with_missing(text: str, left_out: Iterable[str]) -> str:
    """Add a line for each reason to leave out a case."""
    return "\n\n".join([text, *(f"Left out: {reason.rstrip('.')}." for reason in dict.fromkeys(left_out))])


def add_dtype(parser: argparse.ArgumentParser, use: str) -> None:
    """Add `--dtype`."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=f"{use} (default: float32)")


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    """Return the dtype that `--dtype` names."""
    return getattr(torch, options.dtype)  # type: ignore[no-any-return]


def positive(text: str) -> int:
    """Parse a whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def numbers(text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1 on, separated by commas."""
    return tuple(positive(part) for part in text.split(","))


def fastest(ratio: Any, reference: bool) -> tuple[str, str]:
    """Write a ratio with its quartiles, and the ratio of the fastest rounds; "1" for the reference."""
    return ("1", "1") if reference else (str(ratio), f"{ratio.fastest:.3f}x")
