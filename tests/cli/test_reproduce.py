"""`cached reproduce`: rows of equal size, from the same tokens and seeds; a small table from end to end; refusals."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_model, with_memory
from cached_lab.experiments.probes.settings import stream_memories
from cached_lab.experiments.reproductions import REPRODUCTIONS
from cached_lab.experiments.reproductions.arms import arms
from cached_lab.experiments.variants import Variant, equal_parameters
from cached_lab.tasks.recipes import load_config
from cached_lab.training.config import RunConfig, config_to_dict
from cached_lab.yaml_tree import flatten

pytestmark = pytest.mark.usefixtures("no_run_reports")
TABLE5 = REPRODUCTIONS["table5"]
SMALL = {"vocabulary": 4000, "sentence_ends": (4, 365), "paragraph_ends": (1,)}
LARGE = {"vocabulary": 267_735, "sentence_ends": (4, 365), "paragraph_ends": (1,)}
TINY = ["model.width=32", "model.depth=2", "model.heads=2", "model.feed_forward=64", "model.memory.length=8"]
TINY += ["training.steps=3", "training.batch_size=2", "training.segment_length=8", "training.evaluate_every=3"]
TINY += ["training.evaluation_batch_size=2", "training.tensorboard=false", "schedule.warmup_steps=1"]


@pytest.fixture
def wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few hundred words in the layout of WikiText-2."""
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    folder, draw = tmp_path / "wikitext-2", random.Random(0)
    folder.mkdir()
    known = ["the", "of", "and", "a", "river", "flows", "north", ".", "it", "was", "<unk>"]
    for split, words in {"train": 600, "valid": 100, "test": 100}.items():
        text = " ".join(draw.choice(known) for _ in range(words))
        (folder / f"wiki.{split}.tokens").write_text(f" \n = River = \n \n {text} \n", encoding="utf-8")
    return folder


class Described:
    """Data with a description and nothing else."""

    def __init__(self, description: dict[str, Any]) -> None:
        self.description = description

    def describe(self) -> dict[str, Any]:
        return self.description


def table5(scale: str, recipe: RunConfig, data: dict[str, Any], chosen: str) -> list[Variant]:
    return arms(TABLE5, scale, TABLE5.rows(scale, chosen), recipe, Described(data))


@pytest.mark.parametrize(
    ("scale", "data"),
    [pytest.param("small", SMALL, id="small"), pytest.param("paper", LARGE, id="paper", marks=pytest.mark.slow)],
)
def test_rows_are_of_equal_size_and_differ_in_their_memory_alone(scale: str, data: dict[str, Any]) -> None:
    recipe = load_config(TABLE5.recipes[scale])
    variants = table5(scale, recipe, data, "all")
    names = [variant.name for variant in variants]
    assert names[:4] == ["transformer_xl", "memory_transformer", "rmt", "grc_stream"]
    assert set(names) == set(stream_memories())
    counts = []
    for variant in variants:
        with torch.device("meta"):
            model = build_model(variant.config)
        counts.append(sum(p.numel() for p in model.parameters()))
        assert variant.facts["matched_parameters"] == counts[-1]
        assert variant.config.model["feed_forward"] == variant.facts["feed_forward"]
    assert max(counts) / min(counts) < 1.005
    base = flatten(config_to_dict(variants[0].seeded(3)))
    for variant in variants[1:]:
        other = flatten(config_to_dict(variant.seeded(3)))
        differing = {key for key in {**base, **other} if base.get(key) != other.get(key)}
        assert {key for key in differing if not key.startswith("model.memory.")} <= {
            "model.feed_forward",
            "model.positions",
            "model.shared_biases",
            *(["model.scale_embedding"] if variant.name == "feedback" else []),
        }


def test_the_largest_row_keeps_its_width_and_one_that_cannot_is_refused() -> None:
    recipe = load_config("table5_small")
    paper, every = (table5("small", recipe, SMALL, chosen) for chosen in ("paper", "all"))
    assert every[: len(paper)] == paper
    widths = {variant.name: variant.facts["feed_forward"] for variant in every}
    assert min(widths[variant.name] for variant in paper) == recipe.model["feed_forward"] == widths["grc_stream"]
    assert widths["memformer"] < recipe.model["feed_forward"]
    assert table5("small", recipe, SMALL, "rmt,grc_stream") == paper[2:]
    recipe = load_config("table5_small")
    recipe = dataclasses.replace(recipe, model={**recipe.model, "vocabulary": 100})
    big = {"name": "crtn", "segment": 64, "regions": 1, "topk": 1}
    variants = [Variant(name, with_memory(recipe, memory)) for name, memory in (("plain", None), ("big", big))]
    refuses(r"big has \d+ parameters with feed_forward=1, not \d+", equal_parameters, variants, deciding=1)


