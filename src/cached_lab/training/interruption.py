"""Being asked to stop, by SIGINT or SIGTERM: a request that a loop answers between two steps, and an end elsewhere.

No request is lost. A command lives inside `ended_by_signals`, where a signal raises `Stopped`; a loop that has
something to save listens with `stop_requests`. What a library swallows of an exception, the next loop and the end of
the command raise again, and what reaches a loop after it last looked is raised when the loop is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived where there is nothing to save; files that were saved before stay whole.

    Attributes:
        signal_number: which signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class _End:
    """The handler of `ended_by_signals`, which remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, number: int, frame: object) -> None:
        self.asked.append(number)
        raise Stopped(number)

    def insist(self) -> None:
        """Raise again what something has swallowed: imports of extensions and finalisers may."""
        if self.asked:
            raise Stopped(self.asked[0])


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise `Stopped`; one that was swallowed is raised at the end of the block.

    An error that comes of the interruption gives way to it. In other threads than the main one nothing is different.

    Raises:
        Stopped: a signal arrived.
    """
    end = _End()
    with _handled_by(end):
        try:
            yield
        except (Interrupted, Stopped):
            raise
        except Exception:
            end.insist()
            raise
        end.insist()


def starter() -> int | None:
    """The process of torchrun that has started this one; None for another parent.

    When it is killed it takes nobody with it: who goes on then holds the folder, and nobody hears of it.
    """
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(os, "getppid") else None


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that receives the number of the first SIGINT or SIGTERM; a second one acts as if nobody listened.

    Raises:
        Stopped: a request came before the block and was swallowed there, or came when the block no longer looked.
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
    """Both signals go to a handler, in the main thread, which alone may have one; gives what ends that early."""
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
