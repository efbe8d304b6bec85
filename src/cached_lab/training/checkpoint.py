"""Checkpoints: atomic, checksummed step folders from which a run resumes exactly.

    RUN/checkpoints/step_00000100/model.safetensors   weights and buffers, including caches
                                  training.pt         optimiser, scaler, random states, data position, best score
                                  shards/             sharded runs: rows of each process (`sharded_checkpoint.py`);
                                                      the other weights are in training.pt
                                  meta.json           format, step, best score, SHA-256 of the other files,
                                                      configuration, and a SHA-256 of all of these

A checkpoint is written to `.partial` in the same folder, forced to disk, and renamed: the rename is the save. The
newest step folder says which step is the best. The text files `last` and `best` are for people and other tools. Other
files in the folder are left alone. A save off schedule, after a signal, serves to resume until a later save only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import random
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cached_transformers.files import NotWritten, sync_folder, write_durably, write_whole

from .distributed import ALONE, World
from .sharded_checkpoint import join_shards, split_shards, stored_shards, write_shards

FORMAT = 4
"""Format 2, without shards, is also read."""
WEIGHTS, TRAINING, META, SHARDS = "model.safetensors", "training.pt", "meta.json", "shards"
_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL, _SURPLUS = ".partial", ".surplus"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with verified checksums; with `read_checkpoint(whole=False)` shards are `StoredShards`."""

    path: Path
    step: int
    config: dict[str, Any]
    weights: dict[str, Any]
    training: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: `RUN/checkpoints`; created by the first save.
        keep: number of newest checkpoints to keep, besides the best.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"step_{step:08d}"

    def paths(self) -> list[Path]:
        """Return the step folders, newest last."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((p for p in found if _step_of(p) is not None and p.is_dir()), key=lambda p: _step_of(p) or 0)

    def scheduled(self, end: bool = True) -> list[Path]:
        """Return the step folders of scheduled saves, newest last; a damaged one counts, the end if `end` is true."""
        paths, chosen = self.paths(), []
        for path in paths:
            kind: bool | None = True
            with contextlib.suppress(ValueError):
                kind = _read_meta(path).get("scheduled", True)
            if kind or (kind is None and end and path == paths[-1]):
                chosen.append(path)
        return chosen

    def save(
        self,
        step: int,
        config: dict[str, Any],
        weights: Mapping[str, Tensor],
        training: dict[str, Any],
        best: Mapping[str, Any] | None,
        world: World = ALONE,
        scheduled: bool | None = True,
    ) -> Path:
        """Write a checkpoint and remove surplus ones; every process of `world` must call this.

        Args:
            training: training state. With sharded tensors in it or in `weights`, each process writes its rows.
            best: JSON scores of the best step so far, with its "step".
            scheduled: False for a checkpoint that the next save removes; None for the end of training between two
                scheduled saves, which counts as scheduled until a longer training saves again.

        Raises:
            NotWritten: a process could not write (e.g. the disk is full), or the best checkpoint has vanished; all
                processes raise it, and the other checkpoints are untouched.
        """
        partial = self.folder / _PARTIAL
        rest, shards = split_shards({"weights": dict(weights), **training})
        try:
            _agreed(world, lambda: self._begin(step, best) if world.main else None)
            if shards:
                _agreed(world, lambda: write_shards(partial / SHARDS, shards, world))
            meta = {"format": FORMAT, "step": step, "best": best, "scheduled": scheduled, "config": config}
            _agreed(world, lambda: self._finish(meta, rest) if world.main else None)
        except OSError as error:
            if world.main:
                shutil.rmtree(partial, ignore_errors=True)
            raise NotWritten(f"checkpoint {self.path(step)}", error, "earlier checkpoints are untouched") from error
        if world.main:
            self.tidy(None if best is None else int(best["step"]))
        return self.path(step)

    def _begin(self, step: int, best: Mapping[str, Any] | None) -> None:
        """Create an empty partial folder."""
        chosen = None if best is None else int(best["step"])
        if chosen is not None and chosen != step and not self.path(chosen).is_dir():
            raise FileNotFoundError(errno.ENOENT, f"{self.path(chosen)}, the best so far, is not there any more")
        shutil.rmtree(self.folder / _PARTIAL, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        (self.folder / _PARTIAL).mkdir()

    def _finish(self, meta: dict[str, Any], state: dict[str, Any]) -> None:
        """Write the remaining files into the partial folder, and rename it."""
        partial, target = self.folder / _PARTIAL, self.path(meta["step"])
        sums = {f"{SHARDS}/{p.name}": _sha256(p) for p in sorted(partial.glob(f"{SHARDS}/*"))}
        contents: dict[str, bytes] = {}
        if not sums:
            weights = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in state.pop("weights").items()}
            contents[WEIGHTS] = safetensors.torch.save(weights)
        torch.save(state, buffer := io.BytesIO())
        contents[TRAINING] = buffer.getvalue()
        sums |= {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        contents[META] = _sealed({**meta, "sha256": sums})
        for name, content in contents.items():
            write_durably(partial / name, content)
        sync_folder(partial)
        if target.exists():
            self.set_aside(target)
        partial.rename(target)
        sync_folder(self.folder)

    def tidy(self, best: int | None) -> None:
        """Remove surplus checkpoints and leftovers of interrupted saves, and write the files `last` and `best`."""
        chosen, paths = None if best is None else self.path(best), self.paths()
        for name, named in (("last", next(reversed(paths), None)), ("best", chosen)):
            if named is not None and named.is_dir():
                write_whole(self.folder / name, f"{named.name}\n".encode())
            else:
                (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / _PARTIAL, ignore_errors=True)
        shutil.rmtree(self.folder / _SURPLUS, ignore_errors=True)
        kept = {chosen, *paths[-1:], *self.scheduled(end=False)[-self.keep :]}
        for path in paths:
            if path not in kept:
                path.rename(self.folder / _SURPLUS)  # first, so that a step folder is never incomplete
                shutil.rmtree(self.folder / _SURPLUS)

    def named(self, name: str) -> Path:
        """Return the folder of the `last` or the `best` checkpoint, according to the newest one.

        Raises:
            ValueError: there is none, or the newest cannot be read.
        """
        paths = self.paths()
        if not paths:
            raise ValueError(f"{self.folder} has no {name!r} checkpoint; the run has saved none yet")
        if name == "last":
            return paths[-1]
        if (best := _read_meta(paths[-1])["best"]) is None:
            raise ValueError(f"{self.folder} has no {name!r} checkpoint: the run has not been evaluated; take the last")
        if not (path := self.path(int(best["step"]))).is_dir():
            raise ValueError(
                f"{self.folder} has no {name!r} checkpoint: {path.name} has vanished; resume, or take the last"
            )
        return path

    def newest_valid(self, whole: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest readable checkpoint (None without step folders), and the problems of skipped ones.

        Raises:
            ValueError: there are checkpoints, but none can be read.
        """
        problems: list[str] = []
        for path in reversed(self.paths()):
            try:
                return read_checkpoint(path, whole), problems
            except ValueError as error:
                problems.append(str(error))
        if problems:
            listed = "\n  ".join(problems)
            raise ValueError(f"no checkpoint in {self.folder} can be read; train into another folder\n  {listed}")
        return None, []

    def choose(self, best: Mapping[str, Any] | None) -> None:
        """Record another best step in the newest step folder."""
        path = self.paths()[-1]
        meta = _read_meta(path)
        write_whole(path / META, _sealed({**meta, "best": best}))

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than `step` to `superseded_*`."""
        for path in reversed(self.paths()):  # newest first: the best step of the newest that remains still exists
            if (_step_of(path) or 0) > step:
                self.set_aside(path)

    def set_aside(self, path: Path) -> None:
        """Rename a step folder, so that it no longer counts and nothing is lost."""
        number = sum(1 for _ in self.folder.glob(f"superseded_{path.name}_*"))
        path.rename(self.folder / f"superseded_{path.name}_{number}")


def read_checkpoint(path: Path, whole: bool = True) -> Checkpoint:
    """Read and verify a checkpoint.

    Args:
        whole: read shards into memory as whole tensors; otherwise leave them on disk.

    Raises:
        ValueError: not a checkpoint, of another format, or damaged; the message names the file.
    """
    meta = _read_meta(path)
    sums = meta["sha256"]
    shards = [path / SHARDS / Path(name).name for name in sorted(sums) if name.startswith(f"{SHARDS}/")]
    for file in [path / TRAINING, *(shards or [path / WEIGHTS])]:
        name = file.relative_to(path).as_posix()
        try:
            found = _sha256(file)
        except OSError:
            raise ValueError(f"{path} is damaged: {name} is missing or cannot be read") from None
        if found != sums.get(name):
            raise ValueError(f"{path} is damaged: {name} does not match its checksum")
    try:
        training = torch.load(path / TRAINING, weights_only=True, map_location="cpu")
        if shards:
            training = join_shards(training, stored_shards(shards), whole)
        weights = training.pop("weights") if shards else safetensors.torch.load_file(path / WEIGHTS)
    except Exception as error:  # torch and safetensors raise many types of errors for foreign files
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged, or not a checkpoint of cached train: {reason}") from None
    if not isinstance(training, dict):
        raise ValueError(f"{path} is not a checkpoint of cached train: {TRAINING} holds no training state")
    return Checkpoint(path, meta["step"], meta["config"], weights, training)


def stored_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a step folder without reading its weights (ValueError: see `read_checkpoint`)."""
    return dict(_read_meta(path)["config"])


