"""Metrics of any task: evaluation that leaves no trace, what modules count, and the files that metrics go to."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cached_transformers.extras import require
from cached_transformers.files import NotWritten, jsonable, write_whole

from .checkpoint import capture_rng, restore_rng
from .distributed import World


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a `with` block that leaves no trace: modes, buffers and random states come back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rng = capture_rng()
    try:
        with torch.no_grad():
            yield
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
    finally:
        for module, mode in modes:  # parents come before their children, so that a child frozen in eval stays so
            if module.training != mode:
                module.train(mode)
        restore_rng(rng)


def tallies(model: nn.Module, world: World) -> dict[str, Tensor]:
    """What the modules of a model counted since they were last asked, over all processes: (sum, count) by name.

    A module takes part by a method `tallies()`, which returns such pairs of tensors and begins anew; the pairs of one
    name are added up. Every process must ask.
    """
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if callable(own := getattr(module, "tallies", None)):
            for name, pair in own().items():
                found[name] = found.get(name, 0) + pair.double()
    return {name: world.sum(pair).cpu() for name, pair in found.items()}


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, flushed line by line.

    Args:
        path: the file; it is appended to.
        step: lines of later steps, which a resumed run will write again, are removed, as is a line cut short.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_whole(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        self._path = path
        with _naming(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; numbers that JSON does not know (infinities, not a number) become null."""
        with _naming(self._path):
            self._file.write(f"{json.dumps(jsonable(line), allow_nan=False)}\n")
            self._file.flush()

    def sync(self) -> None:
        """Force what is written to disk: a checkpoint must not outlive the lines before it."""
        with _naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with _naming(self._path):
            self._file.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say of an error in a `with` block which file could not be written, and what is safe."""
    try:
        yield
    except OSError as error:
        safe = "checkpoints are untouched, and the same command goes on from them"
        raise NotWritten(str(path), error, safe) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file; none when it does not exist, and an unfinished last line is left out.

    Raises:
        ValueError: a line (named) that is not JSON, or none of ours.
    """
    if not path.is_file():
        return []
    # Line feeds alone end lines, and none stands in JSON; what is not UTF-8 is no JSON either.
    lines = path.read_bytes().decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    parsed = []
    for number, line in enumerate(lines if lines != [""] else [], 1):
        way = f"{path}, line {number} is not one of ours; the file was changed or damaged: remove the line"
        try:
            found = json.loads(line.encode())  # refuses what was escaped
        except (ValueError, RecursionError):
            if number < len(lines):
                raise ValueError(way) from None
            continue
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            raise ValueError(way)
        parsed.append(found)
    return parsed


class EventFiles:
    """TensorBoard event files, when wanted.

    Args:
        folder: where they go.
        wanted: True, False, or "auto" (when tensorboard is installed).
        step: the run continues after this step.

    Raises:
        ImportError: wanted is True and tensorboard is not installed.
    """

    def __init__(self, folder: Path, wanted: Literal["auto", True, False], step: int) -> None:
        self._folder = folder
        self._writer: Any = None
        if wanted is True or (wanted == "auto" and importlib.util.find_spec("tensorboard") is not None):
            require("tensorboard", extra="logging")
            from torch.utils.tensorboard import SummaryWriter

            with _naming(folder):
                self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add the numbers of one metrics line under its split."""
        if self._writer is None:
            return
        with _naming(self._folder):
            for key, value in line.items():
                if key not in ("step", "split", "rows") and isinstance(value, (int, float)):
                    self._writer.add_scalar(f"{line['split']}/{key}", value, line["step"])

    def sync(self) -> None:
        """Write what is pending."""
        if self._writer is not None:
            with _naming(self._folder):
                self._writer.flush()

    def close(self) -> None:
        """Write what is pending and close."""
        if self._writer is not None:
            with _naming(self._folder):
                self._writer.close()
