"""Images of shards that are read one after the other, in windows: every image once per epoch, and exact resume."""

from __future__ import annotations

from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
from data.pictures import encoded, write_tar
from training.same_run import assert_same_run, final

from cached_lab.experiments.run import run_training
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.window_order import WindowedOrder
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.config import RunConfig
from cached_lab.training.loader import Share

STARTS, SIZE, WINDOW = np.array([0, 9, 12, 20]), 24, 5
SHARDS = np.split(np.arange(SIZE), STARTS[1:])


def order(seed: int = 0, start: int = 0, share: Share | None = None, batch: int = 4) -> WindowedOrder:
    return WindowedOrder(STARTS, WINDOW, SIZE, batch, seed, start, share or Share())


def epoch(seed: int, number: int) -> list[int]:
    return [row for step in range(6 * number, 6 * number + 6) for _, row in order(seed).rows(step)]


def test_every_epoch_has_every_row_once_in_windows_of_permuted_shards() -> None:
    epochs = [epoch(0, number) for number in range(8)]
    assert all(sorted(rows) == list(range(SIZE)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 8 and epoch(1, 0) != epoch(0, 0)
    first = set()
    for rows in epochs:
        windows = [sorted(rows[begin : begin + WINDOW]) for begin in range(0, SIZE, WINDOW)]
        assert any(
            windows == [sorted(whole[begin : begin + WINDOW]) for begin in range(0, SIZE, WINDOW)]
            for whole in permutations_of_shards()
        )
        first.add(min(windows[0]))
    assert len(first) > 1


def permutations_of_shards() -> list[list[int]]:
    return [np.concatenate([SHARDS[place] for place in places]).tolist() for places in permutations(range(4))]


def test_processes_and_pieces_read_what_one_reads_from_any_step() -> None:
    for start in (0, 3, 11):
        whole = list(islice(iter(order(start=start)), 5))
        halves = [iter(order(start=start, share=Share(rank, 2, 2))) for rank in range(2)]
        for batch in whole:
            assert batch == [key for half in halves for piece in (next(half), next(half)) for key in piece]
        assert whole == [order().rows(step) for step in range(start, start + 5)]


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


def config(folder: Path, steps: int = 8, **training: object) -> RunConfig:
    settings = {"steps": steps, "batch_size": 8, "accumulate": 2, "evaluate_every": 3, "save_every": 3, "log_every": 1}
    settings |= {"tensorboard": False, "device": "cpu", "mixup": 0.2, "test": "last", **training}
    model = {"name": "vision_transformer", "patch_size": 4, "width": 16, "depth": 1, "heads": 2, "feed_forward": 16}
    data = {"name": "image_shards", "path": str(folder), "image_size": 8, "window": 4, "augmentation": {"erase": 0.5}}
    return config_from_dict(
        {
            "data": data,
            "model": {**model, "memory": "grc"},
            "training": settings,
            "optimizer": {"name": "sgd", "learning_rate": 0.01},
            "schedule": {"name": "constant"},
        }
    )


@pytest.mark.usefixtures("no_run_reports")
def test_a_run_that_stopped_in_the_middle_of_a_shard_goes_on_to_the_bit(folder: Path, tmp_path: Path) -> None:
    assert create_dataset("image_shards", "train", path=folder).shard_starts.tolist() == [0, 5, 11]
    run_training(config(folder), tmp_path / "whole")
    run_training(config(folder, 3), tmp_path / "parts")
    assert final(tmp_path / "parts").step == 3
    run_training(config(folder, workers=2), tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole", 8)


def test_a_window_holds_an_image(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.window=0"):
        create_dataset("image_shards", "train", path=folder, window=0)
