"""The recipes for translation: they match the papers, and train two steps on synthetic data."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from translation.made import write_corpus

from cached_lab.cli.main import main
from cached_lab.experiments import run as run_module
from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.run import run_training
from cached_lab.resources import recipes_folder
from cached_lab.tasks.recipes import load_config
from cached_lab.training.optim import learning_rate
from cached_transformers import create_model

NAMES = sorted(path.stem for path in recipes_folder().glob("*.yaml") if path.stem.startswith(("iwslt", "multi30k")))
TRACKS = {f"iwslt{pair}" for pair in ("14_de_en", "14_es_en", "14_en_fr", "15_de_en", "15_en_vi", "15_cs_en")}

QUICK = ["training.steps=2", "training.evaluate_every=1", "training.log_every=1", "training.tensorboard=false"]
FEW = ["schedule.warmup_steps=1", "training.batch_tokens=300", "training.keep=2"]
FEW += ["training.average_last=2", "training.device=cpu"]

SMALL = ["data.vocabulary_size=280", "data.max_length=64", "model.depth=1", "model.width=32", "evaluation.tokens=4"]


def test_every_track_has_both() -> None:
    assert set(NAMES) == {f"{track}_{kind}" for track in (*TRACKS, "multi30k_en_de") for kind in ("plain", "grc")}


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith("_grc")])
def test_the_two_differ_in_the_memory_alone(name: str) -> None:
    grc, plain = load_config(name), load_config(name.replace("_grc", "_plain"))
    assert grc.model.pop("memory") == {"name": "grc", "variant": "algorithm1", "ratio": 0.5, "length": 64}
    for section in ("data", "model", "training", "optimizer", "schedule", "evaluation"):
        assert getattr(grc, section) == getattr(plain, section)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("iwslt")])
def test_the_tracks_have_the_settings_of_the_paper(name: str) -> None:
    config = load_config(name)
    campaign, source, target, _ = name.split("_")
    assert (config.data["source"], config.data["target"]) == (source, target) and campaign in ("iwslt14", "iwslt15")
    settings = config.training
    assert (settings.batch_tokens, settings.label_smoothing, settings.average_last) == (4096, 0.1, 10)
    assert config.data["max_length"] == 512 and config.optimizer.betas == [0.9, 0.98]
    assert config.optimizer.weight_decay == 1e-4 and config.model["dropout"] == 0.3
    rates = [learning_rate(config.optimizer, config.schedule, t, settings.steps) for t in (400, 4000, 16_000)]
    assert rates == pytest.approx([1.5e-4, 1.5e-3, 7.5e-4], rel=1e-3)


def test_the_plain_model_has_the_size_of_transformer_iwslt_de_en() -> None:
    config = load_config("iwslt14_de_en_plain")
    with torch.device("meta"):
        model = create_model(**config.model, vocabulary=10_000)
    width, hidden = 512, 1024
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * hidden + width + hidden
    encoder = 6 * (attention + feed_forward + 4 * width) + 2 * width
    decoder = 6 * (2 * attention + feed_forward + 6 * width) + 2 * width
    assert count_parameters(model) == encoder + decoder + 10_000 * width


def test_transformer_tiny_is_that_of_its_paper() -> None:
    model = load_config("multi30k_en_de_plain").model
    assert [model[key] for key in ("width", "depth", "heads", "feed_forward")] == [128, 4, 4, 256]


@pytest.mark.parametrize("name", ["iwslt14_de_en_grc", "iwslt15_en_vi_plain", "multi30k_en_de_grc"])
def test_they_train_two_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_module, "write_report", lambda *_: None)
    corpus = write_corpus(tmp_path / "corpus", (60, 6, 6))
    config = load_config(name)
    renamed = {"train": "train", "val": config.data.get("validation") or "valid"}
    renamed["test"] = config.data.get("test") or {"multi30k": "test_2016_flickr"}.get(config.data["name"], "test")
    for file in list(corpus.iterdir()):
        language = {".de": config.data.get("source", "en"), ".en": config.data.get("target", "de")}[file.suffix]
        file.rename(corpus / f"{renamed[file.stem]}.{language}_")
    for file in list(corpus.iterdir()):
        file.rename(file.with_suffix(file.suffix.rstrip("_")))
    chosen = load_config(name, [*QUICK, *FEW, *SMALL, f"data.path={corpus}"])
    summary = run_training(chosen, tmp_path / "run")
    assert summary["steps"] == 2 and math.isfinite(summary["test"]["loss"]) and summary["test"]["step"] == 2
    assert (summary["variant"] == "grc") is name.endswith("grc")
    assert "bleu" in json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["test"]


@pytest.mark.slow
def test_multi30k_from_training_to_translation(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 steps teach no translation; that they end below the entropy of single words shows the path from end to end."""
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))
    changes = ["training.steps=60", "training.evaluate_every=60", "schedule.warmup_steps=20", "training.device=cpu"]
    data = [f"data.path={shared / 'data' / 'multi30k'}", "training.tensorboard=false", "evaluation.tokens=20"]
    out = str(tmp_path / "run")
    assert main(["train", "multi30k_en_de_plain", *changes, *data, "--out", out]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["test"]["loss"] < 6
    text = tmp_path / "some.en"
    text.write_text("A man is riding a bike.\n\nTwo dogs play.\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["translate", out, "--input", str(text), "--output", str(tmp_path / "some.de"), "--device", "cpu"]) == 0
    said = (tmp_path / "some.de").read_text(encoding="utf-8").split("\n")
    assert len(said) == 4 and said[0] and not said[1] and said[2]
