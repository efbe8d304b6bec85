"""One writer a folder: who trains, compares, probes or streams holds a lock, and a second start is refused at once.

The lock is `flock` on a file that names its owner. The system lets go of it when its process ends, however it ends, so
that what a killed owner leaves behind is no obstacle: the next one writes its own name over it. Where there is no flock
(Windows, some network shares), the name is all there is: it refuses while a process of that number lives on this
machine, and sees no other machine's.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cached_transformers.files import NotWritten, lives

from .distributed import World
from .interruption import RunFailed

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""File in a folder that somebody writes, as long as they do; its owner's name is in it."""
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[int] = set()


class InUse(RunFailed):
    """Another process writes here; the message names it, and says what to do."""


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder of results.

    Raises:
        InUse: somebody else holds it.
        NotWritten: it cannot be written.
    """
    with file_lock(folder / LOCK, folder, "another --out"):
        yield


@contextlib.contextmanager
def file_lock(lock: Path, what: Path, way_out: str) -> Iterator[None]:
    """Hold a file for what it stands for; it is there as long as it is held.

    Args:
        lock: the file. Its folder is made when absent, and is removed again if it is still empty at the end.
        what: the folder or file that is to have one writer. way_out: what to take instead, for the message.

    Raises:
        InUse: somebody else holds it.
        NotWritten: the file cannot be written.
    """
    made = not lock.parent.exists()
    handle = _taken(lock, what, way_out)
    _held.add(handle)
    try:
        _write_owner(handle, lock)
        yield
    finally:
        if handle in _held:  # not in a forked process
            # The file goes before the lock, so that who has opened it and then gets the lock knows to begin anew.
            with contextlib.suppress(OSError):
                lock.unlink()
                if made:
                    lock.parent.rmdir()
            _held.discard(handle)
            os.close(handle)


@contextlib.contextmanager
def main_holds(world: World, folder: Path) -> Iterator[None]:
    """`folder_lock` by the main process for all that train together; what stops it stops all (InUse, NotWritten)."""
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


def _taken(lock: Path, what: Path, way_out: str) -> int:
    """Handle of the file, locked."""
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the folder was empty, and its last owner has just removed it
            continue
        except OSError as error:
            raise NotWritten(str(lock), error, "nothing was begun") from error
        try:
            if not _locked(handle):
                raise InUse(_refusal(handle, lock, what, way_out))
            if _names(lock, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner has ended, and removed the file, since we opened it


def _locked(handle: int) -> bool:
    """Whether the lock is ours now."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        else:
            return True
    owner = _owner(handle)
    process = owner.get("process")
    if not isinstance(process, int) or process < 1 or owner.get("host") != socket.gethostname():
        return True
    return process == os.getpid() or not lives(process)


def _names(lock: Path, handle: int) -> bool:
    """Whether the file in the folder is the one that is open."""
    try:
        return os.path.samestat(os.stat(lock), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write_owner(handle: int, lock: Path) -> None:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    since = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    owner = {"process": os.getpid(), "host": socket.gethostname(), "since": since, "command": command}
    try:
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, f"{json.dumps(owner)}\n".encode())
    except OSError as error:
        raise NotWritten(str(lock), error, "nothing was begun") from error


def _owner(handle: int) -> dict[str, Any]:
    """What the file says of its owner; nothing while it is being written."""
    os.lseek(handle, 0, os.SEEK_SET)
    try:
        found = json.loads(os.read(handle, 1 << 16))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(handle: int, lock: Path, what: Path, way_out: str) -> str:
    owner = _owner(handle)
    who = f"process {owner['process']} on {owner['host']}" if {"process", "host"} <= owner.keys() else "another process"
    since = f" since {owner['since']}" if "since" in owner else ""
    command = f" ({owner['command']})" if "command" in owner else ""
    gone = "" if fcntl is not None else f"; if it has ended, remove {lock}"
    return f"{what} is in use by {who}{since}{command}; wait for it, stop it, or take {way_out}{gone}"


def _forked() -> None:
    """A forked process, such as a worker that loads data, does not hold what its parent holds."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
