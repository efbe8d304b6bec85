"""Commands that drills disturb: trainings, a comparison and a stream, each in one folder.

prepare(shared)              in a drill's `prepare`
names()                      names of the commands
carry_out(name, folder)      in a child: the exit status of `cached`
reference(name)              the folder of the undisturbed command, created on first use, and its seconds
watched(name)                the same, with the file operations of the command
goes_on(name, folder, log)   run it again; raise `Failure` if it does not end like the reference
last_words(log)              the end of a command's output
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import yaml

from cached_lab.cli.main import main
from cached_lab.training.config import config_to_dict

from . import _runs
from ._operations import Operation, Operations
from .frame import Failure, in_child

_SHARED: list[Path] = []
"""The folder that `prepare` filled, for the processes that are forked."""


def prepare(shared: Path) -> None:
    """Data, and imports."""
    _SHARED[:] = [shared]
    (shared / "data").mkdir()
    _runs.write_data(shared / "data")


def names() -> list[str]:
    """Return the names of all commands: a training per recipe, and commands on one or several runs."""
    return [*_runs.recipes(), "text_memories", "compare", "stream"]


def carry_out(name: str, folder: Path) -> int:
    """Return the exit status of `cached`; call it in a child process, since it disables the drawing of reports."""
    warnings.resetwarnings()  # not the arguments of the test runner
    _runs.draw_nothing()
    return main(_words(name, folder))


def said(work: Callable[[], int], log: Path) -> int:
    """Run work in a child process with its output in a file; return its exit status."""
    return in_child(lambda: saying(work, log))


def saying(work: Callable[[], int], log: Path) -> int:
    """Return the result of `work`, with the output of this process in a file from now on."""
    sys.stdout = sys.stderr = log.open("w", encoding="utf-8", buffering=1)  # not a test runner's
    for standard in (1, 2):
        os.dup2(sys.stdout.fileno(), standard)
    return work()


def reference(name: str) -> tuple[Path, float]:
    """The folder of an undisturbed command, and how many seconds it took."""
    return made_once(name, lambda home: _undisturbed(name, lambda: carry_out(name, home / "run"), home))


def watched(name: str) -> tuple[Path, list[Operation]]:
    """The folder of an undisturbed command, and its file operations in order."""

    def work(home: Path) -> int:
        operations = Operations(home / "run")
        status = carry_out(name, home / "run")
        (home / "operations.json").write_text(json.dumps(operations.met), encoding="utf-8")
        return status

    run, _ = made_once(f"{name}_watched", lambda home: _undisturbed(name, lambda: work(home), home))
    listed = json.loads((run.parent / "operations.json").read_text(encoding="utf-8"))
    return run, [Operation(*fields) for fields in listed]


def _undisturbed(name: str, work: Callable[[], int], home: Path) -> None:
    if name == "stream":
        reference("language")
    if name in _runs.recipes():
        _runs.recipes()[name](data())  # imports the detector's dependencies before forks
    if status := said(work, home / "said"):
        raise Failure(f"{name}: undisturbed it ended with status {status}: {last_words(home / 'said')}")


def made_once(name: str, make: Callable[[Path], None]) -> tuple[Path, float]:
    """The folder `run` that `make` leaves in a folder of its own, and its seconds; made by the first that asks."""
    home = _SHARED[0] / name
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "seconds").is_file():
            started = time.monotonic()
            make(home)
            (home / "seconds").write_text(f"{time.monotonic() - started}")
    return home / "run", float((home / "seconds").read_text())


def goes_on(name: str, folder: Path, log: Path, wanted: Path | None = None) -> None:
    """Run a disturbed command again; it must end well, like the undisturbed one.

    Args:
        wanted: the folder of the undisturbed command; None for `reference`.

    Raises:
        Failure: it does not.
    """
    if status := said(lambda: carry_out(name, folder), log):
        raise Failure(f"carried out again it ended with status {status}: {last_words(log)}")
    like(folder, wanted or reference(name)[0])


def last_words(log: Path) -> str:
    """Return the end of a command's output."""
    return log.read_text(encoding="utf-8", errors="replace")[-1500:]


def like(folder: Path, wanted: Path) -> None:
    """Compare two folders of runs and results (Failure: they differ)."""
    if (wanted / "metrics.jsonl").is_file():
        return _runs.compare_runs(folder, wanted)
    _runs.compare_files(folder, wanted)
    for inner in sorted(wanted.rglob("metrics.jsonl")):
        _runs.compare_runs(folder / inner.parent.relative_to(wanted), inner.parent)


def data() -> Path:
    """The folder of the data."""
    return _SHARED[0] / "data"


def _words(name: str, folder: Path) -> list[str]:
    if name == "stream":
        run = reference("language")[0]
        words = ["stream", str(run), str(data() / "text" / "train.txt"), "--every", "300"]
        return [*words, "--state", str(folder / "state.safetensors")]
    if name == "compare":
        words = ["compare", _recipe("language"), "training.steps=3", "--with", "plain,transformer_xl:length=4"]
        return [*words, "--seeds", "1", "--out", str(folder)]
    if name == "text_memories":
        memory = 'model.memory=[{"name": "grc_stream", "length": 4}, {"name": "rmt", "length": 2}]'
        words = ["train", _recipe("language"), memory, "training.accumulate=2", "model.depth=2", "--out", str(folder)]
        return [*words, "training.keep=1", "training.save_every=2"]
    return ["train", _recipe(name), "--out", str(folder)]


def _recipe(name: str) -> str:
    """A file with a recipe of `_runs`."""
    path = _SHARED[0] / f"{name}.yaml"
    if not path.is_file():
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.write_text(yaml.safe_dump(config_to_dict(_runs.recipes()[name](data()))), encoding="utf-8")
        own.replace(path)
    return str(path)
