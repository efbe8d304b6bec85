"""Drill: mutations of saved files, each followed by the command that reads them.

A case `train/17` damages one file of a run folder (or of the cache of a run, a stream's state) in a way that follows
from its name. What must hold: the command ends as with the undamaged files, bit for bit, or it ends with a message that
names a file, and exit status 1 or 2. Never a traceback, and never another result.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from . import _damage
from .frame import Failure, in_child

USERS = ("metrics.jsonl", "config.yaml")
"""Text files that people may edit: an edit that can still be read is theirs, and so are the numbers in it."""
UNREAD = ("report.html", "summary.json", "translations.txt", "log.txt")
"""Files that are written anew and not read by the commands that are tried."""
ACTIONS = ("train", "train", "train", "evaluate", "evaluate", "stream", "cache")

_shared: list[Path] = []


def cases(count: int, seed: int) -> Iterator[str]:
    """Actions in turns."""
    return (f"{ACTIONS[number % len(ACTIONS)]}/{seed * 1_000_000 + number}" for number in range(count))


def prepare(shared: Path) -> None:
    """Tiny runs, half and whole, in a process of their own; and what their commands say."""
    from . import _runs

    _runs.import_all()
    _shared[:] = [shared]
    if status := in_child(lambda: _prepare(shared)):
        raise RuntimeError(f"the runs could not be made: exit status {status}")


def _prepare(shared: Path) -> None:
    from cached_lab.training import trainer
    from cached_lab.training.config import config_to_yaml

    from . import _runs

    # Constant time, so that files and mutations are reproducible.
    trainer.time = types.SimpleNamespace(perf_counter=lambda: 0.0)  # type: ignore[attr-defined]
    _runs.write_data(shared)
    made = {name: _runs.recipes()[name](shared) for name in ("language", "translation", "listops")}
    for name, config in made.items():
        (shared / f"{name}.yaml").write_text(config_to_yaml(config), encoding="utf-8")
    for name in made:
        for folder in ("half", "whole"):
            with _ending_behind(4) if folder == "half" else contextlib.nullcontext():
                status, said = _command("train", str(shared / f"{name}.yaml"), "--out", str(shared / name / folder))
            if status not in (0, 130):
                raise RuntimeError(said)
    book = (shared / "text" / "train.txt").read_text(encoding="utf-8")
    (shared / "book.txt").write_text(book[:900].replace(" ", "\n"), encoding="utf-8")
    whole = shared / "language" / "whole"
    half = ("stream", str(whole), str(shared / "book.txt"), "--every", "100")
    _command(*half, "--tokens", "400", "--state", str(shared / "half.safetensors"))
    shutil.copy(shared / "half.safetensors", shared / "end.safetensors")
    _command(*half, "--tokens", "10000", "--state", str(shared / "end.safetensors"))
    said = {}
    for name in made:
        scored = shared / name / "scored"  # a copy, since the command writes more of its scores than training does
        shutil.copytree(shared / name / "whole", scored)
        said[name] = _command("evaluate", str(scored), "--json")
    (shared / "said.json").write_text(json.dumps(said), encoding="utf-8")


@contextlib.contextmanager
def _ending_behind(step: int) -> Iterator[None]:
    """Stop training after a step, like an interruption."""
    from cached_lab.training.trainer import Trainer

    taken = Trainer._train_step

    def stop(self: Trainer, *arguments: Any) -> None:
        if self.step == step:
            raise KeyboardInterrupt
        taken(self, *arguments)

    Trainer._train_step = stop  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer._train_step = taken  # type: ignore[method-assign]


def _command(*words: str) -> tuple[int, str]:
    """Return exit status and output of a command; an error without a message is a `Failure`."""
    from cached_lab.cli.main import main

    from . import _runs

    _runs.draw_nothing()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            status = main(list(words))
        except Exception:
            raise Failure(traceback.format_exc()) from None
    out.seek(0)
    return status, out.read() + said.getvalue()


def attempt(case: str, folder: Path) -> None:
    """Mutate a file, and carry out the command that reads it."""
    random, action, shared = Random(case), case.partition("/")[0], _shared[0]
    os.chdir(folder)
    shutil.copytree(shared / "cache", folder / "cache", copy_function=shutil.copy2)
    os.environ["CACHED_TRANSFORMERS_CACHE"] = str(folder / "cache")
    {"train": _train, "evaluate": _evaluate, "stream": _stream, "cache": _cache}[action](random, folder, shared)
    if (folder / "unpickled").exists():
        raise Failure("something in a file was run")


def _train(random: Random, folder: Path, shared: Path) -> None:
    """Resume a damaged, half finished run."""
    from . import _runs

    name = random.choice(["language", "language", "translation", "listops"])
    run, reference = folder / "run", shared / name / "whole"
    shutil.copytree(shared / name / "half", run)
    changed = _mutate(random, run, _files(run), shared)
    before = {file: _hash(file) for file in changed}
    status, said = _command("train", str(shared / f"{name}.yaml"), "--out", str(run))
    if _refused(status, said, run, changed):
        return
    for file in changed:  # files that later steps do not write again are irrelevant
        wanted = reference / file.relative_to(run)
        if _hash(file) == before[file] and ("checkpoints" in file.parts or file.name in USERS) and wanted.is_file():
            file.parent.mkdir(exist_ok=True)
            shutil.copy(wanted, file)
        elif file.name in USERS and wanted.is_file():
            shutil.copy(wanted, file)
    for aside in (run / "checkpoints").glob("superseded_*"):  # the damaged folder is renamed and reported
        if "skipped: " not in said and "cannot be used" not in said:
            raise Failure(f"{aside.name} was set aside without a word: {said}")
        shutil.rmtree(aside)
    if "the best checkpoint so far cannot be used" in said:  # another one is tested then
        _runs.compare_checkpoints(run / "checkpoints" / "step_00000006", reference / "checkpoints" / "step_00000006")
    else:
        _runs.compare_runs(run, reference)


def _evaluate(random: Random, folder: Path, shared: Path) -> None:
    """Score a damaged run."""
    name = random.choice(["language", "translation", "listops"])
    run = folder / "run"
    shutil.copytree(shared / name / "whole", run)
    changed = _mutate(random, run, _files(run), shared)
    edited = any(file.name == "config.yaml" for file in changed)
    status, said = _command("evaluate", str(run), "--json")
    if _refused(status, said, run, changed):
        return
    wanted = json.loads((shared / "said.json").read_text(encoding="utf-8"))[name][1]
    if edited and not _same_model(run / "config.yaml", shared / name / "whole" / "config.yaml"):
        raise Failure(f"a run with an edited model is scored: {said}")
    if not edited and _scores(said) != _scores(wanted):
        raise Failure(f"scores are other, silently: {_scores(said)} for {_scores(wanted)}")


def _stream(random: Random, folder: Path, shared: Path) -> None:
    """Continue reading from a damaged state, or with a damaged run."""
    run, state = folder / "run", folder / "state.safetensors"
    shutil.copytree(shared / "language" / "whole", run)
    shutil.copy(shared / "half.safetensors", state)
    files = [state] if random.random() < 0.6 else _files(run)
    changed = _mutate(random, run, files, shared)
    edited = any(file.name == "config.yaml" for file in changed)
    words = ("stream", str(run), str(shared / "book.txt"), "--every", "100", "--tokens", "10000", "--state", str(state))
    status, said = _command(*words)
    if _refused(status, said, run, [*changed, state]) or edited:
        return
    if state.read_bytes() != (shared / "end.safetensors").read_bytes():
        raise Failure(f"the state at the end is another: {said}")


def _cache(random: Random, folder: Path, shared: Path) -> None:
    """Train from the beginning with damaged data, tokens or vocabularies in the cache."""
    from . import _runs

    name = random.choice(["language", "translation", "listops"])
    files = sorted((folder / "cache").iterdir())
    changed = _mutate(random, folder / "cache", files, shared)
    run = folder / "run"
    status, said = _command("train", str(shared / f"{name}.yaml"), "--out", str(run))
    if not _refused(status, said, folder, changed):
        _runs.compare_runs(run, shared / name / "whole")


def _files(run: Path) -> list[Path]:
    """Return files of a run to mutate, those in checkpoints twice."""
    files = sorted(file for file in run.rglob("*") if file.is_file() and file.name not in UNREAD)
    saved = [file for file in files if "checkpoints" in file.parts]
    return files + saved


def _mutate(random: Random, run: Path, files: list[Path], shared: Path) -> list[Path]:
    """Change a file in one of the ways; return the changed files."""
    file = random.choice(files)
    kind = random.choice(
        ["bit", "bit", "bit", "cut", "empty", "swap", "other run", "number", "gone", "behind", "random"]
    )
    print(f"{kind}: {file}", flush=True)
    content = file.read_bytes()
    if kind == "swap":
        others = [other for other in files if other != file and other.suffix == file.suffix] or files
        same = [other for other in others if other.name == file.name] or others
        other = random.choice(same)
        theirs = other.read_bytes()
        other.write_bytes(content)
        file.write_bytes(theirs)
        return [file, other]
    if kind == "other run":
        found = sorted(other for other in shared.rglob(file.name) if run not in other.parents and other.is_file())
        others = [other for other in found if other.read_bytes() != content]
        if others:
            file.write_bytes(random.choice(others).read_bytes())
            return [file]
        kind = "bit"
    if kind == "gone":
        file.unlink()
        return [file]
    ways = {"cut": _damage.cut, "empty": _damage.emptied, "number": _number, "behind": _damage.extended}
    ways |= {"random": lambda content, random: _damage.damaged(content, file.suffix, random)}
    file.write_bytes(ways.get(kind, _damage.one_bit)(content, random) if content else b"x")
    return [file]


def _number(content: bytes, random: Random) -> bytes:
    """A digit is another digit: an edit that can still be read."""
    places = [place for place, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return _damage.flipped(content, random)
    place = random.choice(places)
    return content[:place] + str((content[place] - 48 + random.randint(1, 9)) % 10).encode() + content[place + 1 :]


def _refused(status: int, said: str, run: Path, changed: list[Path]) -> bool:
    """Return True if the command ended with a message (Failure: it has none, or names no file)."""
    if status == 0:
        return False
    named = [str(run), "data.path=", *(file.name for file in changed)]  # a config may name another path now
    if status not in (1, 2) or "error: " not in said or not any(name in said for name in named):
        raise Failure(f"exit status {status} with {said[-1500:]!r}, which names none of {named}")
    return True


def _scores(said: str) -> Any:
    begin = said.find("{")
    return json.JSONDecoder().raw_decode(said[begin:])[0]["scores"] if begin >= 0 else said


def _same_model(edited: Path, original: Path) -> bool:
    from cached_lab.experiments.load import read_run_config

    return read_run_config(edited.parent).model == read_run_config(original.parent).model


def _hash(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


SUMMARY = (
    "a file of a run folder, of a stream's state or of the cache with a flipped bit, cut, emptied, exchanged, "
    "edited, gone or longer: the command that reads it ends as with the undamaged one, or with a message that names it"
)
COUNT, SAMPLE = 250, 4
