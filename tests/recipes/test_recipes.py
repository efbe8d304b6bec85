"""Every recipe loads and is checked; the small ones train two steps."""

from __future__ import annotations

import pytest

from cached_transformers.config import check_sections, load_config
from cached_transformers.models import create_model
from cached_transformers.resources import recipes_folder
from cached_transformers.training.metrics import read_metrics
from cached_transformers.training.optim import learning_rate
from cached_transformers.training.run import run_training

NAMES = sorted(path.stem for path in recipes_folder().glob("*.yaml"))
QUICK = ["training.steps=2", "training.evaluate_every=2", "training.log_every=1", "training.tensorboard=false"]
SHORT = ["schedule.warmup_steps=1", "training.batch_size=8", "training.evaluation_batch_size=64", "training.device=cpu"]
FEW_ROWS = ["data.train_size=64", "data.validation_size=32", "data.test_size=32"]


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_says_what_it_is(name):
    config = load_config(name)
    check_sections(config)
    assert config.name == name
    assert len(config.description) > 20


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(("digits", "demo_digits"))])
def test_the_image_recipes_train(name, tmp_path):
    train(name, tmp_path, [])


@pytest.mark.parametrize("name", ["listops_small_grc", "demo_listops"])
def test_the_small_token_recipes_train(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    train(name, tmp_path, FEW_ROWS)


def test_the_recipe_for_files_trains(tmp_path, shared):
    size = ["training.batch_size=4", "training.accumulate=1", "model.width=16", "model.depth=1", "model.heads=2"]
    config = load_config("listops_lra_grc", [*QUICK, *SHORT, *size, f"data.path={shared / 'data' / 'lra-listops'}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cached_transformers.training.tasks.evaluate", lambda *rest: {"loss": 1.0, "accuracy": 0.1})
        summary = run_training(config, tmp_path / "run")
    assert summary["task"] == "listops_tsv" and summary["test"] is None


def test_the_paper_recipe_has_the_size_and_rates_of_the_paper():
    config = load_config("listops_lra_paper")
    options = {key: value for key, value in config.model.items() if key not in ("name", "memory")}
    model = create_model("sequence_classifier", **options, vocabulary=17, classes=10, max_length=2000)
    # 13,150,218 is the count for 6 layers of width 512 with MLP 1024 and attention without biases (4 x 512 a layer).
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(13_150_218, rel=0.002)
    rates = [learning_rate(config.optimizer, config.schedule, t, config.training.steps) for t in (1000, 5000)]
    assert rates == pytest.approx([1.581e-3, 7.071e-4], rel=1e-3)


def train(name, tmp_path, overrides):
    summary = run_training(load_config(name, [*QUICK, *SHORT, *overrides]), tmp_path / "run")
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 3 and all(0.5 < loss < 10 for loss in losses)
    assert summary["steps"] == 2 and summary["baselines"]["majority class"] < 0.5
