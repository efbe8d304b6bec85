"""Checkpoints that appear whole or not at all, are checked when read, and continue a run to the bit.

    RUN/checkpoints/step_00000100/model.safetensors   weights and buffers, caches included
                                  training.pt         optimiser, scaler, random states, data position, best so far
                                  meta.json           step, configuration, format, SHA-256 of the other two
    RUN/checkpoints/last, best                        text files that name a step folder

A checkpoint is written to `.partial` beside its place, forced to disk, and renamed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

FORMAT = 1
WEIGHTS, TRAINING, META = "model.safetensors", "training.pt", "meta.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in memory, its checksums verified."""

    path: Path
    step: int
    config: dict[str, Any]
    weights: dict[str, Tensor]
    training: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `RUN/checkpoints`; made when the first checkpoint is saved.
        keep: how many of the newest stay, besides the one that `best` names.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step_{step:08d}"

    def paths(self) -> list[Path]:
        """Step folders, newest last."""
        return sorted(p for p in self.folder.glob("step_*") if p.is_dir())

    def save(
        self,
        step: int,
        config: dict[str, Any],
        weights: Mapping[str, Tensor],
        training: dict[str, Any],
        best: int | None,
    ) -> Path:
        """Write one checkpoint, point `last` (and `best`, when it is this step) at it, and drop surplus old ones.

        Raises:
            OSError: it could not be written, e.g. the disk is full; earlier checkpoints are untouched.
        """
        target = self.path(step)
        partial = self.folder / ".partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            buffer = io.BytesIO()
            torch.save(training, buffer)
            tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in weights.items()}
            files = {WEIGHTS: safetensors.torch.save(tensors), TRAINING: buffer.getvalue()}
            sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            meta = {"format": FORMAT, "step": step, "sha256": sums, "config": config}
            files[META] = json.dumps(meta, indent=1).encode()
            for name, content in files.items():
                write_durably(partial / name, content)
            sync_folder(partial)
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            sync_folder(self.folder)
            self.point("last", target)
            if best == step:
                self.point("best", target)
            self._drop_surplus()
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = error.strerror or str(error)
            raise OSError(
                error.errno, f"checkpoint {target} could not be written ({reason}); earlier checkpoints are untouched"
            ) from error
        return target

    def point(self, name: str, target: Path) -> None:
        """Make the text file `name` ("last", "best") name a step folder."""
        temporary = self.folder / f".{name}"
        write_durably(temporary, f"{target.name}\n".encode())
        temporary.replace(self.folder / name)

    def named(self, name: str) -> Path:
        """The step folder that `last` or `best` names (ValueError: there is none)."""
        pointer = self.folder / name
        if not pointer.is_file():
            raise ValueError(f"{self.folder} has no {name!r} checkpoint; the run has saved none yet")
        return self.folder / pointer.read_text(encoding="utf-8").strip()

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that can be read (None when there is no folder at all), and why others were skipped.

        Raises:
            ValueError: there are checkpoints, but none can be read.
        """
        problems: list[str] = []
        for path in reversed(self.paths()):
            try:
                return read_checkpoint(path), problems
            except ValueError as error:
                problems.append(str(error))
        if problems:
            listed = "\n  ".join(problems)
            raise ValueError(f"no checkpoint in {self.folder} can be read; train into another folder\n  {listed}")
        return None, []

    def set_aside_after(self, step: int, best: int | None) -> None:
        """Rename checkpoints later than `step` to `superseded_*`: the run goes on from there on a line of its own."""
        for path in self.paths():
            if int(path.name.removeprefix("step_")) > step:
                number = sum(1 for _ in self.folder.glob(f"superseded_{path.name}*"))
                path.rename(self.folder / f"superseded_{path.name}_{number}")
        for name, kept in (("last", step), ("best", best)):
            if kept is not None and self.path(kept).is_dir():
                self.point(name, self.path(kept))
            else:
                (self.folder / name).unlink(missing_ok=True)

    def _drop_surplus(self) -> None:
        best = self.folder / "best"
        protected = best.read_text(encoding="utf-8").strip() if best.is_file() else None
        for path in self.paths()[: -self.keep]:
            if path.name != protected:
                shutil.rmtree(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        ValueError: not a checkpoint, of a newer format, or damaged; the message says which, and names the file.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is not a checkpoint: there is no such folder")
    try:
        meta = json.loads((path / META).read_text(encoding="utf-8"))
        version, step, sums, config = (meta[key] for key in ("format", "step", "sha256", "config"))
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a checkpoint: {META} is missing or not one of ours") from None
    if version != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {version}, this version reads {FORMAT}; use the matching version"
        )
    contents = {name: _verified(path / name, sums) for name in (WEIGHTS, TRAINING)}
    try:
        weights = safetensors.torch.load(contents[WEIGHTS])
        training = torch.load(io.BytesIO(contents[TRAINING]), weights_only=True, map_location="cpu")
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return Checkpoint(path, step, config, weights, training)


def _verified(path: Path, sums: Mapping[str, str]) -> bytes:
    try:
        content = path.read_bytes()
    except OSError:
        raise ValueError(f"{path.parent} is damaged: {path.name} is missing or cannot be read") from None
    if hashlib.sha256(content).hexdigest() != sums.get(path.name):
        raise ValueError(f"{path.parent} is damaged: {path.name} ({len(content)} bytes) does not match its checksum")
    return content


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and force it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force a folder's entries to disk, where the system offers that."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def capture_rng() -> dict[str, Any]:
    """States of the random generators of Python, numpy and torch, in types that `weights_only` loading accepts."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": [version, torch.tensor(internal), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the random generators back where `capture_rng` found them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
