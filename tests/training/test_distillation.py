"""Distillation: the loss against one token by token, its limits, stored answers, resumed runs, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from common import TORCH, refuses
from real_weights import TEXT, glass_folder
from torch import Tensor
from training.small_language import CPU

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import config_from_dict, fill_from_data
from cached_lab.training.config import config_to_yaml
from cached_lab.training.metrics import read_metrics
from cached_lab.training.progress import Reporter
from cached_lab.training.trainer import Trainer
from cached_transformers import ReplayLoop, SegmentLoop, Teacher, create_model
from cached_transformers.layers.token_loss import IGNORED

SEGMENT, ROWS, VOCABULARY, TOKENS = 5, 2, 11, 13
KL, CROSS_ENTROPY = (0.3, 0.0), (0.3, 0.7)


def build(memory: Any = "rmt", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    sizes = {"vocabulary": VOCABULARY, "width": 16, "depth": 1, "heads": 2, "feed_forward": 32}
    model = create_model("language_model", **{**sizes, **options}, memory=memory).double()
    with torch.no_grad():  # far from uniform, so that gains differ
        model.head.weight.mul_(4)
    return model


def batch(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, tokens + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def twin(student: Any, base: Any, top: int, floor: float, cross_entropy: float) -> Tensor:
    """The loss, token by token."""
    (inputs, targets), total = batch(), torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        state = None
        whole = base(inputs[row : row + 1]).outputs[0].softmax(-1).detach()
        for begin in range(0, TOKENS, SEGMENT):
            x = inputs[row : row + 1, begin : begin + SEGMENT]
            out = student(x, state)
            state, alone = out.state, base(x).outputs[0].softmax(-1).detach()
            for i, q in enumerate(out.outputs[0].softmax(-1)):
                p, y = whole[begin + i], int(targets[row, begin + i])
                gain = min(1.0, max(0.0, (p[y] / alone[i, y]).log().item()))
                best = sorted(range(VOCABULARY), key=lambda v: -p[v].item())[:top]
                kl = torch.stack([p[v] * (p[v] / q[v]).log() for v in best]).sum()
                if top < VOCABULARY:
                    rest, other = 1 - p[best].sum(), 1 - q[best].sum()
                    kl = kl + rest * (rest / other).log()
                total = total + (floor + gain) * (kl - cross_entropy * q[y].log())
    return total / (ROWS * TOKENS)


@pytest.mark.parametrize("kind", [SegmentLoop, ReplayLoop])
@pytest.mark.parametrize("top", [3, VOCABULARY])
@pytest.mark.parametrize("weights", [KL, CROSS_ENTROPY])
def test_the_loss_and_its_gradient_are_those_token_by_token(kind: Any, top: int, weights: tuple[float, float]) -> None:
    base, student = build(None, seed=1), build()
    teacher = Teacher(base, top if top < VOCABULARY else None, *weights)
    loss, _ = kind(student, SEGMENT, bptt=3, teacher=teacher)(*batch())
    expected = twin(student, base, top, *weights)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)  # answers and gains are float32
    found = torch.autograd.grad(loss, [*student.parameters()], allow_unused=True)
    right = torch.autograd.grad(expected, [*student.parameters()], allow_unused=True)
    for one, other in zip(found, right, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_teacher_itself_over_the_whole_text_has_nothing_to_learn() -> None:
    base = build(None)
    teacher = Teacher(base, floor=1.0, cross_entropy=0.0, top=4)
    loss, _ = SegmentLoop(build(None), TOKENS, teacher=teacher)(*batch())
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert teacher.answers(*batch(), TOKENS).gain_BN.abs().max() < 1e-6
    assert SegmentLoop(build(None), SEGMENT, teacher=teacher)(*batch())[0].item() > 0.01
    assert all(p.grad is None for p in base.parameters()) and base.training  # as it was given


def test_a_teacher_answers_without_dropout() -> None:
    base = build(None, dropout=0.5)
    teacher = Teacher(base)
    assert base.training
    first, second = (teacher.answers(*batch(), SEGMENT) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_padding_on_the_right_and_ignored_targets_have_no_loss() -> None:
    loop = SegmentLoop(build(), SEGMENT, bptt=3, teacher=Teacher(build(None, seed=1)))
    inputs, targets = batch()
    short = loop(inputs[:, :11], targets[:, :11])[0]
    padding = torch.zeros_like(inputs, dtype=torch.bool)
    padding[:, 11:] = True
    torch.testing.assert_close(loop(inputs, targets, padding=padding)[0], short, rtol=0, atol=1e-9)
    torch.testing.assert_close(loop(inputs, targets.masked_fill(padding, IGNORED))[0], short, rtol=0, atol=1e-9)
    refuses("padding", loop, inputs, targets, padding=padding.flip(1))
    loop(inputs, targets, reset=torch.tensor([[True, False], [False, False]]))
    refuses("reset", loop, inputs, targets, reset=torch.tensor([[True, False], [False, True]]))


def test_reading_gives_token_losses_and_given_answers_are_taken() -> None:
    base = build(None, seed=1)
    taught, plain = (SegmentLoop(build(), SEGMENT, teacher=t) for t in (Teacher(base), None))
    for one, other in zip(taught.read(*batch()), plain.read(*batch()), strict=True):
        assert torch.equal(one.outputs, other.outputs)
    answers = taught.teacher.answers(*batch(), SEGMENT)  # type: ignore[union-attr]
    assert torch.equal(taught(*batch(), answers=answers)[0], taught(*batch())[0])
    refuses("answers", plain, *batch(), answers=answers)


def test_bad_teachers_are_refused() -> None:
    model, base = build(), build(None)
    refuses("7", SegmentLoop, model, SEGMENT, teacher=Teacher(build(None, vocabulary=7)))
    refuses("shares weights", SegmentLoop, base, SEGMENT, teacher=Teacher(base))
    refuses("passes=2", SegmentLoop, build("read_twice"), SEGMENT, passes=2, teacher=Teacher(base))
    refuses("diagonal", SegmentLoop, build("transformer_xl"), SEGMENT, schedule="diagonal", teacher=Teacher(base))
    for wrong in ({"top": 0}, {"floor": -1.0}, {"cross_entropy": float("nan")}):
        refuses(next(iter(wrong)), Teacher, base, **wrong)
    loop = SegmentLoop(model, SEGMENT, teacher=Teacher(base))
    refuses("documents", loop, *batch(), documents=torch.zeros(ROWS, TOKENS, dtype=torch.long))


def recipe(folder: Path, **training: Any) -> Any:
    """A run that teaches AHN on the trained Llama of glassllm, frozen."""
    tree = {
        "name": "distil",
        "data": {
            **{"name": "facts_in_books", "path": str(folder / "book.txt"), "tokenizer": str(glass_folder())},
            **{"segment_length": 24, "segments": 3, "facts": 0.0},
        },
        "model": {
            **{"name": "transformers", "pretrained": str(glass_folder()), "trained": "memory"},
            "memory": {"name": "ahn", "length": 8, "sinks": 2, "relative": False},
        },
        "training": {
            **{"steps": 4, "batch_size": 2, "accumulate": 2, "segment_length": 24, "segments": 3, "bptt": 3},
            **{"teacher": True, "metric": "loss", "evaluate_every": 2, "tensorboard": False, "device": "cpu"},
            **training,
        },
    }
    return config_from_dict(tree)


def trainer(folder: Path, out: Path, **training: Any) -> Trainer:
    out.mkdir(exist_ok=True)
    (folder / "book.txt").write_text(TEXT * 60, encoding="utf-8")
    config = recipe(folder, **training)
    data, held = (build_dataset(config, split) for split in ("train", "validation"))
    config = fill_from_data(config, data.describe())
    return Trainer(config, make_task(config, build_model(config), data, held, CPU), out, CPU, Reporter("", 4, None))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))


def test_a_run_trains_the_memory_only_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = trainer(tmp_path, tmp_path / "whole")
    before = {name: t.clone() for name, t in whole.model.named_parameters()}
    whole.fit()
    for name, t in whole.model.named_parameters():
        assert torch.equal(t, before[name]) or ".memory." in name
    replayed = trainer(tmp_path, tmp_path / "replayed", replay=True)  # the same gradients
    replayed.fit()
    later = trainer(tmp_path, tmp_path / "replayed", replay=True)
    later.resume(str(replayed.checkpoints.path(2)))
    assert later.step == 2
    later.fit()
    mine = later.model.state_dict()
    assert all("memory" in name or name == "host_digest" for name in mine)
    moved = [name for name, t in whole.model.state_dict().items() if not torch.equal(t, mine[name])]
    assert not moved


def test_every_row_of_a_step_is_one_text(tmp_path: Path) -> None:
    """Whatever the number of rows, so that the teacher sees no text but the student's."""
    task = trainer(tmp_path, tmp_path / "run", batch_size=3, accumulate=1).task
    texts = {tuple(part.tolist()) for part in task.data.tokens.reshape(-1, 72)}
    for _, batch in zip(range(4), task.batches(0), strict=False):
        assert all(tuple(row.tolist()) in texts for row in batch.targets) and batch.reset.shape == (3, 1)


