"""The training loop: steps, evaluation, checkpoints, exact resume and clean interruption.

Data order and learning rate are functions of the step number.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cached_transformers.files import jsonable

from .async_checkpoint import CheckpointWriter
from .buffers import buffers_by_rank, remember_buffers, with_own_buffers
from .checkpoint import Checkpoint, Checkpoints, capture_rng, read_checkpoint, restore_rng, seed_everything
from .config import MAY_DIFFER, RunConfig, config_to_dict, differing_keys, with_defaults
from .distributed import World
from .ema import WeightAverage
from .interruption import Interrupted, RunFailed, starter, stop_requests
from .loader import mixed_seed
from .metrics import MetricsFile, tallies
from .optim import build_optimizer, learning_rate, warmup
from .progress import Reporter
from .run_files import check_data, sha256_sums
from .scores import goodness
from .sharding import ShardedLoop, Shards, full_tensor, shard_like, shard_weights
from .task import Task

_SAVED = ("best", "latest", "skipped", "bad_in_a_row", "train_seconds")
"""Attributes of a trainer that a checkpoint holds under their names."""


class Trainer:
    """Train one model in one run folder.

    Args:
        config: resolved configuration.
        task: model, data and scores.
        folder: run folder.
        world: processes that train together; only the main process writes.
        reporter: display of the progress.

    Attributes:
        files: contents of files of the run by name; checkpoints hold their SHA-256.

    Raises:
        ValueError: settings that this model or machine cannot satisfy.
    """

    def __init__(self, config: RunConfig, task: Task, folder: Path, world: World, reporter: Reporter) -> None:
        self.config = config
        self.settings = settings = config.training
        self.world, self.folder, self.reporter = world, folder, reporter
        if settings.precision == "float16" and world.device.type != "cuda":
            raise ValueError(
                f"training.precision='float16' needs a CUDA device, this run uses {world.device.type}; use bfloat16 "
                "or float32"
            )
        if settings.activation_checkpointing:
            enable_activation_checkpointing(task.model)
        self.task, self.model = task, task.model.to(world.device)
        sharded = world.size > 1 and settings.parallel == "fsdp"
        self.shards = task.shards = Shards(self.model, world) if sharded else None
        self.files = task.files()
        self.optimizer = build_optimizer(self.model, config.optimizer)
        decay = settings.ema_decay
        self.average = None if decay is None else WeightAverage(self.model, decay)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "float16")
        self.checkpoints = Checkpoints(folder / "checkpoints", settings.keep)
        writers = World(world.device) if self.shards is None else world
        self.writer = CheckpointWriter(settings.save == "async", writers)
        self.step = self._saved_step = self.skipped = self.bad_in_a_row = 0
        self.best: dict[str, Any] | None = None
        self.latest: dict[str, Any] | None = None
        self._idle: int | None = 0  # steps so far without any gradient; None after the first one with one
        self.train_seconds = self._gradient_norm = self._seconds_before = 0.0
        self._total = torch.zeros(self.task.width, dtype=torch.float64)
        self._tallies: dict[str, Tensor] = {}
        self._started = time.perf_counter()
        self._metrics: MetricsFile | None = None
        self._starter = starter()
        # Each process has its own dropout masks; the first has those of a single process.
        seed_everything(settings.seed if world.main else mixed_seed(settings.seed, world.rank))

    def join(self) -> None:
        """Gather the whole model in every process after training; training cannot continue."""
        if self.shards is None:
            return
        evaluated, self.model = self.evaluated, self.shards.whole()
        if self.average is not None:
            self.average.module = self.model if evaluated is self.task.model else self.shards.whole(evaluated)
        self.task.model, self.task.shards, self.shards = self.model, None, None

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and saved: with averaged weights after the first averaged step."""
        return self.average.module if self.average is not None and self.average.updates else self.model

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the start of the run, over all its resumptions."""
        return self._seconds_before + time.perf_counter() - self._started

    def fit(self) -> None:
        """Train up to `training.steps`.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived; a checkpoint was saved first.
            RuntimeError: too many steps in a row had a non-finite loss or gradient.
            OSError: metrics or a checkpoint could not be written.
        """
        settings = self.settings
        batches = self.task.batches(self.step)
        wrapped, runner = self.task.runner()
        if (given := self.config.schedule.warmup_steps) != (taken := warmup(self.config.schedule, settings.steps)):
            self.reporter.message(f"schedule.warmup_steps={given} would fill training.steps={settings.steps}: {taken}")
        self._metrics = MetricsFile(self.folder, self.step, settings.tensorboard) if self.world.main else None
        closing = contextlib.nullcontext() if self._metrics is None else contextlib.closing(self._metrics)
        with closing, stop_requests() as stop, self.reporter, self.writer.finished(self.reporter.message):
            self.reporter.advance(self.step)
            while self.step < settings.steps:
                started = time.perf_counter()
                self._train_step(wrapped, runner, batches)
                self.train_seconds += time.perf_counter() - started
                self.reporter.advance(self.step)
                if self._due(settings.log_every):
                    self._log_training()
                improved = self._due(settings.evaluate_every) and self._evaluate()
                saving = settings.save_every or settings.evaluate_every
                if improved or self._due(saving):
                    regular = self.step % saving == 0 or (improved and self.step % settings.evaluate_every == 0)
                    self.save(scheduled=regular or None)
                self._stop_if_asked(stop)
        if self.writer.background:
            self.world.barrier()  # the other processes read the files of the first

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.settings.steps

    def _train_step(self, wrapped: nn.Module, runner: Callable[..., Any], batches: Iterator[Any]) -> None:
        """Take one optimiser step: forward and backward per piece, clip, update; skip it if a value is not finite."""
        settings = self.settings
        self.step += 1
        self.model.train()
        put_back = remember_buffers(self.model)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        total = torch.zeros(self.task.width, dtype=torch.float64, device=self.world.device)
        for piece in range(settings.accumulate):
            waits = isinstance(wrapped, DistributedDataParallel | ShardedLoop) and piece < settings.accumulate - 1
            with wrapped.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                total += self.task.backward(runner, next(batches), self.scaler)
        total = self.world.sum(total).cpu()
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if settings.clip_norm is None else settings.clip_norm
        self._gradient_norm = float(full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
        finite = math.isfinite(float(total[0])) and math.isfinite(self._gradient_norm)
        if finite:
            self.scaler.step(self.optimizer)
            if self.average is not None:
                self.average.update(self.model)
            self._total += total
            self.bad_in_a_row = 0
        else:
            put_back()  # running averages and caches have seen the bad values
        self.task.finish(finite)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if not finite:
            self._skip()
        elif self._idle is not None:
            self._idle = None if self._gradient_norm else self._idle + 1
            if self._idle == settings.max_bad_steps:
                raise RunFailed(
                    f"{self._idle} steps in a row (training.max_bad_steps={settings.max_bad_steps}) gave no weight a "
                    "gradient; if only a memory trains, its texts must be longer than its window: take more segments"
                )

    def _learning_rate(self) -> float:
        return learning_rate(self.config.optimizer, self.config.schedule, self.step, self.settings.steps)

    def _skip(self) -> None:
        """Count a skipped step; stop the run after too many in a row."""
        self.skipped += 1
        self.bad_in_a_row += 1
        self.reporter.message(f"step {self.step}: loss or gradient is not finite; the step was skipped")
        if self.bad_in_a_row >= self.settings.max_bad_steps:
            raise RunFailed(
                f"{self.bad_in_a_row} steps in a row had a non-finite loss or gradient (training.max_bad_steps="
                f"{self.settings.max_bad_steps}), the last at step {self.step}; lower optimizer.learning_rate, add "
                f"schedule.warmup_steps, or use training.precision=float32. "
                f"The newest checkpoint is step {self._saved_step}."
            )

    def _write(self, line: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(line)
        self.reporter.line(line)

    def _log_training(self) -> None:
        """Write averages since the last line, skipped steps excluded."""
        if self._total[-1] == 0:
            return
        line = {"step": self.step, "split": "train", **self.task.averages(self._total)}
        line["learning_rate"] = self._learning_rate()
        self._collect_tallies()
        line |= {name: float(total / count) for name, (total, count) in self._tallies.items() if count}
        self._tallies = {}
        line |= {"gradient_norm": self._gradient_norm, "skipped": self.skipped, "seconds": round(self.seconds, 3)}
        self._total = torch.zeros(self.task.width, dtype=torch.float64)
        self._write(line)

    def _collect_tallies(self) -> None:
        """Add the counts of modules to those for the next line."""
        for name, pair in tallies(self.model, self.world).items():
            self._tallies[name] = self._tallies.get(name, 0) + pair

    def _evaluate(self) -> bool:
        """Evaluate on the validation split; return True if this is the best step so far."""
        model = self.evaluated if self.shards is None else self.shards.whole(self.evaluated)
        values, _ = self.task.evaluate(model, self.task.validation)
        self.task.validated(values)
        self._write({"step": self.step, "split": "validation", **values, "seconds": round(self.seconds, 3)})
        self.latest = {"step": self.step, **values}
        metric = self.settings.metric
        improved = self.best is None or goodness(metric, self.latest[metric]) > goodness(metric, self.best[metric])
        if improved:
            self.best = self.latest
        return improved

    def _stop_if_asked(self, stop: list[int]) -> None:
        """Save and leave if any process got a signal or lost its torchrun; all processes decide alike."""
        if not stop and starter() != self._starter:
            stop = [signal.SIGTERM]
        asked = int(self.world.sum(torch.tensor([float(stop[0] if stop else 0)], device=self.world.device)).max())
        if not asked:
            return
        if self._saved_step != self.step:
            self.save(scheduled=False)
        self.writer.wait()
        raise Interrupted(stop[0] if stop else signal.SIGTERM, self.step)

    # Checkpoints

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the evaluated weights and the training state; every process must call this."""
        weights = self.evaluated.state_dict()
        rng, carried = self.world.gather(capture_rng()), self.task.state_dict()
        self._collect_tallies()
        training = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": rng,
            **{name: getattr(self, name) for name in _SAVED},
            "seconds": self.seconds,
            "total": self._total,
            "tallies": self._tallies,
            "carried": carried,
            "rank_buffers": buffers_by_rank(self.model, self.world),
            "files": sha256_sums(self.files),
        }
        if self.average is not None:
            training |= {"averaged_steps": self.average.updates, "live_weights": dict(self.model.state_dict())}
        return weights, training

    def load_state_dict(self, weights: Mapping[str, Tensor], training: dict[str, Any]) -> None:
        """Restore the two parts that `state_dict` returned, with any number of processes."""
        own, say = training.get("rank_buffers", []), self.reporter.message
        live = with_own_buffers(training.get("live_weights") or weights, own, self.world, say)
        self.model.load_state_dict(shard_weights(self.model, live))
        if self.average is not None:
            averaged = with_own_buffers(weights, own, self.world, say=lambda text: None)
            self.average.load(shard_weights(self.average.module, averaged), training["averaged_steps"])
        optimizer, like = training["optimizer"], [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            index: {key: value if value is None else shard_like(value, like[index]) for key, value in fields.items()}
            for index, fields in optimizer["state"].items()
        }
        self.optimizer.load_state_dict({**optimizer, "state": state})
        self.scaler.load_state_dict(training["scaler"])
        for name in _SAVED:
            setattr(self, name, training[name])
        self._seconds_before = training["seconds"]
        self._total, self._tallies = training["total"], training.get("tallies", {})
        with contextlib.nullcontext() if self.shards is None else self.shards.gathered():
            self.task.load_state_dict(training.get("carried", {}))
        if self.world.rank < len(training["rng"]):
            restore_rng(training["rng"][self.world.rank])

    def save(self, scheduled: bool | None = True) -> None:
        """Write a checkpoint of this step. With `training.save=async`, training waits for the previous save only.

        Raises:
            NotWritten: this or the previous checkpoint could not be written; the message names the path.
        """
        self.writer.wait()
        weights, training = self.state_dict()
        if self._metrics is not None:
            self._metrics.sync()
        step, config, best = self.step, config_to_dict(self.config), self._best_step()
        if self.shards is not None or self.world.main:
            weights, training = self.writer.snapshot((weights, training))
            about = (step, config, weights, training, best)
            self.writer.submit(lambda world: self.checkpoints.save(*about, world, scheduled))
        self._saved_step = self.step
        if not self.writer.background:
            self.world.barrier()

    def resume(self, mode: str) -> None:
        """Continue from a checkpoint.

        Args:
            mode: "auto" (the newest readable checkpoint, if any), "anyway" (the same, even if the data have changed),
                "never", or the path of a checkpoint.

        Raises:
            ValueError: the checkpoint is damaged, or belongs to another configuration or other data.
        """
        if mode == "never":
            if self.checkpoints.paths():
                raise ValueError(f"{self.folder} holds a run already; use --resume auto, or another --out")
            return
        if mode in ("auto", "anyway"):
            checkpoint, problems = self.checkpoints.newest_valid(whole=self.shards is None)
            for problem in problems:
                self.reporter.message(f"skipped: {problem}")
            if checkpoint is None:
                return
        else:
            checkpoint = read_checkpoint(Path(mode), whole=self.shards is None)
        differences = differing_keys(with_defaults(checkpoint.config), config_to_dict(self.config))
        if differences:
            listed = "\n  ".join(differences)
            raise ValueError(
                f"{checkpoint.path} belongs to another configuration; use another --out, or undo these changes "
                f"(only {', '.join(MAY_DIFFER)} may change):\n  {listed}"
            )
        if checkpoint.step > self.settings.steps:
            raise ValueError(f"{checkpoint.path} is beyond training.steps={self.settings.steps}; ask for more steps")
        changed = check_data(checkpoint, self.files, anyway=mode == "anyway")
        if changed is not None:
            self.reporter.message(f"{changed}; continuing with them")
        self._load(checkpoint)
        self._repair(checkpoint)
        self.reporter.message(f"continuing from {checkpoint.path}")

    def _load(self, checkpoint: Checkpoint) -> None:
        try:
            self.load_state_dict(checkpoint.weights, checkpoint.training)
        except torch.OutOfMemoryError:  # a RuntimeError, and not the checkpoint's fault
            raise
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise ValueError(f"{checkpoint.path} is not of this run: {reason}; train into another folder") from error
        self.step = self._saved_step = checkpoint.step

    def _repair(self, checkpoint: Checkpoint) -> None:
        """Set aside later checkpoints and a damaged best one."""
        broken: Path | None = None
        if self.best is not None and self.checkpoints.path(self.best["step"]) != checkpoint.path:
            path = self.checkpoints.path(self.best["step"])
            try:
                read_checkpoint(path, whole=False)
            except ValueError as error:
                broken = path
                self.best = self.latest if self.latest is not None and self.latest["step"] == checkpoint.step else None
                now = "the next evaluation decides" if self.best is None else f"step {checkpoint.step} takes its place"
                self.reporter.message(f"the best checkpoint so far cannot be used: {error}; {now}")
        self.world.barrier()
        if self.world.main:
            if broken is not None and broken.is_dir():
                self.checkpoints.set_aside(broken)
            self.checkpoints.set_aside_after(self.step)
            if broken is not None and checkpoint.path == self.checkpoints.path(self.step):
                self.checkpoints.choose(self._best_step())
            self.checkpoints.tidy(self.best["step"] if self.best else None)

    def _best_step(self) -> dict[str, Any] | None:
        """Return step and score of the best so far, for JSON."""
        metric = self.settings.metric
        return None if self.best is None else jsonable({"step": self.best["step"], metric: self.best[metric]})


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Recompute activations in the backward pass instead of keeping them (ValueError: the model does not offer it)."""
    for name in ("set_activation_checkpointing", "set_grad_checkpointing"):
        if hasattr(model, name):
            getattr(model, name)(True)
            return
    raise ValueError(
        f"training.activation_checkpointing=true: {type(model).__name__} does not offer it; set it to false"
    )
