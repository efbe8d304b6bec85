"""Read run and comparison folders as training writes them: only what is there, and errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from cached_lab.data.archives import as_text
from cached_lab.experiments.statistics import summarise, summarise_pairs

from .cache_use_table import cache_use_statistics

Layers = list[list[float]]


@dataclass(frozen=True)
class Run:
    """One training: its records, and whatever else its folder holds (None where a file is absent)."""

    folder: Path
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    gates: Layers | None
    config: str | None
    evaluation: dict[str, Any] | None = None

    @property
    def metric(self) -> str:
        """What decides which checkpoint is the best, as config.yaml says; accuracy where nothing says."""
        training = (yaml.safe_load(self.config) or {}).get("training") if self.config else None
        return str((training or {}).get("metric", "accuracy"))

    @property
    def name(self) -> str:
        """The run's variant as its summary gives it, the folder's name otherwise."""
        return str(self.summary.get("variant") or self.folder.name)

    def feature_maps(self) -> dict[str, npt.NDArray[np.floating[Any]]] | None:
        """Arrays `image`, `self`, `memory` of feature_maps.npz, or None."""
        path = self.folder / "feature_maps.npz"
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                return {key: np.asarray(file[key], dtype=np.float64) for key in ("image", "self", "memory")}
        except Exception as error:  # numpy and zipfile raise a wide choice for a damaged file
            raise ValueError(f"{path} holds no feature maps (arrays image, self, memory): {error}") from error


@dataclass(frozen=True)
class Comparison:
    """Several variants trained on the same seeds: `compare.json`, with its statistics made anew from its values.

    Attributes:
        title: the recipe that was compared, the folder's name otherwise.
        reference: the variant that the others are compared with; with pairs, the one whose cost is 1.
        split: what was scored. baselines: scores of guessers, by name.
        variants: entries of `variants`, in the order of the comparison.
        pairs: statistics of the pairs that are compared; empty where all are compared with `reference`.
        cache_use: what treating the caches of variants in other ways changes: (variant, rows of
            `cache_use_statistics`).
    """

    folder: Path
    data: dict[str, Any]
    title: str
    reference: str
    metric: str
    split: str
    baselines: dict[str, float]
    variants: list[dict[str, Any]]
    statistics: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    cache_use: list[tuple[str, list[dict[str, Any]]]]

    def runs(self) -> dict[str, list[Run]]:
        """The runs of every variant whose folders are still there."""
        found: dict[str, list[Run]] = {}
        for variant in self.variants:
            folders = [self.folder / str(path) for path in variant.get("runs", [])]
            runs = [read_run(folder) for folder in folders if is_run(folder)]
            if runs:
                found[str(variant["name"])] = runs
        return found


def is_run(folder: Path) -> bool:
    """Whether the folder holds a training."""
    return (folder / "metrics.jsonl").is_file()


def is_comparison(folder: Path) -> bool:
    """Whether the folder holds a comparison."""
    return (folder / "compare.json").is_file()


def read_run(folder: str | Path) -> Run:
    """Read one run folder; summary, gates and configuration may be missing.

    Raises:
        ValueError: no metrics.jsonl, or a file that is not what it should be.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run folder: it has no metrics.jsonl")
    summary, gates, config = folder / "summary.json", folder / "gates.json", folder / "config.yaml"
    evaluation = folder / "evaluation.json"
    return Run(
        folder=folder,
        records=_read_records(folder / "metrics.jsonl"),
        summary=_read_object(summary) if summary.is_file() else {},
        gates=_read_gates(gates) if gates.is_file() else None,
        config=as_text(config.read_bytes(), config) if config.is_file() else None,
        evaluation=_read_object(evaluation) if evaluation.is_file() else None,
    )


def read_comparison(folder: str | Path) -> Comparison:
    """Read one comparison folder."""
    folder = Path(folder)
    path = folder / "compare.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a comparison folder: it has no compare.json")
    data = _read_object(path)
    try:
        values = {str(v["name"]): [float(x) for x in v["values"]] for v in data["variants"]}
        pairs = [(str(pair["name"]), str(pair["against"])) for pair in data.get("pairs") or []]
        reference, cache_use = str(data["reference"]), (data.get("cache_use") or {}).items()
        return Comparison(
            folder,
            data,
            title=str(data.get("recipe") or folder.name),
            reference=reference,
            metric=str(data.get("metric", "accuracy")),
            split=str(data.get("split", "test")),
            baselines=dict(data.get("baselines") or {}),
            variants=list(data["variants"]),
            statistics=summarise(values, None if pairs else reference),
            pairs=summarise_pairs(values, pairs),
            cache_use=[(str(name), cache_use_statistics(by_mode)) for name, by_mode in cache_use],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} lacks what a comparison needs (reference; variants with name, values): {error!r}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def find_comparisons(folder: str | Path, sections: Sequence[str] | None = None) -> list[Comparison]:
    """The comparison in `folder`, or those in its sub-folders (by name, or in the order of `sections`)."""
    folder = Path(folder)
    if sections is not None:
        return [read_comparison(folder / name) for name in sections]
    if is_comparison(folder):
        return [read_comparison(folder)]
    found = sorted(child for child in folder.iterdir() if is_comparison(child)) if folder.is_dir() else []
    if not found:
        raise ValueError(f"{folder} holds no comparison: no compare.json in it or in a folder directly below")
    return [read_comparison(child) for child in found]


def _read_records(path: Path) -> list[dict[str, Any]]:
    lines = as_text(path.read_bytes(), path).splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # a run in progress may be in the middle of writing its last line
                break
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, Mapping) or not isinstance(record.get("step"), int):
            raise ValueError(f'{path}, line {number} is not a record with a whole number "step"')
        records.append(dict(record))
    return records


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(as_text(path.read_bytes(), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def _read_gates(path: Path) -> Layers:
    layers = _read_object(path).get("layers")
    try:
        return [[float(share) for share in heads] for heads in layers]  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path} must hold {{"layers": [[share per head], ...]}}: {error}') from error
