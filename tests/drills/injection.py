"""The process is ended at every file operation of a command; the same command again must end as if nothing had been.

Names of cases: `language/43/before`, `language/43/inside` (half of a write is done), `language/97/after` (all is done),
and for two deaths `language/43/inside/12`: the second command is ended before its operation 12, too.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from cached_transformers.cli.main import main
from cached_transformers.training.config import config_to_dict

from . import _runs
from ._operations import DIED, Operation, Operations
from .frame import Drill, Failure, in_child

TWICE = 8
"""For so many cases with one death there is one with two."""

_SHARED: list[Path] = []
"""The folder that `_prepare` filled, for cases in the processes that are forked."""

Command = Callable[[Path], int]
"""What is ended and carried out again: it works in one folder, and gives an exit status."""


def _commands() -> dict[str, Command]:
    """By name, those that take the least time first."""
    trained = {name: _trained(name) for name in _runs.recipes()}
    return {"stream": _stream, "language": trained.pop("language"), **trained, "compare": _compare}


def _trained(name: str) -> Command:
    def command(folder: Path) -> int:
        _runs.train(_runs.recipes()[name](_SHARED[0] / "data"), folder)
        return 0

    return command


def _stream(folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    run, _ = _reference("language")
    words = ["stream", str(run), str(_SHARED[0] / "data" / "text" / "test.txt"), "--every", "40"]
    return main([*words, "--state", str(folder / "state.safetensors")])


def _compare(folder: Path) -> int:
    _runs.draw_nothing()
    config = config_to_dict(_runs.recipes()["language"](_SHARED[0] / "data"))
    recipe = folder.parent / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config), encoding="utf-8")
    words = ["compare", str(recipe), "training.steps=2", "--with", "plain,transformer_xl:length=4", "--seeds", "1"]
    return main([*words, "--out", str(folder)])


def _prepare(shared: Path) -> None:
    _SHARED[:] = [shared]
    (shared / "data").mkdir()
    _runs.write_data(shared / "data")


def _reference(kind: str) -> tuple[Path, list[Operation]]:
    """The folder of an uninterrupted command, and its operations; carried out when first asked for."""
    home = _SHARED[0] / kind
    listed = home / "operations.json"
    if not listed.is_file():
        home.mkdir(exist_ok=True)
        status = in_child(lambda: _listed(kind, home / "run", listed))
        if status:
            raise Failure(f"{kind}: without any death the command ended with status {status}")
    return home / "run", [Operation(*fields) for fields in json.loads(listed.read_text(encoding="utf-8"))]


def _listed(kind: str, folder: Path, listed: Path) -> int:
    if kind == "stream":
        _reference("language")
    operations = Operations(folder)
    status = _commands()[kind](folder)
    listed.write_text(json.dumps(operations.met), encoding="utf-8")
    return status


def _cases(count: int, seed: int) -> Iterator[str]:
    """In turn one case of each command, in an order that the seed draws; a sample is of the first commands alone, since
    each has to be carried out without any death before."""
    chance = random.Random(seed)
    of_kind = {kind: _cases_of(kind, chance) for kind in list(_commands())[: max(3, count // 4)]}
    longest = max(len(cases) for cases in of_kind.values())
    mixed = [cases[place] for place in range(longest) for cases in of_kind.values() if place < len(cases)]
    yield from mixed[:count]


def _cases_of(kind: str, chance: random.Random) -> list[str]:
    _, operations = _reference(kind)
    last = len(operations) - 1
    once = [f"{kind}/{last}/after"]
    for number, operation in enumerate(operations):
        once += [f"{kind}/{number}/{moment}" for moment in (["before", "inside"] if operation.halves else ["before"])]
    chance.shuffle(once)
    twice = [f"{case}/{chance.randrange(last)}" for case in once[::TWICE]]
    return [*once, *twice]


def _attempt(case: str, folder: Path) -> None:
    kind, number, moment, *second = case.split("/")
    command, (reference, operations) = _commands()[kind], _reference(kind)
    run = folder / "run"
    deaths = [(int(number), moment), *((int(later), "before") for later in second)]
    for order, (place, when) in enumerate(deaths):
        status = _ended(command, run, folder, None if when == "after" else place, when == "inside")
        must = 0 if when == "after" else DIED
        if status != must and (order == 0 or status):
            raise Failure(f"it was to be ended, and ended with status {status}\n{_said(folder)}")
    status = _ended(command, run, folder)
    try:
        if status:
            raise Failure(f"carried out again it ended with status {status}\n{_said(folder)}")
        _compared(run, reference)
    except Failure as failure:
        raise Failure(f"ended {moment} {operations[int(number)].what!r}: {failure}") from None


def _compared(run: Path, reference: Path) -> None:
    if (reference / "metrics.jsonl").is_file():
        return _runs.compare_runs(run, reference)
    _runs.compare_files(run, reference)
    for inner in sorted(reference.rglob("metrics.jsonl")):
        _runs.compare_runs(run / inner.parent.relative_to(reference), inner.parent)


def _ended(command: Command, run: Path, folder: Path, number: int | None = None, inside: bool = False) -> int:
    """Exit status of a command in a process of its own, which ends at an operation where one is given."""

    def work() -> int:
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        if number is not None:
            Operations(run, number, inside)
        return command(run)

    return in_child(work)


def _said(folder: Path) -> str:
    return (folder / "said").read_text(encoding="utf-8", errors="replace")[-1500:]


DRILL = Drill(
    name="injection",
    summary="a training, a stream, a comparison is ended before and inside each of its file operations, and carried "
    "out again: it ends as the uninterrupted one, in weights, caches, metrics, best, last, scores and files",
    cases=_cases,
    attempt=_attempt,
    count=100_000,
    sample=6,
    prepare=_prepare,
)
