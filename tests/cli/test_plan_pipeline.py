"""The time of a segment pipeline, by formula, is that of its schedule run event by event."""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import defaultdict

import pytest

from cached_lab.cli.main import main
from cached_lab.experiments.plan.pipeline import FORWARD, Link, Work, best, flow, stops_at, timing, work_of
from cached_lab.experiments.plan.sizes import Given, sized
from cached_lab.tasks.recipes import load_config
from cached_transformers import create_model
from cached_transformers.state import nbytes

WORK = Work(flops=3e9, weights=4_000_000, state=400_000, layers=6, rows=8, segments=16, bptt=16)
SLOW = Link(latency=2e-3, speed=1e8)
FAST = Link(latency=1e-6, speed=1e11)
PEAK = 1e12


def simulated(work: Work, link: Link, processes: int, pipelines: int, micro_batches: int, way: str) -> float:
    """Seconds until the last event of one pipeline: machines are processes and links in both directions, each of which
    does one job at a time, in the order of the units, as soon as what it needs is there."""
    units = micro_batches * (1 if way == "segments" else work.layers)
    rows = work.rows / pipelines
    one = work.flops * rows * work.segments / processes / PEAK / units
    sending = link.latency + work.state * rows / units / link.speed
    crosses = (work.segments // processes) % work.bptt != 0
    jobs: dict[tuple[str, int, int], tuple[str, float, list[tuple[str, int, int]]]] = {}
    order: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for unit, rank in itertools.product(range(units), range(processes)):
        needs = [("send", rank - 1, unit)] if rank else []
        jobs["forward", rank, unit] = (f"process {rank}", FORWARD * one, needs)
        jobs["send", rank, unit] = (f"link {rank}", sending, [("forward", rank, unit)])
        back = [("send back", rank + 1, unit)] if crosses and rank < processes - 1 else []
        jobs["backward", rank, unit] = (f"process {rank}", (1 - FORWARD) * one, back)
        jobs["send back", rank, unit] = (f"link back {rank}", sending, [("backward", rank, unit)])
    for kind in ("forward", "send", "backward", "send back"):
        turns = range(units) if kind in ("forward", "send") else reversed(range(units))
        for unit, rank in itertools.product(turns, range(processes)):
            order[jobs[kind, rank, unit][0]].append((kind, rank, unit))
    finished: dict[tuple[str, int, int], float] = {}
    now, events, busy = 0.0, [], set()
    while True:
        for machine, waiting in order.items():
            if waiting and machine not in busy and all(need in finished for need in jobs[waiting[0]][2]):
                job = waiting.pop(0)
                heapq.heappush(events, (now + jobs[job][1], machine, job))
                busy.add(machine)
        if not events:
            break
        now, machine, job = heapq.heappop(events)
        finished[job] = now
        busy.discard(machine)
    assert len(finished) == len(jobs)
    return max(end for (kind, *_), end in finished.items() if kind in ("forward", "backward"))


@pytest.mark.parametrize("link", [SLOW, FAST], ids=["slow link", "fast link"])
@pytest.mark.parametrize("bptt", [1, 4, 16])
@pytest.mark.parametrize("way", ["segments", "wavefront"])
def test_the_formula_is_the_schedule_event_by_event(link: Link, bptt: int, way: str) -> None:
    work = Work(**{**vars(WORK), "bptt": bptt})
    for processes, (pipelines, micro_batches) in itertools.product((1, 2, 4, 16), ((1, 1), (1, 8), (2, 2))):
        found = timing(work, PEAK, link, processes, pipelines, micro_batches, way)
        expected = simulated(work, link, processes, pipelines, micro_batches, way)
        assert found.seconds - found.averaging == pytest.approx(expected, rel=1e-9), (processes, micro_batches)


def test_limits_that_can_be_said_by_hand() -> None:
    free = Link(latency=0.0, speed=math.inf)
    work = Work(**{**vars(WORK), "bptt": 1000})
    assert timing(work, PEAK, free, 1).faster == pytest.approx(1)
    # GPipe's bubble: M units of M + P - 1 steps; a wavefront's, M L of M L + P - 1.
    assert timing(work, PEAK, free, 4, 1, 8).faster == pytest.approx(4 * 8 / (8 + 3))
    assert timing(work, PEAK, free, 4, 1, 8, "wavefront").faster == pytest.approx(4 * 48 / (48 + 3))
    assert timing(work, PEAK, free, 4, 1, 1).faster == pytest.approx(1)  # one row after the other gains nothing
    assert timing(work, PEAK, free, 4, 1, 1, "scan").faster == pytest.approx(4)
    assert flow(2.0, 1.0, 3, 4) == 3 * 2 + 2 * 1 + 3 * 2
    assert stops_at(work, PEAK, free, 1, 8, "segments") == 8  # 8 of 15 steps, then 8 of 23
    fastest = best(work, PEAK, free, 64, "segments")
    assert (fastest.pipelines, fastest.processes) == (8, 1)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="17.*16"):
        timing(WORK, PEAK, FAST, 17)
    with pytest.raises(ValueError, match="more than 8 rows"):
        timing(WORK, PEAK, FAST, 2, 4, 4)
    with pytest.raises(ValueError, match="a wavefront needs a state in each"):
        timing(Work(**{**vars(WORK), "layers": 1}), PEAK, FAST, 2, 1, 1, "wavefront")


def test_the_command_says_what_the_model_says(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["training.segments=64", "training.bptt=64"]
    words = ["plan", "demo_text", "--gpus", "8", "--pipeline", "4", *changes]
    assert main([*words, "--json"]) == 0
    segments, wavefront = json.loads(capsys.readouterr().out)
    recipe = sized(load_config("demo_text", changes), Given())
    work = work_of(recipe.config, recipe.shape)
    assert (work.rows, work.segments, work.bptt, work.layers) == (16, 64, 64, 2)
    assert segments["state"] == wavefront["state"] == work.state
    expected = timing(work, 19.5e12 * 0.35, Link(10e-6, 50 * 2**30), 4, 2, wavefront["micro_batches"], "wavefront")
    assert wavefront["seconds"] == pytest.approx(expected.seconds) and wavefront["idle"] == pytest.approx(expected.idle)
    assert main(words) == 0
    assert "wavefront: 2 pipelines x 4 GPUs" in capsys.readouterr().out
    assert main(["plan", "demo_text", "--gpus", "8", "--pipeline", "auto", "--markdown", *changes]) == 0
    assert capsys.readouterr().out.count("| `demo_text` |") == 2
    for wrong, said in {
        ("--gpus", "8", "--pipeline", "3"): "--pipeline 3 must be auto, or a number of GPUs that divides --gpus 8",
        ("--micro-batches", "2"): "--micro-batches 2 are of --pipeline",
        ("--pipeline", "auto", "--micro-batches", "2"): "auto finds the micro-batches, too",
    }.items():
        assert main(["plan", "demo_text", *wrong]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_state_bytes_are_those_of_a_model() -> None:
    changes = ["model.memory={name: infini}", "model.width=32", "model.heads=2"]
    recipe = sized(load_config("demo_text", changes), Given())
    memory = {"name": "infini"}
    model = create_model("language_model", vocabulary=256, width=32, depth=2, heads=2, feed_forward=256, memory=memory)
    assert work_of(recipe.config, recipe.shape).state == nbytes(model.init_state(1))
