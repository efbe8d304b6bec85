"""Every recipe loads and is checked; the small ones train two steps; those of pre-training have published sizes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import library
from rich.console import Console

from cached_lab.cli.main import main
from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.run import run_training
from cached_lab.resources import recipes_folder
from cached_lab.tasks import create_dataset
from cached_lab.tasks.recipes import check_sections, load_config
from cached_lab.training.metrics import read_metrics
from cached_lab.training.optim import learning_rate
from cached_transformers import create_model

pytestmark = pytest.mark.usefixtures("no_run_reports")
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
def test_the_small_token_recipes_train(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    train(name, tmp_path, FEW_ROWS)
    baselines = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["baselines"]
    assert list(baselines) == ["majority class", "root operator", "root operator and direct digits"]
    # Beside the score of the same rows, whenever they are scored.
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["baselines"] == baselines
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert all(f"baseline: {name}" in printed and f"{value:.2%}" in printed for name, value in baselines.items())


def test_the_recipe_for_files_trains(tmp_path, shared):
    size = ["training.batch_size=4", "training.accumulate=1", "model.width=16", "model.depth=1", "model.heads=2"]
    config = load_config("listops_lra_grc", [*QUICK, *SHORT, *size, f"data.path={shared / 'data' / 'lra-listops'}"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cached_lab.tasks.classification.task.evaluate", lambda *rest: {"loss": 1.0, "accuracy": 0.1})
        summary = run_training(config, tmp_path / "run")
    assert summary["task"] == "listops_tsv" and summary["test"] is None


ARENA = ["listops_lra_repository", "listops_lra_article", "listops_lra_paper"]
# Of each: the Transformer (and BigBird, whose pattern has no parameters), and the Reformer, which has no output
# projection and no keys beside its queries. Counted from the arena's code.
ARENA_SIZES = {
    "listops_lra_repository": (8_948_746, 6_851_594),
    "listops_lra_article": (19_983_370, 16_837_642),
    "listops_lra_paper": (13_150_218, 10_004_490),
}


@pytest.mark.parametrize("name", ARENA)
def test_the_recipes_of_the_arena_have_its_sizes_and_rates(name):
    config = load_config(name)
    sizes = {"vocabulary": 17, "classes": 10, "max_length": 2000}
    options = {key: value for key, value in config.model.items() if key not in ("name", "memory")}
    reformer = {**options, "shared_query_key": True, "project_output": False}
    counts = []
    for model in (options, reformer):
        with torch.device("meta"):
            counts.append(count_parameters(create_model("sequence_classifier", **model, **sizes)))
    assert tuple(counts) == ARENA_SIZES[name]
    assert (config.optimizer.decay, config.optimizer.betas, config.training.clip_norm) == ("all", [0.9, 0.98], None)
    assert [config.training.steps, config.training.batch_size, config.data["pad_to"]] == [5000, 32, "max"]
    rates = [learning_rate(config.optimizer, config.schedule, t, 5000) for t in (500, 1000, 2000, 5000)]
    assert rates == pytest.approx([7.906e-4, 1.581e-3, 1.118e-3, 7.071e-4], rel=1e-3)


@pytest.mark.parametrize("name", ARENA)
def test_the_recipes_of_the_arena_train_when_they_are_made_small(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    lengths = ["data.max_depth=4", "data.max_args=4", "data.min_length=10", "data.max_length=64"]
    widths = ["model.width=16", "model.depth=1", "model.heads=2", "model.feed_forward=16"]
    train(name, tmp_path, [*FEW_ROWS, *lengths, *widths])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["test"]["step"] == summary["best"]["step"] and summary["test_last"]["step"] == 2


def train(name, tmp_path, overrides):
    console = Console(file=io.StringIO(), width=200)
    summary = run_training(load_config(name, [*QUICK, *SHORT, *overrides]), tmp_path / "run", console=console)
    assert "baselines (accuracy): majority class" in console.file.getvalue()
    losses = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 3 and all(0.5 < loss < 10 for loss in losses)
    assert summary["steps"] == 2 and summary["baselines"]["majority class"] < 0.5


@pytest.mark.slow
def test_short_listops_is_learned_beyond_its_root_operator(tmp_path, monkeypatch):
    """Published scores of the long form hardly do that; data and model are right if it happens here."""
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    sizes = ["data.train_size=20000", "data.test_size=2000", "training.steps=250", "training.evaluate_every=250"]
    plain = ["model.memory=null", "training.tensorboard=false", "training.device=cpu", "data.pad_to=batch"]
    summary = run_training(load_config("table6_small", [*sizes, *plain]), tmp_path / "run")
    assert summary["test"]["accuracy"] > summary["baselines"]["root operator"] + 0.05


BART = dict(d_model=768, encoder_layers=6, encoder_attention_heads=12, encoder_ffn_dim=3072)
BART |= dict(decoder_layers=6, decoder_attention_heads=12, decoder_ffn_dim=3072)
T5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12}
SWITCH = {**T5, "num_experts": 8, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6}
# Recipe, transformers' classes and options, published number of parameters, and how many of them we do without: the
# first two rows of BART's two tables of positions, which nothing reads, and GPT-2's table of positions.
PUBLISHED = [
    ("bart_base", "BartConfig", "BartForConditionalGeneration", BART, 139_420_416, 2 * 2 * 768),
    ("t5_base", "T5Config", "T5ForConditionalGeneration", T5, 222_903_552, 0),
    ("switch_base_8", "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", SWITCH, 619_339_008, 0),
    ("gpt2", "GPT2Config", "GPT2LMHeadModel", {}, 124_439_808, 1024 * 768),
]
SMALL = ["bart_small", "t5_small", "switch_small", "gpt_small"]


@pytest.mark.parametrize(("name", "config", "model", "options", "count", "without"), PUBLISHED)
def test_published_sizes(name: str, config: str, model: str, options: Any, count: int, without: int) -> None:
    transformers = library("transformers")
    ours = load_config(name)
    sizes = {"vocabulary": ours.data["vocabulary_size"], **ours.model}  # as the data would set it
    with torch.device("meta"):
        theirs = getattr(transformers, model)(getattr(transformers, config)(**options))
        built = create_model(**sizes)
    theirs.tie_weights()
    assert count_parameters(theirs) == count
    assert count_parameters(built) == count - without
    if name != "gpt2":
        assert built.vocabulary == theirs.config.vocab_size


@pytest.mark.parametrize("name", ["bart_base", "t5_base", "switch_base_8"])
def test_vocabularies_of_the_published_recipes_have_room_for_the_special_ids(name: str, tmp_path: Path) -> None:
    """The data's ids are as many as the model's, if its tokenizer gets as many as it asks for."""
    config = load_config(name)
    (tmp_path / "text.txt").write_text("some words of a text, again and again. " * 200, encoding="utf-8")
    changes = {"path": tmp_path / "text.txt", "tokenizer": "word", "vocabulary_size": 5}
    data = create_dataset(split="train", **{**config.data, **changes})
    special = data.describe()["vocabulary"] - 5  # type: ignore[operator]
    assert config.data["vocabulary_size"] + special == config.model["vocabulary"]


def quick(tmp_path: Path, *overrides: str) -> list[str]:
    text = "the cat sat on the mat . a dog ran to it , and why not ? it slept ."
    words = text.split()
    lines = [" ".join(words[index % 7 :] + words[: index % 5]) for index in range(400)]
    folder = tmp_path / "text"
    folder.mkdir(exist_ok=True)
    for split, part in {"train": lines, "valid": lines[:40], "test": lines[40:80]}.items():
        (folder / f"wiki.{split}.tokens").write_text(" \n".join(part) + "\n", encoding="utf-8")
    data = [f"data.path={folder}", "data.tokenizer=word", "data.vocabulary_size=null"]
    model = ["model.width=16", "model.heads=2", "model.feed_forward=32", "schedule.warmup_steps=1"]
    training = ["training.steps=2", "training.batch_size=8", "training.log_every=1", "training.evaluate_every=2"]
    return [*data, *model, *training, "training.tensorboard=false", "training.device=cpu", *overrides]


@pytest.mark.parametrize("memory", ["null", "grc"])
@pytest.mark.parametrize("words", [*SMALL, "bart_small data.objective=prefix_lm"])
def test_the_small_recipes_train(words: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *more = words.split()
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    if name == "gpt_small":
        changes = ["training.segment_length=32", f"model.memory={memory}".replace("=grc", "=grc_stream")]
    else:
        changes = ["data.max_length=32", f"model.memory={memory}"]
    if name == "switch_small":
        changes.append("model.experts.experts=4")
    config = load_config(name, quick(tmp_path, *changes, *more))
    summary = run_training(config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == 2 and all(0.5 < loss < 8 for loss in losses)
    assert summary["test"]["loss"] > 0
    dropped = [line.get("dropped_tokens") for line in lines if line["split"] == "train"]
    assert all(0 <= share < 1 for share in dropped) if name == "switch_small" else dropped == [None, None]
