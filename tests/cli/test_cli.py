"""The command line: help, messages, exit statuses, and each command's answer."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys

import pytest
import torch
import yaml
from integrations import families

from cached_lab.cli import main as main_module
from cached_lab.cli.main import main
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.interruption import RunFailed
from cached_transformers import __version__, add_memory
from cached_transformers.registry import MEMORIES


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse ends the process itself
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_help_and_explanations_show_examples_facts_and_options(capsys):
    status, out, _ = call(capsys)
    assert status == 0 and all(f"  cached {command} " in out for command in main_module.EXAMPLES)
    assert call(capsys, "--version") == (0, f"cached-transformers {__version__}\n", "")
    status, out, _ = call(capsys, "explain", "grc")
    parts = ("grc (memory)", "arXiv:2312.12742", "equations:", "state:", "cost:", "gradient:", "ratio: float = 0.5")
    assert status == 0 and all(part in out for part in parts)
    status, _, err = call(capsys, "explain", "gcr")
    assert status == 2 and err.startswith("error: unknown name 'gcr'; did you mean 'grc'?")


@pytest.mark.parametrize("host", ["llama", "gpt2", "bert", "vit", "t5"])
def test_list_tells_which_memories_a_host_takes(capsys, host):
    """Other models of the kind take the memories, with the options, that the table says."""
    family = next(f for f in families.ALL if f.name == host)
    _, out, _ = call(capsys, "list", "memories", "--host", host, "--json")
    table = json.loads(out)
    assert set(table) == set(MEMORIES.names())
    for name, (options, reason) in ((name, row.values()) for name, row in table.items()):
        with pytest.raises(ValueError) if reason else contextlib.nullcontext():
            add_memory(family.build(), {"name": name, **options}, segment_length=None)
    _, out, _ = call(capsys, "list", "--host", host)
    assert out.count("\n") == len(table) and ("yes, with length=64" in out) == (host in ("bert", "t5"))
    if host == "llama":
        taken = {name for name, row in table.items() if not row["reason"]}
        assert {"titans", "ttt", "lact", "memory_caching", "streaming_llm"} <= taken
        assert "host='nothing'" in call(capsys, "list", "--host", "nothing")[2]
        assert "--host=llama" in call(capsys, "list", "models", "--host", "llama")[2]


def test_list_names_every_kind_and_json_is_complete(capsys):
    status, out, _ = call(capsys, "list", "--json")
    rows = json.loads(out)
    found = {kind: {row["name"] for row in group} for kind, group in rows.items()}
    assert status == 0 and {"grc", "grc_stream", "convolution"} <= found["memories"]
    assert {"listops", "digits"} <= found["datasets"] and "digits_vit_grc" in found["recipes"]
    assert {"vision_transformer", "sequence_classifier"} <= found["models"]
    assert all(row["summary"] for kind in rows.values() for row in kind)
    _, out, _ = call(capsys, "list")
    assert {name for group in found.values() for name in group} <= set(out.replace("(", " ").split())
    assert len(out.splitlines()) < 80
    _, out, _ = call(capsys, "list", "memories")
    assert "grc" in out and "digits_vit_grc" not in out
    assert "insertion: input" in out and "reach: layers x M tokens" in out and "cost: multiply-adds per row" in out


def test_dry_run_prints_a_configuration_that_trains_the_same(capsys, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = call(capsys, "train", recipe, "training.steps=5", "--dry-run", "model.width=8")
    tree = yaml.safe_load(out)
    assert status == 0 and tree["training"]["steps"] == 5 and tree["model"]["width"] == 8
    assert "# filled in from the data: model.classes" in out
    assert [p.name for p in tmp_path.iterdir()] == ["standin.yaml"]
    _, out, _ = call(capsys, "train", "digits_vit_plain", "--dry-run", "model.memory=grc")
    assert out.endswith("# filled in from the data: model.image_size, model.channels, model.classes\n")
    status, out, _ = call(capsys, "train", "table1_small", f"data.path={tmp_path / 'absent'}", "--dry-run")
    last = out.splitlines()[-1]
    assert status == 0 and last.startswith("# whether the model can be built is not known: ") and "absent" in last
    assert yaml.safe_load(out)["model"]["name"] == "vision_transformer"


DIGITS = ["train", "digits_vit_plain", "--dry-run"]
TRAIN = ["train", "{recipe}", "--out", "{run}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TRAIN, "training.stesp=3"], "error: unknown key 'training.stesp'; did you mean 'training.steps'?"),
        ([*TRAIN, "--resume", "missing"], "error: missing is not a checkpoint: there is no such folder"),
        ([*TRAIN, "training.batch_size=64"], "error: training.batch_size=64 exceeds the 50 training rows"),
        ([*TRAIN, "--outt", "x"], "unknown option '--outt'; did you mean '--out'"),
        ([*DIGITS, "model.patch_size=3"], "patch_size"),  # 8 pixels, which the data say, cannot be cut into 3
        ([*TRAIN, "stesp=3"], "'stesp' (known: data, "),
        ([*TRAIN, "stesp=3"], "training.steps"),
        (["train"], "RECIPE is missing"),
        (["plot", "curves", "{run}", "--images", "a.png"], "--images a.png"),
        (["plot", "curves", "{run}", "--layers", "1"], "--layers 1"),
        (["probe", "rmt", "--far", "9"], "--far 9"),
        (["probe", "rmt", "--no-ceiling"], "--no-ceiling"),
        (["probe", "rmt", "--train-distance", "1..2", "--distance", "9"], "--distance 9"),
        (["evaluate", "{run}", "--other", "{run}"], "--other {run}"),
        (["explain", "grc", "ratio=1"], "ratio=1: it has an effect with --plot"),
        (["evaluate", "{run}", "--batch-sizes", "1"], "--batch-sizes 1"),
        (["list", "memories", "a=b"], "unrecognized arguments: a=b"),
        (["reproduce", "table1", "--scale", "x" * 20_000], "--scale"),
        (["evaluate", "{run}"], "is not a run folder: it has no config.yaml"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_bad_input_ends_with_status_2_and_a_short_message(capsys, recipe, tmp_path, words, message):
    run = tmp_path / "run"
    status, out, err = call(capsys, *(word.format(recipe=recipe, run=run) for word in words))
    assert (status, out) == (2, "") and message.format(run=run) in err and "Traceback" not in err and len(err) < 6000
    assert not (run / "config.yaml").exists()


@pytest.fixture
def fails(monkeypatch):
    """Make `cached explain` raise an error."""

    def replace(error: BaseException) -> None:
        def fail(arguments):
            raise error

        monkeypatch.setattr("cached_lab.cli.explain.run", fail)

    return replace


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("v"), 2, "error: v"),
        (ImportError("i"), 2, "error: i"),
        (FileNotFoundError(2, "No such file", "f"), 2, "error: No such file: f"),
        (OSError(28, "disk is full"), 1, "error: disk is full"),
        (RunFailed("r"), 1, "error: r"),
        (StopIteration(), 1, "error: the data or the task ended too early"),
        (RuntimeError("generator raised StopIteration"), 1, "error: the data or the task ended too early"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "error: out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "error: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "error: out of memory"),
    ],
)
def test_each_kind_of_failure_has_its_status(capsys, fails, error, status, message):
    fails(error)
    found, out, err = call(capsys, "explain", "grc")
    assert (found, out) == (status, "") and err.startswith(message) and err.count("\n") == 1
    assert ("lower training.batch_size" in err) == ("memory" in message)


@pytest.mark.parametrize("error", [RuntimeError("r"), KeyError("k"), RecursionError("d")])
def test_an_unforeseen_error_is_a_bug_and_shows_its_traceback(capsys, fails, error):
    fails(error)
    status, out, err = call(capsys, "explain", "grc")
    assert (status, out) == (70, "") and "Traceback" in err
    assert re.match(rf"error: this is a bug of .*: {type(error).__name__}: ", err.rstrip().splitlines()[-1])


def test_without_the_extra_a_command_names_it():
    program = """
