"""`cached probe`: the protocol tells a memory from none, and the command keeps finished trainings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cached_lab.cli.main import main
from cached_lab.experiments.probes.protocol import ProbeSizes, build_model, probe, score
from cached_lab.experiments.probes.settings import chosen_tasks, setting, stream_memories
from cached_lab.experiments.probes.trials import Trials
from cached_lab.registries import PROBES
from cached_transformers.interfaces.memory import LayerMemory
from cached_transformers.interfaces.probing import Probing
from cached_transformers.memories import TransformerXL
from cached_transformers.registry import MEMORIES

PROBED = {entry.name: setting(entry.name) for entry in MEMORIES if entry.probe is not None}
QUICK = ProbeSizes(width=16, depth=1, heads=2, feed_forward=16, steps=120, check_every=40, batch_size=32)


def test_a_memory_within_reach_solves_what_one_out_of_reach_and_none_do_not() -> None:
    task = PROBES.create("latch")
    chosen = setting("transformer_xl")
    assert chosen.beyond is not None
    sizes = ProbeSizes(steps=300)
    within = {"name": "transformer_xl", **chosen.within(task.segment, 3, sizes.depth)}
    near = probe(task, within, 3, sizes=sizes, distances=(1, 3))
    as_long = dataclasses.replace(sizes, steps=near.steps)
    far = probe(task, {"name": "transformer_xl", **chosen.beyond(task.segment, 3, sizes.depth)}, 3, sizes=as_long)
    none = probe(task, None, 3, sizes=as_long)
    assert near.accuracy >= 0.95 and near.distances[3] == near.accuracy and near.steps < 300
    assert max(far.accuracy, none.accuracy) < 0.35


def test_the_bound_of_the_theory_is_the_bound_of_the_gradient() -> None:
    """With the options out of reach no output of the last segment depends on the first one."""
    task, sizes = PROBES.create("copy"), ProbeSizes()
    inputs = task.draw(2, 3, torch.Generator().manual_seed(0)).inputs_BN
    for name, chosen in PROBED.items():
        if chosen.beyond is None:
            continue
        spec = {"name": name, **chosen.beyond(task.segment, 3, sizes.depth)}
        model = build_model(task, spec, sizes)
        other = inputs.clone()
        other[:, : task.segment] = (other[:, : task.segment] + 1) % task.vocabulary
        outs = []
        for tokens in (inputs, other):
            state = None
            for segment in tokens.split(task.segment, 1):
                out = model.eval()(segment, state)
                state = out.state
            outs.append(out.outputs)
        assert torch.equal(*outs), name


def test_whole_episodes_are_counted_beside_single_answers() -> None:
    """A model that always answers 1 is right where 1 is asked, and exact where only 1 is asked."""
    task = PROBES.create("copy", symbols=2)
    episode = task.draw(300, 1, torch.Generator().manual_seed(10**6 + 1))
    answers_BS = episode.targets_BN[:, -task.segment :]
    model = build_model(task, None, QUICK)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    ones = torch.nn.functional.one_hot(torch.tensor(1), task.vocabulary).float()
    model.register_forward_hook(lambda module, inputs, out: out._replace(outputs=out.outputs * 0 + ones))
    share = score(model, task, 1, 300)
    assert model.training, "left as it was"
    assert share.accuracy == pytest.approx((answers_BS == 1).float().mean().item())
    assert share.exact == pytest.approx((answers_BS == 1).all(1).float().mean().item()) and 0 < share.exact < 0.2


def test_a_memory_of_a_stream_says_how_it_is_probed_with_options_that_it_takes() -> None:
    task, sizes = PROBES.create("latch"), ProbeSizes()
    assert set(PROBED) == {
        name for name in stream_memories() if MEMORIES.entry(name).factory.__module__.startswith("cached_transformers.")
    }
    for name, chosen in PROBED.items():
        for options in filter(None, (chosen.within, chosen.beyond)):
            MEMORIES.check(name, options(task.segment, 3, sizes.depth))
    for name in stream_memories():
        factory = MEMORIES.entry(name).factory
        assert not (issubclass(factory, LayerMemory) and factory.shared), name  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "probe"


QUICK_MODEL = ["model.width=8", "model.heads=1", "model.feed_forward=8", "model.rows=256", "model.batch_size=8"]
COMMAND = ["probe", "transformer_xl", *QUICK_MODEL, "--tasks", "latch", "--steps", "20"]


def test_the_command_writes_a_table_and_keeps_trainings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMAND) == 0
    first = capsys.readouterr().out
    assert "latch: transformer_xl, within reach, seed 0" in first and "report.html" in first
    content = json.loads((folder / "probe.json").read_text())
    assert [r["arm"] for r in content["results"]] == ["no memory", "within reach", "out of reach"]
    assert content["results"][0]["accuracy"] < 0.35 and set(content["results"][1]["distances"]) == set("123456")
    assert "<svg" in (folder / "report.html").read_text()
    stamp = (folder / "latch/no_memory/no_memory_0.json").stat().st_mtime_ns
    (folder / "latch/transformer_xl/out_of_reach_0.json").unlink()
    assert main(COMMAND) == 0
    assert "2 finished trainings kept, 1 to do" in capsys.readouterr().out
    assert (folder / "latch/no_memory/no_memory_0.json").stat().st_mtime_ns == stamp


def test_controls_give_an_efficiency_and_a_window(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["probe", "rmt,transformer_xl", *QUICK_MODEL, "model.check_every=20", "--tasks", "latch", "--steps", "60"]
    assert main([*words, "--control", "whole,window"]) == 0
    printed, content = capsys.readouterr().out, json.loads((folder / "probe.json").read_text())
    right = {r["arm"]: r["accuracy"] for r in content["results"] if r["memory"] in ("none", "rmt")}
    assert list(right) == ["no memory", "whole text", "within reach", "window"]
    assert "No window of transformer_xl" in printed
    window = next(r for r in content["results"] if r["arm"] == "window")["settings"]["memory"]
    assert window["name"] == "streaming_llm" and window["sinks"] == 0 and window["length"] >= 1
    assert right["whole text"] > right["no memory"], "the whole text is read at once"
    share = (right["within reach"] - right["no memory"]) / (right["whole text"] - right["no memory"])
    assert content["efficiency"]["latch"]["rmt"] == pytest.approx(share)
    line = next(line for line in printed.splitlines() if line.startswith(" rmt "))
    assert f"{share:.3f}".replace("-", "\N{MINUS SIGN}") in line


def test_a_memory_from_outside_the_package_is_probed_as_it_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    asked = []
    within = Probing(lambda *facts: asked.append(facts) or {"length": 9})  # type: ignore[func-returns-value]
    MEMORIES.register("of_a_user", probe=within)(type("OfAUser", (TransformerXL,), {}))
    assert main(["probe", "of_a_user", *QUICK_MODEL, "--tasks", "latch", "--distance", "3", "--steps", "1"]) == 0
    stored = json.loads((folder / "latch/of_a_user/within_reach_0.json").read_text())
    assert stored["settings"]["memory"] == {"name": "of_a_user", "length": 9}
    assert set(asked) == {(PROBES.create("latch").segment, 3, ProbeSizes().depth)}
    assert not (folder / "latch/of_a_user/out_of_reach_0.json").exists()


def test_options_and_files_go_to_their_tasks(tmp_path: Path) -> None:
    tasks = chosen_tasks("recall,latch", {}, ["recall.keys=3", "latch.decoys=true"])
    assert tasks == {"recall": {"keys": 3}, "latch": {"decoys": True}}
    trials = Trials(["rmt"], list(tasks), 2, 1, 1, tmp_path, tasks)
    plain = trials.all()[0]
    [(_, result)] = trials.train([plain], jobs=1)
    assert result["settings"]["task"] == {"keys": 3} and [*result["distances"]] == [1, 2, 3], "no more than keys"
    assert result["exact"] == result["accuracy"] and "% right (" in plain.sentence(result)
    assert len(trials.missing()) == len(trials.all()) - 1
    assert plain in dataclasses.replace(trials, options={"recall": {"keys": 4}}).missing()
    files = {"babi": "a", "books": "b"}
    chosen = chosen_tasks("latch,babilong", files, ["babilong.question=qa2"])
    assert chosen == {"latch": {}, "babilong": files | {"question": "qa2"}}
    assert set(PROBES.names()) - set(chosen_tasks("all", {})) == {"babilong"}
    assert set(chosen_tasks("all", files)) == set(PROBES.names())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rmmt", "unknown memory 'rmmt'"),
        ("grc", "memory 'grc' has no state per row"),
        ("all --tasks lach", "unknown probe task 'lach'; did you mean 'latch'?"),
        ("all --tasks babilong", "give --babi ARCHIVE_OR_FOLDER and --books FOLDER"),
        ("all --tasks latch latch.classes=few", "latch.classes='few' must be a whole number"),
        ("all --tasks latch copy.symbols=3", "'copy', which is neither among the memories nor among the tasks latch"),
        ("all --tasks niah niah.keys=5 --distance 1", "at least 2 segments for Needles"),
        ("all --tasks recall --train-distance 1..7", "at most 6 segments for AssociativeRecall; raise keys"),
        ("all --distance 0", "--distance 0 must be at least 1"),
        ("transformer_xl --tasks latch --distance 2 --steps 1", "take at least 3"),
        ("rmt model.check_evry=3 --tasks latch", "did you mean 'check_every'?"),
        ("rmt model.check_every=0 --tasks latch", "model.check_every=0 must be a number above 0"),
        ("rmt rmt=3 --tasks latch", "rmt=3 sets no option; write rmt.option=value"),
        ("rmt --control windw", "unknown control 'windw'; did you mean 'window'?"),
        ("rmt --train-distance 1..2 --no-ceiling --control whole", "--no-ceiling and --control whole"),
        ("rmt --train-distance far", "--train-distance 'far' must be A..B or ..B"),
        ("rmt --train-distance 1,2,", "segments from cue to question, e.g. 1..7, or stages, e.g. 1,2,3,5"),
        ("rmt --train-distance 1..3 --short-convolution 0", "--short-convolution 0 must be at least 1"),
    ],
)
def test_bad_words_are_refused(folder: Path, capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(["probe", *words.split()]) == 2
    assert message in capsys.readouterr().err and not folder.exists()
