"""Streamed image shards: the same examples as by index, and exact resume in the middle."""

from __future__ import annotations

import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from data.pictures import encoded, write_tar
from training.same_run import assert_same_run, assert_same_tree, final, train_until_killed
from training.small_language import CPU, trainer_of

from cached_lab.data.shard_order import Dealer
from cached_lab.experiments.run import run_training
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.image_shards import ImageShards
from cached_lab.tasks.classification.images.image_stream import ALLOWED, TarStreams
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.loader import Share
from cached_lab.training.streamed_order import StreamedOrder
from cached_lab.training.trainer import Trainer

MODEL = {"name": "vision_transformer", "patch_size": 4, "width": 16, "depth": 1, "heads": 2, "feed_forward": 16}


def files(first: int, count: int) -> dict[str, bytes]:
    found = {}
    for number in range(first, first + count):
        found |= {f"{number:05}.jpg": encoded(number, kind="JPEG"), f"{number:05}.cls": str(number % 3).encode()}
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in range(3):
        write_tar(tmp_path / f"made-train-{shard:03}.tar", files(100 * shard, 5 + shard))
    write_tar(tmp_path / "made-validation-000.tar", files(900, 6))
    return tmp_path


def config(folder: Path, data: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    settings = {"steps": 8, "batch_size": 8, "accumulate": 2, "evaluate_every": 4, "save_every": 3, "log_every": 1}
    settings |= {"tensorboard": False, "device": "cpu", "mixup": 0.2, "test": "last"}
    options = {"name": "image_stream", "path": str(folder), "classes": 3, "image_size": 8, "window": 4}
    augmentation = {"erase": 0.5}
    return config_from_dict(
        {
            "data": {**options, "augmentation": augmentation, **(data or {})},
            "model": {**MODEL, "memory": "grc"},
            "training": {**settings, **training},
            "optimizer": {"name": "sgd", "learning_rate": 0.01},
            "schedule": {"name": "constant"},
        }
    )


def fitted(settings: RunConfig, folder: Path, world: World | None = None) -> Trainer:
    trainer = trainer_of(settings, folder, world or CPU)
    trainer.resume("auto")
    trainer.fit()
    return trainer


def test_it_has_the_examples_of_shards_that_are_indexed(folder: Path) -> None:
    options = {"path": folder, "image_size": 8, "augment": False}
    stream, indexed = (
        create_dataset(n, "train", **options, **o) for n, o in (("image_stream", {"classes": 3}), ("image_shards", {}))
    )
    dealer = Dealer(stream.examples)
    assert stream.shards == 3 and isinstance(indexed, ImageShards)
    for number, example in enumerate(islice(dealer, len(indexed))):
        (image, label), (other, expected) = stream[example], indexed[number]
        assert label == expected and torch.equal(image, other)
        assert example.name == str(indexed.encoded(number)[1]).removesuffix(".jpg")
    validation, test = (create_dataset("image_stream", split, classes=3, **options) for split in ("validation", "test"))
    assert validation.labels.tolist() == test.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert "size" not in stream.describe() and validation.describe()["size"] == 6


@pytest.mark.peers
def test_it_reads_what_the_library_of_the_format_reads(folder: Path) -> None:
    library = pytest.importorskip("webdataset")
    names = [str(path) for path in sorted(folder.glob("made-train-*.tar"))]
    theirs = list(library.WebDataset(names, shardshuffle=False, empty_check=False))
    ours = list(islice(Dealer(TarStreams(names, "cls", 3, False)), len(theirs)))
    assert len(theirs) == 18
    assert [(e.content, str(e.label).encode()) for e in ours] == [(t["jpg"], t["cls"]) for t in theirs]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_is_one_that_was_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    settings = config(folder, {"parts": 2}, workers=workers)
    fitted(config(folder, {"parts": 2}), tmp_path / "whole")
    killed = trainer_of(settings, tmp_path / "killed")
    train_until_killed(killed, 2 * 6 + 1, monkeypatch)  # between the pieces of the seventh step; the sixth was saved
    assert final(tmp_path / "killed").step == 6
    fitted(settings, tmp_path / "killed")
    a, b = final(tmp_path / "killed"), final(tmp_path / "whole")
    assert_same_tree({**a.training, **_no_times(b.training)}, {**b.training, **_no_times(b.training)})
    assert_same_tree(a.weights, b.weights)
    assert a.step == b.step == 8 and set(a.training["carried"]) == {"0", "1"}
    assert workers or assert_same_run(tmp_path / "killed", tmp_path / "whole", 8) is None


def _no_times(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if "seconds" in name}


@pytest.mark.parametrize("parts", [1, 2])
def test_processes_and_pieces_read_what_one_reads(folder: Path, parts: int) -> None:
    shards = TarStreams([str(p) for p in sorted(folder.glob("made-train-*.tar"))], "cls", 3, False)
    one = iter(StreamedOrder(shards, 8, 0, Share(), parts, 3))
    orders = [StreamedOrder(shards, 8, 0, Share(rank, 2, 2), parts, 3) for rank in range(2)]
    two = [iter(order) for order in orders]
    for _ in range(9):
        assert next(one) == [key for half in two for piece in (next(half), next(half)) for key in piece]
    ahead = next(two[1])
    state = orders[1].state_dict(9, World(torch.device("cpu")))
    again = StreamedOrder(shards, 8, 0, Share(1, 2, 2), parts, 3)
    again.load_state_dict(state)
    assert next(iter(again)) == ahead


def test_a_run_from_the_beginning_to_the_report(folder: Path, tmp_path: Path) -> None:
    summary = run_training(config(folder, test="last"), tmp_path / "run")
    assert summary["steps"] == 8 and summary["baselines"] == {} and 0 <= summary["test"]["accuracy"] <= 1


def test_shards_that_programs_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = create_dataset("image_stream", "train", path=folder, classes=3, image_size=8)
    write = f"{shlex.quote(sys.executable)} -c 'import sys; sys.stdout.buffer.write(open(sys.argv[1], \"rb\").read())'"
    path = {
        "train": f"pipe:{write} {folder}/made-train-{{000..002}}.tar",
        "validation": str(folder / "made-validation-000.tar"),
    }
    with pytest.raises(ValueError, match=rf"data.path starts a program .*set {ALLOWED}=1"):
        create_dataset("image_stream", "train", path=path, classes=3)
    monkeypatch.setenv(ALLOWED, "1")
    piped = create_dataset("image_stream", "train", path=path, classes=3, image_size=8)
    assert len(create_dataset("image_stream", "validation", path=path, classes=3)) == 6
    dealers = [Dealer(data.examples, window=4, seed=1) for data in (local, piped)]
    seen = [[(e.content, e.label) for e in islice(dealer, 10)] for dealer in dealers]
    assert seen[0] == seen[1]
    again = Dealer(piped.examples, window=4, seed=1)
    again.go_on(dealers[1].state())
    assert [e.content for e in islice(again, 12)] == [e.content for e in islice(dealers[0], 12)]
    failing = {"train": f"pipe:{sys.executable} -c 'import sys; sys.exit(3)'"}
    with pytest.raises(ValueError, match=r"pipe:.* cannot be read"):
        next(Dealer(create_dataset("image_stream", "train", path=failing, classes=3).examples))
    late = f"pipe:{write[:-1]}; sys.exit(3)' {folder}/made-train-000.tar"
    with pytest.raises(ValueError, match=r"the program ended with status 3"):
        list(islice(Dealer(create_dataset("image_stream", "train", path={"train": late}, classes=3).examples), 9))
    with pytest.raises(ValueError, match=r"for all splits: scored data are read again"):
        create_dataset("image_stream", "validation", path=failing["train"], classes=3)


@pytest.mark.parametrize("keep", [0, 700, 5120, -700, -1])
def test_a_shard_that_was_cut_short_is_named(folder: Path, keep: int) -> None:
    shard = folder / "made-train-000.tar"
    content = shard.read_bytes()
    length = len(content.rstrip(b"\0")) // 512 * 512 + 512  # where the last member ends
    shard.write_bytes(content[: length + keep + 1 if keep < 0 else keep])
    train = create_dataset("image_stream", "train", path=str(shard), classes=3)
    with pytest.raises(ValueError, match=r"made-train-000.tar cannot be read: .*fetch it again"):
        list(islice(Dealer(train.examples), 6))


def test_examples_that_are_not_whole(folder: Path, tmp_path: Path) -> None:
    made = files(0, 4)
    del made["00001.cls"], made["00002.jpg"]
    shard = write_tar(tmp_path / "gaps" / "train-0.tar", {**made, "readme.txt": b"?"})
    options = {"path": str(shard.parent), "classes": 3, "image_size": 8}
    with pytest.raises(ValueError, match=r"0.*00001"):
        list(islice(Dealer(create_dataset("image_stream", "train", **options).examples), 3))
    train = create_dataset("image_stream", "train", bad_files="skip", **options)
    assert [e.label for e in islice(Dealer(train.examples), 4)] == [0, 0, 0, 0]
    dealer = Dealer(train.examples)
    next(dealer), next(dealer)
    again = Dealer(train.examples)
    again.go_on(dealer.state())
    assert next(again).name.endswith(":00000")
    with pytest.raises(ValueError, match=r"2.*data.classes"):
        list(islice(Dealer(TarStreams([str(folder / "made-train-000.tar")], "cls", 2, False)), 5))


def test_a_file_that_cannot_be_decoded_has_a_stand_in(folder: Path, tmp_path: Path) -> None:
    made = {**files(0, 8), "00003.jpg": b"no image"}
    write_tar(tmp_path / "bad" / "train-0.tar", made)
    write_tar(tmp_path / "bad" / "validation-0.tar", files(0, 3))
    with pytest.raises(ValueError, match="00003"):
        fitted(config(tmp_path / "bad", steps=2), tmp_path / "stops")
    with pytest.warns(RuntimeWarning, match=r"skipped .*00003"):
        trainer = fitted(config(tmp_path / "bad", {"bad_files": "skip"}, steps=2), tmp_path / "goes on")
    assert trainer.step == 2 and len(trainer.task.data.bad_found) == 1


@pytest.mark.parametrize(
    ("data", "training", "message"),
    [
        ({"parts": 4}, {}, r"data.parts=4 must lie in 1..3"),
        ({"parts": 3}, {}, r"data.parts=3 must divide training.batch_size=8"),
        ({"classes": 0}, {}, r"data.classes=0 must lie in 1.."),
        ({"label": "tar"}, {}, r"label='tar' must be cls, or json:KEY"),
        ({}, {"repeats": 2}, r"training.repeats=2: data"),
    ],
)
def test_bad_options_are_named(
    folder: Path, tmp_path: Path, data: dict[str, Any], training: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(config(folder, data, **training), tmp_path / "run")
