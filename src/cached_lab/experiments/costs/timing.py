"""Interleaved timing: alternatives run in turn, round by round, so that a busy machine disturbs all of them alike."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cached_lab.training.optim import can_fuse


@dataclass(frozen=True)
class Ratio:
    """Time of one case divided by the time of the reference.

    Attributes:
        median, low, high: median and quartiles of the ratio over rounds.
        seconds: median time of the case.
        fastest: shortest time of the case over the shortest time of the reference. Disturbances only add time, so this
            moves less than the median on a busy machine.
    """

    median: float
    low: float
    high: float
    seconds: float
    fastest: float

    def __str__(self) -> str:
        return f"{self.median:.3f}x ({self.low:.3f}-{self.high:.3f})"


def seconds_of(call: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads during `call`, or on a GPU the wall time up to a synchronisation."""
    on_gpu = torch.cuda.is_available()
    clock = time.perf_counter if on_gpu else time.process_time
    if on_gpu:
        torch.cuda.synchronize()
    begin = clock()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - begin


def precision(device: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Return an autocast context for `dtype`; a null context for float32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """Return a function that makes one AdamW step on the value of `loss`, with the trainer's kernels."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=can_fuse(model))

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every case in every round, in alternating order, after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(rounds + 1):
        for name in cases if index % 2 else reversed(list(cases)):
            spent = seconds_of(cases[name])
            if index:
                times[name].append(spent)
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lower and the upper quartile."""
    ordered, place = sorted(values), len(values) // 4
    return statistics.median(ordered), ordered[place], ordered[-1 - place]


def compare(cases: Mapping[str, Callable[[], object]], reference: str, rounds: int) -> dict[str, Ratio]:
    """Time every case by `interleaved`.

    Returns:
        the ratio of each case to the case called `reference`.
    """
    times, result = interleaved(cases, rounds), {}
    for name, seconds in times.items():
        ratios = quartiles([a / b for a, b in zip(seconds, times[reference], strict=True)])
        result[name] = Ratio(*ratios, statistics.median(seconds), min(seconds) / min(times[reference]))
    return result
