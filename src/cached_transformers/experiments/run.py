"""One run from configuration to report: data, model, training, test, and the files of the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.utils._pytree import tree_map_only

from cached_transformers.registry import DATASETS, MODELS
from cached_transformers.tasks.kinds import baselines, example_inputs, task_name
from cached_transformers.tasks.recipes import config_from_dict, fill_from_data
from cached_transformers.tasks.translation.task import written
from cached_transformers.training.checkpoint import Checkpoints, read_checkpoint, seed_everything, write_durably
from cached_transformers.training.checkpoint_average import checkpoints_made, load_average
from cached_transformers.training.config import RunConfig, config_to_yaml
from cached_transformers.training.distributed import World, in_world
from cached_transformers.training.initial import load_initial_weights
from cached_transformers.training.loader import evaluation_batches
from cached_transformers.training.metrics import jsonable, untouched, with_intervals
from cached_transformers.training.progress import Reporter
from cached_transformers.training.trainer import Trainer
from cached_transformers.yaml_tree import parse_yaml

TOKENIZER = "tokenizer.json"
"""File in a run folder with the tokenizer of a language model or of a translation model."""
TRANSLATIONS = "translations.txt"
"""File in a run folder with sources, references and translations of the test split."""
BAD_FILES = "bad_files.json"
"""File in a run folder that names the data files which were skipped, with what was wrong; absent if there are none."""
CATEGORIES = "categories.json"
"""File in a run folder with the ids and names of a detector's classes."""
MAPPED_IMAGES = 8
"""Images whose feature maps a run keeps."""


def run_training(
    config: RunConfig, folder: Path, resume: str = "auto", console: Console | None = None, variant: str | None = None
) -> dict[str, Any]:
    """Train, test and report one run; returns what `summary.json` holds.

    Args:
        config: from `load_config`; options that the data determine are filled in.
        folder: the run folder, made when absent.
        resume: "auto", "never", or the path of a checkpoint.
        console: where progress goes; None is silent.
        variant: name of the arm of a comparison.

    Raises:
        ValueError: the configuration, the data or the checkpoint do not fit.
        Interrupted: asked to stop; a checkpoint was saved.
        RuntimeError, OSError: training failed or a file could not be written.
    """
    return in_world(
        config.training.device,
        lambda processes: _train_test_report(config, folder, resume, console, variant, processes),
    )


@contextlib.contextmanager
def main_first(processes: World) -> Iterator[None]:
    """Let the main process go first, so that the others find what it has put into a cache on disk."""
    if not processes.main:
        processes.barrier()
    yield
    if processes.main:
        processes.barrier()


def build_dataset(config: RunConfig, split: str) -> Any:
    """One split of the configured data."""
    return DATASETS.create(**config.data, split=split)


def build_model(config: RunConfig) -> nn.Module:
    """The configured model with weights that depend on `training.seed` alone."""
    seed_everything(config.training.seed)
    return MODELS.create(**config.model)


def without_checkpoint(config: RunConfig) -> RunConfig:
    """The configuration without the weights that training began with: a trained run has its own."""
    if config.model.get("checkpoint") is None:
        return config
    return dataclasses.replace(config, model={**config.model, "checkpoint": None})


