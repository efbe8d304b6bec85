"""Checkpoints that appear whole or not at all, are checked when read, and continue a run to the bit.

    RUN/checkpoints/step_00000100/model.safetensors   weights and buffers, caches included
                                  training.pt         optimiser, scaler, random states, data position, best so far
                                  meta.json           format, step, the best so far, SHA-256 of the other two,
                                                      configuration, and a SHA-256 of all that

A checkpoint is written to `.partial` beside its place, forced to disk, and renamed: a save is that one event. Which
checkpoint is the last, and which the best, is what the newest step folder says; the text files `last` and `best`, which
name them for people and other tools, are made from it. Whatever else stands in the folder is left alone.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cached_transformers.files import NotWritten, sync_folder, write_durably, write_whole

FORMAT = 2
"""Of checkpoints that are written. In format 1, which is read as well, `meta.json` neither named the best nor had a sum
of its own."""
WEIGHTS, TRAINING, META = "model.safetensors", "training.pt", "meta.json"
_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL, _SURPLUS = ".partial", ".surplus"


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
        keep: how many of the newest stay, besides the best.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step_{step:08d}"

    def paths(self) -> list[Path]:
        """Step folders, newest last: `step_` and eight digits or more, nothing else."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((p for p in found if _step_of(p) is not None and p.is_dir()), key=lambda p: _step_of(p) or 0)

    def save(
        self,
        step: int,
        config: dict[str, Any],
        weights: Mapping[str, Tensor],
        training: dict[str, Any],
        best: Mapping[str, Any] | None,
    ) -> Path:
        """Write one checkpoint, and drop surplus old ones.

        Args:
            best: "step" of the best so far, this one included, and scores of it that JSON knows.

        Raises:
            NotWritten: it could not be written, e.g. the disk is full, or the best so far has vanished; the other
                checkpoints are untouched.
        """
        target, chosen = self.path(step), None if best is None else int(best["step"])
        partial = self.folder / _PARTIAL
        try:
            if chosen is not None and chosen != step and not self.path(chosen).is_dir():
                raise FileNotFoundError(errno.ENOENT, f"{self.path(chosen)}, the best so far, is not there any more")
            shutil.rmtree(partial, ignore_errors=True)
            self.folder.mkdir(exist_ok=True)
            partial.mkdir()
            buffer = io.BytesIO()
            torch.save(training, buffer)
            tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in weights.items()}
            files = {WEIGHTS: safetensors.torch.save(tensors), TRAINING: buffer.getvalue()}
            sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
            meta = {"format": FORMAT, "step": step, "best": best, "sha256": sums, "config": config}
            files[META] = _sealed(meta)
            for name, content in files.items():
                write_durably(partial / name, content)
            sync_folder(partial)
            if target.exists():
                self.set_aside(target)
            partial.rename(target)
            sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise NotWritten(f"checkpoint {target}", error, "earlier checkpoints are untouched") from error
        self.tidy(chosen)
        return target

    def tidy(self, best: int | None) -> None:
        """Make the folder what a save leaves, whatever was interrupted since: without surplus checkpoints and remains,
        and with text files that name the last and the best."""
        chosen = None if best is None else self.path(best)
        for name, named in (("last", next(reversed(self.paths()), None)), ("best", chosen)):
            if named is not None and named.is_dir():
                write_whole(self.folder / name, f"{named.name}\n".encode())
            else:
                (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / _PARTIAL, ignore_errors=True)
        shutil.rmtree(self.folder / _SURPLUS, ignore_errors=True)
        for path in self.paths()[: -self.keep]:
            if path != chosen:
                path.rename(self.folder / _SURPLUS)  # first, so that a step folder is never there in part
                shutil.rmtree(self.folder / _SURPLUS)

    def named(self, name: str) -> Path:
        """The step folder that is the `last` or the `best`, as the newest says.

        Raises:
            ValueError: there is none, or the newest cannot be read.
        """
        paths = self.paths()
        if not paths:
            raise ValueError(f"{self.folder} has no {name!r} checkpoint; the run has saved none yet")
        if name == "last":
            return paths[-1]
        best = best_step(paths[-1])
        if best is None:
            raise ValueError(f"{self.folder} has no {name!r} checkpoint: the run has not been evaluated; take the last")
        if not self.path(best).is_dir():
            raise ValueError(
                f"{self.folder} has no {name!r} checkpoint any more: it was step {best}, which is not there; take the "
                "last, or train on, which chooses among those that are there"
            )
        return self.path(best)

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

    def readable(self, until: int) -> list[Checkpoint]:
        """Checkpoints up to a step that can be read, newest last."""
        found = []
        for path in self.paths():
            try:
                found.append(read_checkpoint(path))
            except ValueError:
                continue
        return [checkpoint for checkpoint in found if checkpoint.step <= until]

    def choose(self, best: Mapping[str, Any] | None) -> None:
        """Let the newest step folder say another best, in one event, as where the former cannot be read any more."""
        path = self.paths()[-1]
        write_whole(path / META, _sealed({**_read_meta(path), "format": FORMAT, "best": best}))

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than `step` to `superseded_*`: the run goes on from there on a line of its own."""
        for path in reversed(self.paths()):  # so that the newest left is one whose best is still there
            if (_step_of(path) or 0) > step:
                self.set_aside(path)

    def set_aside(self, path: Path) -> None:
        """Rename a step folder, so that it does not count any more, and nothing of it is lost."""
        number = sum(1 for _ in self.folder.glob(f"superseded_{path.name}_*"))
        path.rename(self.folder / f"superseded_{path.name}_{number}")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        ValueError: not a checkpoint, of a newer format, or damaged; the message says which, and names the file.
    """
    meta = _read_meta(path)
    contents = {name: _verified(path / name, meta["sha256"]) for name in (WEIGHTS, TRAINING)}
    try:
        weights = safetensors.torch.load(contents[WEIGHTS])
        training = torch.load(io.BytesIO(contents[TRAINING]), weights_only=True, map_location="cpu")
    except Exception as error:  # what is no archive of torch, or holds more than tensors, raises a wide choice
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged, or not one of ours: {reason}") from None
    if not isinstance(training, dict):
        raise ValueError(f"{path} is not one of ours: {TRAINING} holds no training state")
    return Checkpoint(path, meta["step"], meta["config"], weights, training)


