"""The process is ended at every file operation of a command; the same command again must end as if nothing had been.

Names of cases: `language/43/before`, `language/43/inside` (half of a write is done), `language/97/after` (all is done),
and for two deaths `language/43/inside/12`: the second command is ended before its operation 12, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from . import _commands
from ._operations import DIED, Operations
from .frame import Failure

KINDS = ("stream", "language", "text_memories", "translation", "detection", "compare")
"""Commands, the cheapest first. Trainings of other recipes write their files by the same steps; `kills` has all."""
TWICE = 8
"""For so many cases with one death there is one with two."""


def cases(count: int, seed: int) -> Iterator[str]:
    """Return cases of each command in turn, in random order; a sample takes the first commands only."""
    chance = random.Random(seed)
    of_kind = {kind: _cases_of(kind, chance) for kind in KINDS[: max(3, count // 4)]}
    longest = max(len(cases) for cases in of_kind.values())
    mixed = [cases[place] for place in range(longest) for cases in of_kind.values() if place < len(cases)]
    yield from mixed[:count]


def _cases_of(kind: str, chance: random.Random) -> list[str]:
    _, operations = _commands.watched(kind)
    last = len(operations) - 1
    once = [f"{kind}/{last}/after"]
    flushed = ""
    for number, (what, halves, _) in enumerate(operations):
        verb, _, file = what.partition(" ")
        # Fsync, and close after flush, change nothing that a later process sees; the next operation does.
        if verb != "fsync" and (verb, file) != ("close", flushed):
            once += [f"{kind}/{number}/{moment}" for moment in (["before", "inside"] if halves else ["before"])]
        flushed = file if verb in ("flush", "fsync") else ""
    chance.shuffle(once)
    twice = [f"{case}/{chance.randrange(last)}" for case in once[::TWICE]]
    return [*once, *twice]


def attempt(case: str, folder: Path) -> None:
    kind, number, moment, *second = case.split("/")
    reference, operations = _commands.watched(kind)
    run = folder / "run"
    deaths = [(int(number), moment), *((int(later), "before") for later in second)]
    for order, (place, when) in enumerate(deaths):
        status = _ended(kind, run, folder, None if when == "after" else place, when == "inside")
        must = 0 if when == "after" else DIED
        if status != must and (order == 0 or status):
            raise Failure(
                f"it was to be ended, and ended with status {status}: {_commands.last_words(folder / 'said')}"
            )
    try:
        _commands.goes_on(kind, run, folder / "said", reference)
    except Failure as failure:
        raise Failure(f"ended {moment} {operations[int(number)].what!r}: {failure}") from None


def _ended(kind: str, run: Path, folder: Path, number: int | None, inside: bool) -> int:
    """Exit status of a command in a process of its own, which ends at an operation where one is given."""

    def work() -> int:
        if number is not None:
            Operations(run, number, "inside" if inside else "before")
        return _commands.carry_out(kind, run)

    return _commands.said(work, folder / "said")


SUMMARY = (
    "trainings (texts, pairs, detection), a stream and a comparison are ended before and inside each of their "
    "file operations, and carried out again: each ends as the uninterrupted one, in weights, caches, metrics, best, "
    "last, scores and files"
)
COUNT, SAMPLE = 480, 6
prepare = _commands.prepare
