"""`cached leaderboard`: the order of the rows, their intervals and costs, and the stored and written files."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cached_lab.cli.main import main
from cached_lab.experiments.leaderboard.costs import measure_costs
from cached_lab.experiments.leaderboard.standings import FARTHEST, SEEDS, TASKS, board_trials, groups, standings
from cached_lab.experiments.probes.protocol import ProbeSizes
from cached_lab.experiments.probes.settings import setting, stream_memories
from cached_lab.experiments.reports.board_page import MARKS, board_markdown, board_tables, write_board_page
from cached_lab.experiments.statistics import mean_interval, wilson_interval
from cached_lab.registries import PROBES
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.memories import RMT
from cached_transformers.registry import MEMORIES


def result(memory: str, arm: str, task: str, seed: int, far: dict[str, float]) -> dict[str, Any]:
    answers = {distance: [share, share, 100] for distance, share in far.items()}
    sizes = {"steps": 9, "depth": 2, "width": 32, "heads": 2}
    settings = {"task": {}, "sizes": sizes, "course": {"nearest": int(task == "latch")}}
    kept = {"solved": 3, "parameters": 10, "state_bytes": 4, "settings": settings, "chance": 0.25}
    return {"memory": memory, "arm": arm, "task": task, "seed": seed, "far": answers, **kept}


def made(seeds: int = 1, **shares: tuple[dict[str, float], dict[str, float]]) -> dict[str, Any]:
    """Results on two tasks: for each memory its answers by distance on both."""
    found = [
        result("none", arm, task, seed, {"3": 1.0} if arm == "whole text" else {"3": 0.5, "100": 0.2, "200": 0.2})
        for arm in ("no memory", "whole text")
        for task in ("latch", "copy")
        for seed in range(seeds)
    ]
    for memory, by_task in shares.items():
        for task, far in zip(("latch", "copy"), by_task, strict=True):
            found += [result(memory, "far", task, seed, far) for seed in range(seeds)]
    kept = {"rows": 100, "seeds": seeds, "far": 800, "segments": {"latch": 8, "copy": 4}, "results": found}
    kept |= {"course": {"nearest": 1, "farthest": 3}, "longest": {"latch": 100, "copy": 200}}
    return {"memories": list(shares), "tasks": ["latch", "copy"], **kept}


def test_memories_are_sorted_by_their_mean_then_by_far_ones_then_by_bytes_behind_those_without_one() -> None:
    content = made(
        last=({"3": 0.2, "100": 0.9}, {"3": 0.2, "200": 0.9}),
        heavy=({"3": 0.8, "100": 0.5}, {"3": 0.6, "200": 0.5}),
        light=({"3": 0.6, "100": 0.5}, {"3": 0.8, "200": 0.5}),
        first=({"3": 0.6, "100": 0.6}, {"3": 0.8, "200": 0.5}),
    )
    for r in content["results"]:
        r["state_bytes"] += 100 * (r["memory"] == "heavy" and r["task"] == "copy")
    rows = standings(content)
    assert [row["name"] for row in rows] == ["no memory", "whole text", "first", "light", "heavy", "last"]
    assert rows[2]["near_mean"] == pytest.approx(0.7) and rows[2]["far_mean"] == pytest.approx(0.55)
    assert rows[4]["state_bytes"] == [4, 104] and rows[1]["far"] == {} and rows[1]["far_mean"] is None
    assert rows[0]["far_mean"] == pytest.approx(0.2) and rows[0]["state_bytes"] is None


def test_a_memory_of_which_asking_ended_counts_as_a_guess() -> None:
    content = made(short=({"1": 1.0, "3": 0.9, "5": 0.3}, {"3": 1.0, "200": 0.75, "500": 0.1}))  # 500: of a probe
    row = standings(content)[-1]
    assert row["near"]["latch"]["mean"] == 0.9 and row["near"]["latch"]["tokens"] == 24
    assert row["far"]["latch"] == {"mean": 0.25, "low": None, "high": None, "tokens": 800, "ended": 1}
    assert row["far"]["copy"]["tokens"] == 800 and row["far_mean"] == pytest.approx(0.5)
    cost = {"flops": 1500.0, "reading": {"median": 2.0, "low": 1.0, "high": 3.0}}
    costs = dict.fromkeys(("no memory", "whole text", "short"), cost | {"training": cost["reading"]})
    content |= {"standings": standings(content), "costs": costs, "groups": groups(["latch", "copy"])}
    shown = board_tables(content)
    assert [table.rows[-1][0] for table in shown] == ["short"] * 3 and len(shown[2].rows) == 2
    assert shown[2].rows[1][1:] == ["25.0 ~", "75.0"]
    assert shown[1].columns == ["memory", "holding: latch, 24 tokens", "order: copy, 12 tokens"]
    assert shown[0].rows[-1][1:6] == ["95.0", "0.900", "50.0", "2 of 2", "4"]
    assert [line[2] for line in shown[0].rows] == ["0.000", "1.000", "0.900"]
    assert shown[0].rows[-1][7:] == ["1.5 k", "2.00 (1.00-3.00)", "2.00 (1.00-3.00)"]


def test_intervals_are_over_rows_of_one_seed_and_over_several_seeds() -> None:
    rows = standings(made(a=({"3": 0.9}, {"3": 1.0})))
    wilson = wilson_interval(90, 100)
    assert (rows[-1]["near"]["latch"]["low"], rows[-1]["near"]["latch"]["high"]) == (wilson.low, wilson.high)
    content = made(seeds=3, a=({"3": 0.9}, {"3": 1.0}))
    shares = iter([0.0, 0.9, 1.0])
    for r in content["results"]:
        if r["memory"] == "a" and r["task"] == "latch":
            r["far"]["3"], r["solved"] = [next(shares), 0.0, 100], 2
    row = standings(content)[-1]
    over_seeds = mean_interval([0.0, 0.9, 1.0])
    assert over_seeds.low is not None and over_seeds.low < 0 and over_seeds.high is not None and over_seeds.high > 1
    assert row["near"]["latch"] == {"mean": over_seeds.mean, "low": 0.0, "high": 1.0, "tokens": 24, "ended": 0}
    assert (row["solved"], row["trainings"]) == (3, 6)


def test_tasks_say_what_they_ask_and_how_far(tmp_path: Path) -> None:
    assert [entry.name for entry in PROBES if "asks" not in entry.info] == []
    assert groups(["latch", "copy", "passkey"]) == {"holding": ["latch", "passkey"], "order": ["copy"]}
    trials = board_trials(["rmt"], ["recall"], tmp_path, {"recall": {"keys": 12}})
    assert trials.distances(trials.all()[-1]) == [1, 2, 3, 5, 10]
    trials = board_trials(["rmt"], ["latch"], tmp_path, {"latch": {"segment": 400}})
    assert trials.far == 1200 and trials.distances(trials.all()[-1]) == [1, 2, 3]


def test_the_board_can_be_trained_with_every_memory(tmp_path: Path) -> None:
    trials = board_trials(stream_memories(), list(TASKS), tmp_path, {"mqar": {"pairs": 2}, "rmt": {"length": 7}})
    assert len(trials.missing()) == len(TASKS) * (1 + SEEDS * (1 + len(stream_memories())))
    settings = {trial[:3]: trials.settings(trial) for trial in trials.all()}
    assert settings["mqar", "rmt", "far"]["task"] == {"segment": 16, "pairs": 2}
    assert {found["course"]["nearest"] for found in settings.values()} == {0}
    assert settings["latch", "rmt", "far"]["memory"] == {"name": "rmt", "length": 7}
    far = {"name": "infinity_former", **setting("infinity_former").far(8, FARTHEST, 2)}
    assert settings["latch", "infinity_former", "far"]["memory"] == json.loads(json.dumps(far))
    assert all(FARTHEST in trials.distances(trial) for trial in trials.all())


def test_costs_are_counted_and_compared_with_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cached_lab.experiments.probes.trials.ProbeSizes", functools.partial(ProbeSizes, batch_size=4))
    trials = board_trials(["read_twice"], ["latch"], tmp_path, {})
    costs = measure_costs(trials, "latch", rounds=1)
    assert costs["no memory"]["reading"]["median"] == 1.0 == costs["no memory"]["training"]["median"]
    # By hand, of segments of 8 tokens: projections, feed-forward and logits of width 32, and scores over all 8 keys.
    depth, width, hidden, vocabulary = 2, 32, 64, PROBES.create("latch", segment=8, decoys=True).vocabulary

    def by_hand(keys: int) -> int:
        return 2 * (depth * (4 * width**2 + 2 * width * hidden + 2 * keys * width) + width * vocabulary)

    assert costs["no memory"]["flops"] == by_hand(8) and costs["whole text"]["flops"] == by_hand(32)
    assert costs["read_twice"]["flops"] > 2 * costs["no memory"]["flops"]  # it reads twice


COMMAND = (
    "leaderboard --memories {} --tasks latch --steps 4 --page board.md model.width=8 model.rows=16 model.batch_size=8"
)


@pytest.fixture
def mine() -> Iterator[str]:
    """A third-party memory, registered in this process."""

    class Mine(RMT):
        """Theirs."""

    MEMORIES.register("mine", probe=Probing(fixed(length=3)))(Mine)
    yield "mine"
    del MEMORIES._entries["mine"]


def test_the_command_keeps_what_is_there_and_writes_between_the_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cached_lab.experiments.leaderboard.standings.ROWS", 16)
    page = Path("board.md")
    page.write_text(f"before\n{MARKS[0]}\nwhat was there\n{MARKS[1]}\nafter\n", encoding="utf-8")
    assert main(COMMAND.format(mine).split()) == 0
    assert "latch: mine" in capsys.readouterr().out
    text = page.read_text(encoding="utf-8")
    content = json.loads(Path("runs/leaderboard/leaderboard.json").read_text())
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "what was there" not in text
    assert board_markdown(content) in text and "| mine |" in text and "Intel" not in board_markdown(made_plain(content))
    assert [row["name"] for row in content["standings"]] == ["no memory", "whole text", "mine"]
    assert content["rows"] == 16 and content["results"][-1]["settings"]["memory"] == {"name": "mine", "length": 3}
    weights = Path("runs/leaderboard/latch/mine/far_0.safetensors")
    stamp = weights.stat().st_mtime_ns
    assert main(COMMAND.format(mine).split()) == 0
    assert "3 finished trainings kept, 0 to do" in capsys.readouterr().out and weights.stat().st_mtime_ns == stamp


def test_trainings_from_elsewhere_are_counted_again_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mine: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cached_lab.experiments.leaderboard.standings.ROWS", 16)
    assert main([*COMMAND.format(mine).split(), "--out", "theirs"]) == 0
    merge = [*COMMAND.format(mine).split(), "--out", "ours", "--merge", "theirs"]
    record = Path("theirs/latch/mine/far_0.json")
    good = json.loads(record.read_text())
    share, exact, rows = good["far"]["3"]
    wrong = {
        "at 3 segments": good
        | {"far": good["far"] | {"3": [share - 0.5 if share > 0.5 else share + 0.5, exact, rows]}},
        "state_bytes=1": good | {"state_bytes": 1},
        "other settings": good | {"settings": good["settings"] | {"passes": 2}},
        "damaged": good["far"],
        "no answers": {key: value for key, value in good.items() if key != "far"},
        "parameters=None": {key: value for key, value in good.items() if key != "parameters"},
    }
    for words, content in wrong.items():
        record.write_text(json.dumps(content))
        assert main(merge) == 2 and words in capsys.readouterr().err
        assert not Path("ours/latch/mine").exists()
    record.write_text(json.dumps(good))
    weights = record.with_suffix(".safetensors")
    kept = weights.read_bytes()
    weights.write_bytes(kept[:99])
    assert main(merge) == 2 and "damaged" in capsys.readouterr().err
    weights.write_bytes(kept)
    assert main(merge) == 0
    out = capsys.readouterr().out
    assert "merged: latch: mine" in out and "3 finished trainings kept, 0 to do" in out
    assert json.loads(Path("ours/latch/mine/far_0.json").read_text()) == good


def test_windows_are_rows_of_the_board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cached_lab.experiments.leaderboard.standings.ROWS", 16)
    assert main([*COMMAND.format("rmt,memory_transformer").split(), "--control", "window"]) == 0
    content = json.loads(Path("runs/leaderboard/leaderboard.json").read_text())
    rows = {row["name"]: row for row in content["standings"]}
    assert {*rows} == {"no memory", "whole text", "rmt", "window of rmt", "memory_transformer"} == {*content["costs"]}
    assert rows["window of rmt"]["state_bytes"][1] <= rows["rmt"]["state_bytes"][0]
    near = {name: row["near_mean"] for name, row in rows.items()}
    gain = near["whole text"] - near["no memory"]
    shares = [(share - near["no memory"]) / gain if gain > 0 else None for share in near.values()]
    assert [row["efficiency"] for row in rows.values()] == pytest.approx(shares)
    assert (
        "No window of memory_transformer" in capsys.readouterr().out
        and "| window of rmt |" in Path("board.md").read_text()
    )


def made_plain(content: dict[str, Any]) -> dict[str, Any]:
    """The same content from an unnamed machine, and from trainings without a commit."""
    results = [{key: value for key, value in r.items() if key != "environment"} for r in content["results"]]
    return content | {"machine": "a machine", "results": results}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--page old.md", "old.md: the lines '<!-- leaderboard"),
        ("--page .", "--page . is a folder"),
        ("--steps 0", "--steps 0 must be at least 1"),
        ("rmt.lenght=3 --memories rmt", "did you mean 'length'?"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.md").write_text("a page of somebody's\n")
    assert main(["leaderboard", *arguments.split()]) == 2
    assert message in capsys.readouterr().err and not Path("runs").exists()


def test_a_page_that_is_not_there_is_made_and_its_marks_are_once_in_it(tmp_path: Path) -> None:
    content = made(a=({"3": 0.9}, {"3": 1.0}))
    cost = {"flops": 1.0, "reading": {"median": 1.0, "low": 1.0, "high": 1.0}}
    costs = dict.fromkeys(("no memory", "whole text", "a"), cost | {"training": cost["reading"]})
    content |= {"standings": standings(content), "costs": costs, "groups": groups(["latch", "copy"])}
    content |= {"command": "cached leaderboard", "machine": "m", "board": "quick", "taps": 3}
    content |= {"costs_of": "latch", "environment": {"torch": "2", "python": "3", "commit": None}, "date": "2026-11-23"}
    page = tmp_path / "pages/board.md"
    for _ in range(2):
        write_board_page(page, content)
    text = page.read_text(encoding="utf-8")
    assert [text.count(mark) for mark in MARKS] == [1, 1] and text.count("# Leaderboard") == 1
    assert "cue and question 0 or 1 to 3 segments apart" in text
    assert "commit unknown" in text and "over the 100 texts reach 10 points" in text
    assert "t interval over 3 seeds" in board_markdown(content | {"seeds": 3})
