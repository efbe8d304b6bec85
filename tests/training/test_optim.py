"""Schedules against hand-computed values, and which parameters decay."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from cached_lab.training.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    learning_rate,
    parameter_groups,
    warmup,
)


def test_inverse_square_root_is_that_of_the_long_range_arena():
    optimizer, schedule = OptimizerConfig(learning_rate=0.05), ScheduleConfig("inverse_sqrt", warmup_steps=1000)
    rates = {t: learning_rate(optimizer, schedule, t, 5000) for t in (1, 500, 1000, 2000, 5000)}
    expected = {1: 1.5811e-6, 500: 7.9057e-4, 1000: 1.5811e-3, 2000: 1.1180e-3, 5000: 7.0711e-4}
    assert rates == pytest.approx(expected, rel=1e-4)


def test_cosine_rises_linearly_and_ends_at_its_floor():
    optimizer, schedule = OptimizerConfig(learning_rate=2.0), ScheduleConfig("cosine", 10, final_ratio=0.1)
    rates = [learning_rate(optimizer, schedule, t, 110) for t in range(1, 111)]
    assert rates[:10] == pytest.approx([0.2 * t for t in range(1, 11)])
    assert rates[59] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[-1] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize(("steps", "growth"), [(20, 2), (50, 5), (3, 1), (1, 1)])
def test_a_recipe_may_be_tried_for_fewer_steps_than_it_warms_up(steps, growth):
    """The rate reaches its peak after a tenth of the steps and falls; one step more than the warm-up is as written."""
    optimizer, schedule = OptimizerConfig(learning_rate=2.0), ScheduleConfig("cosine", 50)
    rates = [learning_rate(optimizer, schedule, t, steps) for t in range(1, steps + 1)]
    assert rates[:growth] == pytest.approx([2.0 * t / growth for t in range(1, growth + 1)])
    assert rates[growth - 1 :] == sorted(rates[growth - 1 :], reverse=True) and (steps == 1 or rates[-1] == 0)
    assert warmup(schedule, steps) == growth and warmup(schedule, 51) == 50
    assert warmup(ScheduleConfig("constant", 50), steps) == 50


def test_constant_without_warmup_is_constant():
    rates = {learning_rate(OptimizerConfig(learning_rate=3.0), ScheduleConfig("constant"), t, 9) for t in range(1, 10)}
    assert rates == {3.0}


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


def test_only_matrices_decay():
    model = Parts()
    names = {id(p): n for n, p in model.named_parameters()}
    decay, keep = parameter_groups(model, 0.3)
    assert [names[id(p)] for p in decay["params"]] == ["linear.weight"]
    kept = {names[id(p)] for p in keep["params"]}
    assert kept == {"gate", "token", "positions", "linear.bias", "norm.weight", "norm.bias"}
    assert (decay["weight_decay"], keep["weight_decay"]) == (0.3, 0.0)


def test_all_decay_where_that_is_asked():
    decay, keep = build_optimizer(Parts(), OptimizerConfig(weight_decay=0.1, decay="all")).param_groups
    assert (len(decay["params"]), decay["weight_decay"]) == (7, 0.1) and not keep["params"]


def test_optimisers_carry_their_options_and_refuse_a_frozen_model():
    model = Parts()
    adamw = build_optimizer(model, OptimizerConfig(betas=(0.8, 0.98), eps=1e-9))
    assert isinstance(adamw, torch.optim.AdamW)
    assert adamw.defaults["betas"] == (0.8, 0.98) and adamw.defaults["eps"] == 1e-9
    assert build_optimizer(model, OptimizerConfig(name="sgd", momentum=0.7)).defaults["momentum"] == 0.7
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model.requires_grad_(False), OptimizerConfig())
