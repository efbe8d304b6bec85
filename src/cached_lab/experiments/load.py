"""Load run folders: configuration, trained model, text writer, and the classes of a detector."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cached_lab.tasks.language.completion import Writer, words_of, words_of_transformers
from cached_lab.tasks.language.text_reader import read_tokenizer
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.checkpoint import Checkpoints, read_checkpoint, stored_config
from cached_lab.training.config import RunConfig, config_to_dict, differing_keys, with_defaults
from cached_lab.training.run_files import CATEGORIES, CONFIG, TOKENIZER, refuse_exchanged
from cached_lab.training.stored_weights import load_average
from cached_lab.yaml_tree import flatten, parse_yaml
from cached_transformers.models.published import PublishedModel, is_ours

from .build import build_model, without_checkpoint
from .pretrained import refuse_untrained, remember, resolve_model


def load_run(
    folder: str | Path, checkpoint: str = "best", average: int | None = None, memory: Mapping[str, Any] | None = None
) -> tuple[RunConfig, nn.Module, int]:
    """Return the configuration, the trained model and the step of a run folder.

    Args:
        checkpoint: "best", "last", "tested" (the one of the summary's test scores), or the path of a step folder.
        average: with "tested", the number of newest checkpoints to average.
        memory: name and options of a memory without weights, for a model trained without a memory.

    Raises:
        ValueError: not a run folder; the checkpoint is missing or damaged; a memory with weights, or a model that has
            a memory already.
    """
    folder, config = Path(folder), read_run_config(folder)
    if average is not None and checkpoint != "tested":
        raise ValueError(f"--checkpoint {checkpoint} and --average {average} name different weights; give one of them")
    if checkpoint == "tested":
        checkpoint = "last" if config.training.test == "last" else "best"
        average = config.training.average_last if average is None and config.training.average_last > 1 else average
    if average is not None:
        refuse_exchanged(folder, read_checkpoint(Checkpoints(folder / "checkpoints").named("last")))
        model = build_model(without_checkpoint(config))
        return config, model, load_average(model, folder, average)
    path = Checkpoints(folder / "checkpoints").named(checkpoint) if checkpoint in ("best", "last") else Path(checkpoint)
    stored = read_checkpoint(path)
    refuse_exchanged(folder, stored)
    differing = differing_keys(with_defaults(stored.config), config_to_dict(config))
    if changed := [key for key in differing if key.startswith(("model.", "model:"))]:
        raise ValueError(
            f"{folder / CONFIG} describes another model than {path}; undo the change, or repeat the run's `cached "
            f"train`, which writes the file: {'; '.join(changed[:5])}"
        )
    model = build_model(without_checkpoint(config)) if memory is None else _with_memory(folder, config, memory)
    try:
        model.load_state_dict(stored.weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model of {folder / 'config.yaml'}: {error}") from None
    return config, model, stored.step


def _with_memory(folder: Path, config: RunConfig, memory: Mapping[str, Any]) -> nn.Module:
    """Build the model of a run without a memory with a memory without weights."""
    if (own := config.model.get("memory")) is not None:
        name = own if isinstance(own, str) else own.get("name") if isinstance(own, Mapping) else own
        raise ValueError(f"{folder} was trained with the memory {name!r}; give the run of a model without one")
    config = without_checkpoint(config)
    plain = build_model(config).state_dict()
    model = build_model(dataclasses.replace(config, model={**config.model, "memory": dict(memory)}))
    refuse_untrained(memory, model.state_dict().keys() - plain.keys())
    return model


def load_writer(
    folder: Path,
    checkpoint: str,
    length: int | None,
    device: torch.device,
    *,
    state: Path | None = None,
    memory: Mapping[str, Any] | None = None,
) -> Writer:
    """Load a language model that continues texts, from a run or from `save_pretrained`.

    Args:
        folder: a run folder; a folder of `save_pretrained` of our models with the tokenizer file of the run; or a model
            of transformers, as in `resolve_model`.
        checkpoint: of a run, as in `load_run`.
        length: tokens of a segment; None for the value of training.
        state: file of `Session.save` with a text to continue.
        memory: name and options of a memory without weights, for a model without one.

    Raises:
        ValueError: the folder is none of them; its model generates no text; its tokenizer is missing; the state belongs
            to other weights or segments.
    """
    if (folder / CONFIG).is_file() or (folder.is_dir() and not (folder / "config.json").is_file()):
        config, model, _ = load_run(folder, checkpoint, memory=memory)
        tokenizer = read_tokenizer(folder / TOKENIZER, model)
        length = length or config.evaluation.segment_length or config.training.segment_length
        return Writer(model.to(device), words_of(tokenizer), length, state)
    if checkpoint != "best":
        raise ValueError(f"--checkpoint {checkpoint}: {folder} is no run folder, and has one set of weights")
    if is_ours(folder):
        if memory is not None:
            raise ValueError(
                f"--with-memory {memory['name']}: {folder} has a model of this package; give its run folder"
            )
        saved = PublishedModel.from_pretrained(folder).to(device)
        return Writer(saved, words_of(read_tokenizer(folder / TOKENIZER, saved)), length, state)
    host, words = resolve_model(folder)
    remember(host, folder, memory, length)
    return Writer(host.to(device), words_of_transformers(words), length, state)


def read_run_config(folder: str | Path) -> RunConfig:
    """Return the resolved configuration of a run folder.

    Raises:
        ValueError: not a run folder, or an incomplete configuration: lost sections do not fall back to defaults.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {CONFIG}")
    text = path.read_text(encoding="utf-8", errors="replace")
    way = f"repeat the run's `cached train` with --out {folder}, which writes the file"
    try:
        tree = parse_yaml(text, str(path))
    except ValueError as error:
        raise ValueError(f"{error}; {way}") from None
    if not isinstance(tree, dict) or not text.endswith("\n"):
        raise ValueError(f"{path} is cut or empty ({len(text)} characters); {way}")
    if lost := [key for key in _expected(folder) if key not in {*flatten(tree), *tree}]:
        raise ValueError(f"{path} is cut: it lacks {', '.join(lost[:5])} ({len(lost)}); {way}")
    try:
        return config_from_dict(tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {way}") from error


def _expected(folder: str | Path) -> list[str]:
    """Return the sections of every run's configuration, and the keys of its newest checkpoint."""
    sections = [field.name for field in dataclasses.fields(RunConfig)]
    for step in reversed(Checkpoints(Path(folder) / "checkpoints").paths()):
        with contextlib.suppress(ValueError):
            return [*sections, *flatten(stored_config(step))]
    return sections


def read_categories(folder: str | Path) -> list[dict[str, Any]]:
    """Return ids and names of the classes of a detector's run folder, in order (ValueError if it is none)."""
    path = Path(folder) / CATEGORIES
    if not path.is_file():
        raise ValueError(f"{folder} has no {CATEGORIES}: it is not a run of a detector")
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(record["name"], str) and isinstance(record["id"], int) for record in found):
            return found
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError(f"{path} is damaged: it must list the id and the name of each class; put it back")
