"""Training on documents: the curriculum, exact resume within a stage, evaluation by length, and refused options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from training.same_run import final
from training.small_language import CPU

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.experiments.evaluate import Evaluation
from cached_lab.experiments.run import run_training
from cached_lab.tasks.documents.task import DocumentClassification
from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import config_from_dict, fill_from_data, load_config
from cached_lab.training.config import RunConfig
from cached_lab.training.progress import second_score
from cached_lab.yaml_tree import apply_override
from cached_transformers.loops.curriculum import AdaptiveCurriculum

pytestmark = pytest.mark.usefixtures("no_run_reports")


def recipe(*overrides: str) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "name": "documents",
        "data": {
            **{"name": "planted_documents", "segment_length": 8, "segments": 3, "noise": 4},
            **{"train_size": 48, "validation_size": 12, "test_size": 12},
        },
        "model": {
            **{"name": "sequence_classifier", "width": 8, "depth": 1, "heads": 2, "feed_forward": 16, "dropout": 0.1},
            **{"positions": "rotary", "memory": {"name": "rmt", "length": 2}},
        },
        "training": {
            **{"steps": 12, "batch_size": 6, "evaluate_every": 3, "log_every": 2, "tensorboard": False},
            **{"device": "cpu", "curriculum": [1, 2, 3], "solved": 0.02, "keep": 9},
        },
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"name": "constant"},
    }
    for override in overrides:
        apply_override(tree, override)
    return tree


def made(config: RunConfig) -> Any:
    train, validation = (build_dataset(config, split) for split in ("train", "validation"))
    config = fill_from_data(config, train.describe())
    return make_task(config, build_model(config), train, validation, CPU)


def task_of(*overrides: str) -> DocumentClassification:
    task = made(config_from_dict(recipe(*overrides)))
    assert isinstance(task, DocumentClassification)
    return task


def test_a_curriculum_draws_segments_and_its_stages_end() -> None:
    task = task_of()
    lengths, batches = [], task.batches(0)
    for _ in range(60):
        lengths.append(next(batches).inputs.shape[1] // 8)
        if len(lengths) % 20 == 0:
            task.validated({"stage_accuracy": 0.5})
    assert [set(lengths[:20]), set(lengths[20:40]), set(lengths[40:])] == [{1}, {1, 2}, {1, 2, 3}]
    assert task.batches(41) is not batches and next(task.batches(41)).inputs.shape[1] // 8 == lengths[41]
    assert task_of("training.curriculum=null", "training.solved=null").curriculum is None
    task = task_of("training.solved=0.9")
    for accuracy, stage in ((0.89, 0), (0.9, 1), (0.5, 1), (1.0, 2), (1.0, 2)):
        task.validated({"stage_accuracy": accuracy, "accuracy": 1.0})
        assert isinstance(task.curriculum, AdaptiveCurriculum) and task.curriculum.stage == stage
    scores, _ = task.evaluate(task.model, task.validation)
    assert second_score(scores).endswith("% at 3 segments, the stage of the curriculum")
    assert scores["stage_segments"] == 3 and scores["stage_accuracy"] == scores["accuracy"] and scores["rows"] == 12
    tested, _ = task.evaluate(task.model, build_dataset(task.config, "test"))
    assert set(tested) == {"loss", "accuracy", "rows"}


def test_pieces_of_a_batch_and_replay_change_nothing(tmp_path: Path) -> None:
    """Without dropout: a piece draws its own."""
    weights = []
    for name, option in {"whole": "accumulate=1", "pieces": "accumulate=3", "replay": "replay=true"}.items():
        options = ["model.dropout=0", "training.steps=4", f"training.{option}", "training.test=none"]
        config = config_from_dict(recipe(*options))
        run_training(config, tmp_path / name)
        weights.append(final(tmp_path / name).weights)
    for other in weights[1:]:
        for name, value in weights[0].items():
            torch.testing.assert_close(other[name], value, msg=name)


def test_documents_of_any_length_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run_training(config_from_dict(recipe("training.steps=2")), run)
    assert main(["evaluate", str(run), "--segments", "1,40", "--memory", "carry,reset,shuffle", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["scores"]
    kept = [(row["memory"], row["segments"], row["tokens"], row["rows"]) for row in rows]
    assert kept == [(m, n, 8 * n, 12) for m in ("carry", "reset", "shuffle") for n in (1, 40)]
    assert rows[0]["accuracy"] == rows[2]["accuracy"] == rows[4]["accuracy"], "one segment needs no memory"
    assert found["baselines"] == {"majority class": pytest.approx(1 / 6)}
    assert json.loads((run / "evaluation.json").read_text(encoding="utf-8"))["scores"] == rows
    assert main(["evaluate", str(run)]) == 0
    assert "24" in capsys.readouterr().out, "as long as they are: 3 segments of 8 tokens"


def test_weights_of_short_segments_go_on_with_longer_ones(tmp_path: Path) -> None:
    """Two recipes with the same model and other segments; the second starts from the weights of the first."""
    short, million = (load_config(name) for name in ("rmt_documents", "rmt_million_tokens"))
    assert short.model == million.model and short.data["kind"] == million.data["kind"]
    assert million.training.initial_weights == f"runs/{short.name}"
    run_training(config_from_dict(recipe("training.steps=2")), tmp_path / "short")
    first = f"training.initial_weights={tmp_path / 'short'}"
    still = config_from_dict(
        recipe(first, "data.segment_length=16", "training.steps=1", "optimizer.learning_rate=1e-12")
    )
    run_training(still, tmp_path / "long")
    for name, value in final(tmp_path / "short").weights.items():
        torch.testing.assert_close(final(tmp_path / "long").weights[name], value, rtol=0, atol=1e-9, msg=name)


def test_two_passes_with_the_reordering_head_train(tmp_path: Path) -> None:
    made = {"train_size": 12, "validation_size": 6, "test_size": 6}
    small = ["model.width=8", "model.heads=2", "training.steps=2", "training.batch_size=4", "training.evaluate_every=2"]
    small += ["training.tensorboard=false", "training.device=cpu", "schedule.warmup_steps=1"]
    config = load_config("ernie_doc_documents", [*small, *(f"data.{key}={value}" for key, value in made.items())])
    summary = run_training(config, tmp_path / "run")
    assert config.training.passes == 2 and summary["test"]["rows"] == 6


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.curriculum=[1,9]"], r"curriculum=\[1, 9\] asks for more segments than the 3"),
        (["model.name=language_model", "model.memory=null"], "'language_model'"),
        (["training.metric=perplexity"], "training.metric='perplexity' does not suit documents; take accuracy or loss"),
        (["model.max_length=4"], "model.max_length=4 is below data.segment_length=8"),
        (["training.solved=null"], r"curriculum=\[1, 2, 3\] needs training.solved"),
        (["training.curriculum=[2,1]"], r"training.curriculum: stages=\[2, 1\] must grow"),
        (["training.solved=1.5"], "training.curriculum: solved=1.5 must be an accuracy"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], message: str) -> None:
    refuses(message, task_of, *overrides)


@pytest.mark.parametrize("option", ["curriculum=[1,2]", "replay=true"])
def test_settings_of_documents_are_refused_elsewhere(option: str) -> None:
    extra = ["training.solved=0.5"] if option.startswith("curriculum") else []
    refuses("'digits'", made, load_config("demo_digits", [f"training.{option}", *extra]))


def test_lengths_are_refused_for_other_data(tmp_path: Path) -> None:
    config = load_config("demo_digits")
    evaluation = Evaluation(tmp_path, config, "best", "test", ["carry"], segments=[1, 2])
    refuses(r"1,2.*'digits'", evaluation.score, "cpu")


def learned(memory: Any, tmp_path: Path) -> float:
    options = ["data.segment_length=12", "data.train_size=6000", "data.validation_size=120", "data.test_size=240"]
    options += ["model.width=32", "model.dropout=0", "model.depth=2", "training.steps=300", "training.batch_size=32"]
    options += ["training.evaluate_every=50", "training.solved=0.9", "optimizer.learning_rate=0.003"]
    config = config_from_dict(recipe(*options, f"model.memory={json.dumps(memory)}", "training.test=last"))
    accuracy = run_training(config, tmp_path / "run")["test"]["accuracy"]
    return float(accuracy)


@pytest.mark.slow
def test_a_fact_is_remembered_over_three_segments(tmp_path: Path) -> None:
    assert learned({"name": "rmt", "length": 2}, tmp_path / "rmt") > 0.9
    assert learned(None, tmp_path / "plain") < 0.3
