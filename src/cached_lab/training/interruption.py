"""SIGINT and SIGTERM: a loop saves and stops between two steps, anything else ends at once.

No signal is lost. A command runs inside `ended_by_signals`, where a signal raises `Stopped`; a training loop uses
`stop_requests`. If a library swallows the exception, the next loop and the end of the command raise it again, and a
signal after the last check of a loop is raised when the loop ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run got SIGINT or SIGTERM and saved a checkpoint.

    Attributes:
        signal_number, step: the signal and the saved step.
    """

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name} at step {step}; a checkpoint was saved")
        self.signal_number, self.step = signal_number, step


class RunFailed(RuntimeError):
    """A run failed for the reason in the message, which is not a bug and has a way out."""


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived while there was nothing to save; files saved before stay whole."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class _End:
    """Signal handler of `ended_by_signals`, which remembers signals."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, number: int, frame: object) -> None:
        self.asked.append(number)
        raise Stopped(number)

    def insist(self) -> None:
        """Raise a swallowed signal again: imports of extensions and finalisers may swallow exceptions."""
        if self.asked:
            raise Stopped(self.asked[0])


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise `Stopped` inside the block, also if it was swallowed or caused another error."""
    end = _End()
    with _handled_by(end):
        try:
            yield
        except Exception as error:
            if not isinstance(error, Interrupted):
                end.insist()
            raise
        end.insist()


def starter() -> int | None:
    """Return the process id of the torchrun that started this process; None for another parent.

    When torchrun is killed its processes survive, and must notice and stop.
    """
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(os, "getppid") else None


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Yield a list that receives the first SIGINT or SIGTERM; a second signal has its usual effect.

    Raises:
        Stopped: a signal was swallowed before the block, or came after the block last looked.
    """
    received: list[int] = []
    for number in SIGNALS:
        if isinstance(handler := signal.getsignal(number), _End):
            handler.insist()

    def listen(number: int, frame: object) -> None:
        received.append(number)
        restore()

    with _handled_by(listen) as restore:
        yield received
    if received:
        raise Stopped(received[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[Callable[[], None]]:
    """Install a handler for both signals, in the main thread only; yield a function that removes it."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, former in before.items():
            signal.signal(number, former)

    try:
        for number in SIGNALS:
            signal.signal(number, handler)
        yield restore
    finally:
        restore()
