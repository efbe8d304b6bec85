"""Readers of the binary versions of CIFAR-10 and CIFAR-100; augmentation by timm's transforms."""

from __future__ import annotations

import lzma
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from common import refuses
from data.pictures import class_folders, encoded, write_files, write_tar
from PIL import Image

from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.augmentation import training_transform
from cached_lab.tasks.classification.images.class_folders import ImageFolder
from cached_lab.tasks.classification.images.small_images import CIFAR10, CIFAR100, CLASSES
from cached_lab.training.loader import SeededRows, TrainingOrder, training_batches
from cached_transformers.extras import require

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
    refuses(r"test_batch.*bin.xz", CIFAR10, "test", path=folder, raises=FileNotFoundError)


DEIT = {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25, "interpolation": "bicubic"}
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def test_it_is_what_timm_does():
    create_transform = require("timm.data", extra="vision").create_transform
    options = {"scale": [0.3, 0.9], "flip": 0.3, **DEIT}
    ours = training_transform(options, 16, MEAN, STD)
    theirs = create_transform(
        16, is_training=True, scale=(0.3, 0.9), hflip=0.3, auto_augment=DEIT["auto_augment"], interpolation="bicubic",
        mean=MEAN, std=STD, re_prob=0.25, re_mode="pixel", color_jitter=None,
    )  # fmt: skip
    for transform in (ours, theirs):
        random.seed(3), np.random.seed(3), torch.manual_seed(3)
        made = torch.stack([transform(PICTURE) for _ in range(20)])
        if transform is ours:
            first = made
    assert torch.equal(first, made) and first.shape == (20, 3, 16, 16)


def test_evaluation_sees_the_centre_and_grey_has_no_colours(tmp_path):
    create_transform = require("timm.data", extra="vision").create_transform
    path = write_files(tmp_path, {f"{n}/0.png": encoded(size=(60, 40)) for n in "ab"})
    options = {"path": path, "image_size": 16, "validation_fraction": 0, "test_fraction": 0, "augment": False}
    usual = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    theirs = create_transform(16, crop_pct=0.8, interpolation="bicubic", **usual)
    image = Image.open(path / "a" / "0.png")
    ours = ImageFolder("train", crop_ratio=0.8, **options)[0][0]
    assert torch.allclose(ours, theirs(image), atol=1e-6)
    refuses("channels=1", training_transform, {"auto_augment": "rand-m9"}, 16, (0.5,), (0.5,))
    assert training_transform({"erase": 1.0}, 16, (0.5,), (0.5,))(PICTURE.convert("L")).shape == (1, 16, 16)


def test_items_are_functions_of_seed_epoch_and_index_with_any_number_of_workers(tmp_path):
    path = write_files(tmp_path, class_folders(2, 6))
    data = ImageFolder("train", path=path, image_size=8, validation_fraction=0, test_fraction=0, augmentation=DEIT)
    rows = SeededRows(data, seed=5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = rows[(0, 3)][0]
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    assert before[:2] == after[:2] and torch.equal(before[2], after[2])
    random.random(), np.random.rand(), torch.rand(3)
    assert torch.equal(rows[(0, 3)][0], first)
    assert not torch.equal(SeededRows(data, seed=6)[(0, 3)][0], first)
    assert not torch.equal(rows[(1, 3)][0], first) and not torch.equal(rows[(0, 3, 1)][0], first)
    loaders = [training_batches(data, TrainingOrder(len(data), 6, seed=2, repeats=3), workers) for workers in (0, 2)]
    for _ in range(4):
        alone, together = (next(loader) for loader in loaders)
        assert torch.equal(alone.inputs, together.inputs) and torch.equal(alone.targets, together.targets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flips": 0.5}, r"unknown option of data.augmentation 'flips'; did you mean 'flip'\?"),
        ({"flip": 1.5}, r"flip=1.5 is a probability"),
        ({"flip": True}, "flip=True must be a number, not bool"),
        ({"scale": [0.5, 0.1]}, r"scale=\[0.5, 0.1\] must be two shares"),
        ({"scale": 0.5}, "scale=0.5 must be"),
        ({"erase_mode": "noise"}, "data.augmentation.erase_mode='noise'"),
        ({"interpolation": "lanczos"}, "data.augmentation.interpolation='lanczos'"),
        ({"auto_augment": "wild"}, "auto_augment='wild' is none of timm's descriptions"),
        ({"auto_augment": 9}, "auto_augment=9 must be text or null, not int"),
    ],
)
def test_bad_options(options, message):
    refuses(message, training_transform, options, 16, MEAN, STD)
