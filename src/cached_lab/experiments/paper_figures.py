"""Figures 1, 4 and 5 of the GRC paper from folders of runs and comparisons, each with a file of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cached_lab.data.image_files import open_picture
from cached_transformers.extras import require
from cached_transformers.memories.grc.grc import variant_options

from .build import build_dataset
from .load import load_run, read_run_config
from .reports.collect import LayerMaps, collect_layer_maps
from .reports.draw import label, listed, single_runs
from .reports.figures import paper
from .reports.figures.paper import PLAIN, FormPoint, HeadShares
from .reports.run_folder import Run, StoredComparison, is_comparison, is_run, read_comparison
from .statistics import mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = 4
"""Images of the test split in figure 4 by default."""


def figure_1(folders: Sequence[Path], output: Path) -> Figure:
    """Draw accuracy against operations of the variants of comparisons, and of single runs grouped by variant."""
    comparisons, runs = _read(folders)
    variants = [v for c in comparisons for v in c.variants]
    training = bool(variants) and not runs and all(v.get("training_flops") for v in variants)
    points: list[FormPoint] = []
    metrics = {c.metric for c in comparisons} | {run.metric for group in runs.values() for run in group}
    if len(metrics) != 1:
        raise ValueError(
            f"{listed(folders)} have different metrics ({', '.join(sorted(metrics))}); draw them one by one"
        )
    metric = metrics.pop()
    for c in comparisons:
        for v in c.variants:
            name, backbone = str(v["name"]), v.get("backbone")
            form = name if backbone is None else name.removeprefix(backbone).lstrip("-") or PLAIN
            cost = v.get("training_flops" if training else "flops")
            if cost:
                shown = label(c.title if backbone is None else backbone, c, comparisons)
                points.append(FormPoint(shown, form, float(cost), [float(x) for x in v["values"]]))
    for name, group in runs.items():
        scores = [r.summary["test"][metric] for r in group if (r.summary.get("test") or {}).get(metric) is not None]
        if scores and group[0].summary.get("flops"):
            points.append(FormPoint(str(group[0].summary.get("name")), name, float(group[0].summary["flops"]), scores))
    if not points:
        raise ValueError(f"nothing in {listed(folders)} has both test scores and counted operations")
    rows = []
    for p in points:
        mean, low, high = mean_interval(p.values)
        interval = ["" if x is None else x for x in (mean, low, high)]
        rows.append([p.backbone, p.form, p.operations, *interval, " ".join(map(str, p.values))])
    header = ["backbone", "form", "operations", f"mean {metric}", "low", "high", "values by seed"]
    paper.write_table(output.with_suffix(".csv"), header, rows)
    of = "one forward pass in training, per image" if training else "one forward pass of one image in evaluation"
    return paper.accuracy_against_flops(points, metric, of)


def figure_4(folders: Sequence[Path], output: Path, images: Sequence[Path], layers: Sequence[int] | None) -> Figure:
    """Draw maps of self-attention and cache of one run, on photographs or the first images of its test split.

    Args:
        layers: cached layers, counted from 1; None for the first, the middle and the last.
    """
    if len(folders) != 1 or not is_run(folders[0]):
        raise ValueError(f"figure 4 needs one run; {listed(folders)} is not the folder of one run")
    config = read_run_config(folders[0])
    data = build_dataset(config, "validation" if config.training.test == "none" else "test")
    described = data.describe()
    if "image_size" not in described:
        raise ValueError(f"figure 4 needs images; the data of {folders[0]} are {config.data['name']!r}")
    inputs_NCHW, names = _photographs(images, described) if images else _of_split(data)
    _, model, _ = load_run(folders[0])
    maps = collect_layer_maps(model, inputs_NCHW)
    if not maps:
        raise ValueError(f"the model of {folders[0]} has no cached layer whose tokens are a map of the image")
    chosen = _chosen(maps, layers)
    paper.write_maps(output.with_suffix(".json"), names, chosen)
    mean, std = (torch.tensor(described[key])[:, None, None] for key in ("mean", "std"))
    pixels = (inputs_NCHW * std + mean).permute(0, 2, 3, 1)
    return paper.photograph_maps(pixels.expand(-1, -1, -1, 3).numpy(), chosen)


def figure_5(folders: Sequence[Path], output: Path) -> Figure:
    """Draw the share of the cache in every head and layer of all runs with gates."""
    comparisons, singles = _read(folders)
    groups: list[tuple[str, list[Run]]] = []
    for c in comparisons:
        groups += [(label(name, c, comparisons), group) for name, group in c.runs().items()]
    groups += list(singles.items())
    variants, rows = [], []
    for name, group in groups:
        gated = [run for run in group if run.gates]
        if not gated:
            continue
        variants.append(HeadShares(name, [run.gates or [] for run in gated], initial_share(gated[0])))
        for run in gated:
            for layer, heads in enumerate(run.gates or [], start=1):
                rows += [[name, run.summary.get("seed", ""), layer, head, x] for head, x in enumerate(heads, start=1)]
    if not variants:
        raise ValueError(f"no gates.json in {listed(folders)}: only models with a gated memory have gates")
    paper.write_table(output.with_suffix(".csv"), ["variant", "seed", "layer", "head", "share"], rows)
    return paper.head_shares(variants)


def initial_share(run: Run) -> float | None:
    """Return sigma(lambda) before training from the run's configuration; None for memories without it."""
    memory = read_run_config(run.folder).model.get("memory")
    options = {"name": memory} if isinstance(memory, str) else memory if isinstance(memory, dict) else {}
    if options.get("name") == "grc":
        given = options.get("initial_gate")
        gate = variant_options(options.get("variant", "algorithm1"), initial_gate=given)["initial_gate"]
    elif options.get("name") in ("attention_cache", "grc_stream"):
        gate = float(options.get("initial_gate", 0.0))
    else:
        return None
    return float(torch.tensor(gate).sigmoid())


