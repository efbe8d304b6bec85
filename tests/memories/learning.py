"""What proofs that a memory learns share: a model of one layer, trained on a task of `experiments.probes`.

One layer passes nothing on from layer to layer, so that only a memory reaches an earlier segment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cached_lab.experiments.probes import ProbeTask
from cached_lab.experiments.probes.protocol import ProbeSizes, build_model, score, train
from cached_lab.experiments.probes.tasks import Latch

LATCH = Latch()
"""One of four symbols in the first segment of four tokens, asked for at the end of the last."""
DISTANCE = 3
"""Segments from the symbol to the question."""
ROWS = 1000


def untrained(task: ProbeTask, memory: Any, **sizes: Any) -> nn.Module:
    """The model before its training; `sizes` are those of `experiments.probes.protocol.ProbeSizes`."""
    torch.manual_seed(0)
    return build_model(task, memory, _sizes(**sizes))


def trained(
    task: ProbeTask,
    memory: Any,
    steps: int,
    *,
    distance: int = DISTANCE,
    passes: int = 1,
    bptt: int | None = None,
    **sizes: Any,
) -> nn.Module:
    """The model after at most so many steps; it stops when nearly every answer is right."""
    model = untrained(task, memory, **sizes)
    train(model, task, distance, _sizes(steps=steps, **sizes), seed=1, passes=passes, bptt=bptt)
    return model.eval()


def accuracy(
    model: nn.Module,
    task: ProbeTask,
    distance: int = DISTANCE,
    *,
    passes: int = 1,
    forget: bool = False,
    shuffle: bool = False,
) -> float:
    """Share of right answers on new episodes; `forget` drops the state before the last segment, `shuffle` hands it to
    the next row."""
    return score(model, task, distance, ROWS, passes, forget=forget, shuffle=shuffle).accuracy


@torch.no_grad()
def reach(task: ProbeTask, memory: Any, distance: int = DISTANCE, **sizes: Any) -> float:
    """How much the answers to the last segment change when the first one is another, whatever is learned.

    Where it is 0, no training brings an accuracy above chance. The model has random weights, none of which would hide
    the effect of another.
    """
    model = untrained(task, memory, **sizes).eval()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    inputs_BN = task.draw(ROWS, distance, torch.Generator().manual_seed(0)).inputs_BN
    other_BN = inputs_BN.clone()
    other_BN[:, : task.segment] = (other_BN[:, : task.segment] + 1) % task.vocabulary
    answers = []
    for tokens_BN in (inputs_BN, other_BN):
        state = None
        for segment_BN in tokens_BN.split(task.segment, 1):
            outputs, state, _ = model(segment_BN, state)
        answers.append(outputs)
    return (answers[0] - answers[1]).abs().max().item()


def _sizes(**sizes: Any) -> ProbeSizes:
    return ProbeSizes(**{"depth": 1, "check_every": 50, **sizes})
