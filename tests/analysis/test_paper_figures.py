"""Figures 1, 4 and 5 hold the numbers of runs, and their files hold the same numbers."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from analysis.folders import make_comparison, make_run
from PIL import Image
from torch import nn

from cached_lab.cli.main import main
from cached_lab.experiments.reports.collect import LayerMaps, collect_gates, collect_layer_maps
from cached_lab.experiments.reports.figures import paper
from cached_lab.experiments.reports.figures.paper import FormPoint
from cached_lab.experiments.statistics import mean_interval
from cached_transformers import create_model
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.models.pvt import PyramidVisionTransformer

pytest.importorskip("matplotlib")


def rows_of(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_figure_1_joins_the_forms_of_a_backbone() -> None:
    points = [FormPoint("vit", "plain", 1e6, [0.5, 0.6]), FormPoint("vit", "released", 2e6, [0.6, 0.62])]
    points.append(FormPoint("pvt", "plain", 3e6, [0.7]))
    (ax,) = paper.accuracy_against_flops(points, "accuracy", "one forward pass").axes
    drawn = [line for line in ax.lines if line.get_marker() in "os" and len(line.get_xdata())]
    marks = {(line.get_xdata()[0], round(line.get_ydata()[0], 6)): line for line in drawn}
    found = [mean_interval(p.values) for p in points]
    for p, interval in zip(points, found, strict=True):
        line = marks[(p.operations, round(100 * interval.mean, 6))]
        assert line.get_marker() == ("o" if p.form == "plain" else "s")
        assert line.get_color() == {"vit": "#0072b2", "pvt": "#d55e00"}[p.backbone]
    joined = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_marker() == "None"]
    assert [list(line.get_xdata()) for line in joined] == [[1e6, 2e6]]
    spans = sorted(float(np.ptp(c.get_segments()[0][:, 1])) for c in ax.collections)
    assert spans == pytest.approx(sorted(100 * (f.high - f.low) for f in found if f.low is not None))


def test_figure_1_of_a_comparison_and_of_runs(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "table")
    data = json.loads((folder / "compare.json").read_text())
    for variant, name in zip(data["variants"], ("vit", "vit-released", "vit-convolution"), strict=True):
        variant |= {"name": name, "backbone": "vit", "training_flops": 2 * variant["flops"]}
    (folder / "compare.json").write_text(json.dumps(data | {"reference": "vit"}))
    assert main(["plot", "fig1", str(folder), "--output", str(tmp_path / "a.png")]) == 0
    header, *rows = rows_of(tmp_path / "a.csv")
    assert header == ["backbone", "form", "operations", "mean accuracy", "low", "high", "values by seed"]
    for row, variant, form in zip(rows, data["variants"], ("plain", "released", "convolution"), strict=True):
        assert row[:3] == ["vit", form, str(variant["training_flops"])]
        assert [float(x) for x in row[3:6]] == pytest.approx(list(mean_interval(variant["values"])))
        assert [float(x) for x in row[6].split()] == variant["values"]
    runs = [make_run(tmp_path / f"r{seed}", "grc", seed, 0.9 + seed / 100) for seed in (0, 1)]
    assert main(["plot", "fig1", *map(str, runs), "--output", str(tmp_path / "b.png")]) == 0
    ((backbone, form, flops, mean, *_),) = rows_of(tmp_path / "b.csv")[1:]
    assert (backbone, form, float(flops), float(mean)) == ("digits_vit", "grc", 31_064_064, pytest.approx(0.905))
    assert (tmp_path / "b.png").stat().st_size > 10_000


def test_figure_5_holds_every_head(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "table", {"plain": [0.5, 0.6], "grc": [0.6, 0.7]})
    assert main(["plot", "fig5", str(folder), "--output", str(tmp_path / "f.svg")]) == 0
    expected = [["variant", "seed", "layer", "head", "share"]]
    for seed in (0, 1):
        layers = json.loads((folder / "grc" / f"seed_{seed}" / "gates.json").read_text())["layers"]
        for i, heads in enumerate(layers, 1):
            expected += [["grc", str(seed), str(i), str(j), str(x)] for j, x in enumerate(heads, 1)]
    assert rows_of(tmp_path / "f.csv") == expected


def test_figure_5_shows_heads_and_means() -> None:
    runs = [[[0.2, 0.4], [0.5, 0.9]], [[0.1, 0.3], [0.6, 0.8]]]
    first, second = paper.head_shares({"grc": runs, "one": [[[0.2], [0.5, 0.9, 0.1]]]}).axes
    dots = [[sorted(line.get_ydata()) for line in ax.lines if line.get_marker() == "o"] for ax in (first, second)]
    assert dots == [[[0.2, 0.4], [0.5, 0.9], [0.1, 0.3], [0.6, 0.8]], [[0.2], [0.1, 0.5, 0.9]]]
    mean = next(line for line in first.lines if line.get_marker() == "_")
    assert list(mean.get_ydata()) == pytest.approx([0.25, 0.7])
    assert first.get_ylim() == second.get_ylim() and first.get_ylim()[0] < 0.1 and first.get_ylim()[1] > 0.9
    assert [ax.get_title(loc="left") for ax in (first, second)] == ["grc, 2 runs", "one, one run"]


def test_maps_of_a_pyramid_have_the_size_of_their_stage_on_any_image() -> None:
    sizes = {"embed_dims": (8, 16), "num_heads": (2, 2), "mlp_ratios": (1, 1), "depths": (1, 1), "sr_ratios": (2, 1)}
    model = add_memory(PyramidVisionTransformer(32, 4, num_classes=3, **sizes), "grc")
    for height, width, expected in ((32, 32, [(8, 8), (4, 4)]), (32, 48, [(8, 12), (4, 6)])):
        found = collect_layer_maps(model, torch.randn(2, 3, height, width))
        assert [layer.number for layer in found] == [1, 2]
        assert [layer.self_attention.shape for layer in found] == [layer.memory.shape for layer in found]
        assert [layer.self_attention.shape[1:] for layer in found] == expected
    assert model.training


def test_a_map_is_the_norm_of_what_the_branch_gives_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10, "width": 16, "depth": 1, "heads": 2}
    model = create_model("vision_transformer", feed_forward=16, memory="grc", **sizes).eval()
    branch = next(m for m in model.modules() if type(m).__name__ == "MemoryBranch")
    kept, original = [], type(branch).forward
    monkeypatch.setattr(type(branch), "forward", lambda *given: kept.append(original(*given)) or kept[-1])
    (layer,) = collect_layer_maps(model, torch.randn(3, 1, 8, 8))
    expected = kept[0][:, :, 1:].pow(2).sum((1, 3)).sqrt().view(3, 4, 4)
    assert np.allclose(layer.memory, expected.detach().numpy(), atol=1e-6)


class Halved(nn.Module):
    """A third-party module: its input plays self-attention, twice its input the memory."""

    prefix = 1
    note = None

    def mixing_ratio(self) -> torch.Tensor:
        return torch.tensor([0.25, 0.5])

    def record(self, note) -> None:
        self.note = note

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        tokens_NHTE = nn.functional.pad(images_NCHW.flatten(2).transpose(1, 2)[:, None], (0, 0, self.prefix, 0))
        if self.note is not None:
            self.note(tokens_NHTE, 2 * tokens_NHTE)
        return images_NCHW


def test_a_module_of_a_users_is_drawn_if_it_has_the_methods() -> None:
    model = nn.Sequential(nn.Identity(), Halved(), nn.Sequential(Halved()))
    assert collect_gates(model) == [[0.25, 0.5]] * 2
    images = torch.randn(2, 3, 4, 6)
    first, second = collect_layer_maps(model, images)
    assert (first.number, first.name, second.number, second.name) == (1, "1", 2, "2.0")
    assert np.allclose(first.self_attention, images.norm(dim=1)) and np.allclose(first.memory, 2 * images.norm(dim=1))
    assert model[1].note is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    sizes = ["model.width=16", "model.depth=2", "model.heads=2", "model.feed_forward=16", "training.steps=2"]
    more = ["training.evaluate_every=2", "schedule.warmup_steps=1", "training.tensorboard=false"]
    assert main(["train", "digits_vit_grc", *sizes, *more, "--out", str(run)]) == 0
    return run


def test_figure_4_of_photographs(trained: Path, tmp_path: Path) -> None:
    files = []
    for name, size, mode in (("a.png", (40, 30), "RGB"), ("b.jpg", (20, 50), "L")):
        files.append(tmp_path / name)
        Image.effect_noise(size, 60).convert(mode).save(files[-1])
    output = tmp_path / "f.png"
    arguments = ["plot", "fig4", str(trained), "--images", *map(str, files), "--layers", "2", "--output", str(output)]
    assert main(arguments) == 0
    content = json.loads((tmp_path / "f.json").read_text())
    assert [(row["image"], row["layer"]) for row in content] == [("a.png", 2), ("b.jpg", 2)]
    assert np.array(content[0]["cache"]).shape == (4, 4) and output.stat().st_size > 5_000
    assert main(["plot", "fig4", str(trained), "--output", str(tmp_path / "g.png")]) == 0
    names = [row["image"] for row in json.loads((tmp_path / "g.json").read_text())]
    assert names[:2] == ["test 0", "test 0"] and names[-1] == "test 3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig4", "{run}", "--layers", "5"], "--layers 5 has no map; these have: 1, 2"),
        (["fig4", "{run}", "--layers", "x"], "--layers 'x' must be whole numbers from 1 on"),
        (["fig4", "{run}", "{run}"], "figure 4 needs one run"),
        (["fig4", "{run}", "--images", "nowhere.jpg"], "nowhere.jpg"),
        (["fig5", "{plain}"], "no gates.json in"),
        (["fig1", "{here}"], "is not a run folder"),
    ],
)
def test_figures_that_cannot_be_drawn_are_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    plain = make_run(tmp_path / "plain", "plain")
    assert main(["plot", *(word.format(run=trained, plain=plain, here=tmp_path) for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_photographs_are_drawn_beside_their_maps() -> None:
    generator = np.random.default_rng(0)
    images = generator.random((2, 8, 8, 3))
    layers = [LayerMaps(3, "x", generator.random((2, 4, 4)), generator.random((2, 4, 4)))]
    axes = paper.photograph_maps(images, layers).axes
    expected = [part[n] for n in (0, 1) for part in (images, layers[0].self_attention, layers[0].memory)]
    assert all(np.array_equal(ax.images[0].get_array(), e) for ax, e in zip(axes, expected, strict=True))
    assert [ax.get_title(loc="left") for ax in axes[:3]] == ["photograph", "self, layer 3", "cache, layer 3"]
    assert axes[5].get_xlabel() == f"{layers[0].memory[1].min():.3g} to {layers[0].memory[1].max():.3g}"