def _read(folders: Sequence[Path]) -> tuple[list[StoredComparison], dict[str, list[Run]]]:
    """Comparisons, and single runs by variant."""
    runs: dict[str, list[Run]] = {}
    for run in single_runs(folders):
        runs.setdefault(run.name, []).append(run)
    return [read_comparison(folder) for folder in folders if is_comparison(folder)], runs


def _chosen(maps: Sequence[LayerMaps], layers: Sequence[int] | None) -> list[LayerMaps]:
    if layers is None:
        return [maps[i] for i in sorted({0, len(maps) // 2, len(maps) - 1})]
    by_index = {layer.number: layer for layer in maps}
    for index in layers:
        if index not in by_index:
            raise ValueError(f"layer {index} has no map; these have: {', '.join(map(str, by_index))}")
    return [by_index[index] for index in layers]


def _photographs(files: Sequence[Path], described: Any) -> tuple[torch.Tensor, list[str]]:
    pictures = []
    for file in files:
        if not file.is_file():
            raise ValueError(f"--images: there is no file {file}")
        picture = open_picture(file.read_bytes(), file, described["channels"])
        square = require("PIL.ImageOps", extra="vision").fit(picture, (described["image_size"],) * 2, 3)  # bicubic
        pixels_HWC = np.asarray(square, dtype=np.float32).reshape(*square.size[::-1], described["channels"])
        pictures.append(torch.from_numpy(pixels_HWC).permute(2, 0, 1) / 255)
    mean, std = (torch.tensor(described[key])[:, None, None] for key in ("mean", "std"))
    return (torch.stack(pictures) - mean) / std, [file.name for file in files]


def _of_split(data: Any) -> tuple[torch.Tensor, list[str]]:
    count = min(IMAGES, len(data))
    return data.collate([data[i] for i in range(count)]).inputs, [f"{data.split} {i}" for i in range(count)]
