"""Learning curves, and figures 1, 4 and 5 of the GRC paper, from folders of runs and comparisons.

The numbers of a paper's figure are in a file beside it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cached_lab.data.image_files import open_picture
from cached_transformers.extras import require

from .build import build_dataset
from .load import load_run, read_run_config
from .reports.collect import collect_layer_maps
from .reports.figures.curves import learning_curves
from .reports.figures.paper import PLAIN, FormPoint, accuracy_against_flops, head_shares, photograph_maps
from .reports.run_folder import Run, StoredComparison, is_comparison, is_run, read_comparison, read_run
from .statistics import mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = 4
"""Images of the test split in figure 4 by default."""


def curves(folders: Sequence[Path], output: Path) -> Figure:
    """Draw learning curves of runs and comparisons; single runs of one variant count as its seeds."""
    comparisons, groups, _ = _read(folders)
    records = {name: [run.records for run in group] for name, group in groups.items()}
    metrics = [run.metric for group in groups.values() for run in group] or ["accuracy"]
    return learning_curves(records, metrics[0], comparisons[0].data["reference"] if comparisons else None)


def figure_1(folders: Sequence[Path], output: Path) -> Figure:
    """Draw accuracy against operations of the variants of comparisons, and of single runs grouped by variant."""
    comparisons, groups, singles = _read(folders)
    metrics = {c.data["metric"] for c in comparisons} | {run.metric for group in groups.values() for run in group}
    if len(metrics) != 1:
        raise ValueError(f"the folders have different metrics ({', '.join(sorted(metrics))}); draw them one by one")
    metric, variants = metrics.pop(), [(c, v) for c in comparisons for v in c.data["variants"]]
    training = not singles and all(v.get("training_flops") for _, v in variants)
    points: list[FormPoint] = []
    for c, v in variants:
        name, backbone = str(v["name"]), v.get("backbone", "")
        form = name.removeprefix(backbone).lstrip("-") or PLAIN
        cost = v["training_flops" if training else "flops"]
        points.append(FormPoint(backbone or c.data["recipe"], form, cost, v["values"]))
    for form, group in singles.items():
        if summaries := [run.summary for run in group if run.summary.get("test")]:
            values = [summary["test"][metric] for summary in summaries]
            points.append(FormPoint(summaries[0]["name"], form, summaries[0]["flops"], values))
    if not points:
        raise ValueError(f"no test scores in {', '.join(map(str, folders))}")
    rows = []
    for p in points:
        interval = ["" if x is None else x for x in mean_interval(p.values)]
        rows.append([p.backbone, p.form, p.operations, *interval, " ".join(map(str, p.values))])
    header = ["backbone", "form", "operations", f"mean {metric}", "low", "high", "values by seed"]
    _write_table(output, [header, *rows])
    return accuracy_against_flops(points, metric, f"one forward pass{' in training' if training else ''}, per image")


def figure_4(
    folders: Sequence[Path], output: Path, images: Sequence[Path] = (), layers: Sequence[int] | None = None
) -> Figure:
    """Draw maps of self-attention and cache of one run, on photographs or the first images of its test split.

    Args:
        layers: cached layers, counted from 1; None for the first, the middle and the last.
    """
    if len(folders) != 1 or not is_run(folders[0]):
        raise ValueError(f"figure 4 needs one run; {', '.join(map(str, folders))} is not the folder of one run")
    config = read_run_config(folders[0])
    data = build_dataset(config, "validation" if config.training.test == "none" else "test")
    described = data.describe()
    if "image_size" not in described:
        raise ValueError(f"figure 4 needs images; the data of {folders[0]} are {config.data['name']!r}")
    mean, std = (torch.tensor(described[key])[:, None, None] for key in ("mean", "std"))
    if images:
        inputs_NCHW = (torch.stack([_photograph(file, described) for file in images]) - mean) / std
        names = [file.name for file in images]
    else:
        names = [f"{data.split} {i}" for i in range(min(IMAGES, len(data)))]
        inputs_NCHW = data.collate([data[i] for i in range(len(names))]).inputs
    found = {layer.number: layer for layer in collect_layer_maps(load_run(folders[0])[1], inputs_NCHW)}
    numbers = list(found)
    absent = set(layers or ()) - set(found)
    if absent or not found:
        raise ValueError(f"--layers {min(absent, default='')} has no map; these have: {', '.join(map(str, found))}")
    chosen = [found[number] for number in layers or sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})]
    content = [
        {"image": name, "layer": layer.number, "module": layer.name}
        | {"self": layer.self_attention[n].tolist(), "cache": layer.memory[n].tolist()}
        for n, name in enumerate(names)
        for layer in chosen
    ]
    output.with_suffix(".json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    pixels_NHWC = (inputs_NCHW * std + mean).permute(0, 2, 3, 1).expand(-1, -1, -1, 3)
    return photograph_maps(pixels_NHWC.numpy(), chosen)


def figure_5(folders: Sequence[Path], output: Path) -> Figure:
    """Draw the share of the cache in every head and layer of all runs with gates."""
    variants = {}
    rows: list[list[Any]] = [["variant", "seed", "layer", "head", "share"]]
    for name, group in _read(folders)[1].items():
        if gated := [run for run in group if run.gates]:
            variants[name] = [run.gates for run in gated]
        for run in gated:
            for layer, heads in enumerate(run.gates, start=1):
                rows += [[name, run.summary.get("seed", ""), layer, head, x] for head, x in enumerate(heads, start=1)]
    if not variants:
        raise ValueError(f"no gates.json in {', '.join(map(str, folders))}: only models with a gated memory have gates")
    _write_table(output, rows)
    return head_shares(variants)


def _read(folders: Sequence[Path]) -> tuple[list[StoredComparison], dict[str, list[Run]], dict[str, list[Run]]]:
    """Comparisons, all runs by variant (with the folder's name if there are several comparisons), and single runs."""
    comparisons = [read_comparison(folder) for folder in folders if is_comparison(folder)]
    singles: dict[str, list[Run]] = {}
    for run in [read_run(folder) for folder in folders if not is_comparison(folder)]:
        singles.setdefault(run.name, []).append(run)
    groups = dict(singles)
    for c in comparisons:
        prefix = f"{c.folder.resolve().name}: " if len(comparisons) > 1 else ""
        groups |= {f"{prefix}{name}": group for name, group in c.runs().items()}
    return comparisons, groups, singles


def _write_table(output: Path, rows: Sequence[Sequence[Any]]) -> None:
    with output.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _photograph(file: Path, described: Any) -> torch.Tensor:
    """(C, H, W) in 0..1: the central square at the size of the data."""
    picture = open_picture(file.read_bytes(), file, described["channels"])
    square = require("PIL.ImageOps", extra="vision").fit(picture, (described["image_size"],) * 2, 3)  # bicubic
    pixels_HWC = np.asarray(square, dtype=np.float32).reshape(*square.size[::-1], described["channels"])
    return torch.from_numpy(pixels_HWC).permute(2, 0, 1) / 255
