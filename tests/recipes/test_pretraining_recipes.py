"""Recipes that pre-train on raw text: published sizes, and small ones that train, plain and with a memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import library

from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.run import run_training
from cached_lab.tasks import create_dataset
from cached_lab.tasks.recipes import load_config
from cached_lab.training.metrics import read_metrics
from cached_transformers import create_model

pytestmark = pytest.mark.usefixtures("no_run_reports")
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
