"""`cached reproduce` of tables 1, 2 and 10: backbones plain, cached, and their controls; a table from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.made import make_cifar10
from common import refuses
from PIL import Image

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.experiments.costs.flops import count_flops, count_parameters
from cached_lab.experiments.reports.run_folder import cache_use_statistics
from cached_lab.experiments.reproductions import REPRODUCTIONS
from cached_lab.experiments.reproductions.arms import arms, row_recipes
from cached_lab.experiments.reproductions.base import pairs
from cached_lab.experiments.reproductions.images import PAPER, SMALL
from cached_lab.experiments.variants import Variant, equal_operations, feed_forward_option, training_flops, widened
from cached_lab.tasks.recipes import check_sections, load_config
from cached_lab.training.config import RunConfig, config_hash, config_to_dict
from cached_lab.yaml_tree import flatten
from cached_transformers import create_model
from cached_transformers.memories.grc.shared_cache_memory import PositionalConvolution

pytestmark = pytest.mark.usefixtures("no_run_reports")
TABLES = ("table1", "table2", "table10")
FAST = ["model.width=16", "model.heads=2", "model.feed_forward=32", "model.depth=1", "training.steps=2"]
FAST += ["training.batch_size=8", "training.evaluate_every=2", "training.evaluation_batch_size=30"]
FAST += ["training.tensorboard=false", "schedule.warmup_steps=1"]
FORMS = ("", "-released", "-paper", "-convolution", "-wider")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cifar10(tmp_path_factory.mktemp("made") / "cifar10")


def variants_of(table: str, images: Path, chosen: str = "paper", *overrides: str) -> tuple[Any, ...]:
    entry = REPRODUCTIONS[table]
    recipe = load_config(entry.recipes["small"], [f"data.path={images}", *overrides])
    train = build_dataset(recipe, "train")
    rows = entry.rows("small", chosen)
    recipes = row_recipes(rows, recipe, overrides)
    return arms(entry, "small", rows, recipe, train, recipes), recipe, train


def difference(one: Variant, other: Variant) -> dict[str, tuple[Any, Any]]:
    left, right = (flatten(config_to_dict(variant.seeded(3))) for variant in (one, other))
    return {k: (left.get(k), right.get(k)) for k in {**left, **right} if left.get(k) != right.get(k)}


@pytest.fixture(scope="module", params=list(SMALL))
def rows_of_one(request: pytest.FixtureRequest, images: Path) -> tuple[str, list[Variant], RunConfig, Any]:
    """A backbone's name, all its rows in batches of eight, their recipe and their data."""
    chosen = ",".join(f"{request.param}{form}" for form in FORMS)
    return request.param, *variants_of("table1", images, chosen, "training.batch_size=8")


def test_rows_of_a_backbone_differ_in_what_they_are_compared_for_alone(rows_of_one: Any) -> None:
    backbone, (plain, released, paper, convolution, wider), recipe, _ = rows_of_one
    assert [v.facts["backbone"] for v in (plain, released, paper, convolution, wider)] == [backbone] * 5
    assert plain.config.model["memory"] is None and wider.config.model["memory"] is None
    assert (plain.config.training, plain.config.data) == (recipe.training, recipe.data)
    assert {key.split(".")[1] for key in difference(plain, wider)} <= {"feed_forward", "mlp_ratios"}
    assert difference(released, paper) == {"model.memory.variant": ("released", "algorithm1")}
    assert convolution.config.model["memory"] == {"name": "convolution", "ratio": 0.5}
    assert released.config.model["memory"] == {"name": "grc", "variant": "released", "ratio": 0.5}
    for memory in (released, paper, convolution):
        assert all(key.startswith("model.memory") for key in difference(plain, memory))
    # The control has the very convolution of the released form, and nothing else.
    models = {v.name: build_model(v.config) for v in (plain, released, convolution)}
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in models.items()}
    own = {n: [m for m in model.modules() if isinstance(m, PositionalConvolution)] for n, model in models.items()}
    count = sum(p.numel() for m in own[convolution.name] for p in m.parameters())
    assert sizes[convolution.name] - sizes[plain.name] == count > 0
    assert str([m.convolution for m in own[released.name]]) == str([m.convolution for m in own[convolution.name]])


