"""Optimisers and schedules; curricula; the order of batches."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import standin
import torch
from common import refuses
from torch import nn

from cached_lab.training import optim
from cached_lab.training.loader import Share, TrainingOrder, evaluation_batches
from cached_transformers.loops.curriculum import AdaptiveCurriculum, Curriculum


def test_rates_rise_and_fall_as_their_schedule_says():
    optimizer = optim.OptimizerConfig(learning_rate=0.05)
    schedule = optim.ScheduleConfig("inverse_sqrt", warmup_steps=1000)
    rates = {t: optim.learning_rate(optimizer, schedule, t, 5000) for t in (1, 500, 1000, 2000, 5000)}
    expected = {1: 1.5811e-6, 500: 7.9057e-4, 1000: 1.5811e-3, 2000: 1.1180e-3, 5000: 7.0711e-4}
    assert rates == pytest.approx(expected, rel=1e-4)
    optimizer, schedule = optim.OptimizerConfig(learning_rate=2.0), optim.ScheduleConfig("cosine", 10, final_ratio=0.1)
    rates = [optim.learning_rate(optimizer, schedule, t, 110) for t in range(1, 111)]
    assert rates[:10] == pytest.approx([0.2 * t for t in range(1, 11)])
    assert rates[59] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    optimizer, schedule = optim.OptimizerConfig(learning_rate=3.0), optim.ScheduleConfig("constant")
    assert {optim.learning_rate(optimizer, schedule, t, 9) for t in range(1, 10)} == {3.0}


@pytest.mark.parametrize(("steps", "growth"), [(20, 2), (50, 5), (3, 1), (1, 1)])
def test_a_recipe_may_be_tried_for_fewer_steps_than_it_warms_up(steps, growth):
    """The rate reaches its peak after a tenth of the steps and falls; one step more than the warm-up is as written."""
    optimizer, schedule = optim.OptimizerConfig(learning_rate=2.0), optim.ScheduleConfig("cosine", 50)
    rates = [optim.learning_rate(optimizer, schedule, t, steps) for t in range(1, steps + 1)]
    assert rates[:growth] == pytest.approx([2.0 * t / growth for t in range(1, growth + 1)])
    assert rates[growth - 1 :] == sorted(rates[growth - 1 :], reverse=True) and (steps == 1 or rates[-1] == 0)
    assert optim.warmup(schedule, steps) == growth and optim.warmup(schedule, 51) == 50
    assert optim.warmup(optim.ScheduleConfig("constant", 50), steps) == 50


class Parts(nn.Module):
    """One parameter of each sort."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.gate = nn.Parameter(torch.zeros(1, 5, 1, 1))
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.positions = nn.Parameter(torch.zeros(1, 6, 4))
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def no_weight_decay(self) -> set[str]:
        return {"positions"}


def test_matrices_decay_or_all():
    model = Parts()
    names = {id(p): n for n, p in model.named_parameters()}
    decay, keep = optim.parameter_groups(model, 0.3)
    assert [names[id(p)] for p in decay["params"]] == ["linear.weight"]
    kept = {names[id(p)] for p in keep["params"]}
    assert kept == {"gate", "token", "positions", "linear.bias", "norm.weight", "norm.bias"}
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.3, 0.0)
    decay, keep = optim.build_optimizer(Parts(), optim.OptimizerConfig(weight_decay=0.1, decay="all")).param_groups
    assert (len(decay["params"]), decay["weight_decay"]) == (7, 0.1) and not keep["params"]


def test_optimisers_carry_their_options_and_refuse_a_frozen_model():
    model = Parts()
    adamw = optim.build_optimizer(model, optim.OptimizerConfig(betas=(0.8, 0.98), eps=1e-9))
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.8, 0.98) and adamw.defaults["eps"] == 1e-9
    assert optim.build_optimizer(model, optim.OptimizerConfig(name="sgd", momentum=0.7)).defaults["momentum"] == 0.7
    refuses("no trainable parameter", optim.build_optimizer, model.requires_grad_(False), optim.OptimizerConfig())


