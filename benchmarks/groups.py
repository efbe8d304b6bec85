"""Groups of cases that do the same work, timed in turn: time next to the first case, and share of the device's peaks.

A case that fails leaves its error in the report; the others are measured all the same.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks import command
from benchmarks.peaks import Peaks
from cached_lab.experiments.costs.flops import flops_of
from cached_lab.experiments.costs.live_bytes import peak_bytes
from cached_lab.experiments.costs.timing import compare, seconds_of
from cached_lab.experiments.costs.traffic import bytes_of

Call = Callable[[], object]


class Unavailable(Exception):
    """This machine lacks something for a case, which is left out by name."""


@dataclass(frozen=True)
class BenchmarkCase:
    """One way of doing a group's work.

    Attributes:
        make: builds the timed function.
        like: name of a case with the same operations, if they cannot be counted here (compiled code, kernels outside
            torch). "" for a case that is counted itself, None for one with other operations.
    """

    make: Callable[[], Call]
    like: str | None = ""


@dataclass(frozen=True)
class CaseGroup:
    """Cases in one dtype; the first that can be timed is the reference."""

    part: str
    work: str
    dtype: torch.dtype
    cases: Mapping[str, BenchmarkCase]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        return f"{self.part}, {self.work}, {self.dtype_name}"


@dataclass
class BenchmarkReport:
    """Rows so far; cases and parts that failed with their errors, and those left out with the reason."""

    peaks: Peaks
    rows: list[command.Measurement] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Prepared:
    call: Call
    seconds: float
    flops: int | None
    bytes: int | None
    peak: int | None


def measure_group(group: CaseGroup, report: BenchmarkReport, rounds: int, device: str, end: float) -> None:
    """Build, count and time the cases that can begin before `end` (of `time.monotonic`); append rows to the report."""
    ready: dict[str, _Prepared] = {}
    for name, case in group.cases.items():
        if time.monotonic() >= end:
            report.left_out.append(f"{group}, {name}: no time was left")
            continue
        try:
            ready[name] = _prepare(case, ready, device)
        except (Unavailable, ImportError) as error:
            report.left_out.append(f"{group}, {name}: {error}")
        except Exception as error:
            report.failed.append(f"{group}, {name}: {one_line(error)}")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if not ready:
        return
    reference = next(iter(ready))
    round_seconds = sum(case.seconds for case in ready.values())
    rounds = max(1, min(rounds, int((end - time.monotonic()) / 2 / max(round_seconds, 1e-6)) - 1))
    try:
        times = compare({name: case.call for name, case in ready.items()}, reference, rounds)
    except Exception as error:
        report.failed.append(f"{group}, all in turn: {one_line(error)}")
        return
    finally:
        torch.compiler.reset()  # compiled code must not count towards limits of the next group
    for name, made in ready.items():
        seconds = times[name].seconds
        row = {"part": group.part, "work": group.work, "dtype": group.dtype_name, "case": name}
        rates = {
            "gflop": _share(made.flops, 1e9),
            "gigabytes": _share(made.bytes, 1e9),
            "flops_share": _share(made.flops, seconds * report.peaks.flops.get(group.dtype_name, 0) / 100),
            "bytes_share": _share(made.bytes, seconds * report.peaks.bandwidth / 100),
            "peak_mib": _share(made.peak, 2**20),
        }
        report.rows.append({**row, "time": times[name], "reference": reference, **rates})


def _prepare(case: BenchmarkCase, ready: Mapping[str, _Prepared], device: str) -> _Prepared:
    call = case.make()
    call()  # the first call sets up and compiles
    flops: int | None = None
    moved: int | None = None
    if case.like == "":
        flops, moved = flops_of(call), bytes_of(call)
    elif case.like is not None and case.like in ready:
        flops, moved = ready[case.like].flops, ready[case.like].bytes
    # On a CPU memory is counted by operator, which compiled code hides.
    peak = peak_bytes(call, device) if device == "cuda" or case.like == "" else None
    return _Prepared(call, seconds_of(call), flops, moved, peak)


def _share(amount: int | None, whole: float) -> float | None:
    return None if amount is None or not whole else amount / whole


def one_line(error: Exception) -> str:
    """Write an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
