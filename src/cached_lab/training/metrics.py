"""Metrics: evaluation without side effects, counts of modules, and metrics files."""

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
    """Set evaluation mode for a `with` block, and restore modes, buffers and random states after it."""
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
        for module, mode in modes:  # parents before children, so that a child frozen in eval stays frozen
            if module.training != mode:
                module.train(mode)
        restore_rng(rng)


def tallies(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Return (sum, count) by name of everything the modules have counted since the last call, over all processes.

    A module takes part with a method `tallies()` that returns such pairs and resets them; pairs of one name are added.
    Every process must call this.
    """
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if callable(own := getattr(module, "tallies", None)):
            for name, pair in own().items():
                found[name] = found.get(name, 0) + pair.double()
    return {name: world.sum(pair).cpu() for name, pair in found.items()}


class MetricsFile:
    """`metrics.jsonl`: one JSON object per line, flushed line by line.

    Args:
        path: file to append to.
        step: lines of later steps are removed, since a resumed run writes them again, and so is an incomplete line.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        write_whole(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        self._path = path
        with _naming(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; infinities and NaN become null."""
        with _naming(self._path):
            self._file.write(f"{json.dumps(jsonable(line), allow_nan=False)}\n")
            self._file.flush()

    def sync(self) -> None:
        """Force the lines to disk: a checkpoint must not be newer than them."""
        with _naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with _naming(self._path):
            self._file.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Raise OSErrors of a `with` block as `NotWritten` with the path."""
    try:
        yield
    except OSError as error:
        safe = "checkpoints are untouched, and the same command goes on from them"
        raise NotWritten(str(path), error, safe) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; none if it does not exist. An incomplete last line is left out.

    Raises:
        ValueError: a line that is not JSON or has no step; the message has its number.
    """
    if not path.is_file():
        return []
    # Only line feeds end lines, and JSON contains none. Bytes that are not UTF-8 are refused below.
    lines = path.read_bytes().decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")
    parsed = []
    for number, line in enumerate(lines if lines != [""] else [], 1):
        way = f"{path}, line {number} is no line of metrics; the file was changed or damaged: remove the line"
        try:
            found = json.loads(line.encode())  # refuses escaped bytes
        except (ValueError, RecursionError):
            if number < len(lines):
                raise ValueError(way) from None
            continue
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            raise ValueError(way)
        parsed.append(found)
    return parsed


class EventFiles:
    """TensorBoard event files.

    Args:
        folder: folder of the files.
        wanted: True, False, or "auto" (if tensorboard is installed).
        step: step after which the run continues.

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
        """Flush pending events."""
        if self._writer is not None:
            with _naming(self._folder):
                self._writer.flush()

    def close(self) -> None:
        """Flush pending events and close."""
        if self._writer is not None:
            with _naming(self._folder):
                self._writer.close()
