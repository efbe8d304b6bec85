"""Drill: damaged inputs of every data source.

A case `cifar10/7` is a batch of damaged inputs in one process; `cifar10/7/23` is one of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import shutil
import signal
import traceback
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from . import _damage, _small_data
from .frame import Failure, bound_memory, each

BATCH = 50
BATCHES = 100
"""Of a split that are read: a line may be there a thousand times."""
SECONDS = 30
ROOM = 1 << 30
"""Bytes that reading may take beyond what the process has when it begins."""

_made: dict[str, Path] = {}


def cases(count: int, seed: int) -> Iterator[str]:
    """Batches of all data sets in turns, and of each the forms in which it comes."""
    forms: dict[str, list[str]] = {}
    for name, source in _small_data.SOURCES.items():
        forms.setdefault(source.dataset, []).append(name)
    datasets = list(forms)
    Random(seed).shuffle(datasets)
    for number in range(count):
        turn, place = divmod(number, len(datasets))
        names = forms[datasets[place]]
        yield f"{names[(turn + seed) % len(names)]}/{seed * 1_000_000 + turn}"


def prepare(shared: Path) -> None:
    """Import what cases use, and make a good input of every source."""
    import torch

    import cached_lab.tasks.recipes
    import cached_lab.training.loader  # noqa: F401

    torch.set_num_threads(1)
    for name, source in _small_data.SOURCES.items():
        (shared / name).mkdir()
        source.make(shared / name)
        _made[name] = shared / name


def attempt(case: str, folder: Path) -> None:
    """Damage and read the inputs of a batch, or one of them."""
    os.chdir(folder)
    bound_memory(ROOM)
    signal.signal(signal.SIGALRM, _too_long)

    def one(name: str) -> str | None:
        print(f"input {name}", flush=True)
        source, _, number = name.split("/")
        try:
            signal.alarm(SECONDS)
            faulthandler.dump_traceback_later(SECONDS + 5, exit=True)  # for code that no signal interrupts
            _attempt_one(source, Random(name), folder / number)
        except Exception as error:
            return str(error) if isinstance(error, Failure) else traceback.format_exc()
        finally:
            signal.alarm(0)
        shutil.rmtree(folder / number)
        return None

    each(case, BATCH, one)


def _too_long(number: int, frame: object) -> None:
    raise Failure(f"took longer than {SECONDS} seconds")


def _attempt_one(name: str, random: Random, folder: Path) -> None:
    """Read a damaged input: it works, or ends with a message that names the damaged file."""
    source = _small_data.SOURCES[name]
    shutil.copytree(_made[name], folder / "data")
    os.environ["CACHED_TRANSFORMERS_CACHE"] = str(folder / "cache")
    files = sorted(file for file in (folder / "data").rglob("*") if file.is_file())
    done = []
    for _ in range(random.choice([1, 1, 1, 2])):
        file = random.choice(files)
        if file.is_file() and not file.is_symlink():
            done.append(f"{file.name}: {_damage.damage_file(file, random, files)}")
    names = {part for file in files for part in (file.name, file.name.split(".")[0] + ".tar")} | {str(folder)}
    print(f"  {done}", flush=True)
    for _ in range(random.choice([1, 1, 2])):  # the second time with the cache of the first
        read = _read(source, folder / "data")
        if read is not None and not any(part in str(read) for part in names):
            raise Failure(f"a message that does not say which file: {type(read).__name__}: {read} ({done})") from read
    if Path("unpickled").exists() or (folder / "unpickled").exists():
        raise Failure(f"something in the file was run ({done})")


def _read(source: _small_data.Source, folder: Path) -> Exception | None:
    """Read all of a data set; the error for which there is a message."""
    from cached_lab.tasks import create_dataset

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            found = {split: create_dataset(source.dataset, split, **source.arguments(folder)) for split in SPLITS}
            for split, dataset in found.items():
                json.dumps(dataset.describe())
                _rows(dataset, split, found["train"])
        except (ValueError, OSError) as error:
            return error
    return None


SPLITS = ("train", "validation", "test")


def _rows(dataset: Any, split: str, train: Any) -> None:
    """Every row, checked; and the scores that are taken from the data."""
    from cached_lab.training.loader import TrainingOrder, evaluation_batches, training_batches

    kind = getattr(dataset, "task", "classification")
    if kind == "language":
        if not 0 <= int(dataset.tokens.min()) <= int(dataset.tokens.max()) < dataset.tokenizer.vocabulary:
            raise Failure("token ids out of range")
        dataset.tokenizer.decode(dataset.tokens[:50].tolist())
        dataset.scores(1.0, len(dataset))
        dataset.baselines(train)
        return
    if kind == "detection":
        _detection(dataset)
        return
    batches = evaluation_batches(dataset, 4)
    if split == "train":
        batches = islice(training_batches(dataset, TrainingOrder(len(dataset), 1, 0)), len(dataset))
    for batch in islice(batches, BATCHES):
        if kind == "translation":
            _in_range(batch.inputs, dataset.describe()["vocabulary"])
        else:
            _in_range(batch.targets, dataset.classes)
            if not bool(batch.inputs.isfinite().all()):
                raise Failure("inputs that are not finite")
    has_texts = kind == "translation" and split != "train" and hasattr(type(dataset), "texts")
    if has_texts and len(dataset.texts.source) != len(dataset):
        raise Failure("texts and pairs are not as many")
    if hasattr(dataset, "baselines"):
        dataset.baselines(train)


def _in_range(ids: Any, count: int) -> None:
    if not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise Failure(f"ids from {int(ids.min())} to {int(ids.max())} do not lie in 0..{count - 1}")


def _detection(dataset: Any) -> None:
    """Items of a detection data set, and average precision against its ground truth."""
    import torch

    from cached_lab.tasks.detection.scores import score, to_results

    results: dict[str, list[Any]] = {"box": [], "mask": []}
    counted = []
    for index, number in enumerate(dataset.image_ids):
        image, target = dataset[index] if dataset.split == "train" else (dataset.pixels(number), dataset.target(number))
        counted.append(number)
        high, wide = image.shape[-2:]
        boxes = target["boxes"]
        if not bool(boxes.isfinite().all()) or (len(boxes) and not 0 <= float(boxes.min()) <= float(boxes.max()) <= 8):
            raise Failure(f"boxes {boxes} do not lie in the image")
        if "masks" in target and target["masks"].shape[-2:] != (high, wide):
            raise Failure(f"masks of {tuple(target['masks'].shape)} for an image of {high} x {wide}")
        masks = torch.zeros(1, 1, high, wide)
        masks[..., 1:4, 1:4] = 1
        box = torch.tensor([[1.0, 1.0, 6.0, 5.0]])
        answer = {"boxes": box, "scores": torch.tensor([0.9]), "labels": torch.tensor([0]), "masks": masks}
        for kind, entries in to_results(answer, number, dataset.category_ids).items():
            results[kind] += entries
    if counted:
        score(dataset.annotations.truth, results if dataset.masks else {"box": results["box"]}, counted)


SUMMARY = (
    "inputs of every data source with flipped bits, cut, of other types, sizes, encodings and links: they are "
    "read, or refused with a message that names the file, within 30 s and 1 GiB, and nothing in them is run "
    f"({BATCH} inputs a case)"
)
COUNT, SAMPLE, LIMIT = 10 * len({source.dataset for source in _small_data.SOURCES.values()}), 3, 300.0
