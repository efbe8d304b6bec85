"""Read the folders of runs and comparisons; errors name the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cached_lab.data.archives import as_text
from cached_lab.experiments.statistics import summarise, summarise_pairs


class Run(NamedTuple):
    """One training: the lines of metrics.jsonl, summary.json, and the gates by layer and head (empty if absent)."""

    folder: Path
    records: list[dict[str, Any]]
    summary: dict[str, Any]
    gates: list[list[float]]

    @property
    def name(self) -> str:
        """The variant in the summary, else the folder's name."""
        return str(self.summary.get("variant") or self.folder.name)

    @property
    def metric(self) -> str:
        """The metric that selects the best checkpoint, from config.yaml; accuracy by default."""
        path = self.folder / "config.yaml"
        settings = yaml.safe_load(as_text(path.read_bytes(), path)) if path.is_file() else {}
        return str(settings.get("training", {}).get("metric", "accuracy"))


class StoredComparison(NamedTuple):
    """Several variants trained on the same seeds: compare.json, with statistics computed again from its values.

    Attributes:
        statistics: in the order of `data["variants"]`, against the reference unless `pairs` are compared.
        cache_use: for each variant scored with changed caches its rows of `cache_use_statistics`.
    """

    folder: Path
    data: dict[str, Any]
    statistics: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    cache_use: list[tuple[str, list[dict[str, Any]]]]

    def runs(self) -> dict[str, list[Run]]:
        """The runs of every variant whose folders still exist."""
        found = {}
        for variant in self.data["variants"]:
            folders = [self.folder / path for path in variant["runs"]]
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


def read_run(folder: Path) -> Run:
    """Read one run folder; all but metrics.jsonl may be missing.

    Raises:
        ValueError: no metrics.jsonl, or a malformed file.
    """
    if not is_run(folder):
        raise ValueError(f"{folder} is not a run folder: it has no metrics.jsonl")
    path, records = folder / "metrics.jsonl", []
    lines = as_text(path.read_bytes(), path).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):  # a run in progress may be writing its last line
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
    gates = read_json(folder / "gates.json").get("layers", [])
    return Run(folder, records, read_json(folder / "summary.json"), gates)


def read_comparison(folder: Path) -> StoredComparison:
    """Read one comparison folder (ValueError if compare.json is missing or malformed)."""
    path = folder / "compare.json"
    data = read_json(path)
    try:
        values = {v["name"]: v["values"] for v in data["variants"]}
        pairs = [(pair["name"], pair["against"]) for pair in data.get("pairs", [])]
        statistics = summarise(values, None if pairs else data["reference"])
        cache_use = [(name, cache_use_statistics(by_mode)) for name, by_mode in data.get("cache_use", {}).items()]
        return StoredComparison(folder, data, statistics, summarise_pairs(values, pairs), cache_use)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no comparison of variants with name and values: {error!r}") from error


def find_comparisons(folder: Path) -> list[StoredComparison]:
    """The comparison in `folder`, or those in its sub-folders, by name (ValueError if there is none)."""
    found = [child for child in [folder, *sorted(folder.glob("*"))] if is_comparison(child)]
    if not found:
        raise ValueError(f"{folder} holds no comparison: no compare.json in it or in a folder directly below")
    return [read_comparison(child) for child in (found[:1] if found[0] == folder else found)]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(as_text(path.read_bytes(), path)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no JSON object: {error}") from error