def test_the_wider_control_costs_in_training_what_the_cached_row_costs(rows_of_one: Any, images: Path) -> None:
    _, (plain, released, _, _, wider), _, train = rows_of_one
    batch = train.collate([train[index] for index in range(8)])
    counted = {v.name: count_flops(build_model(v.config), batch.inputs, mode="train") for v in (plain, released, wider)}
    assert counted == {v.name: training_flops(v.config, batch) for v in (plain, released, wider)}
    assert counted[wider.name] == pytest.approx(counted[released.name], rel=0.005)
    assert counted[plain.name] < 0.95 * counted[wider.name]
    assert wider.facts["matched"] == released.name
    assert wider.facts["flops_ratio"] == counted[wider.name] / counted[released.name]
    alone = variants_of("table1", images, wider.name, "training.batch_size=8")[0]
    assert alone == [wider] and config_hash(alone[0].config) == config_hash(wider.config)


def test_the_same_rows_in_several_tables_are_the_same_runs(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cached_lab.experiments.variants.count_flops", lambda *_, **__: 1000)  # facts beside the runs
    found: dict[str, set[str]] = {}
    for table in TABLES:
        rows = [row.name for row in REPRODUCTIONS[table].rows("small") if "wider" not in row.name]
        for variant in variants_of(table, images, ",".join(rows))[0]:
            found.setdefault(config_hash(variant.config), set()).add(variant.name)
    pvt = SMALL["pvt_v2"].name
    shared = [{f"{pvt}-released", f"{pvt}-r=0.5"}, {f"{pvt}-convolution", f"{pvt}-r=0.5-convolution"}]
    assert all(names in found.values() for names in shared)
    assert sorted(map(len, found.values()), reverse=True)[:3] == [2, 2, 1]


def test_the_compared_variants() -> None:
    found = pairs(REPRODUCTIONS["table2"].rows("small"))
    assert [pair for pair in found if pair[0] == "vit-paper"] == [
        ("vit-paper", "vit"),
        ("vit-paper", "vit-attention"),
        ("vit-paper", "vit-store"),
    ]
    assert [b for a, b in found if a == "vit-released"] == ["vit", "vit-convolution", "vit-wider"]
    rows = REPRODUCTIONS["table10"].rows("small")
    backbone = SMALL["pvt_v2"].name
    assert [row.name for row in rows if row.against] == [f"{backbone}-r={r:g}" for r in (0.125, 0.25, 0.5, 1)]
    assert [row.matched for row in rows if row.matched] == [f"{backbone}-r={r:g}" for r in (0.125, 0.25, 0.5, 1)]
    assert pairs(rows)[:3] == [
        (f"{backbone}-r=0.125", name)
        for name in (backbone, f"{backbone}-r=0.125-convolution", f"{backbone}-r=0.125-wider")
    ]


def test_a_larger_cache_has_a_smaller_convolution(images: Path) -> None:
    backbone = SMALL["pvt_v2"].name
    chosen = ",".join(f"{backbone}-r={ratio}-convolution" for ratio in (0.125, 1))
    small, large = (build_model(v.config) for v in variants_of("table10", images, chosen)[0])
    groups = [
        [m.convolution.groups for m in model.modules() if isinstance(m, PositionalConvolution)]
        for model in (small, large)
    ]
    assert [b / a for a, b in zip(*groups, strict=True)] == [8] * len(groups[0])


def test_a_table_from_images_to_report(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    rows = ["vit", "vit-paper", "vit-released"]
    arguments = ["reproduce", "table1", "--data", str(images), "--rows", ",".join(rows), *FAST]
    arguments += ["--out", str(out), "--seeds"]
    assert main([*arguments, "1"]) == 0
    kept = {path: path.stat().st_mtime_ns for path in out.rglob("cache_use.json")}
    capsys.readouterr()
    assert main([*arguments, "2"]) == 0
    printed = capsys.readouterr().out
    assert "3 finished runs kept, 3 to train" in printed
    # The last seed's run takes the caches of the next one, which there was not before.
    assert len(kept) == 2 and all(path.stat().st_mtime_ns != when for path, when in kept.items())
    result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in result["variants"]] == rows and result["rows"] == 60
    assert result["reference"] == "vit" and "pairs" not in result  # the control of the convolution was not chosen
    # Rows that read the mean of the batch can be asked for it; those that read their own update make it anyway.
    batches = [f"batch {n}" for n in (4, 8, 256)]
    assert list(result["cache_use"]) == rows[1:]
    assert list(result["cache_use"]["vit-paper"]) == ["carry", "reset", "shuffle", "other", *batches]
    assert list(result["cache_use"]["vit-released"]) == ["carry", "reset", "shuffle", "other"]
    values = {row["name"]: row["values"] for row in result["variants"]}
    for name in rows[1:]:
        assert result["cache_use"][name]["carry"] == values[name]
    run, theirs = (str(out / "vit-paper" / f"seed_{seed}") for seed in (1, 0))
    more = ["--memory", "carry,reset,shuffle,other,batch", "--other", theirs, "--batch-sizes", "4,8,256"]
    assert main(["evaluate", run, *more, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    second = {mode: found[1] for mode, found in result["cache_use"]["vit-paper"].items()}
    assert {row["memory"]: row["accuracy"] for row in scores} == second
    assert len({row["loss"] for row in scores[:4]}) == 4
    markdown = (out / "compare.md").read_text(encoding="utf-8")
    report = (out / "report.html").read_text(encoding="utf-8")
    for text in (printed, markdown):
        assert "Use of the cache: vit-paper" in text and "batch 4" in text
    assert "Use of the cache" in report and "grc(variant=released, ratio=0.5)" in report
    row = next(r for r in cache_use_statistics(result["cache_use"]["vit-paper"]) if r["name"] == "carry")
    assert f"| vit-paper | {100 * row['mean']:.2f} %" in markdown


def test_ratios_of_feed_forward_layers_are_widened(images: Path) -> None:
    recipe = load_config("table1_small", [f"data.path={images}"])
    model = {"name": "timm", "architecture": "pvt_tiny", "img_size": 32, "memory": None}
    model |= {"depths": [1, 1, 1], "embed_dims": [16, 32, 64], "num_heads": [1, 2, 4], "sr_ratios": [2, 1, 1]}
    config = RunConfig(recipe.data, {**model, "mlp_ratios": [4, 2, 4]}, training=recipe.training)
    assert feed_forward_option(config) == "mlp_ratios"
    assert widened(config, 1500).model["mlp_ratios"] == [6, 3, 6]
    vit = {"name": "timm", "architecture": "vit_tiny_patch16_224", "mlp_ratio": 4.0}
    assert widened(RunConfig(recipe.data, vit), 500).model["mlp_ratio"] == 2
    with pytest.raises(ValueError, match=r"'timm'.*model\.mlp_ratio"):
        feed_forward_option(RunConfig(recipe.data, {"name": "timm", "architecture": "vit_tiny_patch16_224"}))
    refuses(r"'timm'.*model\.mlp_ratio", feed_forward_option, RunConfig(recipe.data, {**vit, "mlp_ratio": None}))
    train = build_dataset(recipe, "train")
    dear = RunConfig(recipe.data, {**model, "mlp_ratios": [5, 5, 5]}, training=recipe.training)
    found = equal_operations([Variant("plain", config), Variant("dear", dear)], {"plain": "dear"}, train)[0]
    assert found.facts["flops_ratio"] == pytest.approx(1, abs=0.005)
    assert found.config.model["mlp_ratios"][0] == pytest.approx(2 * found.config.model["mlp_ratios"][1])
    assert "feed_forward" not in found.config.model and found.facts["feed_forward"] == found.config.model["mlp_ratios"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--memory", "other"], "--memory other takes the caches of --other RUN"),
        (["--memory", "batch", "--batch-sizes", "0"], "--batch-sizes '0' must be whole numbers from 1 on"),
        (["--memory", "batch"], "this model's rows read 'sample'"),
        (["--memory", "other", "--other", "{wide}"], "the other run's caches are of"),
        (["--memory", "batch", "{plain}"], "has no shared cache"),
    ],
)
def test_evaluations_that_cannot_be_made_are_refused(
    trained: dict[str, Path], capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    given = [word.format(**trained) for word in more]
    run = [] if given[-1] == str(trained["plain"]) else [str(trained["run"])]
    assert main(["evaluate", *run, *given]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    found = {}
    changes = {"run": [], "plain": ["model.memory=null"], "wide": ["model.memory.ratio=1.0"]}
    for name, more in changes.items():
        found[name] = folder / name
        arguments = ["train", "table1_small", f"data.path={images}", *FAST, *more]
        assert main([*arguments, "--out", str(found[name])]) == 0
    return found


@pytest.mark.parametrize("table", [*TABLES, "table8"])
def test_rows_of_the_papers_scale_have_the_recipes_of_their_backbones(table: str) -> None:
    entry = REPRODUCTIONS[table]
    rows = entry.rows("paper", "all")
    main_recipe = load_config(entry.recipes["paper"])
    recipes = row_recipes(rows, main_recipe, [])
    for row in rows:
        assert row.recipe is not None and row.backbone is not None
        own = load_config(row.recipe)
        config = row.config(recipes[row.recipe])
        check_sections(config)
        assert config.training == own.training and config.optimizer == own.optimizer
        assert {**own.model, "memory": None}.items() <= {**config.model, "memory": None}.items()
        assert feed_forward_option(config) in ("mlp_ratio", "mlp_ratios")
        memory = config.model["memory"]
        if row.name.endswith("-released"):
            assert memory == own.model["memory"] == {"name": "grc", "variant": "released", "ratio": 0.5}
        elif row.matched is not None or row.name == row.backbone:
            assert memory is None


@pytest.mark.parametrize("backbone", ["vit_small", "pvt_tiny", "swin_tiny", "pvt_v2_b2"])
def test_written_ratios_of_feed_forward_layers_are_those_of_the_model(backbone: str) -> None:
    row = PAPER[backbone].rows()[0]
    assert row.recipe is not None
    config = row.config(load_config(row.recipe))
    sizes = []
    for model in (config.model, {k: v for k, v in config.model.items() if not k.startswith("mlp_ratio")}):
        with torch.device("meta"):
            sizes.append(count_parameters(create_model(**model)))
    assert sizes[0] == sizes[1] > 10_000_000


def test_recipes_that_are_scored_differently_are_refused() -> None:
    rows = REPRODUCTIONS["table1"].rows("paper", "vit_small,pvt_tiny")
    refuses(r"'accuracy'.*'last'.*table1_small.*'accuracy'.*'best'", row_recipes, rows, load_config("table1_small"), [])


def test_table_8_has_a_swin_of_equal_cost(tmp_path: Path) -> None:
    for split, count in (("train", 10), ("val", 2)):
        for label in range(12):
            folder = tmp_path / "tiny" / split / f"n{label:08d}"
            folder.mkdir(parents=True)
            for index in range(count):
                Image.effect_noise((32, 32), 60).convert("RGB").save(folder / f"{index}.JPEG")
    entry = REPRODUCTIONS["table8"]
    recipe = load_config(entry.recipes["small"], [f"data.path={tmp_path / 'tiny'}", "training.batch_size=4"])
    train = build_dataset(recipe, "train")
    variants = {v.name: v for v in arms(entry, "small", entry.rows("small"), recipe, train)}
    assert list(variants) == [f"swin{form}" for form in ("", "-released", "-paper", "-convolution", "-wider")]
    costs = {name: variant.facts["training_flops"] for name, variant in variants.items()}
    assert costs["swin"] < costs["swin-wider"] == pytest.approx(costs["swin-released"], rel=0.005)
    batch = train.collate([train[index] for index in range(4)])
    for variant in variants.values():
        output = build_model(variant.config)(batch.inputs).outputs
        assert output.shape == (4, 12)
        output.sum().backward()
