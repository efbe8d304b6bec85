"""Training on text: the state that crosses steps, exact resume, whole commands, and refused options."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pairs
import pytest
import torch
import yaml
from training.same_run import final
from training.small_language import STEPS, fitted, made_text, make, own_cache, recipe  # noqa: F401

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_model
from cached_lab.experiments.run import run_training
from cached_lab.tasks.language.streams import rows_to_empty
from cached_lab.tasks.recipes import load_config
from cached_lab.training.metrics import read_metrics
from cached_lab.training.settings import TrainingConfig
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.state import detach, from_tensors, map_state, named_tensors

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def no_report(monkeypatch) -> None:
    monkeypatch.setattr("cached_lab.experiments.run.write_report", lambda *_: None)


def test_it_learns(tmp_path, text):
    sizes = ("training.steps=100", "training.evaluate_every=100", "model.dropout=0.0", "model.width=32")
    trainer = fitted(tmp_path / "run", text, *sizes, "optimizer.learning_rate=0.02")
    unigram = trainer.task.validation.baselines(trainer.task.validation)["unigram"]["bits_per_byte"]
    assert trainer.best["bits_per_byte"] < 0.8 * unigram


@pytest.mark.parametrize("options", [(), ("data.reset=document", "data.shuffle=true")])
def test_what_a_step_computes_is_what_a_plain_loop_computes(tmp_path, text, options):
    """Twin: streams cut by hand, the model called segment by segment with the state of the step before."""
    trainer = make(tmp_path / "run", text, "model.dropout=0.0", "training.steps=3", "training.log_every=1", *options)
    twin = build_model(trainer.config)
    decay = [p for p in twin.parameters() if sum(n > 1 for n in p.shape) >= 2]
    keep = [p for p in twin.parameters() if sum(n > 1 for n in p.shape) < 2]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": keep, "weight_decay": 0}], lr=0.01, weight_decay=0.05)
    tokens = [10, *trainer.task.data.tokens.tolist()]
    size = len(tokens) - 1
    bounds = [row * size // 4 for row in range(4)]
    if options:  # one document: rows are cut at whole segments of 8 tokens
        bounds = [row * -(-size // 8) // 4 * 8 for row in range(4)]
    state, losses = None, []
    for step in range(3):
        total = 0.0
        for segment in range(2):
            begin = [bound + 16 * step + 8 * segment for bound in bounds]
            inputs, targets = (torch.tensor([tokens[b + o : b + o + 8] for b in begin]) for o in (0, 1))
            logits, state, _ = twin(inputs, state)
            total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            state = detach(state)
        (total / 64).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / 64)
    trainer.fit()
    logged = [line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["split"] == "train"]
    assert logged == pytest.approx(losses, rel=1e-5)
    for (name, tensor), (_, other) in zip(named_tensors(trainer.task._states[0]), named_tensors(state), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-4, msg=name)


def test_accumulation_does_not_change_what_is_learned(tmp_path, text):
    # 12 steps are more than an epoch, so that the last step with its padding is among them.
    # SGD: the bias of the keys has no gradient but rounding, which Adam would blow up.
    options = ("model.dropout=0.0", "training.segments=12", "training.bptt=2", "optimizer.name=sgd")
    options += ("training.reset_rows=0.5",)
    whole = fitted(tmp_path / "a", text, *options)
    streams = whole.task.streams
    assert streams.steps < STEPS and streams.batch(streams.steps - 1).padding is not None
    pieces = fitted(tmp_path / "b", text, *options, "training.accumulate=2")
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(weight, pieces.model.state_dict()[name], rtol=1e-4, atol=1e-6, msg=name)
    carried = whole.task.state_dict(), pieces.task.state_dict()
    assert carried[0].keys() == carried[1].keys() and all(len(t) == 4 for t in carried[1].values())


@pytest.mark.parametrize(
    ("option", "most"),
    [
        ("training.activation_checkpointing=true", 1e-5),
        ("training.precision=bfloat16", 0.05),
        pytest.param("training.compile=true", 1e-4, marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_compute_follow_the_same_curve_and_save_the_same_names(tmp_path, text, option, most):
    plain, other = (fitted(tmp_path / n, text, "model.dropout=0.0", *more) for n, more in (("a", ()), ("b", (option,))))
    assert other.latest["loss"] == pytest.approx(plain.latest["loss"], abs=most)
    assert final(tmp_path / "a").weights.keys() == final(tmp_path / "b").weights.keys()


def test_scores_of_training_are_of_the_text_alone(tmp_path, text):
    memory = "{name: compressive, length: 4, compressed: 4, rate: 2}"
    options = (f"model.memory={memory}", "model.dropout=0.0", "training.steps=4", "training.log_every=1")
    trainer = make(tmp_path / "run", text, *options)
    trainer.fit()
    assert trainer.task._loop.auxiliary_loss > 0
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["split"] == "train"]
    other = make(tmp_path / "task", text, *options, f"model.memory={memory[:-1]}, loss: task}}")
    other.fit()  # the loss of the compression has a gradient of its own, and the first step none before it
    twin = [line for line in read_metrics(tmp_path / "task" / "metrics.jsonl") if line["split"] == "train"]
    assert lines[0]["loss"] == pytest.approx(twin[0]["loss"], abs=1e-6)


def test_a_step_that_is_skipped_leaves_the_state_as_it_was(tmp_path, text, monkeypatch):
    trainer = make(tmp_path / "run", text, "model.dropout=0.0", "training.accumulate=2")
    original, calls, kept = SegmentLoop.forward, [], []

    def poisoned(self, *arguments, **documents):
        loss, state = original(self, *arguments, **documents)
        calls.append(0)
        if len(calls) == 8:  # the second piece of the fourth step
            kept.extend(trainer.task._states)
            return loss * math.nan, map_state(lambda t: t * math.nan if t.is_floating_point() else t, state)
        if len(calls) == 9:
            assert arguments[2] is kept[0]
        return loss, state

    monkeypatch.setattr(SegmentLoop, "forward", poisoned)
    trainer.fit()
    assert trainer.skipped == 1 and trainer.step == STEPS
    assert all(torch.isfinite(t).all() for t in trainer.task.state_dict().values() if t.is_floating_point())
    assert math.isfinite(trainer.latest["loss"])


def test_a_row_that_is_emptied_goes_on_as_a_new_one(tmp_path, text):
    """Twin: each row by itself, from an empty memory or from its own."""
    trainer = make(tmp_path / "run", text, "model.dropout=0.0", "training.reset_rows=0.5")
    task, loop = trainer.task, SegmentLoop(trainer.model, 8)
    _, runner = task.runner()
    batches, states = task.batches(1), []  # at the first step all rows are new
    for _ in range(2):
        batch = next(batches)
        task.backward(runner, batch, trainer.scaler)
        task.finish(True)
        states.append(task.state_dict())
    emptied_B = batch.reset[:, 0]
    assert emptied_B.tolist() == rows_to_empty(trainer.settings, 2).tolist() and 0 < emptied_B.sum() < 4
    fresh = trainer.model.init_state(1)
    for row, emptied in enumerate(emptied_B):
        before = fresh if emptied else from_tensors({n: t[[row]] for n, t in states[0].items()}, fresh, "step 0")
        _, after = loop(batch.inputs[[row]], batch.targets[[row]], before)
        for name, tensor in named_tensors(after):
            torch.testing.assert_close(tensor[0], states[1][name][row], rtol=1e-5, atol=1e-6, msg=name)


def test_the_rows_to_empty_are_a_share_and_a_function_of_seed_and_step():
    settings = TrainingConfig(batch_size=8, reset_rows=0.3)
    drawn = torch.stack([rows_to_empty(settings, step) for step in range(1000)]).double()
    assert drawn.mean() == pytest.approx(0.3, abs=0.02) and (drawn.mean(0) > 0.2).all()
    assert torch.equal(rows_to_empty(settings, 7), drawn[7].bool())
    other = torch.stack([rows_to_empty(dataclasses.replace(settings, seed=1), step) for step in range(1000)])
    assert (other != drawn.bool()).any(0).all()
    assert not rows_to_empty(dataclasses.replace(settings, reset_rows=0.0), 7).any()
    assert rows_to_empty(TrainingConfig(reset_rows=1.0, segments=2), 0).all()


def test_a_state_of_another_memory_is_refused(tmp_path, text):
    trainer = fitted(tmp_path / "run", text)
    other = make(tmp_path / "other", text, "model.memory.length=5")
    with pytest.raises(ValueError, match=r"the checkpoint .* this model expects"):
        other.task.load_state_dict(trainer.task.state_dict())


@pytest.mark.usefixtures("no_report")
def test_two_processes_follow_the_curve_of_one(tmp_path, text):
    file = tmp_path / "language.yaml"
    options = ("training.accumulate=2", "training.evaluation_batch_size=3", "training.reset_rows=0.3")
    tree = recipe(text, "model.dropout=0.0", *options)
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    curves, carried = [], []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        words = ["train", str(file), "--out", str(out)]
        if processes == 1:
            assert main(words) == 0
        else:
            pairs.commands(words, tmp_path / "meeting")
        curves.append([line["loss"] for line in read_metrics(out / "metrics.jsonl")])
        carried.append(final(out).training["carried"])
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)
    for name in carried[0]:
        torch.testing.assert_close(carried[0][name], carried[1][name], rtol=1e-3, atol=1e-3, msg=name)


def test_train_evaluate_and_report(tmp_path, text, capsys):
    file = tmp_path / "language.yaml"
    file.write_text(yaml.safe_dump(recipe(text)), encoding="utf-8")
    run = tmp_path / "run"
    assert main(["train", str(file), "--out", str(run)]) == 0
    assert "bits per byte" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["flops"] > 0 and summary["baselines"]["unigram"] > 2
    assert "loss (nats) by place" in (run / "report.html").read_text(encoding="utf-8")
    assert "bits per byte" in (run / "report.html").read_text(encoding="utf-8")
    assert main(["evaluate", str(run), "--memory", "carry,reset,shuffle", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["memory"] for row in result["scores"]] == ["carry", "reset", "shuffle"]
    assert result["scores"][0]["loss"] == summary["test"]["loss"]
    stored = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    assert stored["scores"] == result["scores"] and stored["scores"][1]["places"][0]["tokens"] == 1
    assert stored["use"] == result["use"] and result["use"]["units"] > 8 and "unknown" not in result
    assert "shuffled, it changes the loss" in (run / "report.html").read_text(encoding="utf-8")
    assert stored["reset"] == {"reset_rows": 0.0, "documents": False, "trained_on": False}
    assert main(["evaluate", str(run), "--segment-length", "4"]) == 0
    assert "whether the memory is used: --memory carry,shuffle" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--memory", "reset,carry,shuffle"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "place tokens reset carry shuffle use quarter 1 of the segment" in said and " 0 segments read before" in said
    assert "reset: an empty memory; trained on: no" in said
    assert f"{result['use']['units']} blocks of consecutive" in said


@pytest.mark.usefixtures("no_report")
def test_compare_takes_the_lower_perplexity_for_the_better(tmp_path, text, capsys):
    file = tmp_path / "language.yaml"
    tree = recipe(text, "data.tokenizer=word", "training.metric=perplexity", "training.steps=2")
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    out = tmp_path / "out"
    arguments = ["--with", "plain,transformer_xl", "--control", "flops", "--seeds", "2", "--out", str(out)]
    assert main(["compare", str(file), *arguments]) == 0
    result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    assert result["metric"] == "perplexity" and result["baselines"]["unigram"] > 10
    for variant in result["variants"]:
        for folder, value in zip(variant["runs"], variant["values"], strict=True):
            assert json.loads((out / folder / "summary.json").read_text())["test"]["perplexity"] == value
    assert "difference to plain" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.metric=accuracy", "training.metric='accuracy' does not suit text with tokenizer 'byte'; take loss"),
        ("data.tokenizer=word", "training.metric='bits_per_byte' does not suit text with tokenizer 'word'"),
        ("model.vocabulary=200", "model.vocabulary=200, but data 'text' has vocabulary=256"),
        ("model={name: sequence_classifier, classes: 2, max_length: 9}", "not 'sequence_classifier'"),
        ("training.evaluation_batch_size=9999", "a batch of 9999 rows exceeds the"),
        ("training={bptt: 2, segments: 2, bptt_window: sliding, compile: true}", "training.compile=True"),
        ("training={bptt: 2, segments: 2, bptt_window: sliding, passes: 2}", "does not go with training.passes=2"),
        ("evaluation.memory=keep", "evaluation.memory='keep' must be one of 'carry', 'reset', 'shuffle'"),
        ("data={name: digits}", "training.metric='bits_per_byte' does not suit classification"),
    ],
)
def test_bad_input_ends_with_status_2(tmp_path, text, capsys, override, message):
    file = tmp_path / "language.yaml"
    tree = recipe(text, override)
    if "digits" in override:
        tree["model"] = {"name": "vision_transformer", "patch_size": 2, "width": 16, "depth": 1, "heads": 2}
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("no_report")
def test_a_run_of_a_text_recipe(tmp_path, text):
    options = ["training.steps=2", "schedule.warmup_steps=1", "training.batch_size=2", "training.tensorboard=false"]
    small = [(f"lm_wikitext2_small_{memory}", text) for memory in ("xl", "memorizing")]
    for name, path in (("demo_text", text / "train.txt"), *small):
        summary = run_training(load_config(name, [*options, f"data.path={path}"]), tmp_path / name)
        assert summary["steps"] == 2 and summary["test"]["perplexity"] > 1
