"""Optimisers and learning-rate schedules.

The learning rate is a function of the step number, so there is no scheduler state. The inverse-square-root schedule is
that of the Long Range Arena (Tay et al., arXiv:2011.04006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser and its peak learning rate (the `optimizer` section of a recipe)."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    """Peak learning rate; for the inverse_sqrt schedule the factor of 1 / sqrt(step)."""
    weight_decay: float = 0.05
    """Decoupled for adamw (times the learning rate), L2 for sgd."""
    decay: Literal["matrices", "all"] = "matrices"
    """Parameters that decay: matrices (see `parameter_groups`), or all (as in the Long Range Arena)."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    """sgd only."""

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={list(self.betas)} must be two numbers in [0, 1), e.g. [0.9, 0.999]")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"optimizer.learning_rate={self.learning_rate} must be positive and finite")
        if self.weight_decay < 0 or self.eps <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"optimizer.weight_decay={self.weight_decay} must not be negative, optimizer.eps={self.eps} must be "
                f"positive and optimizer.momentum={self.momentum} must lie in [0, 1)"
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule (the `schedule` section of a recipe)."""

    name: Literal["constant", "cosine", "inverse_sqrt", "step"] = "cosine"
    warmup_steps: int = 0
    """Steps of linear warmup; at most a tenth of the run for a cosine schedule that they would fill (`warmup`)."""
    initial_ratio: float = 0.0
    """Learning rate at the start of the warmup, as a share of the peak."""
    final_ratio: float = 0.0
    """cosine only: learning rate of the last step, as a share of the peak."""
    decay_steps: tuple[int, ...] = ()
    """step only: after each of these steps the learning rate falls to `decay_factor` of itself."""
    decay_factor: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps={self.warmup_steps} must not be negative")
        for name in ("initial_ratio", "final_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name}={getattr(self, name)} must lie in [0, 1]")
        if self.name == "step" and not self.decay_steps:
            raise ValueError("schedule.name=step needs schedule.decay_steps, e.g. [58632, 80619]; or take constant")
        if any(step < 1 for step in self.decay_steps) or list(self.decay_steps) != sorted(set(self.decay_steps)):
            raise ValueError(f"schedule.decay_steps={list(self.decay_steps)} must grow, from 1 on")
        if not 0 < self.decay_factor <= 1:
            raise ValueError(f"schedule.decay_factor={self.decay_factor} must lie in (0, 1]")


def warmup(schedule: ScheduleConfig, steps: int) -> int:
    """Return the warmup steps of a run: `schedule.warmup_steps`, or a tenth of a run that they would fill (cosine)."""
    if schedule.name == "cosine" and schedule.warmup_steps >= steps:
        return max(1, steps // 10)
    return schedule.warmup_steps


def learning_rate(optimizer: OptimizerConfig, schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step (from 1) in a run of `steps` steps.

    With w of `warmup` and i = `initial_ratio`, the ramp is i + (1 - i) * min(1, t / w). Constant is peak * ramp; cosine
    falls from the peak at t = w to `final_ratio` * peak at t = steps; inverse_sqrt is peak * ramp / sqrt(max(t, w));
    step is peak * ramp * factor^k after k of the decay steps.
    """
    peak, growth = optimizer.learning_rate, warmup(schedule, steps)
    begin = schedule.initial_ratio
    ramp = begin + (1 - begin) * min(1.0, step / growth) if growth else 1.0
    if schedule.name == "inverse_sqrt":
        return peak * ramp / math.sqrt(max(step, growth, 1))
    if schedule.name == "step":
        return peak * ramp * schedule.decay_factor ** sum(step > at for at in schedule.decay_steps)
    if schedule.name == "constant" or step <= growth:
        return peak * ramp
    progress = min(1.0, (step - growth) / max(1, steps - growth))
    floor = schedule.final_ratio
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def parameter_groups(model: nn.Module, weight_decay: float, every: bool = False) -> list[dict[str, object]]:
    """Return two groups: matrices decay; biases, norms, tokens and per-head gates do not, unless `every`.

    A matrix has at least two dimensions longer than one: a gate of shape (1, H, 1, 1) is a vector. Names in
    `model.no_weight_decay()` (a convention of timm) do not decay.
    """
    named = getattr(model, "no_weight_decay", None)
    exempt = set(named()) if callable(named) else set()
    decay: list[nn.Parameter] = []
    keep: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = sum(size > 1 for size in parameter.shape) >= 2 and name not in exempt
            (decay if matrix or every else keep).append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": keep, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimiser of the trainable parameters (ValueError: there are none)."""
    groups = parameter_groups(model, config.weight_decay, config.decay == "all")
    if not any(group["params"] for group in groups):
        raise ValueError("the model has no trainable parameter; set requires_grad on some of them")
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=can_fuse(model))


def can_fuse(model: nn.Module) -> bool:
    """True if one kernel can update each parameter, in a third of the time and without temporary tensors."""
    return all(p.device.type in ("cpu", "cuda") for p in model.parameters())
