"""The command line: help, messages, exit statuses, and each command's answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import standin
import torch
import yaml

from cached_lab.cli import main as main_module
from cached_lab.cli.main import main
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.interruption import RunFailed
from cached_transformers import __version__


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "standin.yaml"
    path.write_text(yaml.safe_dump(standin.recipe()), encoding="utf-8")
    return str(path)


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(arguments)
    except SystemExit as stop:  # argparse ends the process itself
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_without_arguments_it_prints_help_with_an_example_of_every_command(capsys):
    status, out, _ = call(capsys)
    assert status == 0 and all(f"  cached {command} " in out for command in main_module.EXAMPLES)
    assert call(capsys, "--version") == (0, f"cached-transformers {__version__}\n", "")


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


def test_explain_shows_facts_and_options_with_defaults(capsys):
    status, out, _ = call(capsys, "explain", "grc")
    parts = ("grc (memory)", "arXiv:2312.12742", "equations:", "state:", "cost:", "gradient:", "ratio: float = 0.5")
    assert status == 0 and all(part in out for part in parts)
    status, _, err = call(capsys, "explain", "gcr")
    assert status == 2 and err.startswith("error: unknown name 'gcr'; did you mean 'grc'?")


def test_dry_run_prints_a_configuration_that_trains_the_same(capsys, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = call(capsys, "train", recipe, "training.steps=5", "--dry-run", "model.width=8")
    assert status == 0
    tree = yaml.safe_load(out)
    assert tree["training"]["steps"] == 5 and tree["model"]["width"] == 8
    assert "# filled in from the data: model.classes" in out
    assert [p.name for p in tmp_path.iterdir()] == ["standin.yaml"]


def test_dry_run_refuses_what_cannot_be_built(capsys):
    words = ("train", "digits_vit_plain", "--dry-run")
    status, out, _ = call(capsys, *words, "model.memory=grc")
    learned = "# filled in from the data: model.image_size, model.channels, model.classes"
    assert status == 0 and out.splitlines()[-1] == learned
    status, out, err = call(capsys, *words, "model.memory={name: grc, ratio: 0.3}")
    assert (status, out) == (2, "") and err.startswith("error: ratio=0.3 gives a cache of 19 channels")
    # 8 pixels, which the data say, cannot be cut into patches of 3.
    status, out, err = call(capsys, *words, "model.patch_size=3")
    assert (status, out) == (2, "") and "patch_size" in err


def test_dry_run_without_the_data_says_what_it_could_not_check(capsys, tmp_path):
    status, out, _ = call(capsys, "train", "table1_small", f"data.path={tmp_path / 'absent'}", "--dry-run")
    last = out.splitlines()[-1]
    assert status == 0 and last.startswith("# whether the model can be built is not known: ") and "absent" in last
    assert yaml.safe_load(out)["model"]["name"] == "vision_transformer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.stesp=3"], "error: unknown key 'training.stesp'; did you mean 'training.steps'?"),
        (["training.steps=x"], "error: training.steps='x' must be a whole number, not str"),
        (["--resume", "missing"], "error: missing is not a checkpoint: there is no such folder"),
        (["training.precision=float16"], "error: training.precision='float16' needs a CUDA device"),
        (["training.batch_size=64"], "error: training.batch_size=64 exceeds the 50 training rows"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(capsys, recipe, tmp_path, arguments, message):
    status, _, err = call(capsys, "train", recipe, "--out", str(tmp_path / "run"), *arguments)
    assert status == 2
    assert err.startswith(message) and "Traceback" not in err
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_stray_words_are_refused(capsys, recipe):
    status, _, err = call(capsys, "train", recipe, "--outt", "x")
    assert status == 2 and "unrecognized arguments: --outt" in err
    status, _, err = call(capsys, "list", "memories", "a=b")
    assert status == 2 and "unrecognized arguments: a=b" in err


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
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_each_kind_of_failure_has_its_status(capsys, fails, error, status, message):
    fails(error)
    assert call(capsys, "explain", "grc") == (status, "", f"{message}\n")


@pytest.mark.parametrize("error", [RuntimeError("r"), TypeError("t"), KeyError("k"), RecursionError("d")])
@pytest.mark.parametrize("words", [(), ("--debug",)], ids=["plain", "debug"])
def test_an_unforeseen_error_is_a_bug_and_leaves_its_traceback(capsys, fails, monkeypatch, tmp_path, error, words):
    fails(error)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status, out, err = call(capsys, *words, "explain", "grc")
    assert (status, out) == (70, "")
    line = err.rstrip().splitlines()[-1]
    assert line.startswith(f"error: this is a bug of cached-transformers: {type(error).__name__}: ")
    if words:
        assert "Traceback" in err and not list(tmp_path.iterdir())
    else:
        (kept,) = tmp_path.iterdir()
        assert err.count("\n") == 1 and f"({kept})" in line and "in fail" in kept.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "words"),
    [("rich", ["list"]), ("yaml", ["list"]), ("scipy", ["reproduce", "table1"])],
)
def test_without_the_extra_a_command_names_it(module, words):
    program = (
        f"import sys; sys.modules[{module!r}] = None; from cached_lab.cli.main import main; sys.exit(main({words}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert module in done.stderr and 'pip install "cached-transformers[lab]"' in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_memory_that_does_not_suffice_says_what_to_lower(capsys, fails, error):
    fails(error)
    status, _, err = call(capsys, "explain", "grc")
    assert status == 1 and err.startswith("error: out of memory") and "lower training.batch_size" in err


@pytest.mark.parametrize("words", [("--debug", "explain", "gcr"), ("explain", "gcr", "--debug"), ("explain", "gcr")])
def test_debug_goes_before_or_after_the_command_or_into_the_environment(capsys, monkeypatch, words):
    monkeypatch.setenv("CACHED_DEBUG", str(int("--debug" not in words)))
    status, _, err = call(capsys, *words)
    assert status == 2 and "Traceback" in err and err.rstrip().splitlines()[-1].startswith("error: unknown name 'gcr'")


@pytest.mark.parametrize("option", ["width", "depth", "feed_forward", "patch_size"])
@pytest.mark.parametrize("size", [0, -1, 10**12])
def test_absurd_sizes_are_refused_before_they_are_asked_for(capsys, tmp_path, monkeypatch, option, size):
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits_vit_plain", f"model.{option}={size}", "training.tensorboard=false"]
    for dry in (["--dry-run"], []):
        status, _, err = call(capsys, *words, *dry)
        assert status == 2 and option in err, err
    if option == "width" and size > 0:
        status, _, err = call(capsys, "train", "digits_vit_plain", "model.width=8000000", "model.heads=1")
        assert status == 2 and "GiB of weights and caches, this machine" in err


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
    status, _, err = call(capsys, "evaluate", str(tmp_path))
    assert status == 2 and "is not a run folder: it has no config.yaml" in err
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


def test_an_endless_argument_is_not_repeated(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["reproduce", "table1", "--scale", "x" * 20_000])
    assert 0 < len(capsys.readouterr().err) < 6000
