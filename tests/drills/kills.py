"""Drill: the process is killed or stopped at random moments, repeatedly; the same command resumes and ends well.

Names of cases: `SIGKILL/images/3`: signal, command, and a seed of the moments. The signal determines the exit status.
`injection` has the file operations.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from cached_lab.cli import main as main_module

from . import _commands
from .frame import Failure, forked

DEATHS = 3
"""Times at most that a command of one case is ended."""
KINDS = ("SIGKILL",) * 5 + ("SIGTERM", "SIGINT")


def cases(count: int, seed: int) -> Iterator[str]:
    """In turn the commands; of seven cases of each, five are of SIGKILL."""
    names = _commands.names()
    return (
        f"{KINDS[number // len(names) % len(KINDS)]}/{names[number % len(names)]}/{seed + number // len(names)}"
        for number in range(count)
    )


def attempt(case: str, folder: Path) -> None:
    kind, name, _ = case.split("/")
    chance, number = random.Random(case), signal.Signals[kind]
    run, seconds = folder / "run", _commands.reference(name)[1]
    ends: list[str] = []
    try:
        for _ in range(DEATHS):
            after = chance.uniform(0, seconds)
            ends.append(f"after {after:.3f} s")
            status = _signalled(name, run, folder, number, after)
            if not status:
                break
            expected = -signal.SIGKILL if kind == "SIGKILL" else 128 + number
            if status != expected:
                raise Failure(f"the exit status is {status}, not {expected}: {_commands.last_words(folder / 'said')}")
        _commands.goes_on(name, run, folder / "said")
    except Failure as failure:
        raise Failure(f"{kind} {', then '.join(ends)}: {failure}") from None


def _signalled(name: str, run: Path, folder: Path, number: int, after: float) -> int:
    """Exit status of a command that gets a signal some seconds after it has begun to listen to signals.

    Raises:
        Failure: it had the signal, ended well, and said nothing of it.
    """
    reader, writer = os.pipe()
    process = forked(lambda: _commands.saying(lambda: _listening(name, run, writer), folder / "said"))
    os.close(writer)
    os.read(reader, 1)
    time.sleep(after)
    sent = time.monotonic()
    os.kill(process, number)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    over = float(os.read(reader, 64) or "inf")
    os.close(reader)
    if not status and sent < over - 0.05:
        raise Failure(f"the signal came {over - sent:.3f} s before the end, and was swallowed")
    return status


def _listening(name: str, run: Path, writer: int) -> int:
    """Carry out a command, and write when it begins to listen to signals, and when it no longer does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # before and after that
        signal.signal(number, signal.SIG_IGN)
    original = main_module.ended_by_signals

    @contextlib.contextmanager
    def told() -> Iterator[None]:
        with original():
            os.write(writer, b"x")
            yield
            over = time.monotonic()
        os.write(writer, f"{over}".encode())

    main_module.ended_by_signals = told
    return _commands.carry_out(name, run)


SUMMARY = (
    "trainings, a comparison and a stream get SIGKILL, SIGTERM or SIGINT at random moments, up to three times "
    "each, and are carried out again: they end as the undisturbed ones, and the exit status is the signal's"
)
COUNT, SAMPLE, LIMIT = 120, 2, 400.0
prepare = _commands.prepare
