"""Scores of a trained run with its memory as saved, emptied, shuffled, exchanged or updated per batch.

The modes show if the model uses its memory: emptying an unused memory costs nothing. For text and documents the memory
is emptied before each segment, or exchanged between rows; for text the cost becomes a verdict (`memory_use.py`), and
documents can be longer than in training. Beside a memory without weights the same model is scored without one, with a
window of as many bytes, and with the whole text, which gives an efficiency (`efficiency.py`). Modes of a cache that all
rows share are in `cache_use.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from cached_lab.experiments.build import build_dataset
from cached_lab.experiments.load import load_run, read_categories
from cached_lab.tasks.detection.task import check_categories, evaluate_detector
from cached_lab.tasks.documents.scores import evaluate_documents
from cached_lab.tasks.kinds import baselines, task_name
from cached_lab.tasks.language.scores import SplitLosses, evaluation_streams, split_losses
from cached_lab.tasks.translation.task import evaluate_pairs
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World, in_world
from cached_lab.training.run_files import check_tokenizer
from cached_transformers.memories.grc.shared_cache import caches
from cached_transformers.models.segments import remembers

from .cache_use import score_cache_use, treat_memory
from .efficiency import NONE, NOTE, WHOLE, WINDOW, efficiencies, window_of
from .memory_use import about_text, text_row
from .reports.formatting import MISSING
from .statistics import with_intervals

OF_SHARED_CACHES = ("other", "batch")
"""Modes that only a cache shared by all rows has."""
WHOLE_TEXT = 8192
"""Tokens up to which attention over the whole text is scored; its work grows with their square."""
NO_TWIN = (
    f"efficiency {MISSING}: the model was trained with its memory in segments, and only a twin trained on the {WHOLE} "
    "is a fair bar; `cached probe`, or `cached compare --control whole` for documents, trains one"
)
ScoreRow = dict[str, Any]


@dataclass(frozen=True)
class EvaluationScores:
    """Scores of a run.

    Attributes:
        rows: {"memory": mode, score: value}; for text those of `text_row`; for documents a row for each largest number
            of "segments".
        baselines: scores of simple guessers, if the data have any.
        about: for text, facts of `about_text`; "efficiency": a remark on it.
    """

    rows: list[ScoreRow]
    step: int
    baselines: dict[str, float] | None = None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of the run in `folder` with its changed `config`.

    Attributes:
        checkpoint, average: as in `load_run`.
        modes: "carry", "reset", "shuffle", "other", "batch N".
        other: folder of the run whose caches "other" takes.
        segments: for documents, the largest numbers of segments; empty for whole documents.
        memory: for text, name and options of a memory without weights, for a model without a memory.
    """

    folder: Path
    config: RunConfig
    checkpoint: str
    split: str
    modes: Sequence[str]
    other: Path | None = None
    average: int | None = None
    segments: Sequence[int] = ()
    memory: Mapping[str, Any] | None = None

    def score(self, device: str) -> EvaluationScores:
        """Score each mode, on all processes of the launch.

        Raises:
            ValueError: an option or a mode that the model or the data do not have.
        """
        return in_world(device, self._score)

    def _score(self, processes: World) -> EvaluationScores:
        try:
            dataset = build_dataset(self.config, self.split)
        except (FileNotFoundError, ValueError) as error:
            if self.split != "test" or self.config.training.test != "none":
                raise
            raise ValueError(
                f"{self.folder} was trained with training.test=none, and has no test split to score: {error}; give "
                "--split validation"
            ) from error
        task = task_name(dataset)
        self._check(dataset, task)
        if task == "language":
            return self._score_text(dataset, processes)
        if task not in ("documents", "detection", "translation"):
            return self._score_shared(dataset, processes)
        rows: list[ScoreRow] = []
        for mode in self.modes:
            _, model, step = load_run(self.folder, self.checkpoint, self.average)
            model.to(processes.device)
            if task == "translation" and mode != "carry" and not has_caches(model):
                raise ValueError(f"--memory {mode}: the model of {self.folder} has no cache to {mode}; take carry")
            if task != "documents" or has_caches(model):
                treat_memory(model, mode, self.config.training.seed)
            if task == "documents":
                rows += self._score_documents(model, dataset, mode, processes)
            elif task == "translation":
                rows.append({"memory": mode, **evaluate_pairs(model, dataset, processes, self.config, None)[0]})
            else:
                size = self.config.training.evaluation_batch_size or self.config.training.batch_size
                rows.append({"memory": mode, **evaluate_detector(model, dataset, processes, size)})
        return EvaluationScores(rows, step, fitted_baselines(self.config, dataset) if task == "documents" else None)

    def _score_documents(self, model: nn.Module, dataset: Any, mode: str, processes: World) -> list[ScoreRow]:
        """Score documents with each largest number of segments."""
        settings = self.config.training
        size, passes = settings.evaluation_rows, settings.passes
        rows: list[ScoreRow] = []
        for count in self.segments or (None,):
            values = evaluate_documents(model, dataset, processes, size, passes, count, mode, settings.seed)
            longest = dataset.segments if count is None else count
            length = {"segments": longest, "tokens": longest * dataset.segment_length}
            rows.append({"memory": mode, **length, **with_intervals(values)})
        return rows

    def _check(self, dataset: Any, task: str) -> None:
        """Refuse options that the data do not have (ValueError)."""
        length = self.config.evaluation.segment_length
        if self.average is not None and task != "translation":
            raise ValueError(f"--average {self.average} is for translation, not {dataset.name!r}")
        if task == "translation":
            check_tokenizer(self.folder, dataset.tokenizer)
        if task == "detection":
            check_categories([record["name"] for record in read_categories(self.folder)], dataset)
        if length and task != "language":
            raise ValueError(f"--segment-length {length} is for text, not {dataset.name!r}")
        if self.segments and task != "documents":
            raise ValueError(f"--segments {','.join(map(str, self.segments))} is for documents, not {dataset.name!r}")
        if self.memory and task != "language":
            raise ValueError(f"--with-memory {self.memory['name']} is for text, not {dataset.name!r}")
        refused = [mode for mode in self.modes if mode.split()[0] in OF_SHARED_CACHES]
        if refused and task in ("language", "documents", "detection", "translation"):
            raise ValueError(
                f"--memory {refused[0]!r} is for caches that all rows of a classifier share; take carry, reset"
            )

    def _score_text(self, dataset: Any, processes: World) -> EvaluationScores:
        """Score a language model, whose rows have their own memories."""
        losses: dict[str, SplitLosses] = {}
        for mode in self.modes:
            _, model, step = load_run(self.folder, self.checkpoint, memory=self.memory)
            model.to(processes.device)
            shared = has_caches(model)
            if shared:
                treat_memory(model, mode, self.config.training.seed)
            losses[mode] = split_losses(model, dataset, processes, self._treated(mode))
        memory = shared or remembers(model.init_state(1))  # type: ignore[operator]
        about = about_text(losses, dataset, self.config, memory, shared)
        controls, remark = ({}, NO_TWIN if memory else "") if self.memory is None else self._controls(model, dataset)
        for name, spec in controls.items():
            model = load_run(self.folder, self.checkpoint, memory=spec)[1].to(processes.device)
            losses[name] = split_losses(model, dataset, processes, self._treated("carry"))
        rows = [{"memory": mode, **text_row(found, dataset)} for mode, found in losses.items()]
        if controls:
            shares = efficiencies("loss", {row["memory"]: row["loss"] for row in rows})
            rows = [row | {"efficiency": shares[row["memory"]]} for row in rows]
        return EvaluationScores(rows, step, about=about | ({"efficiency": remark} if remark else {}))

    def _treated(self, mode: str) -> RunConfig:
        """Return the configuration of a memory mode of text."""
        section = dataclasses.replace(self.config.evaluation, memory=mode)  # type: ignore[arg-type]
        return dataclasses.replace(self.config, evaluation=section)

    def _controls(self, model: nn.Module, dataset: Any) -> tuple[dict[str, dict[str, Any] | None], str]:
        """Return memories without weights that show the worth of `self.memory`, by name, and a remark on efficiency."""

        def build(memory: Mapping[str, Any]) -> nn.Module:
            return load_run(self.folder, self.checkpoint, memory=memory)[1]

        found: dict[str, dict[str, Any] | None] = {NONE: None}
        try:
            window = window_of(self.memory, build, relative=False)
        except ValueError as error:
            return found, f"efficiency {MISSING}: {error}"
        found |= {f"{WINDOW} of {window['length']} tokens": window} if window else {}
        streams = evaluation_streams(dataset, self.config)
        tokens = streams.steps * streams.length
        tokens = tokens if dataset.reset == "never" else min(tokens, int(streams.lengths.max()))
        host = getattr(getattr(model, "model", None), "config", None)
        most = min(WHOLE_TEXT, getattr(host, "max_position_embeddings", WHOLE_TEXT))
        if tokens > most:
            return found, f"efficiency {MISSING}: a row has {tokens:,} tokens, and the {WHOLE} is read up to {most:,}"
        return {**found, WHOLE: {"name": "streaming_llm", "sinks": 0, "relative": False, "length": tokens}}, NOTE

    def _score_shared(self, dataset: Any, processes: World) -> EvaluationScores:
        """Score a classifier, whose memory is a cache shared by all rows."""
        settings = self.config.training
        _, model, step = load_run(self.folder, self.checkpoint)
        found = list(caches(model))
        for mode in self.modes:
            if mode.split()[0] in OF_SHARED_CACHES and not found:
                raise ValueError(f"--memory {mode.split()[0]}: the model of {self.folder} has no shared cache")
            if mode.startswith("batch ") and any(cache.attend != "mean" for cache in found):
                raise ValueError(
                    "--memory batch is for caches whose batch mean is read in training; this model's rows read "
                    f"{found[0].attend!r}, as in evaluation"
                )
        rows = score_cache_use(
            lambda: load_run(self.folder, self.checkpoint)[1],
            dataset,
            self.modes,
            processes,
            settings.evaluation_batch_size or settings.batch_size,
            settings.seed,
            None if self.other is None else load_run(self.other, self.checkpoint)[1],
            settings.workers,
        )
        scored = [{"memory": row.pop("mode"), **with_intervals(row)} for row in rows]
        return EvaluationScores(scored, step, fitted_baselines(self.config, dataset))


def fitted_baselines(config: RunConfig, dataset: Any) -> dict[str, float] | None:
    """Return scores of the guessers, fitted to the training rows; None if these are absent."""
    try:
        train = build_dataset(config, "train")
    except FileNotFoundError:
        return None
    return baselines(config, train, dataset)


def has_caches(model: nn.Module) -> bool:
    """Return whether the model has caches that all rows share."""
    return any(getattr(module, "shared", False) is True for module in model.modules())
