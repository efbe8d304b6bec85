"""Scores of a text: memory kept, emptied and exchanged, and several passes over its segments."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise

import pytest
import torch
from common import refuses, stirred
from torch.nn import functional as F
from training.small_language import CPU, fitted, made_text, make, own_cache  # noqa: F401

from cached_lab.tasks.language.scores import evaluate_language, evaluation_streams, split_losses
from cached_lab.training.trainer import Trainer
from cached_transformers.loops.segments import SegmentLoop


def evaluation(trainer: Trainer, **options) -> tuple[dict, list]:
    training = {k: v for k, v in options.items() if k in ("evaluation_batch_size", "segments", "passes")}
    section = {k: v for k, v in options.items() if k not in training}
    config = dataclasses.replace(
        trainer.config,
        training=dataclasses.replace(trainer.config.training, **training),
        evaluation=dataclasses.replace(trainer.config.evaluation, **section),
    )
    return evaluate_language(trainer.model, trainer.task.validation, CPU, config)


def test_the_score_is_that_of_reading_the_split_from_beginning_to_end(tmp_path, text):
    trainer = fitted(tmp_path / "run", text)
    tokens = [10, *trainer.task.validation.tokens.tolist()]
    before = torch.get_rng_state()
    values, places = evaluation(trainer, evaluation_batch_size=1)
    assert torch.equal(torch.get_rng_state(), before) and trainer.model.training
    state, losses = None, []
    model = trainer.model.eval()
    with torch.no_grad():
        for begin in range(0, len(tokens) - 1, 8):
            end = min(begin + 8, len(tokens) - 1)
            logits, state, _ = model(torch.tensor([tokens[begin:end]]), state)
            targets = torch.tensor(tokens[begin + 1 : end + 1])
            losses += F.cross_entropy(logits[0], targets, reduction="none").tolist()
    assert len(losses) == len(trainer.task.validation)
    mean = sum(losses) / len(losses)
    assert values["loss"] == pytest.approx(mean, rel=1e-5)
    assert values["bits_per_byte"] == pytest.approx(mean / math.log(2), rel=1e-5)
    assert values["perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)
    for place in places:
        part = losses[place["from"] : place["to"] + 1]
        assert place["tokens"] == len(part) and place["loss"] == pytest.approx(sum(part) / len(part), rel=1e-4)
    one_row = dataclasses.replace(trainer.config.training, evaluation_batch_size=1)
    config = dataclasses.replace(trainer.config, training=one_row)
    found = split_losses(trainer.model, trainer.task.validation, CPU, config)
    segments = [losses[at : at + 8] for at in range(0, len(losses), 8)]
    assert found.segments[0, 0].tolist() == pytest.approx([sum(part) for part in segments], rel=1e-4)
    assert found.segments[1, 0].tolist() == [len(part) for part in segments]
    assert found.documents.tolist() == [[pytest.approx(sum(losses), rel=1e-5)], [len(losses)]]
    for quarter in range(4):
        part = [x for at in (2 * quarter, 2 * quarter + 1) for x in losses[at::8]]
        assert found.quarters[:, quarter].tolist() == pytest.approx([sum(part), len(part)], rel=1e-4)
    for power in range(5):
        part = [x for segment in segments[2**power - 1 : 2 ** (power + 1) - 1] for x in segment]
        assert found.carried[:, power].tolist() == pytest.approx([sum(part), len(part)], rel=1e-4)


def test_without_a_memory_rows_and_modes_change_nothing(tmp_path, text):
    trainer = make(tmp_path / "run", text, "model.memory=null")
    data = trainer.task.validation
    data.tokens = data.tokens[: 8 * 4 * 9]  # rows end where segments end
    losses = {
        (rows, mode): evaluation(trainer, evaluation_batch_size=rows, memory=mode)[0]["loss"]
        for rows, mode in ((1, "carry"), (2, "carry"), (4, "carry"), (4, "reset"), (4, "shuffle"))
    }
    assert list(losses.values()) == pytest.approx([losses[1, "carry"]] * 5, rel=1e-6)


def test_memory_kept_emptied_and_exchanged(tmp_path, text):
    trainer = fitted(tmp_path / "run", text, "training.steps=40", "training.evaluate_every=40")
    carry, reset, shuffle = (evaluation(trainer, memory=mode)[0]["loss"] for mode in ("carry", "reset", "shuffle"))
    assert len({carry, reset, shuffle}) == 3
    # Emptied before each segment is the same as segments without a past.
    tokens = [10, *trainer.task.validation.tokens.tolist()]
    bounds = [row * (len(tokens) - 1) // 4 for row in range(5)]
    total, model = 0.0, trainer.model.eval()
    for begin, end in pairwise(bounds):
        for at in range(begin, end, 8):
            stop = min(at + 8, end)
            with torch.no_grad():
                logits = model(torch.tensor([tokens[at:stop]])).outputs[0]
            total += float(F.cross_entropy(logits, torch.tensor(tokens[at + 1 : stop + 1]), reduction="sum"))
    assert reset == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
    refuses(r"training\.evaluation_batch_size", evaluation, trainer, memory="shuffle", evaluation_batch_size=1)


def test_a_longer_segment_gives_more_to_see(tmp_path, text):
    trainer = fitted(tmp_path / "run", text)
    losses = [evaluation(trainer, segment_length=n, memory="reset")[0]["loss"] for n in (1, 8)]
    assert losses[0] != pytest.approx(losses[1], abs=1e-4)


READ_TWICE = 'model.memory={"name": "read_twice", "slots": 8}'


@pytest.mark.parametrize("reset", ["never", "document"])
def test_several_passes_are_scored_as_they_are_trained(tmp_path, text, reset):
    """Two passes have the same loss in training and evaluation, unlike one pass."""
    options = f"training.segments=3 training.bptt=3 training.passes=2 model.dropout=0.0 data.reset={reset}".split()
    trainer = make(tmp_path / "run", text, READ_TWICE, *options)
    model = stirred(trainer.model, 0.3).eval()
    streams = evaluation_streams(trainer.task.validation, trainer.config)
    losses = {}
    for passes in (1, 2):
        state, nats = None, 0.0
        for step in range(streams.steps):
            batch = streams.batch(step)
            loop = SegmentLoop(model, 8, 3, passes)
            loss, state = loop(batch.inputs, batch.targets, state, batch.reset, batch.padding)
            nats += loss.item() * batch.tokens
        losses[passes] = nats / len(trainer.task.validation)
    assert evaluation(trainer)[0]["loss"] == pytest.approx(losses[2], rel=1e-5)
    assert abs(losses[1] - losses[2]) > 1e-3


SCOPES = [{"name": "read_twice", "slots": 8, "scope": scope} for scope in ("document", "others")]


@pytest.mark.parametrize("memory", ["transformer_xl", "ernie_doc", *SCOPES])
def test_a_pass_that_has_read_the_answers_is_refused(tmp_path, text, memory):
    options = [f"model.memory={json.dumps(memory)}", "training.segments=2"]
    refuses(r"training\.passes=2.*training\.passes=1", make, tmp_path / "run", text, *options, "training.passes=2")
    trainer = make(tmp_path / "run", text, *options)
    refuses(r"training\.passes=2", evaluation, trainer, passes=2)


@pytest.mark.parametrize("memory", [READ_TWICE, "model.memory=null"])
def test_a_pass_that_shows_no_answer_is_not_refused(tmp_path, text, memory):
    """Beside a memory that rereads, a model without one is the plain arm of a comparison."""
    trainer = make(tmp_path / "run", text, memory, "training.segments=2", "training.passes=2")
    data = trainer.task.validation
    before = evaluation(trainer, evaluation_batch_size=1)[1][0]["loss"]
    data.tokens = data.tokens.copy()
    data.tokens[1:] ^= 1
    assert evaluation(trainer, evaluation_batch_size=1)[1][0]["loss"] == before


def test_the_memory_of_a_document_that_begins_has_read_nothing(tmp_path, text):
    """In one row of three documents, whose segments each count from 0."""
    for number, file in enumerate(("a", "b", "c")):
        (text / "valid").mkdir(exist_ok=True)
        (text / "valid" / f"{file}.txt").write_text("abc de\n" * (2 * number + 1), encoding="utf-8")
    (text / "valid.txt").unlink()
    trainer = make(tmp_path / "run", text, "data.reset=document", "training.evaluation_batch_size=1")
    found = split_losses(trainer.model, trainer.task.validation, CPU, trainer.config)
    sizes = [7, 21, 35]
    assert found.documents[1].tolist() == sizes
    assert found.carried[1, :3].tolist() == [
        sum(max(0, min(8 * last, size) - 8 * first) for size in sizes) for first, last in ((0, 1), (1, 3), (3, 7))
    ]
    assert found.segments[1, 0].tolist() == [7, 8, 8, 5, 8, 8, 8, 8, 3]
