"""Every benchmark by its name: what it is asked, what it measures, and how its numbers are kept."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cached_lab.experiments.environment import environment
from cached_lab.experiments.reports.figures.curves import cost_against_length
from cached_lab.experiments.reports.figures.style import save
from cached_lab.experiments.reports.formatting import environment_text
from cached_transformers.files import write_whole

from . import (
    attentions,
    diagonal,
    documents,
    everything,
    generation,
    grc,
    grc_roofline,
    loading,
    memories,
    memorizing,
    saves,
    translation,
    vision,
)
from .peers import Sizes


@dataclasses.dataclass(frozen=True)
class Options:
    """What the benchmarks are asked, each as `cached benchmark --help` has it; each takes what concerns it."""

    batch: int
    rounds: int
    threads: int
    device: str | None
    compile: bool
    roofline: bool
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
    quick: bool
    minutes: float

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
        failed, left_out: what could not be measured, and what was not tried, with the reasons.
        curves: seconds and mebibytes by length, for a figure; empty where there is none.
    """

    rows: Sequence[Any]
    table: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    curves: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failed: Sequence[str] = ()
    left_out: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The table, and what it was measured on."""
        return f"{self.table}\n\n{environment_text(dict(self.settings))}"

    def write(self, path: Path) -> Path | None:
        """Write the numbers as JSON, and beside it the table and the figure where there is one; returns its path."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [dataclasses.asdict(row) for row in self.rows]
        found = {"rows": rows, "failed": list(self.failed), "left_out": list(self.left_out)}
        write_whole(path, (json.dumps({"environment": self.settings, **found}, indent=2) + "\n").encode())
        write_whole(path.with_suffix(".md"), f"{self.text}\n".encode())
        if not self.curves:
            return None
        return save(cost_against_length(self.curves, attentions.EXACT), path.with_suffix(".png"))


def measure(name: str, options: Options) -> Iterator[Measured]:
    """Measure on this machine, with `options.threads` threads from now on.

    Args:
        name: one of `BENCHMARKS`, or "all".

    Returns:
        the numbers; of "all" what there is of them after each part, the last time the whole.
    """
    torch.set_num_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; take --device cpu")
    for found in _all(options, device) if name == "all" else [BENCHMARKS[name](options, device)]:
        yield dataclasses.replace(found, settings={**environment(device), "rounds": options.rounds, **found.settings})


def _grc(options: Options, device: str) -> Measured:
    if options.roofline:
        least = grc_roofline.run(options.batch, options.rounds, device, options.image_size)
        settings = {name: getattr(options, name) for name in ("batch", "image_size")}
        return Measured(least, grc_roofline.as_markdown(least), settings)
    rows = grc.run(options.batch, options.rounds, device, options.compile, options.precision)
    return Measured(
        rows, grc.as_markdown(rows), {name: getattr(options, name) for name in ("batch", "compile", "dtype")}
    )


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
        dtype=options.precision,
    )
    settings = {name: getattr(options, name) for name in ("batch", "image_size", "compile", "channels_last", "dtype")}
    return Measured(rows, vision.as_markdown(rows), settings)


def _loading(options: Options, device: str) -> Measured:
    rows = loading.run(options.rounds, options.batch, options.workers, device, options.path)
    return Measured(rows, loading.as_markdown(rows), {"batch": options.batch, "cores": os.cpu_count()})


def _attentions(options: Options, device: str) -> Measured:
    lengths = options.lengths or attentions.LENGTHS
    rows = attentions.run(options.rounds, options.attentions, lengths, device, options.precision)
    curves = {row.attention: (row.seconds, row.mebibytes) for row in rows}
    return Measured(rows, attentions.as_markdown(rows), {"dtype": options.dtype}, curves)


def _translation(options: Options, device: str) -> Measured:
    models, kept = translation.run(options.rounds, device, dtype=options.precision)
    return Measured([*models, *kept], translation.as_markdown(models, kept), {"dtype": options.dtype})


def _memories(options: Options, device: str) -> Measured:
    if options.profile is not None:
        return Measured([], memories.profile(options.profile, device, options.precision), {"dtype": options.dtype})
    rows = memories.run(options.rounds, options.memories or "all", device, options.precision)
    return Measured(rows, memories.as_markdown(rows), {"dtype": options.dtype})


def _memorizing(options: Options, device: str) -> Measured:
    stores, text = memorizing.run(
        options.rounds, options.lengths or memorizing.KEYS, options.tokens or memorizing.TOKENS, device
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
    rows, left_out = generation.run(
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
    return Measured(rows, generation.as_markdown(rows, left_out), settings, left_out=left_out)


def _all(options: Options, device: str) -> Iterator[Measured]:
    for report in everything.run(device, rounds=options.rounds, minutes=options.minutes, quick=options.quick):
        text, settings = everything.as_markdown(report), {"measured peaks": str(report.peaks), "quick": options.quick}
        yield Measured([*report.rows], text, settings, failed=[*report.failed], left_out=[*report.left_out])


def _diagonal(options: Options, device: str) -> Measured:
    names = diagonal.MEMORIES if options.memories in (None, "all") else tuple(options.memories.split(","))
    rows = diagonal.run(options.rounds, device, names, options.lengths or diagonal.LENGTHS)
    return Measured(rows, diagonal.as_markdown(rows))


def _documents(options: Options, device: str) -> Measured:
    names = documents.MEMORIES if options.memories in (None, "all") else tuple(options.memories.split(","))
    rows = documents.run(options.rounds, device, names, options.lengths or documents.LENGTHS)
    return Measured(rows, documents.as_markdown(rows))


def _saves(options: Options, device: str) -> Measured:
    rows = saves.run(options.rounds, device)
    return Measured(rows, saves.as_markdown(rows))


BENCHMARKS: dict[str, Callable[[Options, str], Measured]] = {
    "grc": _grc,
    "vision": _vision,
    "loading": _loading,
    "attentions": _attentions,
    "translation": _translation,
    "memories": _memories,
    "memorizing": _memorizing,
    "generation": _generation,
    "diagonal": _diagonal,
    "documents": _documents,
    "saves": _saves,
}