import sys
from cached_lab.cli.main import main
for module, words in (("rich", ["list"]), ("scipy", ["reproduce", "table1"])):
    sys.modules[module] = None
    assert main(words) == 2, module
    del sys.modules[module]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    for module, line in zip(("rich", "scipy"), done.stderr.splitlines(), strict=True):
        assert module in line and "cached-transformers[lab]" in line


def test_the_environment_asks_for_tracebacks(capsys, monkeypatch):
    monkeypatch.setenv("CACHED_DEBUG", "1")
    status, _, err = call(capsys, "explain", "gcr")
    assert status == 2 and "Traceback" in err and err.rstrip().splitlines()[-1].startswith("error: unknown name 'gcr'")


@pytest.mark.parametrize("option", ["width", "depth", "feed_forward", "patch_size"])
@pytest.mark.parametrize("size", [0, -1, 10**12])
def test_absurd_sizes_are_refused_before_they_are_asked_for(capsys, tmp_path, monkeypatch, option, size):
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits_vit_plain", f"model.{option}={size}", "training.tensorboard=false"]
    status, _, err = call(capsys, *words, "--dry-run")
    assert status == 2 and option in err, err
    if option == "width" and size > 0:
        status, _, err = call(capsys, "train", "digits_vit_plain", "model.width=8000000", "model.heads=1")
        assert status == 2 and "its weights take" in err


def test_a_run_that_diverges_ends_with_status_1(capsys, recipe, tmp_path):
    arguments = ("data.poison=0", "training.max_bad_steps=2", "--out", str(tmp_path / "run"))
    status, out, err = call(capsys, "train", recipe, *arguments)
    assert status == 1 and err.startswith("error: 2 steps in a row had a non-finite loss")
    assert out.count("the step was skipped") == 2


def test_train_then_evaluate_gives_the_score_of_the_summary(capsys, recipe, tmp_path):
    run = tmp_path / "run"
    status, out, err = call(capsys, "train", recipe, "--out", str(run))
    assert status == 0, err
    assert "validation" in out and f"report: {run / 'report.html'}" in out.replace("\n", "")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    status, _, err = call(capsys, "evaluate", str(run), "--memory", "carry,resett")
    assert status == 2 and "did you mean 'reset'" in err
    status, out, _ = call(capsys, "evaluate", str(run), "--json")
    scores = json.loads(out)
    assert status == 0 and scores["step"] == summary["best"]["step"]
    tested = {name: value for name, value in summary["test"].items() if name != "step"}
    assert scores["scores"] == [{"memory": "carry", **tested}]
    low, high = tested["accuracy_interval"]
    assert low <= tested["accuracy"] <= high and tested["rows"] == 50
    last = Checkpoints(run / "checkpoints").named("last")
    status, out, _ = call(capsys, "evaluate", str(run), "--checkpoint", str(last), "--split", "validation", "--json")
    assert json.loads(out)["scores"][0]["loss"] == pytest.approx(summary["final"]["loss"])
    status, out, _ = call(capsys, "train", recipe, "--out", str(run))
    assert status == 0 and "training is complete already (12 steps)" in out
