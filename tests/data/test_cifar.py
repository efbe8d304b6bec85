"""The readers of the binary versions of CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import write_tar
from refusals import refuses

from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.cifar import CIFAR10, CIFAR100, CLASSES

RECORD_BYTES = 1 + 3 * 32 * 32


def records(count: int, seed: int = 0) -> np.ndarray:
    """Records (count, 3073) with labels 0..9 in turn and random pixels."""
    made = np.random.default_rng(seed).integers(0, 256, (count, RECORD_BYTES), dtype=np.uint8)
    made[:, 0] = np.arange(count) % 10
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records(40, seed=1).tofile(tmp_path / "data_batch_1.bin")
    (tmp_path / "data_batch_2.bin.xz").write_bytes(lzma.compress(records(60, seed=2).tobytes()))
    records(20, seed=3).tofile(tmp_path / "test_batch.bin")
    return tmp_path


def test_a_record_is_a_label_and_three_planes(tmp_path):
    made = np.zeros((2, RECORD_BYTES), dtype=np.uint8)
    made[1, 0] = 7
    made[1, 1 + 0] = 11  # red, row 0, column 0
    made[1, 1 + 1024 + 32 + 5] = 22  # green, row 1, column 5
    made[1, 1 + 2048 + 1023] = 33  # blue, last
    images, labels = CIFAR10.records(made.tobytes(), tmp_path / "data_batch_1.bin")
    assert labels.tolist() == [0, 7]
    assert (images[1, 0, 0, 0], images[1, 1, 1, 5], images[1, 2, 31, 31]) == (11, 22, 33)
    assert images.sum() == 66


def test_splits(folder):
    splits = {split: CIFAR10(split, path=folder) for split in ("train", "validation", "test")}
    assert {split: len(data) for split, data in splits.items()} == {"train": 90, "validation": 10, "test": 20}
    assert splits["validation"].labels.tolist().count(3) == 1
    pixels = {data.pixels(index).numpy().tobytes() for data in splits.values() for index in range(len(data))}
    originals = {row[1:].tobytes() for seed, count in ((1, 40), (2, 60), (3, 20)) for row in records(count, seed)}
    assert pixels == originals and len(pixels) == 120
    files = {f"cifar-10-batches-bin/{file.name}": file.read_bytes() for file in folder.iterdir()}
    packed = CIFAR10("train", path=write_tar(folder / "cifar-10-binary.tar", {**files, "readme.html": b"x"}))
    assert packed.labels.tolist() == splits["train"].labels.tolist()


def test_an_augmented_image_is_a_window_of_the_padded_one_mirrored_or_not(folder):
    test, train = CIFAR10("test", path=folder), CIFAR10("train", path=folder)
    mean_C11, std_C11 = (torch.tensor(facts)[:, None, None] for facts in (test.mean, test.std))
    assert torch.allclose(test[4][0], (test.pixels(4) / 255 - mean_C11) / std_C11)
    assert train.augment and not test.augment
    assert len({train[0][0].numpy().tobytes() for _ in range(40)}) > 20
    padded_CHW = torch.nn.functional.pad(train.pixels(0).float() / 255, (4, 4, 4, 4))
    windows = torch.stack([padded_CHW[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)])
    for _ in range(5):
        image_CHW = train[0][0] * std_C11 + mean_C11
        far_2V = torch.stack([windows - image_CHW, windows - image_CHW.flip(-1)]).abs().amax((2, 3, 4))
        assert far_2V.min() < 1e-5


def test_original_pixels(shared):
    source = shared / "data" / "cifar10"
    train, test = (CIFAR10(split, path=source) for split in ("train", "test"))
    assert np.bincount(train.labels).tolist() == [900] * 10 and np.bincount(test.labels).tolist() == [500] * 10
    assert list(CLASSES) == (source / "batches.meta.txt").read_text().split()
    pixels = torch.stack([test.pixels(index) for index in range(0, len(test), 5)]) / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(test.mean, abs=0.01)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(test.std, abs=0.01)


def test_the_fine_label_of_cifar100_counts(tmp_path):
    made = np.random.default_rng(0).integers(0, 256, (200, 3074), dtype=np.uint8)
    made[:, 0], made[:, 1] = np.arange(200) % 20, np.arange(200) % 100
    made.tofile(tmp_path / "train.bin")
    (tmp_path / "test.bin.xz").write_bytes(lzma.compress(made[:100].tobytes()))
    assert len(CIFAR100("train", path=tmp_path, validation_fraction=0.5)) == 100
    test = create_dataset("cifar100", "test", path=tmp_path)
    assert test.labels.tolist() == list(range(100)) and test.class_names[7] == "class 7"
    assert test.pixels(4).flatten().tolist() == made[4, 2:].tolist()
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"n{i}" for i in range(100)))
    assert CIFAR100("test", path=tmp_path).class_names[7] == "n7"
    (tmp_path / "fine_label_names.txt").write_text("n0")
    refuses(r"fine_label_names\.txt names 1 classes, .* 100", CIFAR100, "test", path=tmp_path)


@pytest.mark.parametrize("size", [0, 1, RECORD_BYTES - 1, 2 * RECORD_BYTES + 1])
def test_cut_batches(folder, size):
    (folder / "data_batch_1.bin").write_bytes(records(3).tobytes()[:size])
    refuses(f"data_batch_1.bin holds {size} bytes, not a whole number of 3073", CIFAR10, "train", path=folder)


def test_damage_is_named(folder):
    file = folder / "data_batch_2.bin.xz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    refuses(r"data_batch_2.bin.xz", CIFAR10, "train", path=folder)
    file.write_bytes(whole)
    made = records(12)
    made[5, 0] = 10
    made.tofile(folder / "data_batch_1.bin")
    refuses(r"data_batch_1.bin.*10", CIFAR10, "train", path=folder)
    (folder / "data_batch_1.bin.xz").write_bytes(lzma.compress(records(10).tobytes()))
    refuses("holds a batch twice", CIFAR10, "train", path=folder)
    (folder / "test_batch.bin").unlink()
    refuses(r"test_batch.*bin.xz", CIFAR10, "test", path=folder, error=FileNotFoundError)
