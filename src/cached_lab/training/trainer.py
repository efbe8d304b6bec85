"""The training loop: one plain loop over steps, with evaluation, checkpoints, exact resume and clean interruption.

A step number is everything the loop needs to know about its place: data order and learning rate are functions of it.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cached_transformers.files import jsonable

from .async_checkpoint import Saves
from .buffers import by_rank, of_rank, remembered
from .checkpoint import (
    Checkpoint,
    Checkpoints,
    capture_rng,
    put_together,
    read_checkpoint,
    restore_rng,
    seed_everything,
)
from .config import MAY_DIFFER, RunConfig, config_to_dict, differing_keys, with_defaults
from .data_fingerprint import refuse_other_data, sums
from .distributed import World
from .ema import WeightAverage
from .interruption import Interrupted, RunFailed, starter, stop_requests
from .loader import mixed_seed
from .metrics import EventFiles, MetricsFile, tallies
from .optim import build_optimizer, learning_rate, set_learning_rate, warmup_note
from .progress import Reporter
from .scores import goodness
from .sharded_checkpoint import read_cut
from .sharding import Sharded, Shards, cut_as, cut_like, whole_norm
from .task import Task

_KEPT = ("best", "latest", "skipped", "bad_in_a_row", "train_seconds")
"""Attributes of a trainer that a checkpoint keeps under their names."""


class Trainer:
    """Trains one model in one run folder.

    Args:
        config: the resolved configuration.
        task: the model, on any device, with its data and scores.
        folder: the run folder.
        world: the processes that train together; only the main one writes.
        reporter: what shows the progress.

    Attributes:
        files: files of the run by name, of which checkpoints hold the sums.

    Raises:
        ValueError: settings that this model or machine cannot satisfy.
    """

    def __init__(self, config: RunConfig, task: Task, folder: Path, world: World, reporter: Reporter) -> None:
        self.config = config
        self.settings = settings = config.training
        self.world, self.folder, self.reporter = world, folder, reporter
        check_precision(settings.precision, world.device)
        if settings.activation_checkpointing:
            enable_activation_checkpointing(task.model)
        self.task, self.model = task, task.model.to(world.device)
        self.shards = task.shards = self._shards()
        self.files = task.files()
        self.optimizer = build_optimizer(self.model, config.optimizer)
        decay = settings.ema_decay
        self.average = None if decay is None else WeightAverage(self.model, decay, settings.ema_warmup)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "float16")
        self.checkpoints = Checkpoints(folder / "checkpoints", settings.keep)
        writers = World(world.device) if self.shards is None else world
        self.saves = Saves(settings.save == "async", writers)
        self.step = 0
        self.skipped = 0
        self.bad_in_a_row = 0
        self.best: dict[str, Any] | None = None
        self.latest: dict[str, Any] | None = None
        self.train_seconds = 0.0
        self._total = torch.zeros(self.task.width, dtype=torch.float64)
        self._tallies: dict[str, torch.Tensor] = {}
        self._gradient_norm = 0.0
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._files: list[MetricsFile | EventFiles] = []
        self._saved_step = 0
        self._starter = starter()
        # Every process draws its own dropout; the first draws what a single process would.
        seed_everything(settings.seed if world.main else mixed_seed(settings.seed, world.rank))

    def _shards(self) -> Shards | None:
        """What cuts the weights up, where that is asked for and there are processes to share them."""
        parallel, size = self.settings.parallel, self.world.size
        if size > 1 and parallel == "none":
            raise ValueError(
                f"training.parallel='none' with {size} processes would train {size} models into one folder; take ddp "
                "or fsdp, or start one process"
            )
        if size == 1 or parallel != "fsdp":
            return None
        half = torch.bfloat16 if self.settings.precision == "bfloat16" else None
        return Shards(self.model, self.world, half, self.settings.shares)

    def join(self) -> None:
        """Give every process the whole model again, when training is over; it cannot go on."""
        if self.shards is None:
            return
        evaluated, self.model = self.evaluated, self.shards.whole()
        if self.average is not None:
            self.average.replace(self.model if evaluated is self.task.model else self.shards.whole(evaluated))
        self.task.model, self.task.shards, self.shards = self.model, None, None

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated and saved: that of averaged weights, where there is an average of a step."""
        return self.average.module if self.average is not None and self.average.updates else self.model

    def resume(self, mode: str) -> None:
        """Continue from a checkpoint: "auto" (the newest valid one, if any), "anyway" (that one, with whatever the data
        are now), "never", or a path.

        Raises:
            ValueError: the checkpoint is bad, or belongs to another configuration; the message says why.
        """
        if mode == "never":
            if self.checkpoints.paths():
                raise ValueError(
                    f"{self.folder} holds a run already; continue it with --resume auto, or use another --out"
                )
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
        other = refuse_other_data(checkpoint, self.files, self.folder, mode == "anyway")
        if other is not None:
            self.reporter.message(f"{other}; going on with them")
        self._load(checkpoint)
        self._settle(checkpoint)
        self.reporter.message(f"continuing from {checkpoint.path}")

    def _settle(self, checkpoint: Checkpoint) -> None:
        """Make the checkpoints those of a run that has just saved this one.

        Later ones, which are damaged or of another line, are set aside. So is a best one that is damaged; the best of
        those that are left takes its place.
        """
        broken: Path | None = None
        if self.best is not None and self.checkpoints.path(self.best["step"]) != checkpoint.path:
            place = self.checkpoints.path(self.best["step"])
            try:
                read_checkpoint(place, whole=False)
            except ValueError as error:
                broken = place
                self._choose_best(str(error))
        self.world.barrier()
        if self.world.main:
            if broken is not None and broken.is_dir():
                self.checkpoints.set_aside(broken)
            self.checkpoints.set_aside_after(self.step)
            if broken is not None and checkpoint.path == self.checkpoints.path(self.step):
                self.checkpoints.choose(self._best_in_short())
            self.checkpoints.tidy(self.best["step"] if self.best else None)

    def _choose_best(self, problem: str) -> None:
        """Another best checkpoint, of those that can be read and were evaluated."""
        metric = self.settings.metric
        latest = [(point.step, point.training["latest"]) for point in self.checkpoints.readable(self.step)]
        scored = [scores for step, scores in latest if scores is not None and scores["step"] == step]
        self.best = max(scored, key=lambda scores: goodness(metric, scores[metric]), default=None)
        now = "the next evaluation decides" if self.best is None else f"of those left it is step {self.best['step']}"
        self.reporter.message(f"the best checkpoint so far cannot be used: {problem}; {now}")

    def _best_in_short(self) -> dict[str, Any] | None:
        """Step and score of the best so far, for JSON."""
        metric = self.settings.metric
        return None if self.best is None else jsonable({"step": self.best["step"], metric: self.best[metric]})

    def _load(self, checkpoint: Checkpoint) -> None:
        try:
            self._take_up(checkpoint, checkpoint.training)
        except torch.OutOfMemoryError:  # a RuntimeError, and no fault of the checkpoint
            raise
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise ValueError(f"{checkpoint.path} is not of this run: {reason}; train into another folder") from error

    def _take_up(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        own, say = state.get("rank_buffers", []), self.reporter.message
        weights = checkpoint.weights
        if checkpoint.cut is not None:
            weights, state = put_together(read_cut(checkpoint.cut, self._likes()), state)
        live = of_rank(state.get("live_weights") or weights, own, self.world, say)
        self.model.load_state_dict(cut_like(self.model, live))
        if self.average is not None:
            averaged = of_rank(weights, own, self.world, say=lambda text: None)
            self.average.load(cut_like(self.average.module, averaged), state["averaged_steps"])
        self._load_optimizer(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step = self._saved_step = checkpoint.step
        for name in _KEPT:
            setattr(self, name, state[name])
        self._seconds_before = state["seconds"]
        self._total, self._tallies = state["total"], state.get("tallies", {})
        with contextlib.nullcontext() if self.shards is None else self.shards.gathered():
            self.task.load_state_dict(state.get("carried", {}))
        if self.world.rank < len(state["rng"]):
            restore_rng(state["rng"][self.world.rank])

    def _likes(self) -> Callable[[str], torch.Tensor | None]:
        """What is here of a tensor by its name in a checkpoint that is cut up: of the optimiser, the parameter."""
        parameters, own = self._parameters(), self.model.state_dict()

        def like(key: str) -> torch.Tensor | None:
            kind, _, name = key.partition("/")
            return parameters.get(name.rpartition("/")[0]) if kind == "optimizer" else own.get(name)

        return like

    def _parameters(self) -> dict[str, nn.Parameter]:
        """What the optimiser holds by name, in its order."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {names[id(p)]: p for group in self.optimizer.param_groups for p in group["params"]}

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        if self.shards is not None:
            own = list(self._parameters().values())
            cut = {i: {k: cut_as(v, own[i]) for k, v in fields.items()} for i, fields in state["state"].items()}
            state = {**state, "state": cut}
        self.optimizer.load_state_dict(state)

    def save(self) -> None:
        """Write a checkpoint of this step: the main process, or each its share of the weights.

        Training waits for it, or with `training.save=async` for the one before.

        Raises:
            NotWritten: it, or the one before, could not be written; the message names the path.
        """
        self.saves.wait()
        weights = self.evaluated.state_dict()
        rng, carried = self.world.gather(capture_rng()), self.task.state_dict()
        self._collect_tallies()
        optimizer = self.optimizer.state_dict()
        state = {
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "rng": rng,
            **{name: getattr(self, name) for name in _KEPT},
            "seconds": self.seconds,
            "total": self._total,
            "tallies": self._tallies,
            "carried": carried,
            "rank_buffers": by_rank(self.model, self.world),
            "files": sums(self.files),
        }
        live = {}
        if self.average is not None:
            live, state["averaged_steps"] = self.model.state_dict(), self.average.updates
        for file in self._files:
            file.sync()
        place, best, main = (self.step, config_to_dict(self.config)), self._best_in_short(), self.world.main
        if self.shards is not None:
            names = list(self._parameters())
            state["optimizer"] = {"param_groups": optimizer["param_groups"], "names": names}
            tensors = {f"weights/{name}": t for name, t in weights.items()}
            tensors |= {f"live/{name}": t for name, t in live.items()}
            for index, fields in optimizer["state"].items():
                tensors |= {f"optimizer/{names[index]}/{field}": t for field, t in fields.items() if t is not None}
            tensors, state = self.saves.kept((tensors, state if main else {}))
            self.saves.carry_out(lambda world: self.checkpoints.save_cut(*place, tensors, state, best, world))
        elif main:
            if live:
                state["live_weights"] = {name: t.detach().to("cpu", copy=True) for name, t in live.items()}
            weights, state = self.saves.kept((weights, state))
            self.saves.carry_out(lambda _: self.checkpoints.save(*place, weights, state, best))
        self._saved_step = self.step
        if not self.saves.background:
            self.world.barrier()

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
        if note := warmup_note(self.config.schedule, settings.steps):
            self.reporter.message(note)
        with self._open_files(), stop_requests() as stop, self.reporter, self.saves.finished(self.reporter.message):
            self.reporter.advance(self.step)
            while self.step < settings.steps:
                started = time.perf_counter()
                self._train_step(wrapped, runner, batches)
                self.train_seconds += time.perf_counter() - started
                self.reporter.advance(self.step)
                if self._due(settings.log_every):
                    self._log_training()
                evaluated = self._due(settings.evaluate_every)
                improved = self._evaluate() if evaluated else False
                if improved or (evaluated if settings.save_every is None else self._due(settings.save_every)):
                    self.save()
                self._stop_if_asked(stop)
        if self.saves.background:
            self.world.barrier()  # others read what the first process has written

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.settings.steps

    def _train_step(self, wrapped: nn.Module, runner: Callable[..., Any], batches: Iterator[Any]) -> None:
        """One optimiser step: forward and backward for each piece, clip, update; skipped when a value is not finite."""
        settings = self.settings
        self.step += 1
        self.model.train()
        put_back = remembered(self.model)
        set_learning_rate(self.optimizer, self._learning_rate())
        total = torch.zeros(self.task.width, dtype=torch.float64, device=self.world.device)
        for piece in range(settings.accumulate):
            waits = isinstance(wrapped, DistributedDataParallel | Sharded) and piece < settings.accumulate - 1
            with wrapped.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                total += self.task.backward(runner, next(batches), self.scaler)
        total = self.world.sum(total).cpu()
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if settings.clip_norm is None else settings.clip_norm
        self._gradient_norm = whole_norm(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        finite = math.isfinite(float(total[0])) and math.isfinite(self._gradient_norm)
        if finite:
            self.scaler.step(self.optimizer)
            if self.average is not None:
                self.average.update(self.model)
            self._total += total
        else:
            put_back()  # running averages and caches have seen the bad values
        self.task.finish(finite)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._count_bad(finite)

    def _learning_rate(self) -> float:
        return learning_rate(self.config.optimizer, self.config.schedule, self.step, self.settings.steps)

    def _count_bad(self, finite: bool) -> None:
        """Keep count of skipped steps; stop the run when they do not end."""
        if finite:
            self.bad_in_a_row = 0
            return
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

    @contextlib.contextmanager
    def _open_files(self) -> Iterator[None]:
        self._files = []
        if self.world.main:
            self._files.append(MetricsFile(self.folder / "metrics.jsonl", self.step))
            self._files.append(EventFiles(self.folder / "tensorboard", self.settings.tensorboard, self.step))
        try:
            yield
        finally:
            for file in self._files:
                file.close()

    def _write(self, line: dict[str, Any]) -> None:
        for file in self._files:
            file.write(line)
        self.reporter.line(line)

    def _log_training(self) -> None:
        """One line with the averages since the last line; steps that were skipped are not in them."""
        if self._total[-1] == 0:
            return
        line = {
            "step": self.step,
            "split": "train",
            **self.task.averages(self._total),
            "learning_rate": self._learning_rate(),
        }
        self._collect_tallies()
        line |= {name: float(total / count) for name, (total, count) in self._tallies.items() if count}
        self._tallies = {}
        line |= {"gradient_norm": self._gradient_norm, "skipped": self.skipped, "seconds": round(self.seconds, 3)}
        self._total = torch.zeros(self.task.width, dtype=torch.float64)
        self._write(line)

    def _collect_tallies(self) -> None:
        """Add what the modules counted to what is logged with the next line."""
        for name, pair in tallies(self.model, self.world).items():
            self._tallies[name] = self._tallies.get(name, 0) + pair

    def _evaluate(self) -> bool:
        """Evaluate on the validation split; whether this is the best step so far."""
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
        """Save and leave when any process was asked to stop, or has lost who started it; all processes decide alike."""
        if not stop and starter() != self._starter:
            stop = [signal.SIGTERM]
        asked = int(self.world.sum(torch.tensor([float(stop[0] if stop else 0)], device=self.world.device)).max())
        if not asked:
            return
        if self._saved_step != self.step:
            self.save()
        self.saves.wait()
        raise Interrupted(stop[0] if stop else signal.SIGTERM, self.step)


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse float16 where it is not supported (ValueError)."""
    if precision == "float16" and device.type != "cuda":
        raise ValueError(
            f"training.precision='float16' needs a CUDA device, this run uses {device.type}; use bfloat16 or float32"
        )


def enable_activation_checkpointing(model: nn.Module) -> None:
    """Recompute activations in the backward pass instead of keeping them (ValueError: the model does not offer it)."""
    for name in ("set_activation_checkpointing", "set_grad_checkpointing"):
        if hasattr(model, name):
            getattr(model, name)(True)
            return
    raise ValueError(
        f"training.activation_checkpointing=true: {type(model).__name__} does not offer it; set it to false"
    )
