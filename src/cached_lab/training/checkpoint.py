"""Checkpoints that appear whole or not at all, are checked when read, and continue a run to the bit.

    RUN/checkpoints/step_00000100/model.safetensors   weights and buffers, caches included
                                  training.pt         optimiser, scaler, random states, data position, best so far
                                  shards/             of weights that are cut up, in the place of model.safetensors and
                                                      the optimiser in training.pt (`cut_tensors.py`)
                                  meta.json           format, step, the best so far, SHA-256 of the other files,
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cached_transformers.files import NotWritten, sync_folder, write_durably, write_whole

from .distributed import World
from .sharded_checkpoint import read_cut, write_cut

FORMAT = 2
"""Of checkpoints that are written. In format 1, which is read as well, `meta.json` neither named the best nor had a sum
of its own."""
CUT_FORMAT = 3
"""Of checkpoints with `shards/`; others keep format 2, which older versions read."""
WEIGHTS, TRAINING, META, SHARDS = "model.safetensors", "training.pt", "meta.json", "shards"
_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL, _SURPLUS = ".partial", ".surplus"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint in memory, its checksums verified.

    Attributes:
        cut: the folder of tensors that were left there, as `read_checkpoint` was asked to; then `weights` is empty, and
            `training` has no live weights and of the optimiser only its groups and the names of their parameters.
    """

    path: Path
    step: int
    config: dict[str, Any]
    weights: dict[str, Tensor]
    training: dict[str, Any]
    cut: Path | None = None


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
        with self._saving(step):
            partial = self._begin(step, best)
            tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in weights.items()}
            write_durably(partial / WEIGHTS, content := safetensors.torch.save(tensors))
            sums = {WEIGHTS: hashlib.sha256(content).hexdigest()}
            self._finish(step, FORMAT, config, training, best, sums)
        self.tidy(None if best is None else int(best["step"]))
        return self.path(step)

    def save_cut(
        self,
        step: int,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        training: dict[str, Any],
        best: Mapping[str, Any] | None,
        world: World,
    ) -> None:
        """As `save`, of tensors that processes have parts of, which every process must call.

        Args:
            tensors: by the names that `read_checkpoint` knows: `weights/NAME`, `live/NAME`, `optimizer/NAME/FIELD`.
            training: of the first process, with "optimizer" as `param_groups` and `names` of their parameters.

        Raises:
            NotWritten: a process could not write; all raise it, and the other checkpoints are untouched.
        """
        with self._saving(step, world):
            partial = self.folder / _PARTIAL
            _together(world, lambda: self._begin(step, best))
            write_cut(partial / SHARDS, tensors, world)

            def finish() -> None:
                sums = {f"{SHARDS}/{p.name}": _sum_of(p) for p in sorted((partial / SHARDS).iterdir())}
                self._finish(step, CUT_FORMAT, config, training, best, sums)

            _together(world, finish)
        if world.main:
            self.tidy(None if best is None else int(best["step"]))

    @contextmanager
    def _saving(self, step: int, world: World | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if world is None or world.main:
                shutil.rmtree(self.folder / _PARTIAL, ignore_errors=True)
            what = f"checkpoint {self.path(step)}"
            raise NotWritten(what, error, "earlier checkpoints are untouched") from error

    def _begin(self, step: int, best: Mapping[str, Any] | None) -> Path:
        """An empty folder for what is to be a checkpoint."""
        chosen = None if best is None else int(best["step"])
        if chosen is not None and chosen != step and not self.path(chosen).is_dir():
            raise FileNotFoundError(errno.ENOENT, f"{self.path(chosen)}, the best so far, is not there any more")
        partial = self.folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        partial.mkdir()
        return partial

    def _finish(
        self,
        step: int,
        version: int,
        config: dict[str, Any],
        training: dict[str, Any],
        best: Mapping[str, Any] | None,
        sums: dict[str, str],
    ) -> None:
        """Write what else belongs into the folder, and give it its name."""
        partial, target = self.folder / _PARTIAL, self.path(step)
        buffer = io.BytesIO()
        torch.save(training, buffer)
        sums = {**sums, TRAINING: hashlib.sha256(buffer.getvalue()).hexdigest()}
        meta = {"format": version, "step": step, "best": best, "sha256": sums, "config": config}
        for name, content in {TRAINING: buffer.getvalue(), META: _sealed(meta)}.items():
            write_durably(partial / name, content)
        sync_folder(partial)
        if target.exists():
            self.set_aside(target)
        partial.rename(target)
        sync_folder(self.folder)

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

    def newest_valid(self, whole: bool = True) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that can be read (None when there is no folder at all), and why others were skipped.

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

    def readable(self, until: int) -> list[Checkpoint]:
        """Checkpoints up to a step that can be read, newest last."""
        found = []
        for path in self.paths():
            try:
                found.append(read_checkpoint(path, whole=False))
            except ValueError:
                continue
        return [checkpoint for checkpoint in found if checkpoint.step <= until]

    def choose(self, best: Mapping[str, Any] | None) -> None:
        """Let the newest step folder say another best, in one event, as where the former cannot be read any more."""
        path = self.paths()[-1]
        meta = _read_meta(path)
        write_whole(path / META, _sealed({**meta, "format": max(FORMAT, meta["format"]), "best": best}))

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints later than `step` to `superseded_*`: the run goes on from there on a line of its own."""
        for path in reversed(self.paths()):  # so that the newest left is one whose best is still there
            if (_step_of(path) or 0) > step:
                self.set_aside(path)

    def set_aside(self, path: Path) -> None:
        """Rename a step folder, so that it does not count any more, and nothing of it is lost."""
        number = sum(1 for _ in self.folder.glob(f"superseded_{path.name}_*"))
        path.rename(self.folder / f"superseded_{path.name}_{number}")


def read_checkpoint(path: Path, whole: bool = True) -> Checkpoint:
    """Read and verify one checkpoint.

    Args:
        whole: put tensors that are cut up together, and all of them into memory; else they stay where they are
            (`Checkpoint.cut`).

    Raises:
        ValueError: not a checkpoint, of a newer format, or damaged; the message says which, and names the file.
    """
    meta = _read_meta(path)
    cut = path / SHARDS if meta["format"] == CUT_FORMAT else None
    contents = {name: _verified(path / name, meta["sha256"]) for name in ((WEIGHTS, TRAINING), (TRAINING,))[bool(cut)]}
    for name in sorted(meta["sha256"]) if cut else ():
        if name.startswith(f"{SHARDS}/"):
            _verify(path / SHARDS / Path(name).name, meta["sha256"][name])
    try:
        weights = {} if cut else safetensors.torch.load(contents[WEIGHTS])
        training = torch.load(io.BytesIO(contents[TRAINING]), weights_only=True, map_location="cpu")
    except Exception as error:  # what is no archive of torch, or holds more than tensors, raises a wide choice
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged, or not one of ours: {reason}") from None
    if not isinstance(training, dict):
        raise ValueError(f"{path} is not one of ours: {TRAINING} holds no training state")
    if cut and whole:
        weights, training, cut = *put_together(read_cut(cut), training), None
    return Checkpoint(path, meta["step"], meta["config"], weights, training, cut)


def put_together(
    tensors: Mapping[str, Tensor], training: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and training state as a checkpoint in one piece has them, of what `Checkpoints.save_cut` was given."""
    found: dict[str, dict[str, Tensor]] = {"weights": {}, "live": {}, "optimizer": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        found[kind][name] = tensor
    names, groups = (training["optimizer"][key] for key in ("names", "param_groups"))
    numbers = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in found["optimizer"].items():
        name, _, field = key.rpartition("/")
        state.setdefault(numbers[name], {})[field] = tensor
    whole = {**training, "optimizer": {"state": state, "param_groups": groups}}
    return found["weights"], whole | ({"live_weights": found["live"]} if found["live"] else {})


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
    if version > CUT_FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {version}, this version reads 1 to {CUT_FORMAT}; use the matching version"
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


def _verify(path: Path, wanted: str) -> None:
    """As `_verified`, of a file that need not fit into memory."""
    try:
        found = _sum_of(path)
    except OSError:
        raise ValueError(f"{path.parent.parent} is damaged: {path.name} is missing or cannot be read") from None
    if found != wanted:
        raise ValueError(f"{path.parent.parent} is damaged: {path.name} does not match its checksum")


def _sum_of(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def _together(world: World, work: Callable[[], object]) -> None:
    """Let the main process work; where it meets an error of files, all raise it."""
    error = None
    if world.main:
        try:
            work()
        except OSError as found:
            error = (found.errno, str(found.strerror or found))
    if (told := world.gather(error)[0]) is not None:
        raise OSError(*told)


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