def load_run(folder: Path, checkpoint: str = "best", average: int | None = None) -> tuple[RunConfig, nn.Module, int]:
    """Configuration, model with its trained weights, and step of a run folder.

    Args:
        folder: a run folder.
        checkpoint: "best", "last", "tested" (what the summary's test scores are of), or the path of a step folder.
        average: with "tested", so many newest checkpoints are averaged instead; caches as `training.average_caches`.

    Raises:
        ValueError: not a run folder, or the checkpoint is missing or damaged.
    """
    config = read_run_config(folder)
    if average is not None and checkpoint != "tested":
        raise ValueError(f"--checkpoint {checkpoint} and --average {average} name different weights; give one of them")
    if checkpoint == "tested":
        checkpoint = "last" if config.training.test == "last" else "best"
        average = config.training.average_last if average is None and config.training.average_last > 1 else average
    if average is not None:
        model = build_model(without_checkpoint(config))
        return config, model, load_average(model, folder, average, config.training.average_caches)
    path = Checkpoints(folder / "checkpoints").named(checkpoint) if checkpoint in ("best", "last") else Path(checkpoint)
    stored = read_checkpoint(path)
    model = build_model(without_checkpoint(config))
    try:
        model.load_state_dict(stored.weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model of {folder / 'config.yaml'}: {error}") from None
    return config, model, stored.step


def read_run_config(folder: Path) -> RunConfig:
    """The resolved configuration of a run folder (ValueError when it is none)."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.yaml")
    return config_from_dict(parse_yaml(path.read_text(encoding="utf-8"), str(path)))


def read_categories(folder: Path) -> list[dict[str, Any]]:
    """Ids and names of the classes of a detector's run folder, in order of the classes (ValueError when it is none)."""
    path = folder / CATEGORIES
    if not path.is_file():
        raise ValueError(f"{folder} has no {CATEGORIES}: it is not a run of a detector")
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def environment(device: torch.device | str) -> dict[str, Any]:
    """Versions, device and date, for the record."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": f"{torch.device(device).type} ({name})",
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the source tree that the package runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def _train_test_report(
    config: RunConfig, folder: Path, resume: str, console: Console | None, variant: str | None, processes: World
) -> dict[str, Any]:
    label = config.name if variant is None else f"{variant}, seed {config.training.seed}"
    reporter = Reporter(label, config.training.steps, console if processes.main else None)
    with main_first(processes):
        train, validation = (build_dataset(config, split) for split in ("train", "validation"))
        test = None if config.training.test == "none" else build_dataset(config, "test")
    config = fill_from_data(config, train.describe())
    continued = resume != "never" and bool(Checkpoints(folder / "checkpoints").paths())
    model = build_model(without_checkpoint(config) if continued else config)
    trainer = Trainer(config, model, train, validation, folder, processes, reporter)
    if continued and hasattr(train, "tokenizer"):
        check_tokenizer(folder, train.tokenizer)
    check_average(config)
    trainer.resume(resume)
    begin_with(trainer)
    if processes.main:
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / "config.yaml", config_to_yaml(config).encode())
        if hasattr(train, "tokenizer"):
            write_durably(folder / TOKENIZER, train.tokenizer.dump())
        elif task_name(train) == "detection":
            pairs = zip(train.category_ids, train.class_names, strict=True)
            _write_json(folder / CATEGORIES, [{"id": number, "name": name} for number, name in pairs])
    facts = trainer.task.facts() if hasattr(trainer.task, "facts") else {}
    for name, value in facts.items():
        reporter.message(f"{name.replace('_', ' ')}: {value:,.4g}")
    processes.barrier()
    if trainer.step == config.training.steps:
        reporter.message(f"training is complete already ({trainer.step} steps)")
    trainer.fit()
    last = _test_last(trainer, test)
    tested = _test(trainer, test, processes)
    summary: dict[str, Any] = {}
    bad = bad_files(processes, train, validation, test)
    if processes.main:
        summary = _summary(trainer, variant, tested, (train, test if test is not None else validation))
        summary |= facts
        if last is not None:
            summary["test_last"] = last
        if (translations := getattr(trainer.task, "translations", None)) and tested is not None:
            write_durably(folder / TRANSLATIONS, written(translations).encode())
        if number := write_bad_files(folder, bad):
            summary["bad_files"] = number
            reporter.message(f"{number} files could not be used and were skipped: {folder / BAD_FILES}")
        _write_json(folder / "summary.json", summary)
        _say_baselines(summary["baselines"], config.training.metric, reporter)
        write_figures(model, validation, folder, processes)
        write_report(folder, reporter)
    processes.barrier()
    return summary


def check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Refuse to go on with a run whose token ids meant other text (ValueError)."""
    path = folder / TOKENIZER
    if path.is_file() and path.read_bytes() != tokenizer.dump():
        raise ValueError(
            f"{path} is another tokenizer than that of the data now; use another --out, or fetch the data again "
            f"that the "
            f"run began with (or set data.tokenizer={path}, where the data take a file)"
        )


def check_average(config: RunConfig) -> None:
    """Refuse to average more checkpoints than the run will write (ValueError)."""
    settings = config.training
    made = checkpoints_made(settings.steps, settings.save_every or settings.evaluate_every)
    if settings.average_last > made:
        raise ValueError(
            f"training.average_last={settings.average_last}, but training.steps={settings.steps} with a checkpoint "
            f"every "
            f"{settings.save_every or settings.evaluate_every} make {made}; save more often (training.save_every)"
        )


def begin_with(trainer: Trainer) -> None:
    """Put the weights that `training.initial_weights` names into a model that has not been trained yet.

    Raises:
        ValueError: they do not fit; the message says what would.
    """
    settings = trainer.settings
    if settings.initial_weights is None or trainer.step:
        return
    path = Path(settings.initial_weights).expanduser()
    load_initial_weights(trainer.model, path, settings.new_head, settings.reset_caches, say=trainer.reporter.message)


def _test_last(trainer: Trainer, test: Any) -> dict[str, Any] | None:
    """Scores of the last step on the test split, where those of the best are wanted too."""
    if trainer.settings.test != "both" or test is None:
        return None
    values, _ = trainer.task.evaluate(trainer.evaluated, test)
    return {"step": trainer.step, **with_intervals(values)}


def _say_baselines(found: dict[str, float] | None, metric: str, reporter: Reporter) -> None:
    """Say what guessers reach that learn nothing, so that no score stands alone."""
    from .reports.wording import Metric

    if found:
        scores = ", ".join(f"{name} {Metric(metric).value(value)}" for name, value in found.items())
        reporter.message(f"{reporter.label}  baselines ({metric}): {scores}")


def _test(trainer: Trainer, test: Any, processes: World) -> dict[str, Any] | None:
    """Evaluate the chosen checkpoint, or the average of the last ones, on the test split; the model keeps its
    weights."""
    settings = trainer.settings
    step = trainer.step
    if settings.average_last > 1:
        load_average(trainer.model, trainer.folder, settings.average_last, settings.average_caches)
    elif settings.test != "last" and trainer.best is not None:
        stored = read_checkpoint(trainer.checkpoints.named("best"))
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


def _summary(
    trainer: Trainer, variant: str | None, tested: dict[str, Any] | None, data: tuple[Any, Any]
) -> dict[str, Any]:
    from .costs.flops import count_flops, count_parameters

    train, scored = data
    config = trainer.config
    inputs, keywords = example_inputs(scored, config)
    device = trainer.world.device
    inputs, moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (inputs, keywords))
    return {
        "name": config.name,
        "task": config.data["name"],
        "variant": variant or memory_name(config),
        "seed": config.training.seed,
        "steps": trainer.step,
        "parameters": count_parameters(trainer.model),
        "flops": count_flops(trainer.model, *inputs, **moved),
        "seconds_per_step": trainer.train_seconds / trainer.step,
        "train_seconds": trainer.train_seconds,
        "skipped_steps": trainer.skipped,
        "best": trainer.best,
        "final": trainer.latest,
        "test": tested,
        "environment": environment(device),
        "baselines": baselines(config, train, scored),
    }


