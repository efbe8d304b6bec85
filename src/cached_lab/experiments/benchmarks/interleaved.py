"""Timing of alternatives in turn, round by round, as ratios, so that a busy machine disturbs all alike."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Ratio:
    """The time of one case divided by that of the reference.

    Attributes:
        median, low, high: median and quartiles over rounds, each round by itself.
        seconds: median time of the case.
        fastest: the least time of the case divided by the least of the reference. What disturbs a machine only adds
            to a time, so on a busy one this moves less than the median.
    """

    median: float
    low: float
    high: float
    seconds: float
    fastest: float

    def __str__(self) -> str:
        return f"{self.median:.3f}x ({self.low:.3f}-{self.high:.3f})"


def seconds_of(fn: Callable[[], object]) -> float:
    """Seconds that `fn` keeps the processor (CPU time of all threads) or the GPU (wall time to a fence) busy."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        return time.perf_counter() - begin
    begin = time.process_time()
    fn()
    return time.process_time() - begin


def precision(device: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[object]:
    """Autocast to a dtype, under which a forward pass runs; nothing for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device, dtype)


def training_step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """A function that makes one AdamW step on what `loss` gives."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def compare(cases: Mapping[str, Callable[[], object]], reference: str, rounds: int) -> dict[str, Ratio]:
    """Time every case once a round, in alternating order, after one round that is not counted.

    Returns:
        For each case its ratio to the case called `reference`.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(rounds + 1):
        names = list(cases)
        for name in names if index % 2 else reversed(names):
            spent = seconds_of(cases[name])
            if index:
                times[name].append(spent)
    result = {}
    for name, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, times[reference], strict=True))
        quartile = len(ratios) // 4
        low, high = ratios[quartile], ratios[-1 - quartile]
        fastest = min(seconds) / min(times[reference])
        result[name] = Ratio(statistics.median(ratios), low, high, statistics.median(seconds), fastest)
    return result
