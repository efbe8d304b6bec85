"""Lock of a results folder: one process writes, and a second start is refused with the owner's name.

The lock is `filelock.FileLock` on a file with the owner's name. The system releases it when the owner ends, however it
ends, and forked data-loading workers do not hold it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from cached_transformers.files import NotWritten

from .distributed import World
from .interruption import RunFailed

LOCK = ".lock"
"""File in a locked folder, with the owner's name."""


class InUse(RunFailed):
    """Another process writes here; the message names it."""


def folder_lock(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Hold the lock of a results folder in a `with` block (InUse, NotWritten)."""
    return file_lock(folder / LOCK, folder, "another --out")


@contextlib.contextmanager
def file_lock(path: Path, what: Path, way_out: str) -> Iterator[None]:
    """Hold a lock file, which exists while it is held.

    Args:
        path: the file. Its folder is created, and removed at the end if it is empty.
        what: locked folder or file. way_out: alternative, for the message.

    Raises:
        InUse: another process holds it.
        NotWritten: the file cannot be written.
    """
    made, lock = not path.parent.exists(), FileLock(path)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    owner = {"process": os.getpid(), "host": socket.gethostname(), "since": since, "command": command}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        path.write_text(f"{json.dumps(owner)}\n", encoding="utf-8")
    except Timeout:
        raise InUse(f"{what} is in use by {_owner(path)}; wait for it, stop it, or take {way_out}") from None
    except OSError as error:
        lock.release()
        raise NotWritten(str(path), error, "nothing was begun") from error
    process = os.getpid()
    try:
        yield
    finally:
        if process == os.getpid():  # not in a forked process
            with contextlib.suppress(OSError):
                path.unlink()  # before the release: a process that waits for the lock sees that its file is gone
                if made:
                    path.parent.rmdir()
            lock.release()


@contextlib.contextmanager
def main_holds(world: World, folder: Path) -> Iterator[None]:
    """Hold `folder_lock` in the main process; all processes raise its errors (InUse, NotWritten)."""
    with contextlib.ExitStack() as held:
        problem: Exception | None = None
        if world.main:
            try:
                held.enter_context(folder_lock(folder))
            except (InUse, NotWritten) as error:
                problem = error
        if (found := world.gather(problem)[0]) is not None:
            raise found
        yield


def _owner(path: Path) -> str:
    """Describe the owner named in the file, which it may not have written yet."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['process']} on {owner['host']} since {owner['since']} ({owner['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