def test_answers_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path, tmp_path / "first").fit()
    monkeypatch.setattr(Teacher, "answers", None)
    trainer(tmp_path, tmp_path / "second").fit()


@pytest.mark.skipif(TORCH < (2, 7), reason="older versions of torch have no FSDP2 on the CPU")
def test_two_processes_distil_as_one_does(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT * 60, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(config_to_yaml(recipe(tmp_path, log_every=1, batch_size=4)), encoding="utf-8")
    losses = {}
    for kind in ("one", "ddp", "fsdp"):
        words = ["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / kind)]
        if kind == "one":
            assert main(words) == 0
        else:
            pairs.commands([*words, f"training.parallel={kind}"], tmp_path / f"{kind}_meeting")
        losses[kind] = [record["loss"] for record in read_metrics(tmp_path / kind / "metrics.jsonl")]
    assert len(losses["one"]) == 6
    assert losses["ddp"] == pytest.approx(losses["one"], abs=1e-5)
    assert losses["fsdp"] == pytest.approx(losses["one"], abs=1e-5)
    assert main(["evaluate", str(tmp_path / "one"), "--memory", "carry,reset,shuffle"]) == 0
    scored = json.loads((tmp_path / "one" / "evaluation.json").read_text(encoding="utf-8"))
    assert scored["use"]["carried_tokens"] > 0


def test_runs_that_no_teacher_suits_are_refused(tmp_path: Path) -> None:
    task = trainer(tmp_path, tmp_path / "run", segments=6, bptt=1).task
    refuses("128 positions", task.runner)
    plain = trainer(tmp_path, tmp_path / "run").task
    plain.model = build()  # type: ignore[assignment]
    refuses("training.teacher", plain.runner)
