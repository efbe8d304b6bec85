"""One figure of existing runs and comparisons, by their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .figures.curves import learning_curves
from .figures.maps import feature_maps
from .figures.paper import FormPoint, HeadShares, accuracy_against_flops, head_shares
from .run_folder import Run, StoredComparison, find_comparisons, is_comparison, is_run, read_comparison, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves(folders: Sequence[Path]) -> Figure:
    """Learning curves of runs and comparisons."""
    runs, comparisons = _read(folders)
    records = {name: [run.records for run in group] for name, group in runs.items()}
    return learning_curves(records, comparisons[0].metric if comparisons else "accuracy", _reference(comparisons))


def gates(folders: Sequence[Path]) -> Figure:
    """Share of the memory in every head and layer."""
    groups = _read(folders)[0].items()
    layers = {name: found for name, group in groups if (found := [run.gates for run in group if run.gates])}
    if not layers:
        raise ValueError(f"no gates.json in {listed(folders)}: only models with a gated memory have gates")
    return head_shares([HeadShares(name, found) for name, found in layers.items()])


def maps(folders: Sequence[Path]) -> Figure:
    """Feature maps of one run."""
    if len(folders) != 1 or not is_run(folders[0]):
        raise ValueError(f"`cached plot maps` draws one run; {listed(folders)} is not the folder of one run")
    found = read_run(folders[0]).feature_maps()
    if found is None:
        raise ValueError(f"no feature_maps.npz in {folders[0]}: only image models with a memory have feature maps")
    return feature_maps(found["image"], found["self"], found["memory"])


def flops(folders: Sequence[Path]) -> Figure:
    """Metric against operations, of comparisons."""
    comparisons = [comparison for folder in folders for comparison in find_comparisons(folder)]
    metrics = sorted({comparison.metric for comparison in comparisons})
    if len(metrics) > 1:
        raise ValueError(f"the comparisons have different metrics ({', '.join(metrics)}); draw them one by one")
    points = [
        FormPoint(label(str(variant["name"]), c, comparisons), "", float(variant["flops"]), variant["values"])
        for c in comparisons
        for variant in c.variants
        if variant.get("flops")
    ]
    if not points:
        raise ValueError(f"compare.json in {listed(folders)} counts no operations (flops)")
    return accuracy_against_flops(points, metrics[0], "one forward pass", _reference(comparisons))


def _read(folders: Sequence[Path]) -> tuple[dict[str, list[Run]], list[StoredComparison]]:
    """Runs by name: those of comparisons under their variant; single runs of one name count as its seeds."""
    comparisons = [read_comparison(folder) for folder in folders if is_comparison(folder)]
    runs: dict[str, list[Run]] = {}
    for comparison in comparisons:
        for name, group in comparison.runs().items():
            runs.setdefault(label(name, comparison, comparisons), []).extend(group)
    for run in single_runs(folders):
        runs.setdefault(str(run.summary.get("name") or run.folder.resolve().name), []).append(run)
    return runs, comparisons


def single_runs(folders: Sequence[Path]) -> list[Run]:
    """The folders that are runs and no comparisons (ValueError if one is neither)."""
    single = [folder for folder in folders if not is_comparison(folder)]
    for folder in single:
        if not is_run(folder):
            raise ValueError(f"{folder} is neither a run (metrics.jsonl) nor a comparison (compare.json)")
    return [read_run(folder) for folder in single]


def label(name: str, comparison: StoredComparison, comparisons: Sequence[StoredComparison]) -> str:
    """The name of a variant, with its comparison's folder if there are several comparisons."""
    return name if len(comparisons) == 1 else f"{comparison.folder.resolve().name}: {name}"


def _reference(comparisons: list[StoredComparison]) -> str | None:
    return comparisons[0].reference if len(comparisons) == 1 else None


def listed(folders: Sequence[Path]) -> str:
    """Folders in a message."""
    return ", ".join(map(str, folders))
