"""Processes that train together, forked and not started anew: what torchrun does, without the seconds of its imports.

The process that forks must never have made a process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drills.frame import forked

from cached_lab.training import distributed

PATIENCE = 1.0
"""Seconds that a process has to end by itself after SIGTERM, when another one has failed."""


def start(work: Callable[[], object], meeting: Path, size: int = 2) -> list[int]:
    """Process numbers of `size` forked processes, in order of rank, in each of which `work` is called.

    Args:
        meeting: a file that does not exist, at which the processes find each other.
    """
    return [forked(lambda: _ranked(work, meeting, rank, size)) for rank in range(size)]  # noqa: B023


def _ranked(work: Callable[[], object], meeting: Path, rank: int, size: int) -> object:
    together = distributed.in_group

    def in_group(inner: Callable[[], Any], backend: str) -> Any:
        return together(inner, backend, init_method=f"file://{meeting}", rank=rank, world_size=size)

    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{size}", GLOO_SOCKET_IFNAME="lo")
    distributed.in_group = in_group  # type: ignore[assignment]
    return work()


def statuses(processes: Sequence[int]) -> list[int]:
    """Exit statuses, negative for signals; where one fails, the others are ended as torchrun does."""
    found: dict[int, int] = {}
    failed_at = None
    while len(found) < len(processes):
        for process in processes:
            if process not in found:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    found[process] = os.waitstatus_to_exitcode(status)
        left = [process for process in processes if process not in found]
        if failed_at is None and any(found.values()):
            failed_at = time.monotonic()
            _send(left, signal.SIGTERM)
        if failed_at is not None and time.monotonic() > failed_at + PATIENCE:
            _send(left, signal.SIGKILL)
        time.sleep(0.005)
    return [found[process] for process in processes]


def commands(words: Sequence[str], folder: Path) -> list[str]:
    """Carry out a `cached` command in two processes; return what each printed.

    Args:
        folder: an empty folder, or one that does not exist.
    """
    from cached_lab.cli.main import main

    folder.mkdir(exist_ok=True)

    def work() -> int:
        with (folder / os.environ["RANK"]).open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            return main(list(words))

    assert statuses(start(work, folder / "meeting")) == [0, 0]
    return [(folder / f"{rank}").read_text(encoding="utf-8") for rank in range(2)]


def _send(processes: Sequence[int], number: int) -> None:
    for process in processes:
        os.kill(process, number)
