"""Standings: shares of right answers with intervals, means over tasks, and the order of the rows.

Memories are tested on new texts at two distances: the farthest in training ("near"), and the longest text ("far").
Testing stops once a memory is near a guess (`FarTrials`), which then counts as a guess in longer texts. Trainings and
their records are those of `cached probe --train-distance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from cached_lab.experiments.efficiency import NONE, WHOLE, efficiencies, probe_rows
from cached_lab.experiments.environment import machine
from cached_lab.experiments.probes.distances import Course
from cached_lab.experiments.probes.far_trials import FarTrials
from cached_lab.experiments.probes.settings import MODEL
from cached_lab.experiments.probes.trials import Trial
from cached_lab.experiments.statistics import mean_interval, wilson_interval
from cached_lab.registries import PROBES
from cached_transformers.files import json_text, write_whole

from .costs import measure_costs

FILE = "leaderboard.json"
NAME = "quick"
TASKS: dict[str, dict[str, Any]] = {  # segments with room for distance 0
    "latch": {"segment": 8, "decoys": True},
    "copy": {"segment": 8, "length": 4},
    "mqar": {"segment": 16},
    "rewrite": {"segment": 12},
}
SIZES: dict[str, Any] = {"heads": 2}
"""Sizes of the models: with 4 heads of 8 channels, many memories never find a key."""
FARTHEST, FAR = 3, 512
"""Segments between cue and question in training, and tokens of the longest tested text."""
ROWS, TAPS = 256, 3
"""Texts for each share (an interval of at most 12 points), and tokens of the short convolution."""
STEPS, SEEDS = 800, 1


def board_trials(
    memories: Sequence[str],
    tasks: Sequence[str],
    folder: Path,
    options: Mapping[str, Mapping[str, Any]],
    *,
    seeds: int | None = None,
    steps: int | None = None,
    controls: Sequence[str] = (),
) -> FarTrials:
    """Return the trainings of these memories and tasks; `options` override those of the board."""
    own = {**TASKS, MODEL: SIZES}
    merged = {name: {**own.get(name, {}), **options.get(name, {})} for name in {*tasks, *options, MODEL}}
    return FarTrials(
        memories,
        tasks,
        FARTHEST,
        seeds or SEEDS,
        steps or STEPS,
        folder,
        {name: chosen for name, chosen in merged.items() if chosen},
        TAPS,
        course=Course(1, FARTHEST),
        begin_near=True,
        far=max([FAR, *(FARTHEST * PROBES.create(task, **merged[task]).segment for task in tasks)]),
        rows=ROWS,
        controls=controls,
    )


def write_leaderboard(trials: FarTrials, command: str) -> dict[str, Any]:
    """Measure costs, write leaderboard.json and return its content. All trainings must be finished."""
    content = trials.content(command) | {
        "board": NAME,
        "machine": machine(),
        "groups": groups(trials.tasks),
        "costs": measure_costs(trials, trials.tasks[0]),
        "costs_of": trials.tasks[0],
        "longest": {task: trials.distances(Trial(task, trials.memories[0], "far", 0))[-1] for task in trials.tasks},
    }
    content["standings"] = standings(content)
    write_whole(trials.folder / FILE, json_text(content))
    return content


def groups(tasks: Sequence[str]) -> dict[str, list[str]]:
    """Group tasks by the ability they test."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(PROBES.entry(task).info.get("asks", "other"), []).append(task)
    return found


def standings(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each memory, the best first, after the two arms without a memory.

    Memories, and windows of those that have one in every task, are sorted by their mean over tasks at the farthest
    trained distance, then on the longest text, then by fewest bytes.

    Returns:
        rows with name; near and far, by task {mean, low, high}, "tokens" from cue to question, and "ended", the number
        of trainings that were at chance earlier (far is empty for the whole text); near_mean and far_mean over tasks;
        efficiency, of near_mean; solved and trainings; and [least, greatest] parameters and state_bytes over tasks
        (None without a memory).
    """
    by_task = {task: probe_rows(content, task) for task in content["tasks"]}
    names = [name for name in next(iter(by_task.values())) if all(name in rows for rows in by_task.values())]
    rows = {name: _row(content, name, {task: found[name] for task, found in by_task.items()}) for name in names}
    shares = efficiencies("accuracy", {name: row["near_mean"] for name, row in rows.items()})
    none, whole, *others = ({**rows[name], "efficiency": share} for name, share in shares.items())
    others.sort(key=lambda row: (-row["near_mean"], -row["far_mean"], row["state_bytes"][1]))
    return [none, whole, *others]


def _row(content: Mapping[str, Any], name: str, by_task: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    farthest = content["course"]["farthest"]
    near, far = {}, {}
    all_of_them = [training for found in by_task.values() for training in found]
    for task, found in by_task.items():
        segment = content["segments"][task]
        near[task] = _share(found, farthest, segment)
        if name != WHOLE:
            far[task] = _share(found, content["longest"][task], segment)
    return {
        "name": name,
        "near": near,
        "far": far,
        "near_mean": mean(share["mean"] for share in near.values()),
        "far_mean": mean(share["mean"] for share in far.values()) if far else None,
        "solved": sum(r["solved"] >= farthest for r in all_of_them),
        "trainings": len(all_of_them),
        "parameters": [f(r["parameters"] for r in all_of_them) for f in (min, max)],
        "state_bytes": None
        if name in (NONE, WHOLE)
        else [f(r["state_bytes"] for r in all_of_them) for f in (min, max)],
    }


def _share(trainings: Sequence[Mapping[str, Any]], distance: int, segment: int) -> dict[str, Any]:
    """Return a share of right answers with its 95 % interval: Wilson over texts of one seed, t over several seeds.

    Texts with several answers count as one each, so Wilson's interval is too wide for them. A guess has no interval.
    """
    answers = [training["far"].get(str(distance)) for training in trainings]
    shares = [r["chance"] if answer is None else answer[0] for r, answer in zip(trainings, answers, strict=True)]
    found = mean_interval(shares)
    if len(shares) == 1 and answers[0] is not None:
        share, _, rows = answers[0]
        found = wilson_interval(round(share * rows), rows)
    return {
        "mean": mean(shares),
        "low": None if found.low is None else max(0.0, found.low),
        "high": None if found.high is None else min(1.0, found.high),
        "tokens": distance * segment,
        "ended": answers.count(None),
    }
