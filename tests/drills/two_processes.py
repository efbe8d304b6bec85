"""Drill: two processes train together; one or both are killed at a random moment, and the same command resumes.

Names of cases: `none/3`, `mean/7`: how caches are shared, and a seed of the moments.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pairs

from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.config import RunConfig, config_to_dict

from . import _commands, _runs
from .frame import Failure

SYNCS = ("none", "mean", "broadcast")
DEATHS = 2
"""Times at most that a run of one case dies."""


def _config(sync: str) -> RunConfig:
    """Dropout, averaged weights and a shared cache, in each of the two processes."""
    tree: dict[str, Any] = config_to_dict(_runs.recipes()["images"](_commands.data()))
    tree["model"]["memory"] = {"name": "grc", "ratio": 0.5, "sync": sync}
    tree["training"] |= {"test": "last", "steps": 4}
    return config_from_dict(tree)


def _start(sync: str, run: Path, meeting: Path) -> list[int]:
    def work() -> None:
        _runs.train(_config(sync), run)

    return pairs.start(work, meeting)


def _reference(sync: str) -> tuple[Path, float]:
    def make(home: Path) -> None:
        if any(found := pairs.statuses(_start(sync, home / "run", home / "meeting"))):
            raise Failure(f"sync={sync}: undisturbed, the processes ended with statuses {found}")

    return _commands.made_once(sync, make)


def cases(count: int, seed: int) -> Iterator[str]:
    return (f"{SYNCS[number % len(SYNCS)]}/{seed + number // len(SYNCS)}" for number in range(count))


def attempt(case: str, folder: Path) -> None:
    sync = case.partition("/")[0]
    chance = random.Random(case)
    run, deaths = folder / "run", []
    reference, seconds = _reference(sync)
    for number in range(DEATHS):
        processes = _start(sync, run, folder / f"meeting_{number}")
        after = chance.uniform(0, seconds)
        victims = chance.choice([processes[:1], processes[1:], processes])
        time.sleep(after)
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        deaths.append(f"{'both' if len(victims) == 2 else f'rank {processes.index(victims[0])}'} after {after:.2f} s")
        if not any(pairs.statuses(processes)):
            break
    found = pairs.statuses(_start(sync, run, folder / "meeting_last"))
    try:
        if any(found):
            raise Failure(f"the processes that went on ended with statuses {found}")
        _runs.compare_runs(run, reference)
    except Failure as failure:
        raise Failure(f"killed {', then '.join(deaths)}: {failure}") from None


SUMMARY = (
    "of two processes that train together one or both are killed at a random moment, twice, with each way of "
    "sharing caches: the resumed run equals the undisturbed run"
)
COUNT, SAMPLE = 30, 1
prepare = _commands.prepare
