"""Processes that work for this one: they end when it ends, however it does, and when it stops them.

Each holds the reading end of a pipe and this process the writing end. When that is closed, by us or by the system after
our death, the child asks itself to stop as SIGTERM would: a run saves a checkpoint first. Signals of the terminal reach
this process alone, so that a run is asked once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import IO, TypeVar

from cached_lab.training.interruption import Stopped, stop_requests

T = TypeVar("T")
_COMMAND = """\
import os, sys
from cached_lab.experiments.subprocesses import stop_after
stop_after(lambda: os.read(0, 1))
from cached_lab.cli.main import main
sys.argv[0] = "cached"
sys.exit(main())
"""
_PAUSE = 0.05
"""Seconds between two looks at the children."""


def stop_after(wait: Callable[[], object]) -> None:
    """In a child: ask this process to stop when `wait`, which a thread calls, returns."""

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def stop_with(line: Connection) -> None:
    """In a child: ask this process to stop when the other end of a pipe is closed."""
    stop_after(lambda: line.poll(None))


def start_command(arguments: Iterable[str], log: IO[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a `cached` command that writes what it says into a file.

    Args:
        environment: all variables.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )


def work_off(
    items: Iterable[T], jobs: int, start: Callable[[T], subprocess.Popen[bytes]], ended: Callable[[T, int], None]
) -> None:
    """Work off items in processes, so many at a time.

    Args:
        start: begins with one. ended: told the exit status of each; what it raises stops the others.

    Raises:
        Stopped: SIGINT or SIGTERM arrived; all processes have been stopped, and have ended.
    """
    waiting, running = deque(items), list[tuple[T, subprocess.Popen[bytes]]]()
    with stop_requests() as stop:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    item = waiting.popleft()
                    running.append((item, start(item)))
                time.sleep(_PAUSE)
                for item, process in [one for one in running if one[1].poll() is not None]:
                    running.remove((item, process))
                    _hang_up(process)
                    ended(item, process.returncode)
                if stop:
                    raise Stopped(stop[0])
        finally:
            for _, process in running:
                _hang_up(process)
            for _, process in running:
                process.wait()


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close our end of a child's pipe, which it takes for our death."""
    assert process.stdin is not None
    process.stdin.close()
