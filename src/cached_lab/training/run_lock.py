"""Lock of a results folder: one process writes, and a second start is refused.

The lock is `flock` on a file with the owner's name, released by the system however the owner ends. Without flock
(Windows, some network shares) the name alone counts, while its process lives on this machine. The package filelock
would neither name the owner nor release the lock in forked data-loading workers.
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
"""File in a locked folder, with the owner's name."""
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_held: set[int] = set()


class InUse(RunFailed):
    """Another process writes here; the message names it."""


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a results folder (InUse, NotWritten)."""
    with file_lock(folder / LOCK, folder, "another --out"):
        yield


@contextlib.contextmanager
def file_lock(lock: Path, what: Path, way_out: str) -> Iterator[None]:
    """Hold a lock file, which exists while it is held.

    Args:
        lock: the file. Its folder is created, and removed at the end if it is empty.
        what: locked folder or file. way_out: alternative, for the message.

    Raises:
        InUse: another process holds it.
        NotWritten: the file cannot be written.
    """
    made = not lock.parent.exists()
    handle = _acquire(lock, what, way_out)
    _held.add(handle)
    try:
        _write_owner(handle, lock)
        yield
    finally:
        if handle in _held:  # False in a forked process
            # Remove the file before its lock: a process that opened it and then gets the lock sees that it is gone.
            with contextlib.suppress(OSError):
                lock.unlink()
                if made:
                    lock.parent.rmdir()
            _held.discard(handle)
            os.close(handle)


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


def _acquire(lock: Path, what: Path, way_out: str) -> int:
    """Return the handle of the locked file."""
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the last owner has just removed the folder
            continue
        except OSError as error:
            raise NotWritten(str(lock), error, "nothing was begun") from error
        try:
            if not _locked(handle):
                raise InUse(_refusal(handle, lock, what, way_out))
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(lock), os.fstat(handle)):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its owner has ended, and removed the file, since it was opened here


def _locked(handle: int) -> bool:
    """Try to lock a file; return True if this process now owns it."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
        else:
            return True
    owner = _owner(handle)
    process = owner.get("process")
    if not isinstance(process, int) or process < 1 or owner.get("host") != socket.gethostname():
        return True
    return process == os.getpid() or not lives(process)


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
    """Return the owner named in the file; empty while it is being written."""
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


def _release_in_child() -> None:
    """Close the locks in a forked process, such as a data-loading worker."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