def stored_config(path: Path) -> dict[str, Any]:
    """The configuration that a step folder holds, without reading its weights (ValueError: see `read_checkpoint`)."""
    config: dict[str, Any] = _read_meta(path)["config"]
    return config


def best_step(path: Path) -> int | None:
    """The best step so far, as a step folder says (ValueError: see `read_checkpoint`)."""
    meta = _read_meta(path)
    best = meta["best"] if "best" in meta else read_checkpoint(path).training["best"]
    return None if best is None else int(best["step"])


def _read_meta(path: Path) -> dict[str, Any]:
    """What `meta.json` of a step folder says; every bit of it is checked, save in format 1."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a checkpoint: there is no such folder")
    try:
        content = (path / META).read_bytes()
        meta: dict[str, Any] = json.loads(content)
        version, step, sums, config = (meta[key] for key in ("format", "step", "sha256", "config"))
        right = isinstance(version, int) and isinstance(step, int) and isinstance(sums, dict)
        if not right or not isinstance(config, dict):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is not a checkpoint: {META} is missing or not one of ours") from None
    if version > FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {version}, this version reads 1 to {FORMAT}; use the matching version"
        )
    sealed = version > 1 or "best" in meta
    named = _step_of(path)
    if (sealed and content != _sealed(meta)) or (named is not None and named != step):
        raise ValueError(f"{path} is damaged: {META} does not match its checksum, or is of another step ({step})")
    return meta


def _sealed(meta: Mapping[str, Any]) -> bytes:
    """The bytes of `meta.json`: what it says, and the SHA-256 of that. One content has one form, so that whoever reads
    it can compare all of it."""
    body = {key: value for key, value in meta.items() if key != "seal"}
    seal = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, "seal": seal}, indent=1).encode()


def _step_of(path: Path) -> int | None:
    """The step of a folder that is called as ours are; None for other names."""
    found = _STEP.fullmatch(path.name)
    return None if found is None else int(found[1])


def _verified(path: Path, sums: Mapping[str, str]) -> bytes:
    try:
        content = path.read_bytes()
    except OSError:
        raise ValueError(f"{path.parent} is damaged: {path.name} is missing or cannot be read") from None
    if hashlib.sha256(content).hexdigest() != sums.get(path.name):
        raise ValueError(f"{path.parent} is damaged: {path.name} ({len(content)} bytes) does not match its checksum")
    return content


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