def memory_name(config: RunConfig) -> str:
    """Name of the model's memory, "plain" when it has none."""
    memory = config.model.get("memory")
    return "plain" if memory is None else memory if isinstance(memory, str) else memory["name"]


def write_figures(model: nn.Module, dataset: Any, folder: Path, processes: World) -> None:
    """Write `gates.json` and, for images, `feature_maps.npz`, when the model has a gated memory."""
    from .reports.feature_maps import collect_feature_maps
    from .reports.gates import collect_gates

    with untouched(model):
        gates = collect_gates(model)
        if not gates:
            return
        _write_json(folder / "gates.json", {"layers": gates})
        if not hasattr(dataset, "collate") or task_name(dataset) == "detection":  # its images differ in size
            return
        images = next(evaluation_batches(dataset, MAPPED_IMAGES)).inputs
        if not images.is_floating_point():
            return
        maps = collect_feature_maps(model, images.to(processes.device))
    if maps is not None:
        arrays = {key: np.asarray(value) for key, value in maps.items()}
        np.savez_compressed(folder / "feature_maps.npz", **arrays)  # type: ignore[arg-type]


def bad_files(processes: World, *datasets: Any) -> dict[str, str]:
    """Files that the data sets of all processes have skipped, with what is wrong."""
    own = {file: why for data in datasets for file, why in getattr(data, "bad_found", {}).items()}
    return {file: why for found in processes.gather(own) for file, why in found.items()}


def write_bad_files(folder: Path, found: Mapping[str, str]) -> int:
    """Add files to `bad_files.json`, which holds those of earlier sessions of the run; how many it then names."""
    path = folder / BAD_FILES
    files = {**(json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else {}), **found}
    if files:
        _write_json(path, {"count": len(files), "files": files})
    return len(files)


def write_evaluation(folder: Path, result: dict[str, Any]) -> None:
    """Write `evaluation.json`: scores by way of treating the memory, and the loss by place in the document."""
    _write_json(folder / "evaluation.json", result)


def write_report(folder: Path, reporter: Reporter) -> None:
    """Write `report.html`, or say why not."""
    from .reports.report import write_run_report

    try:
        path = write_run_report(folder)
    except ImportError as error:
        reporter.message(f"no report: {error}")
        return
    reporter.message(f"report: {path}")


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}")
    write_durably(temporary, json.dumps(jsonable(value), indent=1).encode())
    temporary.replace(path)


def with_memory(config: RunConfig, memory: str | dict[str, Any] | None) -> RunConfig:
    """The same configuration with another memory in the model."""
    return dataclasses.replace(config, model={**config.model, "memory": memory})
