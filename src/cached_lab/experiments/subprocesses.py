"""Child processes that end with this one, however it ends, and when it stops them.

Each child has the reading end of a pipe and this process the writing end. When that is closed, by us or by the system
after our end, the child stops itself as by SIGTERM: a run saves a checkpoint first. Signals of the terminal reach only
this process, so that a run is stopped once.
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


def stop_after(wait: Callable[[], object]) -> None:
    """In a child: send this process SIGTERM when `wait`, which runs in a thread, returns."""

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def start_command(arguments: Iterable[str], log: IO[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a `cached` command with all its environment variables, its output in a file."""
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
    """Process items in at most `jobs` child processes.

    Args:
        start: starts the child of an item. ended: gets the exit status of each; an exception in it stops the others.

    Raises:
        Stopped: SIGINT or SIGTERM arrived; all children have stopped.
    """
    waiting, running = deque(items), list[tuple[T, subprocess.Popen[bytes]]]()
    with stop_requests() as stop:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    item = waiting.popleft()
                    running.append((item, start(item)))
                time.sleep(0.05)
                for item, process in [one for one in running if one[1].poll() is not None]:
                    running.remove((item, process))
                    _close_pipe(process)
                    ended(item, process.returncode)
                if stop:
                    raise Stopped(stop[0])
        finally:
            for _, process in running:
                _close_pipe(process)
            for _, process in running:
                process.wait()


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
