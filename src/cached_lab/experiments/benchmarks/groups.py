"""Cases that do the same work, timed in turn: what each takes beside the first, and of what the device could do.

One case that fails leaves its error in the report and nothing else.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from cached_lab.experiments.costs.flops import flops_of
from cached_lab.experiments.costs.live_bytes import peak_bytes
from cached_lab.experiments.costs.traffic import bytes_of

from .interleaved import Ratio, compare, seconds_of
from .peaks import Peaks

Call = Callable[[], object]


class Unavailable(Exception):
    """A case that this machine lacks something for: it is left out by name."""


@dataclass(frozen=True)
class Case:
    """One way of doing a group's work.

    Attributes:
        make: builds what is timed, a function without arguments.
        like: the case whose operations these are, too, where they cannot be counted: of compiled code and of kernels
            that are no operators of torch. "" for a case that is counted itself, None for one with other operations.
    """

    make: Callable[[], Call]
    like: str | None = ""


@dataclass(frozen=True)
class Group:
    """Cases in one dtype; the first that can be timed is what the others are compared with."""

    part: str
    work: str
    dtype: torch.dtype
    cases: Mapping[str, Case]


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        time: over that of the reference, with the case's own seconds.
        gflop, gigabytes: counted, of operators in eager mode; None where they cannot be.
        flops_share, bytes_share: of the device's measured peaks, in per cent.
        peak_mib: most that was alive at once beside what was there before; None where nothing reports it.
    """

    part: str
    work: str
    dtype: str
    case: str
    time: Ratio
    reference: str
    gflop: float | None
    gigabytes: float | None
    flops_share: float | None
    bytes_share: float | None
    peak_mib: float | None


@dataclass
class Report:
    """What was found, as far as it went.

    Attributes:
        failed: cases and parts with their errors. left_out: those that were not tried, with the reason.
    """

    peaks: Peaks
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Clock:
    """Until when a part may begin something new."""

    end: float

    @property
    def left(self) -> float:
        """Seconds; below 0 when time is up."""
        return self.end - time.monotonic()


@dataclass(frozen=True)
class _Ready:
    call: Call
    seconds: float
    flops: int | None
    bytes: int | None
    peak: int | None


def measure(group: Group, report: Report, rounds: int, device: str, clock: Clock) -> None:
    """Build, count and time the cases that time allows, and write them into the report."""
    ready: dict[str, _Ready] = {}
    for name, case in group.cases.items():
        title = f"{title_of(group)}, {name}"
        if clock.left <= 0:
            report.left_out.append(f"{title}: no time was left")
            continue
        try:
            ready[name] = _prepare(case, ready, device)
        except (Unavailable, ImportError) as error:
            report.left_out.append(f"{title}: {error}")
        except Exception as error:
            report.failed.append(f"{title}: {described(error)}")
        _release(device)
    if not ready:
        return
    reference = next(iter(ready))
    round_seconds = sum(case.seconds for case in ready.values())
    rounds = max(1, min(rounds, int(clock.left / 2 / max(round_seconds, 1e-6)) - 1))
    try:
        times = compare({name: case.call for name, case in ready.items()}, reference, rounds)
    except Exception as error:
        report.failed.append(f"{title_of(group)}, all in turn: {described(error)}")
        return
    finally:
        torch.compiler.reset()  # what was compiled here counts against no limit of the next group
    report.rows += [_row(group, name, case, times[name], reference, report.peaks) for name, case in ready.items()]


def title_of(group: Group) -> str:
    """What a report calls it."""
    return f"{group.part}, {group.work}, {_named(group.dtype)}"


def _prepare(case: Case, ready: Mapping[str, _Ready], device: str) -> _Ready:
    call = case.make()
    call()  # whatever is set up or compiled at the first call
    flops: int | None = None
    moved: int | None = None
    if case.like == "":
        flops, moved = flops_of(call), bytes_of(call)
    elif case.like is not None and case.like in ready:
        flops, moved = ready[case.like].flops, ready[case.like].bytes
    # Without a device that reports it, memory is counted operator by operator, which compiled code does not show.
    peak = peak_bytes(call, device) if device == "cuda" or case.like == "" else None
    return _Ready(call, seconds_of(call), flops, moved, peak)


def _row(group: Group, name: str, case: _Ready, time: Ratio, reference: str, peaks: Peaks) -> Row:
    def share(amount: int | None, speed: float | None) -> float | None:
        return None if amount is None or not speed or not time.seconds else 100 * amount / time.seconds / speed

    dtype = _named(group.dtype)
    return Row(
        group.part,
        group.work,
        dtype,
        name,
        time,
        reference,
        None if case.flops is None else case.flops / 1e9,
        None if case.bytes is None else case.bytes / 1e9,
        share(case.flops, peaks.flops.get(dtype)),
        share(case.bytes, peaks.bandwidth),
        None if case.peak is None else case.peak / 2**20,
    )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _release(device: str) -> None:
    """Memory of what failed, and of what was only counted."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
