"""`cached reproduce table9`: throughput, measured and written with its circumstances; and table 6."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from training.small_language import own_cache  # noqa: F401

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.experiments.costs.flops import count_flops
from cached_lab.experiments.costs.throughput import CASES, MODELS
from cached_lab.experiments.costs.timing import Ratio
from cached_lab.experiments.reproductions import REPRODUCTIONS, table9, text_tables
from cached_lab.experiments.reproductions.arms import arms
from cached_lab.experiments.reproductions.base import pairs
from cached_lab.experiments.reproductions.table9 import ROWS, beside_the_paper
from cached_lab.experiments.statistics import summarise, summarise_pairs, wilson_interval
from cached_lab.experiments.variants import training_flops
from cached_lab.tasks.classification.listops.expressions import root_operator_baselines
from cached_lab.tasks.recipes import load_config
from cached_lab.training.config import config_to_dict
from cached_lab.yaml_tree import flatten
from cached_transformers.registry import ATTENTIONS


def canned(batch: int, rounds: int, device: str, *, models: Sequence[str], image_size: int) -> list[dict[str, Any]]:
    """Return rows as `measure_throughput` does; tests/benchmarks/test_image_benchmarks.py measures."""
    counts = dict.fromkeys(("train_images", "inference_images", "train_peak_mib", "inference_peak_mib"), float(batch))
    counts |= {"parameters": image_size, "train_flops_ratio": 1.1, "inference_flops_ratio": 1.0}
    times = {"train": Ratio(1.3, 1.2, 1.4, 0.5, 1.25), "inference": Ratio(1.1, 1.0, 1.2, 0.5, rounds)}
    return [{"model": name, "case": case, **counts, **times} for name in models for case in CASES]


def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table9, "measure_throughput", canned)
    settings = ["batch=1", "rounds=1", "image_size=64"]
    assert main(["reproduce", "table9", "--rows", "PVT-Tiny", *settings, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "throughput.json").read_text(encoding="utf-8"))
    assert [row["case"] for row in content["rows"]] == ["plain", "GRC", "GRC, released variant"]
    assert {row["model"] for row in content["rows"]} == {"PVT-Tiny"}
    assert [content["environment"][key] for key in ("batch", "rounds", "image_size")] == [1, 1, 64]
    assert content["rows"][0]["train"]["median"] == 1.3 and content["rows"][0]["parameters"] == 64
    text = (tmp_path / "throughput.md").read_text(encoding="utf-8")
    assert "| PVT-Tiny | plain |" in text and text.count("in the paper (V100) 1.22 and 1.21") == 2
    assert "| PVT-Tiny | GRC |" in printed and "written:" in printed


def test_the_sentence_beside_the_paper_and_its_models() -> None:
    (line, _) = beside_the_paper(canned(1, 1, "cpu", models=["PVT-Tiny", "ViT-S"], image_size=32))
    assert line == (
        "PVT-Tiny, GRC: training takes 1.30 times as long as the plain model, inference 1.10; in the paper (V100) 1.22 "
        "and 1.21."
    )
    for models in ROWS.values():
        assert set(models) <= set(MODELS)


pytestmark = pytest.mark.usefixtures("no_run_reports")
TABLE6 = REPRODUCTIONS["table6"]
BACKBONES = [n for n, section in text_tables.ATTENTIONS["small"].items() if section["name"] in ATTENTIONS]
"""Those whose attention is there."""
FEW = ["data.train_size=300", "data.validation_size=50", "data.test_size=200"]
TINY = [*FEW, "model.width=16", "model.heads=2", "model.feed_forward=64", "training.steps=3", "training.batch_size=8"]
TINY += ["training.evaluate_every=3", "training.tensorboard=false", "schedule.warmup_steps=1"]


def rows_of(backbone: str) -> str:
    return f"{backbone},{backbone}-grc,{backbone}-control"


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_control_costs_in_training_what_grc_costs(backbone: str) -> None:
    recipe = load_config("table6_small", [*TINY, "training.batch_size=8"])
    train = build_dataset(recipe, "train")
    plain, grc, control = arms(TABLE6, "small", TABLE6.rows("small", rows_of(backbone)), recipe, train)
    batch = train.collate([train[index] for index in range(8)])
    counted = {}
    for variant in (plain, grc, control):  # on values here, where `training_flops` has shapes alone
        model = build_model(variant.config)
        counted[variant.name] = count_flops(model, batch.inputs, mode="train", padding=batch.padding)
        assert counted[variant.name] == training_flops(variant.config, batch)
        assert variant.facts["training_flops"] == round(counted[variant.name] / 8)
    assert counted[control.name] == pytest.approx(counted[grc.name], rel=0.005)
    assert counted[plain.name] < counted[control.name]
    assert control.facts["matched"] == grc.name
    assert control.facts["flops_ratio"] == counted[control.name] / counted[grc.name]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_rows_differ_in_what_they_are_compared_for_alone(backbone: str) -> None:
    recipe = load_config("table6_small", FEW)
    train = build_dataset(recipe, "train")
    rows = TABLE6.rows("small", rows_of(backbone))
    assert rows[1].against == (rows[0].name, rows[2].name) and rows[2].matched == rows[1].name
    plain, grc, control = (flatten(config_to_dict(v.config)) for v in arms(TABLE6, "small", rows, recipe, train))
    assert {key for key in {**plain, **control} if plain.get(key) != control.get(key)} == {"model.feed_forward"}
    differing = {key for key in {**plain, **grc} if plain.get(key) != grc.get(key)}
    options = {f"model.memory.{option}" for option in ("name", "variant", "ratio", "bias")}
    assert differing - {"model.memory"} == options
    assert grc["model.memory.name"] == "grc" and plain["model.head_width"] == control["model.head_width"] == 128


def test_the_rows_of_the_table_and_what_is_compared() -> None:
    names = [row.name for row in TABLE6.rows("paper")]
    assert names == [f"{b}{kind}" for b in ("transformer", "bigbird", "reformer") for kind in ("", "-grc", "-control")]
    found = pairs(TABLE6.rows("small"))
    assert found == [(f"{b}-grc", f"{b}{k}") for b in ("transformer", "bigbird", "reformer") for k in ("", "-control")]
    # One reference for all needs no list of pairs.
    assert pairs(TABLE6.rows("small", "transformer,transformer-grc")) == []
    assert pairs(REPRODUCTIONS["table5"].rows("small")) == []


@pytest.mark.parametrize(("scale", "name", "tokens"), [("small", "table6_small", 64), ("paper", "table6_paper", 2000)])
def test_its_recipes(scale: str, name: str, tokens: int) -> None:
    config = load_config(TABLE6.recipes[scale])
    assert (config.name, config.data["max_length"], config.data["pad_to"]) == (name, tokens, "max")
    assert config.data["test_size"] >= 20_000 and config.training.test == {"small": "best", "paper": "both"}[scale]
    if scale == "paper":
        arena = load_config("listops_lra_paper")
        assert {**config.model, "head_width": None} == {**arena.model, "head_width": None}
        assert (config.optimizer, config.schedule) == (arena.optimizer, arena.schedule)


def test_a_table_from_rows_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["reproduce", "table6", "--rows", rows_of("transformer"), *TINY, "--seeds", "2", "--out", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    names = ["transformer", "transformer-grc", "transformer-control"]
    assert [row["name"] for row in result["variants"]] == names
    assert [result[key] for key in ("reference", "metric", "split", "rows")] == ["transformer", "accuracy", "test", 200]
    values = {row["name"]: row["values"] for row in result["variants"]}
    assert result["statistics"] == as_json(summarise(values, None))
    compared = [("transformer-grc", "transformer"), ("transformer-grc", "transformer-control")]
    assert result["pairs"] == as_json(summarise_pairs(values, compared))
    costs = {row["name"]: row["training_flops"] for row in result["variants"]}
    assert costs["transformer"] < costs["transformer-control"] == pytest.approx(costs["transformer-grc"], rel=0.005)
    for row in result["variants"]:
        interval = wilson_interval(round(sum(row["values"]) / 2 * 200), 200)
        assert row["rows_interval"] == [interval.low, interval.high]
        for folder, value in zip(row["runs"], row["values"], strict=True):
            summary = json.loads((out / folder / "summary.json").read_text(encoding="utf-8"))
            assert summary["test"]["accuracy"] == value and summary["baselines"] == result["baselines"]
    recipe = load_config("table6_small", TINY)
    train, test = (build_dataset(recipe, split).expressions() for split in ("train", "test"))
    assert result["baselines"] == root_operator_baselines(train, test)
    assert "paired differences" in printed and "baseline: root operator" in printed


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
