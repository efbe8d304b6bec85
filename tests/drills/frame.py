"""Definition and execution of drills: each case in its own process, with a time limit.

A case is a name from which inputs, seeds and places of kills follow, so that a failed case can be repeated.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Failure(Exception):
    """A case did not end well; the message has the expected and the actual result."""


@dataclass(frozen=True)
class Drill:
    """One kind of trouble.

    Attributes:
        name: name of the module.
        summary: action and condition, in one sentence; the table has what is before the first colon.
        cases: (count, seed) to names of cases: the first `count` in a random order, or all if there are fewer.
        attempt: run a case in an empty folder, in a forked process; raise `Failure`, or anything else, if it fails.
        count: cases of `make drills`. sample: cases of `make test`.
        prepare: run once before the first case, in the parent: imports, and data that cases only read.
        limit: seconds of a case.
    """

    name: str
    summary: str
    cases: Callable[[int, int], Iterable[str]]
    attempt: Callable[[str, Path], None]
    count: int
    sample: int
    prepare: Callable[[Path], None] | None = None
    limit: float = 60.0


class Result(NamedTuple):
    """Result of a case; `problem` is None if it passed."""

    case: str
    problem: str | None
    seconds: float


class Outcome(NamedTuple):
    """All that is reported of a drill."""

    drill: Drill
    results: list[Result]
    seconds: float

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.problem is not None]

    def line(self) -> str:
        """Tried, held, failed, and the command that repeats each failure."""
        tried, failed = len(self.results), len(self.failed)
        lines = [f"{self.drill.name}: tried {tried}, held {tried - failed}, failed {failed} ({self.seconds:.0f} s)"]
        for result in self.failed:
            lines.append(f"  python -m drills {self.drill.name} --case '{result.case}'")
            lines += [f"    {line}" for line in (result.problem or "").strip().splitlines()[-12:]]
        return "\n".join(lines)


def numbered(count: int, seed: int) -> Iterator[str]:
    """Names of `count` cases: seed/number."""
    return (f"{seed}/{number}" for number in range(count))


def each(case: str, count: int, work: Callable[[str], str | None]) -> None:
    """Work on `count` inputs of a case `a/b`, or on the one of `a/b/place`; raise Failure with what is wrong."""
    names = [case] if case.count("/") == 2 else [f"{case}/{place}" for place in range(count)]
    if problems := [f"--case '{name}'\n{problem}" for name in names if (problem := work(name))]:
        raise Failure("\n\n".join(problems))


def bound_memory(room: int) -> None:
    """Let this process take `room` bytes beyond what it has."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_AS, (held, held))


def carry_out(drill: Drill, cases: Iterable[str], jobs: int = 1, say: Callable[[str], None] | None = None) -> Outcome:
    """Try cases, `jobs` at a time."""
    started = time.perf_counter()
    with kept_environment(), tempfile.TemporaryDirectory(prefix=f"drill_{drill.name}_", dir=_in_memory()) as folder:
        work = Path(folder)
        if drill.prepare is not None:
            (work / "shared").mkdir()
            drill.prepare(work / "shared")
        gc.collect()
        gc.freeze()  # or each child that collects garbage goes through all that was imported, and copies its pages
        results: list[Result] = []
        for result in _tried(drill, iter(cases), work, jobs):
            results.append(result)
            if say is not None and (result.problem or len(results) % 100 == 0):
                say(f"{drill.name}: {len(results)} tried" + (f"; {result.case} failed" if result.problem else ""))
    return Outcome(drill, results, time.perf_counter() - started)


def _in_memory() -> Path | None:
    """Return a folder in memory with enough room, since drills call fsync very often; None for the usual place."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * 2**30
    return memory if roomy else None


@contextlib.contextmanager
def kept_environment() -> Iterator[None]:
    """Restore the environment after the block, and take out modules that a drill made instead of a library."""
    before, modules = dict(os.environ), set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - modules:
            if getattr(sys.modules[name], "__spec__", None) is None:
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(before)


def _tried(drill: Drill, cases: Iterator[str], work: Path, jobs: int) -> Iterator[Result]:
    """Results in the order in which cases end."""
    running: dict[int, tuple[str, Path, float]] = {}
    while True:
        while len(running) < jobs and (case := next(cases, None)) is not None:
            folder = work / hashlib.sha256(case.encode()).hexdigest()[:16]
            folder.mkdir()
            running[_forked(drill, case, folder)] = (case, folder, time.perf_counter())
        if not running:
            return
        for process, (case, folder, started) in list(running.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            seconds = time.perf_counter() - started
            if not ended and seconds <= drill.limit:
                continue
            if not ended:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
            del running[process]
            yield Result(case, _problem(folder, status if ended else None, drill.limit), seconds)
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.002)


def _forked(drill: Drill, case: str, folder: Path) -> int:
    """Run a case in a child with output and problem in its folder; return the process id."""

    def work() -> int:
        os.setpgid(0, 0)
        log = os.open(folder / ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        inside = folder / "case"
        inside.mkdir()
        try:
            drill.attempt(case, inside)
            return 0
        except Failure as failure:
            (folder / ".problem").write_text(str(failure), encoding="utf-8")
        except BaseException:
            (folder / ".problem").write_text(traceback.format_exc(), encoding="utf-8")
        return 1

    return forked(work)


def _problem(folder: Path, status: int | None, limit: float) -> str | None:
    if status == 0:
        return None
    if status is None:
        return f"took longer than {limit:.0f} seconds"
    file = folder / ".problem"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    log = (folder / ".log").read_text(encoding="utf-8", errors="replace") if (folder / ".log").is_file() else ""
    return f"{log[-2000:]}\nthe process ended with status {status}"


def in_child(work: Callable[[], object]) -> int:
    """Do something in a forked process; its exit status, negative for a signal. For cases that end a process."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])


def forked(work: Callable[[], object]) -> int:
    """Process number of a forked process that does something and ends with its result, or 1, as its exit status."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        status = 1
        try:
            status = int(work() or 0)  # type: ignore[call-overload]
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return process
