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
    """`metrics.jsonl`, one JSON object per line, flushed line by line; and TensorBoard event files of the same numbers.

    Args:
        folder: run folder.
        step: lines of later steps are removed, since a resumed run writes them again, and so is an incomplete line.
        tensorboard: write event files; "auto" if tensorboard is installed.

    Raises:
        ImportError: `tensorboard` is True, and it is not installed.
    """

    def __init__(self, folder: Path, step: int, tensorboard: Literal["auto", True, False] = False) -> None:
        self.path = folder / "metrics.jsonl"
        self._events: Any = None
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        write_whole(self.path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        with _naming(self.path):
            self._file = self.path.open("a", encoding="utf-8")
            if tensorboard is True or (tensorboard == "auto" and importlib.util.find_spec("tensorboard") is not None):
                require("tensorboard", extra="logging")
                writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
                self._events = writer(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; infinities and NaN become null."""
        with _naming(self.path):
            self._file.write(f"{json.dumps(jsonable(line), allow_nan=False)}\n")
            self._file.flush()
            for key, value in line.items() if self._events else ():
                if key not in ("step", "split", "rows") and isinstance(value, (int, float)):
                    self._events.add_scalar(f"{line['split']}/{key}", value, line["step"])

    def sync(self) -> None:
        """Force the lines to disk: a checkpoint must not be newer than them."""
        with _naming(self.path):
            os.fsync(self._file.fileno())
            if self._events:
                self._events.flush()

    def close(self) -> None:
        """Close the files."""
        with _naming(self.path):
            self._file.close()
            if self._events:
                self._events.close()


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
