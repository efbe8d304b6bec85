"""Drill: the disk is full or broken at one file operation; the command names the file, and resumes when there is room.

Names of cases: `ENOSPC/images/43`: error, command, and number of the failing operation.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path

from . import _commands
from ._operations import Operations
from .frame import Failure

NAMES = ("language", "images", "translation", "compare", "stream")
ERRORS = ("ENOSPC", "EIO")


def cases(count: int, seed: int) -> Iterator[str]:
    """In turn the commands, each with its changes in an order that the seed draws; EIO follows ENOSPC."""
    chance = random.Random(seed)
    by_name = []
    for name in NAMES[:count]:  # a few cases need a few commands
        numbers = [number for number, operation in enumerate(_commands.watched(name)[1]) if operation.fails]
        cases = [f"{error}/{name}/{number}" for error in ERRORS for number in numbers]
        chance.shuffle(cases)
        by_name.append(cases)
    longest = max(map(len, by_name))
    yield from [cases[place] for place in range(longest) for cases in by_name if place < len(cases)][:count]


def attempt(case: str, folder: Path) -> None:
    kind, name, number = case.split("/")
    run, said = folder / "run", folder / "said"
    what = _commands.watched(name)[1][int(number)].what

    def work() -> int:
        operations = Operations(run, int(number), getattr(errno, kind))
        status = _commands.carry_out(name, run)
        (folder / "failed").write_text(operations.failed or "", encoding="utf-8")
        return status

    try:
        status = _commands.said(work, said)
        text = said.read_text(encoding="utf-8", errors="replace")
        if not (folder / "failed").is_file() or "Traceback" in text:
            raise Failure(f"a traceback, status {status}: {text[-600:]}")
        path = (folder / "failed").read_text(encoding="utf-8")
        if not path:
            raise Failure("nothing failed")
        if status != 1:
            raise Failure(f"the exit status is {status}, not 1: {text[-400:]}")
        if str(run) not in text.partition("error:")[2]:
            raise Failure(f"the message names no file: {text[-400:]}")
        _commands.goes_on(name, run, said)
    except Failure as failure:
        raise Failure(f"{what!r}: {failure}") from None


SUMMARY = (
    "each change of a file in a training, a comparison and a stream fails once, for want of room or a sound "
    "disk: exit status 1, a message that names the file, and the next run ends as the undisturbed one"
)
COUNT, SAMPLE, LIMIT = 110, 1, 400.0
prepare = _commands.prepare