def test_rows_are_set_as_the_table_says() -> None:
    recipe = load_config("table5_small", ["model.memory.length=48"])
    rows = {v.name: v for v in table5("small", recipe, SMALL, "all")}
    assert rows["transformer_xl"].config.model["memory"] == {"name": "transformer_xl", "length": 48}
    assert rows["rmt"].config.model["memory"] == {"name": "rmt", "length": 10, "cache": 48}
    assert rows["grc_stream"].config.model["memory"] == {"name": "grc_stream", "length": 48, "ratio": 0.5}
    assert rows["segatron"].config.model["memory"]["sentence_ends"] == [4, 365]
    assert rows["rmt"].facts["protocol"] == "segment 64, state carried, length=10 cache=48"
    assert rows["segatron"].facts["protocol"] == "segment 64, state carried, length=48"
    assert rows["grc_stream"].config.model["positions"] == "relative"
    assert "positions" not in rows["segatron"].config.model
    recipe = load_config("table5_small")
    refuses(r"model\.memory=None", TABLE5.rows("small", "rmt")[0].config, with_memory(recipe, None))


def test_a_table_from_text_to_report(wikitext: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["reproduce", "table5", "--data", str(wikitext), "--out", str(out), *TINY]
    assert main([*arguments, "--seeds", "1"]) == 0
    printed = capsys.readouterr().out
    result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in result["variants"]] == [row.name for row in TABLE5.paper("small")]
    assert "pairs" not in result and "rows" not in result and (out / "compare.md").is_file()
    assert [result[key] for key in ("reference", "metric", "split")] == ["transformer_xl", "perplexity", "test"]
    assert all(row["parameters"] == row["matched_parameters"] for row in result["variants"])
    counts = [row["parameters"] for row in result["variants"]]
    assert max(counts) / min(counts) < 1.005
    for row in result["variants"]:
        for folder, value in zip(row["runs"], row["values"], strict=True):
            summary = json.loads((out / folder / "summary.json").read_text(encoding="utf-8"))
            assert summary["test"]["perplexity"] == value and summary["steps"] == 3
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "<th" in report and "protocol" in report and "segment 8, state carried, length=10 cache=8" in report
    assert re.search(r" memory_transformer .* segment 8, state carried, length=10 cache=8", printed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tabel5 --data {data}", "'tabel5'; did you mean 'table5'"),
        ("table5", "--data"),
        ("table5 --scale paper", "WikiText-103"),
        ("table5 --data {data}/nowhere", "nowhere"),
        ("table5 --data {test_only} --scale paper", "'train'"),
        ("table5 --data {data} --rows rtm", "'rtm'; did you mean 'rmt'"),
        ("table5 --data {data} --rows rmt,rmt", "--rows 'rmt,rmt'"),
        ("table5 --data {data} --jobs 0", "--jobs 0"),
        ("table5 --data {data} training.seed=1", "training.seed"),
        ("table5 --data {data} data.path=x", "data.path"),
        ("table5 --data {data} model.memory=rmt", "model.memory='rmt'"),
        *((f"table5 --data {{data}} model.{option}", option) for option in ("heads=0", "heads=999")),
        ("table1", "CIFAR-10"),
        ("table1 --data {data} model.memory=convolution", "model.memory='convolution'"),
        ("table4", "Multi30k En-De"),
        ("table4 --data {data}", "'train'"),
        ("table6 --data folder", "--data folder"),
        ("table6 --rows transformer-grc model.memory=rmt", "model.memory='rmt'"),
        ("table9 --rows PVT-tiny", "did you mean 'PVT-Tiny'"),
        ("table9 --rows ViT-S,ViT-S", "ViT-S,ViT-S"),
        ("table9 btach=1", "'btach'; did you mean 'batch'"),
        ("table9 batch=0", "batch=0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(
    wikitext: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    folders = {"data": wikitext, "test_only": tmp_path / "test_only"}
    folders["test_only"].mkdir()
    (folders["test_only"] / "wiki.test.tokens").write_text(" = A = \n b c \n", encoding="utf-8")
    assert main(["reproduce", *arguments.format(**folders).split(), "--out", str(tmp_path / "out")]) == 2
    assert said.format(**folders) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
