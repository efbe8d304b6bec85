"""Asking a run to stop: SIGINT and SIGTERM become a request that the training loop answers between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interrupted(Exception):
    """The run was asked to stop (SIGINT or SIGTERM) and has saved a checkpoint.

    Attributes:
        signal_number: which signal.
        step: the step that was saved.
    """

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} at step {step}; a checkpoint was saved")
        self.signal_number = signal_number
        self.step = step


class RunFailed(RuntimeError):
    """A run ended before its time for a reason that the message tells, with its way out; no mistake of the code."""


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that receives the number of the first SIGINT or SIGTERM; a second one acts as if nobody listened."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def listen(number: int, frame: object) -> None:
        received.append(number)
        restore()

    for number in before:
        signal.signal(number, listen)
    try:
        yield received
    finally:
        restore()
