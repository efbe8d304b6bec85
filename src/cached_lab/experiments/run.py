"""One run from configuration to report: train, test, and write the files of the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import fill_from_data
from cached_lab.training.checkpoint import Checkpoints, read_checkpoint
from cached_lab.training.config import RunConfig, config_to_yaml
from cached_lab.training.distributed import World, in_world
from cached_lab.training.interruption import RunFailed
from cached_lab.training.loader import to_device
from cached_lab.training.progress import Reporter
from cached_lab.training.run_files import BAD_FILES, CONFIG, data_file
from cached_lab.training.run_lock import main_holds
from cached_lab.training.stored_weights import load_average, load_initial_weights
from cached_lab.training.trainer import Trainer
from cached_transformers.files import json_text, jsonable, write_whole

from .build import build_dataset, build_model, memory_name, without_checkpoint
from .costs.flops import count_flops, count_parameters
from .environment import environment
from .reports.formatting import Metric
from .run_outputs import bad_files, write_bad_files, write_evaluation, write_gates, write_report
from .statistics import with_intervals


def run_training(
    config: RunConfig, folder: Path, resume: str = "auto", console: Console | None = None, variant: str | None = None
) -> dict[str, Any]:
    """Train, test and report one run; return the content of `summary.json`.

    Args:
        config: from `load_config`; options that depend on the data are filled in.
        folder: the run folder, made if absent.
        resume: "auto", "anyway", "never", or the path of a checkpoint; see `Trainer.resume`.
        console: for progress; None is silent.
        variant: name of the variant in a comparison.

    Raises:
        ValueError: the configuration, the data or the checkpoint do not fit.
        Interrupted: asked to stop; a checkpoint was saved.
        InUse: another process trains into the folder.
        RuntimeError, OSError: training failed or a file could not be written.
    """

    def work(processes: World) -> dict[str, Any]:
        with main_holds(processes, folder):
            return _train_test_report(config, folder, resume, console, variant, processes)

    return in_world(config.training.device, work)


def _train_test_report(
    config: RunConfig, folder: Path, resume: str, console: Console | None, variant: str | None, processes: World
) -> dict[str, Any]:
    label = config.name if variant is None else f"{variant}, seed {config.training.seed}"
    reporter = Reporter(label, config.training.steps, console if processes.main else None)
    if not processes.main:  # the main process goes first; the other processes find its cache on disk
        processes.barrier()
    train, validation = (build_dataset(config, split) for split in ("train", "validation"))
    test = None if config.training.test == "none" else build_dataset(config, "test")
    if processes.main:
        processes.barrier()
    splits = {"train": train, "validation": validation, "test": test}
    trainer = _prepare_trainer(fill_from_data(config, train.describe()), splits, folder, resume, processes, reporter)
    facts = trainer.task.facts()
    for name, value in facts.items():
        reporter.message(f"{name.replace('_', ' ')}: {value:,.4g}")
    processes.barrier()
    if trainer.step == config.training.steps:
        reporter.message(f"training is complete already ({trainer.step} steps)")
    trainer.fit()
    trainer.join()
    last = _test_last(trainer, test)
    tested = _test(trainer, test, processes)
    bad = bad_files(processes, train, validation, test)
    summary: dict[str, Any] = {}
    if processes.main:
        summary = _summary(trainer, variant, tested, validation if test is None else test) | facts
        if last is not None:
            summary["test_last"] = last
        if tested is not None:
            for name, content in trainer.task.results().items():
                write_whole(folder / name, content)
        if number := write_bad_files(folder, bad):
            summary["bad_files"] = number
            reporter.message(f"{number} files could not be used and were skipped: {folder / BAD_FILES}")
        if summary["baselines"]:
            metric = config.training.metric
            scores = ", ".join(f"{name} {Metric(metric).value(v)}" for name, v in summary["baselines"].items())
            reporter.message(f"{reporter.label}  baselines ({metric}): {scores}")
        write_gates(trainer.model, folder)
        write_report(folder, reporter, jsonable(summary))
        write_whole(folder / "summary.json", json_text(summary))  # last: it marks the run as finished
    processes.barrier()
    return summary


def _prepare_trainer(
    config: RunConfig, splits: Mapping[str, Any], folder: Path, resume: str, processes: World, reporter: Reporter
) -> Trainer:
    """Build the trainer at the start of the run or at its checkpoint, and write the files that describe the run."""
    continued = resume != "never" and bool(Checkpoints(folder / "checkpoints").paths())
    model = build_model(without_checkpoint(config) if continued else config)
    task = make_task(config, model, splits["train"], splits["validation"], processes)
    trainer = Trainer(config, task, folder, processes, reporter)
    trainer.files |= data_file(splits)
    check_average(config)
    trainer.resume(resume)
    settings = config.training
    if settings.initial_weights is not None and not trainer.step:
        path = Path(settings.initial_weights).expanduser()
        load_initial_weights(trainer.model, path, settings.new_head, say=reporter.message)
    if processes.main:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {CONFIG: config_to_yaml(config).encode(), **trainer.files}.items():
            write_whole(folder / name, content)
    return trainer


def check_average(config: RunConfig) -> None:
    """Refuse to average more checkpoints than the run writes (ValueError)."""
    settings = config.training
    every = settings.save_every or settings.evaluate_every
    made = -(-settings.steps // every)
    if settings.average_last > made:
        raise ValueError(
            f"training.average_last={settings.average_last}, but training.steps={settings.steps} with a checkpoint "
            f"every {every} make {made}; save more often (training.save_every)"
        )


def _test_last(trainer: Trainer, test: Any) -> dict[str, Any] | None:
    """Score the last step on the test split with training.test=both."""
    if trainer.settings.test != "both" or test is None:
        return None
    values, _ = trainer.task.evaluate(trainer.evaluated, test)
    return {"step": trainer.step, **with_intervals(values)}


def _test(trainer: Trainer, test: Any, processes: World) -> dict[str, Any] | None:
    """Score the chosen checkpoint, or the average of the last ones, on the test split; the model keeps its weights."""
    settings = trainer.settings
    step = trainer.step
    if settings.average_last > 1:
        load_average(trainer.model, trainer.folder, settings.average_last)
    elif settings.test != "last" and trainer.best is not None:
        try:
            stored = read_checkpoint(trainer.checkpoints.path(trainer.best["step"]))
        except ValueError as error:  # damaged since this run saved it: not bad input
            raise RunFailed(f"{error}; the same command goes on with the checkpoints that are left") from error
        trainer.model.load_state_dict(stored.weights)
        step = stored.step
    elif trainer.average is not None:
        trainer.model.load_state_dict(trainer.evaluated.state_dict())
    if test is None:
        return None
    values, places = trainer.task.evaluate(trainer.model, test)
    if places and processes.main:
        scores = [{"memory": trainer.config.evaluation.memory, **values, "places": places}]
        write_evaluation(trainer.folder, {"split": "test", "step": step, "scores": scores})
    trainer.reporter.line({"step": step, "split": "test", **values})
    return {"step": step, **with_intervals(values)}


def _summary(trainer: Trainer, variant: str | None, tested: dict[str, Any] | None, scored: Any) -> dict[str, Any]:
    config, task, device = trainer.config, trainer.task, trainer.world.device
    inputs, keywords = to_device(task.example_inputs(scored, config), device)
    return {
        "name": config.name,
        "task": config.data["name"],
        "variant": variant or memory_name(config),
        "seed": config.training.seed,
        "steps": trainer.step,
        "parameters": count_parameters(trainer.model),
        "flops": count_flops(trainer.model, *inputs, **keywords),
        "seconds_per_step": trainer.train_seconds / trainer.step,
        "train_seconds": trainer.train_seconds,
        "skipped_steps": trainer.skipped,
        "best": trainer.best,
        "final": trainer.latest,
        "test": tested,
        "environment": environment(device),
        "baselines": task.baselines(task.data, scored, config.training.metric),
    }
