"""What a run folder holds, read back: configuration, trained model, what writes with it, and a detector's classes."""

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
from cached_lab.training.checkpoint_average import load_average
from cached_lab.training.config import RunConfig, config_to_dict, differing_keys, with_defaults
from cached_lab.training.data_fingerprint import refuse_exchanged
from cached_lab.training.run_files import CATEGORIES, CONFIG, TOKENIZER
from cached_lab.yaml_tree import flatten, parse_yaml
from cached_transformers.extras import require
from cached_transformers.integrations.transformers.load import load_pretrained
from cached_transformers.models.published import Published

from .build import build_model, without_checkpoint


def load_run(
    folder: str | Path,
    checkpoint: str = "best",
    average: int | None = None,
    memory: Mapping[str, Any] | None = None,
) -> tuple[RunConfig, nn.Module, int]:
    """Configuration, model with its trained weights, and step of a run folder.

    Args:
        folder: a run folder.
        checkpoint: "best", "last", "tested" (what the summary's test scores are of), or the path of a step folder.
        average: with "tested", so many newest checkpoints are averaged instead; caches as `training.average_caches`.
        memory: name and options of a memory without weights, for a model that was trained without one.

    Raises:
        ValueError: not a run folder, or the checkpoint is missing or damaged; a memory with weights, or a model that
            has one already.
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
        return config, model, load_average(model, folder, average, config.training.average_caches)
    path = Checkpoints(folder / "checkpoints").named(checkpoint) if checkpoint in ("best", "last") else Path(checkpoint)
    stored = read_checkpoint(path)
    refuse_exchanged(folder, stored)
    changed = [key for key in differing_keys(with_defaults(stored.config), config_to_dict(config)) if _of_model(key)]
    if changed:
        raise ValueError(
            f"{folder / CONFIG} describes another model than {path} holds; undo the change, or carry out the run's "
            f"`cached train` again, which writes it anew: {'; '.join(changed[:5])}"
        )
    model = build_model(without_checkpoint(config)) if memory is None else _with_memory(folder, config, memory)
    try:
        model.load_state_dict(stored.weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model of {folder / 'config.yaml'}: {error}") from None
    return config, model, stored.step


def _with_memory(folder: Path, config: RunConfig, memory: Mapping[str, Any]) -> nn.Module:
    """The model of a run that has no memory, with one that has nothing to be trained."""
    if (own := config.model.get("memory")) is not None:
        name = own if isinstance(own, str) else own.get("name") if isinstance(own, Mapping) else own
        raise ValueError(f"{folder} was trained with the memory {name!r}; give the run of a model without one")
    config = without_checkpoint(config)
    plain = build_model(config).state_dict()
    model = build_model(dataclasses.replace(config, model={**config.model, "memory": dict(memory)}))
    if added := sorted(model.state_dict().keys() - plain.keys()):
        raise ValueError(
            f"memory {memory['name']!r} brings weights that this run has not trained, such as {added[0]!r}; take one "
            "without, such as streaming_llm, tova or h2o, or train a model with the memory: cached train ... "
            f"model.memory={memory['name']}"
        )
    return model


def load_writer(
    folder: Path, checkpoint: str, length: int | None, device: torch.device, *, state: Path | None = None
) -> Writer:
    """What continues texts: the language model of a run, or a model that was saved by `save_pretrained`.

    Args:
        folder: a run folder; or one of `save_pretrained`, with the tokenizer beside the model (transformers' own, or
            for a model of ours the file of its run).
        checkpoint: of a run, as in `load_run`.
        length: tokens of a segment; None for what the model was trained or saved with.
        state: file of a text that is gone on with, as `Session.save` writes it.

    Raises:
        ValueError: the folder is neither; what it holds writes no text; its tokenizer is missing; the state is that of
            other weights or segments.
    """
    if (folder / CONFIG).is_file() or not (folder / "config.json").is_file():
        config, model, _ = load_run(folder, checkpoint)
        tokenizer = read_tokenizer(folder / TOKENIZER, model)
        length = length or config.evaluation.segment_length or config.training.segment_length
        return Writer(model.to(device), words_of(tokenizer), length, state)
    if checkpoint != "best":
        raise ValueError(f"--checkpoint {checkpoint}: {folder} is no run folder, and has one set of weights")
    saved = load_pretrained(str(folder)).to(device)
    if isinstance(saved, Published):
        return Writer(saved, words_of(read_tokenizer(folder / TOKENIZER, saved)), length, state)
    return Writer(saved, words_of_transformers(_tokenizer_beside(folder)), length, state)


def _tokenizer_beside(folder: Path) -> Any:
    """The tokenizer of transformers that was saved into the folder of a model."""
    try:
        return require("transformers", extra="language").AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder} has no tokenizer that transformers can read ({' '.join(str(error).split())}); save it beside "
            f"the model: tokenizer.save_pretrained({str(folder)!r})"
        ) from None


def _of_model(difference: str) -> bool:
    return difference.startswith("model.") or difference.startswith("model:")


def read_run_config(folder: str | Path) -> RunConfig:
    """The resolved configuration of a run folder.

    Raises:
        ValueError: it is none, or its configuration is not whole: lost sections do not fall back to defaults.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no {CONFIG}")
    text = path.read_text(encoding="utf-8", errors="replace")
    way = f"carry out the run's `cached train` with --out {folder} again, which writes it anew"
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
    """Sections of every configuration that a run writes, and the keys that its newest checkpoint has."""
    sections = [field.name for field in dataclasses.fields(RunConfig)]
    for step in reversed(Checkpoints(Path(folder) / "checkpoints").paths()):
        with contextlib.suppress(ValueError):
            return [*sections, *flatten(stored_config(step))]
    return sections


def read_categories(folder: str | Path) -> list[dict[str, Any]]:
    """Ids and names of the classes of a detector's run folder, in order of the classes (ValueError when it is none)."""
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
