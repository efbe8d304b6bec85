"""Read the folders of runs and comparisons; errors name the file."""

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

GateLayers = list[list[float]]


@dataclass(frozen=True)
class Run:
    """One training: its records, and the other files of its folder (None or empty if absent)."""

    folder: Path
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    gates: GateLayers | None
    config: str | None
    evaluation: dict[str, Any]

    @property
    def metric(self) -> str:
        """The metric that selects the best checkpoint, from config.yaml; accuracy by default."""
        training = (yaml.safe_load(self.config) or {}).get("training") if self.config else None
        return str((training or {}).get("metric", "accuracy"))

    @property
    def name(self) -> str:
        """The variant in the summary, else the folder's name."""
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
class StoredComparison:
    """Several variants trained on the same seeds: `compare.json`, with statistics computed again from its values.

    Attributes:
        reference: the variant that the others are compared with; with pairs, the one whose cost is 1.
        split: the scored split. baselines: scores of guessers, by name.
        variants: entries of `variants`, in the order of `statistics`.
        pairs: statistics of the compared pairs; empty if all are compared with `reference`.
        cache_use: for each variant scored with changed caches its rows of `cache_use_statistics`.
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
        """The runs of every variant whose folders still exist."""
        found = {}
        for variant in self.variants:
            folders = [self.folder / str(path) for path in variant.get("runs", [])]
            if runs := [read_run(folder) for folder in folders if is_run(folder)]:
                found[str(variant["name"])] = runs
        return found


def cache_use_statistics(by_mode: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Rows of `summarise` against `carry`: the effect of each change of the cache, paired run by run."""
    return summarise({mode: values for mode, values in by_mode.items() if values}, "carry")


def is_run(folder: Path) -> bool:
    """True if the folder holds a training."""
    return (folder / "metrics.jsonl").is_file()


def is_comparison(folder: Path) -> bool:
    """True if the folder holds a comparison."""
    return (folder / "compare.json").is_file()


def read_run(folder: str | Path) -> Run:
    """Read one run folder; all but metrics.jsonl may be missing.

    Raises:
        ValueError: no metrics.jsonl, or a malformed file.
    """
    folder = Path(folder)
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run folder: it has no metrics.jsonl")
    gates, config = folder / "gates.json", folder / "config.yaml"
    return Run(
        folder,
        _read_records(folder / "metrics.jsonl"),
        _read_object(folder / "summary.json"),
        _read_gates(gates) if gates.is_file() else None,
        as_text(config.read_bytes(), config) if config.is_file() else None,
        _read_object(folder / "evaluation.json"),
    )


def read_comparison(folder: str | Path) -> StoredComparison:
    """Read one comparison folder (ValueError if compare.json is missing or malformed)."""
    folder = Path(folder)
    path = folder / "compare.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a comparison folder: it has no compare.json")
    data = _read_object(path)
    try:
        values = {str(v["name"]): [float(x) for x in v["values"]] for v in data["variants"]}
        pairs = [(str(pair["name"]), str(pair["against"])) for pair in data.get("pairs") or []]
        reference, cache_use = str(data["reference"]), (data.get("cache_use") or {}).items()
        return StoredComparison(
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
        needed = "reference; variants with name, values"
        raise ValueError(f"{path} lacks what a comparison needs ({needed}): {error!r}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def find_comparisons(folder: str | Path, sections: Sequence[str] | None = None) -> list[StoredComparison]:
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
    """A JSON object; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(as_text(path.read_bytes(), path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def _read_gates(path: Path) -> GateLayers:
    layers = _read_object(path).get("layers")
    try:
        return [[float(share) for share in heads] for heads in layers]  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise ValueError(f'{path} must hold {{"layers": [[share per head], ...]}}: {error}') from error