def test_numbers_are_drawn_evenly_or_are_the_largest() -> None:
    curriculum = Curriculum([1, 2, 5], steps_each=[100, 2000, 5000])
    drawn = list(curriculum)
    assert len(drawn) == len(curriculum) == 7100
    assert set(drawn[:100]) == {1}
    for part, largest in ((drawn[100:2100], 2), (drawn[2100:], 5)):
        counts = Counter(part)
        assert set(counts) == set(range(1, largest + 1))
        assert all(abs(n - len(part) / largest) < 0.15 * len(part) / largest for n in counts.values())
    assert list(Curriculum([2, 3], steps_each=2, uniform=False)) == [2, 2, 3, 3]


def test_a_step_depends_on_seed_and_step_and_a_stage_on_its_score() -> None:
    first, again, other = (Curriculum([3, 7], 50, seed=seed) for seed in (1, 1, 2))
    assert list(first) == list(again) != list(other)
    assert [*first[:37], *first[37:]] == list(first), "training that is resumed goes on as it would have"
    assert first[60] == list(first)[60] and first[-1] == list(first)[-1]
    assert [first.largest(step) for step in (0, 49, 50, 99, 1000)] == [3, 3, 7, 7, 7]
    with pytest.raises(IndexError, match=r"100.*100"):
        first[100]
    curriculum = AdaptiveCurriculum([1, 3, 7], solved=0.9, seed=1)
    found = []
    for accuracy in (0.5, 0.9, 0.2, 0.95, 1.0, 1.0):
        found.append((curriculum.largest(), curriculum.scored(accuracy)))
    assert found == [(1, False), (1, True), (3, False), (3, True), (7, False), (7, False)]
    same = Curriculum([7], 50, seed=1)
    assert [curriculum.segments(step) for step in range(60)] == [same.segments(step) for step in range(60)]
    assert [same.segments(step) for step in range(50)] == list(same)


@pytest.mark.parametrize("solved", [0, 1.01])
def test_an_accuracy_that_nothing_reaches_is_refused(solved: float) -> None:
    refuses(f"solved={solved} must be an accuracy above 0 and up to 1", AdaptiveCurriculum, [1, 2], solved)
    refuses(r"stages=\[2, 1\]", AdaptiveCurriculum, [2, 1], 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 5), "at least one number of segments"),
        (([0, 1], 5), r"stages=\[0, 1\] must be .* each at least 1"),
        (([2, 2], 5), r"stages=\[2, 2\] must grow"),
        (([1, 2], 0), "steps_each=0 must be at least 1"),
        (([1, 2], [5]), r"steps_each=\[5\] must be .* one for each of 2 stages"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, message: str) -> None:
    refuses(message, Curriculum, *arguments)


def take(order: TrainingOrder, count: int) -> list[list[tuple[int, int]]]:
    return list(itertools.islice(order, count))


def test_an_epoch_holds_every_row_once_and_may_start_later():
    batches = take(TrainingOrder(12, 4, seed=3), 6)
    first, second = (list(itertools.chain(*batches[i : i + 3])) for i in (0, 3))
    assert sorted(index for _, index in first) == sorted(index for _, index in second) == list(range(12))
    assert {epoch for epoch, _ in first} == {0} and {epoch for epoch, _ in second} == {1}
    assert [index for _, index in first] != [index for _, index in second]
    whole = take(TrainingOrder(10, 3, seed=1), 9)
    for start in range(9):
        assert take(TrainingOrder(10, 3, seed=1, start=start), 9 - start) == whole[start:]


def test_processes_and_pieces_together_take_the_rows_of_one_process():
    whole = take(TrainingOrder(20, 8, seed=1), 4)
    for size, count in ((2, 1), (1, 4), (2, 2)):
        pieces = [take(TrainingOrder(20, 8, 1, 0, Share(rank, size, count)), 4 * count) for rank in range(size)]
        for step in range(4):
            parts = [p for mine in pieces for p in mine[step * count : (step + 1) * count]]
            assert list(itertools.chain(*parts)) == whole[step]


def test_evaluation_covers_every_row_once_and_large_batches_are_refused():
    data = standin.StandinRows("validation", size=11)
    seen = [b.inputs for rank in range(3) for b in evaluation_batches(data, 2, rank, 3)]
    assert sorted(torch.cat(seen)[:, 0].tolist()) == sorted(data.points[:, 0].tolist())
    refuses("batch_size=8", TrainingOrder, 20, 8, 0, share=Share(processes=3))
    refuses("batch_size=8", TrainingOrder, 7, 8, 0)