def _read_meta(path: Path) -> dict[str, Any]:
    """Read and verify `meta.json`."""
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
        raise ValueError(f"{path} is not a checkpoint: {META} is missing or of another program") from None
    if version not in (2, FORMAT):
        raise ValueError(f"{path} has checkpoint format={version}, not 2 or {FORMAT}; read it by its own version")
    if content != _sealed(meta) or _step_of(path) not in (None, step):
        raise ValueError(f"{path} is damaged: {META} does not match its checksum, or is of another step ({step})")
    return meta


def _sealed(meta: Mapping[str, Any]) -> bytes:
    """Return `meta.json` with its own SHA-256, in a canonical form that readers compare as a whole."""
    body = {key: value for key, value in meta.items() if key != "seal"}
    seal = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    return json.dumps({**body, "seal": seal}, indent=1).encode()


def _step_of(path: Path) -> int | None:
    """Return the step of a folder `step_` and eight digits or more; None for other names."""
    found = _STEP.fullmatch(path.name)
    return None if found is None else int(found[1])


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def _agreed(world: World, work: Callable[[], object]) -> None:
    """Call `work`; all processes raise the first OSError of any of them."""
    error = None
    try:
        work()
    except OSError as found:
        error = (found.errno, str(found.strerror or found))
    if (told := next(filter(None, world.gather(error)), None)) is not None:
        raise OSError(*told)


def capture_rng() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch, in types that `weights_only` loading accepts."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    return {
        "python": [version, torch.tensor(internal), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the states from `capture_rng`."""
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
