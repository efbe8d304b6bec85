"""Drill: random recipes and command lines, each of which works or ends with a message.

A case is `seed/number`, 25 inputs in one process; `seed/number/place` is one of them. Training lasts one step at most;
long work (comparisons, probes, benchmarks, reproductions) is stopped at its start, after its input was accepted.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from cached_lab.cli.main import build_parser, main
from cached_lab.registries import LISTED
from cached_transformers.extras import require

from ._fuzz_grammar import Grammar, Input, tree_of
from .frame import Failure, bound_memory, each, in_child

TOGETHER = 25
"""Inputs of a case."""
SECONDS = 60
RUNS = ("images", "text", "pairs")
OTHERS = ("sklearn.datasets", "tokenizers", "pycocotools.coco", "matplotlib.pyplot", "rich.table")
GIBIBYTES = 3
"""What an input may take beside what the process has when it begins."""
_grammar: list[Grammar] = []


class Reached(BaseException):
    """The long work of a command would begin here."""


class Hung(BaseException):
    """An input took too long."""


def prepare(shared: Path) -> None:
    """Data, three trained runs, and everything imported that inputs may reach."""
    import matplotlib

    matplotlib.use("Agg")
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "COLUMNS": "120"}
    torch.set_num_threads(1)
    write_data(shared)
    _grammar[:] = [Grammar(shared, build_parser())]
    if in_child(lambda: [_train(tree_of(_grammar[0].bases[name]), shared / "runs" / name) for name in RUNS] and 0):
        raise Failure("the runs that inputs ask for could not be trained")
    for module in ("timm", "transformers.models.gpt2.modeling_gpt2", "torchvision.models.detection", *OTHERS):
        with contextlib.suppress(ImportError):
            require(module, extra="vision")


def write_data(shared: Path) -> None:
    """A text, a corpus of pairs, a data set of detection, and a file of no kind."""
    from detection.made import folder as write_coco
    from training.small_language import write_text
    from translation.made import write_corpus

    write_text(shared / "text")
    write_corpus(shared / "pairs", (40, 10, 10))
    write_coco(shared / "coco")
    (shared / "binary.bin").write_bytes(random.Random(0).randbytes(2000))


def _train(tree: dict[str, Any], folder: Path) -> None:
    from cached_lab.experiments import run
    from cached_lab.tasks.recipes import config_from_dict

    run.write_report = lambda *args: None  # type: ignore[assignment]
    run.run_training(config_from_dict(tree), folder)


def attempt(case: str, folder: Path) -> None:
    """Give the inputs of a case to the command."""
    bound_memory(GIBIBYTES * 2**30)
    _stop_long_work()
    outside = _watch_writes(folder.parent)

    def one(name: str) -> str | None:
        given, inside = _grammar[0].draw(name), folder / name.rpartition("/")[2]
        inside.mkdir()
        problem = tried(given, inside)
        if outside:
            problem = f"{problem or ''}\nwritten or changed outside of its folder: {outside[:5]}"
            outside.clear()
        os.chdir(folder)
        shutil.rmtree(inside, ignore_errors=True)
        gc.collect()
        return problem and f"{given}\n{problem}"

    each(case, TOGETHER, one)


def tried(given: Input, folder: Path) -> str | None:
    """Run an input; return a description of a wrong ending, or None."""
    os.chdir(folder)
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    tempfile.tempdir = str(folder)
    if given.recipe is not None:
        (folder / "recipe.yaml").write_bytes(given.recipe)
    if any(word.startswith("runs/") for word in given.argv):
        shutil.copytree(_grammar[0].shared / "runs", folder / "runs")
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    kept = sys.stdout, sys.stderr, sys.stdin, sys.argv
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"der hund\n"), encoding="utf-8")
    signal.signal(signal.SIGPROF, _hung)  # seconds of computing: other processes are none of an input's doing
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    status: Any
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            status = main(given.argv)
    except SystemExit as stop:
        status = stop.code
    except Reached:
        status = 0
    except Hung:
        status = f"took longer than {SECONDS} seconds"
    except BaseException as error:
        status = f"{type(error).__name__} from main: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout, sys.stderr, sys.stdin, sys.argv = kept
    for stream in (out, err):
        with contextlib.suppress(UnicodeError, ValueError):
            stream.flush()
    said = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]
    return wrong(given, status, said[1])


def wrong(given: Input, status: Any, err: str) -> str | None:
    """Check the ending: a known status, no traceback, and a message that names the mistake."""
    if given.refused and status != 2:
        return f"expected exit status 2, found {status!r}: {err[-500:]}"
    if status == 70:
        return f"exit status 70: {err[-2400:]}"
    if status not in (0, 1, 2):
        return f"exit status {status!r}: {err[-1500:]}"
    if "Traceback (most recent call last)" in err:
        return f"a traceback: {err[-1500:]}"
    if status == 0:
        return None
    message = re.search(r"error: (.+)", err, re.DOTALL)
    if message is None or len(message.group(1)) > 8000:
        return f"no message, or one of {len(err)} characters: {err[-500:]}"
    names = {letters(part) for key in given.touched for part in (key, key.rpartition(".")[2], Path(key).name)} - {""}
    names |= {"timm", "transformers"} if "model." in given.touched else set()  # get options of any name, also of none
    for entry in (entry for registry in LISTED.values() for entry in registry if letters(entry.name) in names):
        names |= {letters(entry.factory.__name__), *map(letters, entry.options)}
    if names and status == 2 and "not valid YAML" not in err and not any(name in letters(err) for name in names):
        return f"the message names none of {sorted(names)}: {err[-800:]}"
    return None


def letters(text: str) -> str:
    """Normalise a name, so that `improved_clustered` is found in ImprovedClusteredAttention."""
    return re.sub(r"[\W_]", "", text).lower()


def _hung(number: int, frame: object) -> None:
    raise Hung


def _reached(*arguments: Any, **options: Any) -> Any:
    raise Reached


def _stop_long_work() -> None:
    from cached_lab.cli import benchmark
    from cached_lab.experiments import compare, run, run_outputs
    from cached_lab.experiments.probes.trials import Trials
    from cached_lab.experiments.reproductions import table9

    compare.carry_out = _reached  # type: ignore[assignment]
    table9.measure = benchmark.run = _reached  # type: ignore[assignment]
    Trials.train = _reached  # type: ignore[method-assign]
    for module in (run, run_outputs):  # slow, and tested in other drills
        module.write_report = module.write_gates = lambda *args: None  # type: ignore[attr-defined]


def _watch_writes(root: Path) -> list[str]:
    """A list that fills with the files outside of `root` that are opened for writing, made, moved or removed."""
    found: list[str] = []
    events = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"}

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect":
            raise OSError("no network in a drill")
        if event == "open":
            if not isinstance(arguments[0], str | bytes | os.PathLike) or not arguments[2] & (os.O_WRONLY | os.O_RDWR):
                return
            paths: tuple[Any, ...] = arguments[:1]
        elif event in events:
            paths = tuple(a for a in arguments[:2] if isinstance(a, str | bytes | os.PathLike))
        else:
            return
        for path in map(os.fsdecode, paths):
            whole = os.path.abspath(path)
            device = whole.startswith(("/dev/", "/proc/")) and not whole.startswith("/dev/shm/")
            if not device and not whole.startswith(f"{root}/"):
                found.append(f"{event} {whole}")

    sys.dont_write_bytecode = True
    sys.addaudithook(look)
    return found


SUMMARY = (
    f"{TOGETHER} command lines and recipes a case, right, wrong, damaged or misspelt: exit status 0, 1 or 2 within "
    "60 seconds, a message that names the mistake, no traceback, nothing written elsewhere"
)
COUNT, SAMPLE, LIMIT = 100, 1, 400.0
