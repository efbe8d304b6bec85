"""Every benchmark by its name: what it is asked, what it measures, and how its numbers are kept."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cached_transformers.experiments.environment import environment
from cached_transformers.experiments.reports.figures.curves import cost_against_length
from cached_transformers.experiments.reports.figures.style import save
from cached_transformers.experiments.reports.wording import environment_text

from . import attentions, generation, grc, loading, memories, memorizing, translation, vision
from .peers import Sizes


@dataclasses.dataclass(frozen=True)
class Options:
    """What the benchmarks are asked, each as `cached benchmark --help` has it; each takes what concerns it."""

    batch: int
    rounds: int
    threads: int
    device: str | None
    compile: bool
    models: str | None
    image_size: int
    channels_last: bool
    released: bool
    workers: tuple[int, ...]
    path: str | None
    memories: str | None
    attentions: str
    lengths: tuple[int, ...] | None
    dtype: str
    vocabulary: int
    width: int
    depth: int
    heads: int
    rows: tuple[int, ...]
    segments: tuple[int, ...]
    prompt: int
    tokens: int | None
    profile: str | None

    @property
    def precision(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclasses.dataclass(frozen=True)
class Measured:
    """Numbers of a benchmark.

    Attributes:
        rows: dataclasses. table: the same as Markdown.
        settings: what of the options changes the numbers.
        curves: seconds and mebibytes by length, for a figure; empty where there is none.
    """

    rows: Sequence[Any]
    table: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """The table, and what it was measured on."""
        return f"{self.table}\n\n{environment_text(dict(self.settings))}"

    def write(self, path: Path) -> Path | None:
        """Write the numbers as JSON, and beside them the figure where there is one, of which the path is returned."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": self.settings, "rows": [dataclasses.asdict(row) for row in self.rows]}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if not self.curves:
            return None
        return save(cost_against_length(self.curves, attentions.EXACT), path.with_suffix(".png"))


def measure(name: str, options: Options) -> Measured:
    """Measure on this machine, with `options.threads` threads from now on.

    Args:
        name: one of `BENCHMARKS`.
    """
    torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = BENCHMARKS[name](options, device)
    return dataclasses.replace(found, settings={**environment(device), "rounds": options.rounds, **found.settings})


def _grc(options: Options, device: str) -> Measured:
    rows = grc.run(options.batch, options.rounds, device, options.compile)
    return Measured(rows, grc.as_markdown(rows), {"batch": options.batch, "compile": options.compile})


def _vision(options: Options, device: str) -> Measured:
    rows = vision.run(
        options.batch,
        options.rounds,
        device,
        models=options.models.split(",") if options.models else vision.STANDARD,
        image_size=options.image_size,
        released=options.released,
        channels_last=options.channels_last,
        compiled=options.compile,
    )
    settings = {name: getattr(options, name) for name in ("batch", "image_size", "compile", "channels_last")}
    return Measured(rows, vision.as_markdown(rows), settings)


def _loading(options: Options, device: str) -> Measured:
    rows = loading.run(options.rounds, options.batch, options.workers, device, options.path)
    return Measured(rows, loading.as_markdown(rows), {"batch": options.batch, "cores": os.cpu_count()})


def _attentions(options: Options, device: str) -> Measured:
    rows = attentions.run(options.rounds, options.attentions, options.lengths or attentions.LENGTHS, device)
    curves = {row.attention: (row.seconds, row.mebibytes) for row in rows}
    return Measured(rows, attentions.as_markdown(rows), curves=curves)


def _translation(options: Options, device: str) -> Measured:
    models, kept = translation.run(options.rounds, device)
    return Measured([*models, *kept], translation.as_markdown(models, kept))


def _memories(options: Options, device: str) -> Measured:
    rows = memories.run(options.rounds, options.memories or "all")
    return Measured(rows, memories.as_markdown(rows))


def _memorizing(options: Options, device: str) -> Measured:
    stores, text = memorizing.run(
        options.rounds, options.lengths or memorizing.KEYS, options.tokens or memorizing.TOKENS
    )
    return Measured([*stores, *text], memorizing.as_markdown(stores, text))


def _generation(options: Options, device: str) -> Measured:
    of_models = ("vocabulary", "width", "depth", "heads")
    sizes = Sizes(**{name: getattr(options, name) for name in of_models})
    tokens = options.tokens or generation.TOKENS
    settings = {name: getattr(options, name) for name in ("dtype", *of_models, "prompt")} | {"tokens": tokens}
    if options.profile is not None:
        seen = generation.Text(options.rows[0], options.segments[0], options.prompt, tokens)
        return Measured([], generation.profile(options.profile, device, sizes, seen, options.precision), settings)
    rows, missing = generation.run(
        options.rounds,
        device,
        only=options.memories,
        sizes=sizes,
        batches=options.rows,
        segments=options.segments,
        prompt=options.prompt,
        tokens=tokens,
        dtype=options.precision,
    )
    return Measured(rows, generation.as_markdown(rows, missing), settings)


BENCHMARKS: dict[str, Callable[[Options, str], Measured]] = {
    "grc": _grc,
    "vision": _vision,
    "loading": _loading,
    "attentions": _attentions,
    "translation": _translation,
    "memories": _memories,
    "memorizing": _memorizing,
    "generation": _generation,
}
