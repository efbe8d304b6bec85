"""Who comes where: shares of right answers with their intervals, means over tasks, and the order of the rows.

An answer is asked of new texts at two distances: the farthest of the training ("near"), and the longest text ("far").
Asking ends where a memory is near a guess (`FarTrials`); then its last answer stands for the longer texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from cached_transformers.experiments.environment import machine
from cached_transformers.experiments.probes.far_trials import NONE, WHOLE, FarTrials
from cached_transformers.experiments.statistics import Interval, mean_interval, wilson_interval
from cached_transformers.files import json_text, write_whole
from cached_transformers.registry import PROBES

from .boards import Board
from .costs import measure_costs

FILE = "leaderboard.json"
OTHER = "other"
"""The group of a task whose registration names none."""


def write_leaderboard(trials: FarTrials, name: str, board: Board, command: str) -> dict[str, Any]:
    """Measure costs, write leaderboard.json with everything, and return what it holds. All trainings must be there."""
    content = trials.content(command) | {
        "board": name,
        "why": board.reason(trials),
        "machine": machine(),
        "groups": groups(trials.tasks),
        "costs": measure_costs(trials, trials.tasks[0]),
        "costs_of": trials.tasks[0],
    }
    content["standings"] = standings(content)
    write_whole(trials.folder / FILE, json_text(content))
    return content


def groups(tasks: Sequence[str]) -> dict[str, list[str]]:
    """What tasks ask of a memory, and the tasks that ask it."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(PROBES.entry(task).info.get("asks", OTHER), []).append(task)
    return found


def standings(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each memory, the best first, behind the two without one.

    Memories are in the order of their mean over tasks at the farthest trained distance; equal ones in that of the
    longest text, then of the fewest bytes.

    Returns:
        rows with name; near and far, by task {mean, low, high} and "asked", the tokens from cue to question (far is
        empty without a memory); near_mean and far_mean over tasks (None where there is none); solved and trainings;
        and the least and greatest of parameters and state_bytes over tasks.
    """
    arms = [_row(content, "none", arm) for arm in (NONE, WHOLE)]
    rows = [_row(content, memory, "far") for memory in content["memories"]]
    return [*arms, *sorted(rows, key=lambda row: (-row["near_mean"], -row["far_mean"], row["state_bytes"][1]))]


def _row(content: Mapping[str, Any], memory: str, arm: str) -> dict[str, Any]:
    farthest = content["course"]["farthest"]
    near, far, all_of_them = {}, {}, []
    for task in content["tasks"]:
        found = [r for r in content["results"] if (r["task"], r["memory"], r["arm"]) == (task, memory, arm)]
        segment = content["segments"][task]
        near[task] = _share([r["far"][str(farthest)][0] for r in found], content["rows"], farthest * segment)
        if arm == "far":
            last = [max(d for d in map(int, r["far"]) if d * segment <= content["far"]) for r in found]
            shares = [r["far"][str(distance)][0] for r, distance in zip(found, last, strict=True)]
            far[task] = _share(shares, content["rows"], min(last) * segment)
        all_of_them += found
    sizes = {key: [r[key] for r in all_of_them] for key in ("parameters", "state_bytes")}
    return {
        "name": arm if memory == "none" else memory,
        "near": near,
        "far": far,
        "near_mean": mean(share["mean"] for share in near.values()),
        "far_mean": mean(share["mean"] for share in far.values()) if far else None,
        "solved": sum(r["solved"] >= farthest for r in all_of_them),
        "trainings": len(all_of_them),
        **{key: [min(values), max(values)] for key, values in sizes.items()},
    }


def _share(shares: Sequence[float], rows: int, asked: int) -> dict[str, Any]:
    """A share of right answers with its 95 % interval: of Wilson over rows of one seed, of t over several seeds.

    Rows with several answers count as one each, so that Wilson's interval is rather too wide for them.
    """
    if len(shares) == 1:
        interval = wilson_interval(round(shares[0] * rows), rows)
        return {"mean": shares[0], "low": interval.low, "high": interval.high, "asked": asked}
    found: Interval = mean_interval(shares)
    assert found.low is not None and found.high is not None
    return {"mean": found.mean, "low": max(0.0, found.low), "high": min(1.0, found.high), "asked": asked}
