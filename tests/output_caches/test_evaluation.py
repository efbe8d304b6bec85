"""`cached evaluate RUN --output-cache`."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.made import train_on_bytes

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_dataset
from cached_lab.experiments.load import load_run
from cached_lab.output_caches import NeuralCache
from cached_lab.output_caches.evaluation import GRIDS

NEURAL = ("--output-cache", "neural")
KNN = ("--output-cache", "knn")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a text that repeats itself, which has hardly trained."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trained")
        patch.setenv("CACHED_TRANSFORMERS_CACHE", str(folder / "cache"))
        patch.setattr("cached_lab.experiments.run.write_report", lambda *_: None)
        return train_on_bytes(folder, "training.evaluation_batch_size=3", "training.steps=20")


@pytest.fixture(autouse=True)
def kept(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(trained.parent / "cache"))


def evaluated(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["evaluate", str(trained), *words, "--json", "--device", "cpu"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_missing_options_are_tuned_and_a_repetitive_text_becomes_easier(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluated(trained, capsys, *NEURAL, "neural.size=200")
    plain, cached = result["scores"]
    about = result["output_cache"]
    assert [plain["output_cache"], cached["output_cache"]] == ["none", "neural"]
    assert cached["loss"] < plain["loss"] - 0.1 and cached["perplexity"] == pytest.approx(math.exp(cached["loss"]))
    assert about["tuned"] == ["theta", "lambda"] and about["options"]["lambda"] > 0 and about["options"]["size"] == 200
    assert about["validation"]["with"] < about["validation"]["without"] and set(about["seconds"]) > {"tune", "score"}
    assert evaluated(trained, capsys)["scores"][0]["loss"] == pytest.approx(plain["loss"], rel=1e-6)

    given = [f"neural.{name}={about['options'][name]}" for name in ("theta", "lambda")]
    again = evaluated(trained, capsys, *NEURAL, *given, "neural.size=200")
    assert again["scores"] == result["scores"] and again["output_cache"]["tuned"] == []


def test_the_score_is_that_of_a_loop_over_rows(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twin: each row of the split by itself, segment by segment, full distributions."""
    result = evaluated(trained, capsys, *NEURAL, "neural.size=30", "neural.theta=0.3", "neural.lambda=0.4")
    config, model, _ = load_run(trained, "tested")
    model.eval()
    dataset = build_dataset(config, "test")
    tokens, length = [dataset.tokenizer.start, *dataset.tokens.tolist()], config.training.segment_length
    bounds = [row * (len(tokens) - 1) // 3 for row in range(4)]
    cache, nats = NeuralCache(30, 0.3, 0.4), 0.0
    for first, last in pairwise(bounds):
        state = copies = None
        for begin in range(first, last, length):
            row = torch.tensor([tokens[begin : min(begin + length, last) + 1]])
            with torch.no_grad():
                state = model.init_state(1) if state is None else state
                out = model.stack(model.embed(row[:, :-1], state)[0], state)
                mixed, copies = cache(model.answer(out.outputs), out.outputs, row[:, 1:], copies)
            state = out.state
            nats -= float(mixed.gather(2, row[:, 1:, None]).sum())
    assert result["scores"][1]["loss"] == pytest.approx(nats / len(dataset), rel=1e-5)


def test_neighbours_of_the_training_split(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = evaluated(trained, capsys, *KNN, "knn.k=16")
    plain, cached = result["scores"]
    about = result["output_cache"]
    assert about["tuned"] == ["temperature", "lambda"] and about["options"]["key"] == "feed_forward"
    assert cached["loss"] < plain["loss"] - 0.1
    config, _, _ = load_run(trained, "tested")
    assert about["entries"] == len(build_dataset(config, "train"))
    given = [f"knn.{name}={about['options'][name]}" for name in ("temperature", "lambda")]
    other = evaluated(trained, capsys, *KNN, "knn.k=16", *given, "knn.key=last_hidden")
    assert other["scores"][0] == plain and other["scores"][1]["loss"] != cached["loss"]
    monkeypatch.setattr(torch.nn.Module, "__call__", None)  # the datastore is read from the cache, and not built again
    monkeypatch.setattr("cached_lab.output_caches.evaluation.cache_losses", lambda *_: (torch.ones(2), 1.0))
    assert evaluated(trained, capsys, *KNN, *given)["output_cache"]["entries"] == about["entries"]


def test_it_is_printed_for_people(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRIDS, "theta", (0.1,))
    assert main(["evaluate", str(trained), *NEURAL, "neural.size=20", "neural.lambda=0.2"]) == 0
    printed = capsys.readouterr().out
    assert "output cache" in printed and "neural.size=20" in printed and "neural.lambda=0.2" in printed
    assert "tuned on the validation split: theta (loss" in printed and " score " in printed
    assert "theta is at the end of its candidates" in printed


def test_a_cache_that_does_not_help_is_left_out(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one pair that a cache of size 1 holds says nothing of the next byte, at any share but 0."""
    monkeypatch.setitem(GRIDS, "lambda_", (0.0, 0.9, 1.0))
    result = evaluated(trained, capsys, *NEURAL, "neural.size=1", "neural.theta=0")
    assert result["output_cache"]["options"]["lambda"] == 0 and result["output_cache"]["at_end"] == []
    plain, cached = result["scores"]
    assert cached["loss"] == plain["loss"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("neural.size=3",), "'neural.size=3' is an option of --output-cache or --with-memory"),
        ((*NEURAL, "knn.k=3"), "'knn.k=3' sets an option of 'knn', but the output cache is 'neural'"),
        ((*NEURAL, "neural.width=3"), "unknown option of the output cache 'neural' 'width'"),
        ((*NEURAL, "neural.size=big"), "neural.size='big' must be a whole number"),
        ((*NEURAL, "neural.lambda=2"), "lambda=2 must lie in [0, 1]"),
        ((*NEURAL, "neural=3"), "neural=3 sets no option; write neural.option=value"),
        ((*NEURAL, "--memory", "reset"), "--memory reset:"),
        ((*NEURAL, "--average", "2"), "--average 2:"),
        ((*KNN, "--split", "train"), "each would find itself"),
    ],
)
def test_unfit_options_are_refused(
    trained: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained), *words, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_is_no_language_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cached_lab.experiments.run.write_report", lambda *_: None)
    small = ("training.steps=1", "model.width=8", "model.depth=1", "model.heads=1")
    assert main(["train", "digits_vit_plain", *small, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), *NEURAL]) == 2
    assert "of a language model, and" in (err := capsys.readouterr().err) and "was trained on 'digits'" in err
