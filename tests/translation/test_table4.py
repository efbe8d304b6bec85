"""`cached reproduce table4`: plain, GRC in both forms, and plain at equal operations; a small table from end to end."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
import torch

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.experiments.costs.flops import count_flops
from cached_lab.experiments.reproductions import REPRODUCTIONS
from cached_lab.experiments.reproductions.arms import arms
from cached_lab.experiments.reproductions.base import pairs
from cached_lab.experiments.statistics import summarise_pairs
from cached_lab.tasks.kinds import model_arguments
from cached_lab.tasks.recipes import load_config
from cached_transformers.memories.grc.shared_cache import caches

NAMES = ["transformer", "transformer-paper", "transformer-released", "transformer-wider"]
TINY = ["data.name=translation", "data.source=de", "data.target=en", "data.vocabulary_size=280", "data.max_length=64"]
TINY += ["model.width=16", "model.depth=1", "model.heads=2", "model.feed_forward=64", "training.steps=4"]
TINY += ["training.batch_tokens=400", "training.evaluate_every=4", "training.tensorboard=false"]
TINY += ["evaluation.bleu_sentences=2", "evaluation.beams=2", "evaluation.tokens=8", "schedule.warmup_steps=1"]


def test_rows_cost_what_they_are_said_to_cost(corpus: Path) -> None:
    table = REPRODUCTIONS["table4"]
    recipe = load_config("table4_small", [*TINY, f"data.path={corpus}"])
    train = build_dataset(recipe, "train")
    variants = {v.name: v for v in arms(table, "small", table.rows("small"), recipe, train)}
    assert list(variants) == NAMES
    inputs, keywords = model_arguments(train.collate([train[i] for i in range(recipe.training.batch_size)]))
    counted = {n: count_flops(build_model(v.config), *inputs, mode="train", **keywords) for n, v in variants.items()}
    for name, variant in variants.items():
        assert variant.facts["training_flops"] == round(counted[name] / recipe.training.batch_size)
    assert counted["transformer-wider"] == pytest.approx(counted["transformer-released"], rel=0.005)
    assert counted["transformer"] < counted["transformer-paper"] < 1.2 * counted["transformer-released"]
    for name in ("transformer-paper", "transformer-released"):
        (cache,) = caches(build_model(variants[name].config))  # in the encoder's layer only
        assert cache.cache_MC.shape == (64, 8)
        assert cache.attend == ("mean" if name.endswith("paper") else "sample")


def test_what_is_compared() -> None:
    found = pairs(REPRODUCTIONS["table4"].rows("small"))
    assert found == [(f"transformer-{f}", f"transformer{o}") for f in ("paper", "released") for o in ("", "-wider")]


@pytest.mark.parametrize("name", ["table4_small", "table4_small_iwslt14", "table4_paper"])
def test_its_recipes_are_scored_by_bleu_of_what_was_not_chosen(name: str) -> None:
    config = load_config(name)
    assert config.training.metric == "bleu" and config.model["memory"]["length"] == 64
    assert config.training.test == "last" or config.training.average_last == 10


def test_a_table_from_rows_to_report(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    chosen = ["--rows", "transformer,transformer-paper", "--seeds", "2", "--data", str(corpus), "--out", str(out)]
    arguments = ["reproduce", "table4", *chosen, *TINY]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert [result[key] for key in ("metric", "split")] == ["bleu", "test"]
    values = {row["name"]: row["values"] for row in result["variants"]}
    assert all(0 <= value <= 100 for row in values.values() for value in row)
    for row in result["variants"]:
        summaries = [json.loads((out / run / "summary.json").read_text(encoding="utf-8")) for run in row["runs"]]
        assert row["values"] == [summary["test"]["bleu"] for summary in summaries]
        intervals = torch.tensor([summary["test"]["bleu_interval"] for summary in summaries], dtype=torch.float64)
        assert row["rows_interval"] == pytest.approx(intervals.mean(0).tolist())
        assert all((out / run / "translations.txt").is_file() for run in row["runs"])
    found = summarise_pairs(values, [("transformer-paper", "transformer")])
    tested = [*result["statistics"], *result.get("pairs", [])]
    difference = [row["difference"] for row in tested if row["difference"]]
    assert difference[0]["mean"] == pytest.approx(found[0]["difference"]["mean"])
    assert "interval by rows" in printed and "transformer-paper" in printed and "encoder_decoder + grc" in printed
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "bleu" in report and "the mean of the runs' bootstrap intervals" in html.unescape(report)
    run_report = (out / result["variants"][0]["runs"][0] / "report.html").read_text(encoding="utf-8")
    assert "tokenised bleu" in run_report and "chrf" in run_report
    assert main(arguments) == 0
    assert "4 finished runs kept, 0 to train" in capsys.readouterr().out
