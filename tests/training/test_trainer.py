"""The training loop: its files, its side effects, and its errors."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import get_args

import pytest
import standin
import torch
from common import refuses
from rich.console import Console
from same_run import assert_same_tree
from small_language import trainer_of
from torch import nn

from cached_lab.cli.main import main
from cached_lab.experiments.build import build_model
from cached_lab.experiments.load import load_run, read_run_config
from cached_lab.experiments.run import run_training
from cached_lab.tasks.classification.scores import evaluate
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.checkpoint import read_checkpoint
from cached_lab.training.config import config_to_dict
from cached_lab.training.distributed import World, in_world
from cached_lab.training.metrics import MetricsFile, read_metrics
from cached_lab.training.progress import Reporter
from cached_lab.training.scores import Score, goodness
from cached_lab.training.trainer import Trainer
from cached_lab.yaml_tree import apply_override

CPU = World(torch.device("cpu"))


def make(folder: Path, *overrides: str, model: nn.Module | None = None) -> Trainer:
    tree = copy.deepcopy(standin.recipe())
    for override in overrides:
        apply_override(tree, override)
    return trainer_of(config_from_dict(tree), folder, model=model)


def fitted(folder: Path, *overrides: str) -> Trainer:
    trainer = make(folder, *overrides)
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def metrics(folder: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_metrics(folder / "metrics.jsonl")]


def test_it_learns(tmp_path):
    trainer = fitted(tmp_path, "training.steps=150", "training.evaluate_every=150", "data.size=200")
    assert trainer.best["accuracy"] > 0.85


def test_metrics_and_checkpoints_are_those_asked_for(tmp_path):
    fitted(tmp_path, "training.save_every=5", "training.keep=9")
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if line["split"] == "train"] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in lines if line["split"] == "validation"] == [4, 8, 12]
    steps = {int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step_*")}
    assert steps >= {5, 10, 12}
    losses = {line["step"]: line["loss"] for line in lines if line["split"] == "validation"}
    assert all(0 < loss < 5 for loss in losses.values())


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    first, again = (weights(fitted(tmp_path / name)) for name in ("a", "b"))
    assert_same_tree(first, again)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    other = weights(fitted(tmp_path / "c", "training.seed=1"))
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_accumulation_and_workers_do_not_change_what_is_learned(tmp_path):
    options = ("model.dropout=0.0", "model.rate=0.0", "training.clip_norm=0.5")
    whole = weights(fitted(tmp_path / "a", *options))
    pieces = weights(fitted(tmp_path / "b", *options, "training.accumulate=4"))
    workers = weights(fitted(tmp_path / "c", *options, "training.workers=1"))
    assert_same_tree(whole, workers)
    for name in whole:
        torch.testing.assert_close(whole[name], pieces[name], rtol=1e-4, atol=1e-5)


def test_evaluation_leaves_mode_buffers_and_random_states():
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Dropout().eval()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, inputs):
            self.count += 1
            return torch.randn(len(inputs), 4)

    model = Restless().train()
    model.frozen.eval()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    values = evaluate(model, standin.StandinRows("validation"), CPU, 7)
    assert model.training and not model.frozen.training and model.count == 0
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 <= values["accuracy"] <= 1


def test_evaluation_weighs_every_row_alike():
    config = config_from_dict({**standin.recipe(), "model": {"name": "standin_mlp", "classes": 4}})
    model = build_model(config).eval()
    data = standin.StandinRows("validation", size=11)
    logits = model(data.points).outputs
    values = evaluate(model, data, CPU, 4)
    assert values["loss"] == pytest.approx(nn.functional.cross_entropy(logits, data.labels).item(), rel=1e-6)
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == data.labels).double().mean().item())


def test_label_smoothing_and_auxiliary_loss_reach_the_weights_but_not_the_reported_loss(tmp_path):
    class Auxiliary(standin.StandinMLP):
        def forward(self, inputs):
            output = super().forward(inputs)
            return output._replace(auxiliary_loss=self.head.bias.sum())

    plain = make(tmp_path / "a")
    auxiliary = make(tmp_path / "b", model=Auxiliary(classes=4))
    auxiliary.model.load_state_dict(plain.model.state_dict())
    smooth = make(tmp_path / "c", "training.label_smoothing=0.3")
    for trainer in (plain, auxiliary, smooth):
        torch.manual_seed(0)
        trainer.fit()
    first = [metrics(tmp_path / name)[0]["loss"] for name in "abc"]
    biases = [trainer.model.head.bias.sum().item() for trainer in (plain, auxiliary, smooth)]
    assert biases[1] < biases[0] - 0.01
    assert not torch.equal(plain.model.head.weight, smooth.model.head.weight)
    assert abs(first[0] - first[2]) < 0.2


def test_a_poisoned_batch_is_skipped_and_counted(tmp_path):
    trainer = fitted(tmp_path, "data.poison=49", "training.steps=30", "data.augment=false")
    assert trainer.skipped > 0 and trainer.bad_in_a_row == 0
    assert all(torch.isfinite(value).all() for value in trainer.model.state_dict().values())
    assert metrics(tmp_path)[-2]["skipped"] == trainer.skipped


def test_too_many_bad_steps_in_a_row_end_the_run(tmp_path):
    trainer = make(tmp_path, "data.poison=0", "training.max_bad_steps=3")
    before = weights(trainer)
    refuses(r"3.*max_bad_steps=3.*learning_rate", trainer.fit, raises=RuntimeError)
    assert torch.equal(trainer.model.head.weight, before["head.weight"])


def test_a_run_that_trains_nothing_ends(tmp_path):
    trainer = make(tmp_path, "training.max_bad_steps=3")
    for parameter in trainer.model.parameters():
        parameter.register_hook(torch.zeros_like)
    refuses(r"3 .*max_bad_steps=3.*gradient", trainer.fit, raises=RuntimeError)
    assert trainer.step == 3


def test_clipping_bounds_the_step(tmp_path):
    options = ("optimizer.name=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", "schedule.name=constant")
    trainer = make(tmp_path, *options, "schedule.warmup_steps=0", "training.steps=1", "training.clip_norm=0.001")
    before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
    trainer.fit()
    after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.001 * 0.01, rel=1e-3)


def test_what_the_machine_or_model_cannot_do_is_refused(tmp_path):
    refuses("precision='float16'", make, tmp_path, "training.precision=float16")
    refuses("StandinMLP", make, tmp_path, "training.activation_checkpointing=true")
    refuses("is no device", in_world, "gpu", lambda processes: None)


@pytest.mark.parametrize("score", get_args(Score))
def test_the_best_ignores_a_score_that_is_not_a_number(score):
    less = score in ("loss", "perplexity", "bits_per_byte", "word_perplexity")
    worse, better = (5.0, 3.0) if less else (3.0, 5.0)
    assert goodness(score, better) > goodness(score, worse) > goodness(score, float("nan"))


def test_resuming_into_another_configuration_lists_the_differences(tmp_path):
    fitted(tmp_path)
    trainer = make(tmp_path, "optimizer.learning_rate=0.5", "training.seed=3", "training.steps=20")
    with pytest.raises(ValueError) as error:
        trainer.resume("auto")
    assert "optimizer.learning_rate: 0.01 -> 0.5" in str(error.value)
    assert "training.seed: 0 -> 3" in str(error.value)
    assert "training.steps:" not in str(error.value)
    refuses("holds a run already", make(tmp_path).resume, "never")
    refuses(r"training\.steps=4", make(tmp_path, "training.steps=4").resume, "auto")
    refuses("is not a checkpoint", make(tmp_path).resume, str(tmp_path / "nowhere"))


def test_going_back_to_a_named_checkpoint_repeats_the_run(tmp_path):
    fitted(tmp_path, "training.keep=9")
    final = read_checkpoint(tmp_path / "checkpoints" / "step_00000012").weights
    before = metrics(tmp_path)
    trainer = make(tmp_path, "training.keep=9")
    trainer.resume(str(tmp_path / "checkpoints" / "step_00000004"))
    assert [line["step"] for line in metrics(tmp_path)][-1] == 12
    trainer.fit()
    assert_same_tree(weights(trainer), final)
    assert metrics(tmp_path) == before
    assert len(list((tmp_path / "checkpoints").glob("superseded_*"))) == 2


def test_the_bar_fits_a_terminal_of_80_columns_and_evaluations_stay_on_the_screen():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Reporter("digits_vit_grc", 12000, console) as reporter:
        reporter.advance(6000)
        reporter.line({"split": "train", "step": 6000, "loss": 2.3, "accuracy": 0.125, "learning_rate": 1e-3})
        reporter.line({"split": "validation", "step": 6000, "loss": 2.25, "accuracy": 0.5})
    shown = console.file.getvalue()
    assert "6000/12000" in shown and "loss 2.3000  accuracy 12.50%" in shown and "\u2026" not in shown
    assert "step   6000/12000  validation  loss 2.2500  accuracy 50.00%" in shown


def test_a_metrics_file_is_cut_at_the_step_and_at_a_broken_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 5, "loss": 2.0}\n{"step": 6, "lo', encoding="utf-8")
    file = MetricsFile(path.parent, 4)
    file.write({"step": 5, "loss": float("inf")})
    file.close()
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}, {"step": 5, "loss": None}]


def test_a_whole_run_leaves_a_complete_folder(tmp_path):
    config = config_from_dict(standin.recipe())
    summary = run_training(config, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(summary))
    assert stored["parameters"] == 16 * 3 + 32 + 4 * 17
    assert stored["flops"] == 2 * (2 * 16 + 16 * 4)
    assert stored["variant"] == "plain" and stored["test"]["step"] == stored["best"]["step"]
    _, model, step = load_run(str(tmp_path / "run"), "best")
    refuses("elsewhere is not a run folder", load_run, "elsewhere")
    values = evaluate(model, standin.StandinRows("test"), CPU, 8)
    assert step == stored["best"]["step"]
    assert values["loss"] == pytest.approx(stored["test"]["loss"], rel=1e-9)
    validated = evaluate(model, standin.StandinRows("validation"), CPU, 8)
    assert validated["accuracy"] == stored["best"]["accuracy"]


def test_a_recipe_is_tried_for_fewer_steps_than_it_warms_up(tmp_path, capsys):
    """A short run trains, reports the shorter warmup, and keeps its configuration."""
    file, folder = tmp_path / "standin.yaml", tmp_path / "run"
    file.write_text(json.dumps(standin.recipe(log_every=1)), encoding="utf-8")
    assert main(["train", str(file), "training.steps=3", "--out", str(folder)]) == 0
    note = "schedule.warmup_steps=3 would fill training.steps=3"
    assert note in capsys.readouterr().out
    rates = [line["learning_rate"] for line in read_metrics(folder / "metrics.jsonl") if line["split"] == "train"]
    assert rates == pytest.approx([0.01, 0.005, 0]) and read_run_config(folder).schedule.warmup_steps == 3
    assert main(["train", str(file), "training.steps=4", "--out", str(tmp_path / "longer")]) == 0
    assert "would fill" not in capsys.readouterr().out


def test_tensorboard_receives_the_lines(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fitted(tmp_path, "training.tensorboard=true")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = events.Scalars("validation/loss")
    expected = [(line["step"], line["loss"]) for line in metrics(tmp_path) if line["split"] == "validation"]
    assert [(p.step, pytest.approx(p.value)) for p in points] == expected


@pytest.mark.parametrize(
    ("training", "message"),
    [({"epoch": 3}, "it lacks 'optimizer'"), ({"optimizer": {"state": {}, "param_groups": []}}, "param")],
)
def test_a_training_state_of_something_else_is_refused_by_message(tmp_path, training, message):
    """Sums that match say only that the files are whole."""
    trainer = make(tmp_path)
    state = trainer.model.state_dict()
    trainer.checkpoints.save(1, config_to_dict(trainer.config), state, training, None)
    refuses(rf"step_00000001 is not of this run: .*{message}", trainer.resume, "auto")
