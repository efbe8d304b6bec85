"""Augmentation: timm's transforms, sampled from the three global generators only."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from data.pictures import class_folders, encoded, write_files
from PIL import Image
from refusals import refuses

from cached_lab.tasks.classification.images.augmentation import training_transform
from cached_lab.tasks.classification.images.class_folders import ImageFolder
from cached_lab.training.loader import SeededRows, TrainingOrder, training_batches
from cached_transformers.extras import require

DEIT = {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25, "interpolation": "bicubic"}
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def reseed() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def test_it_is_what_timm_does():
    create_transform = require("timm.data", extra="vision").create_transform
    options = {"scale": [0.3, 0.9], "flip": 0.3, **DEIT}
    ours = training_transform(options, 16, MEAN, STD)
    theirs = create_transform(
        16, is_training=True, scale=(0.3, 0.9), hflip=0.3, auto_augment=DEIT["auto_augment"], interpolation="bicubic",
        mean=MEAN, std=STD, re_prob=0.25, re_mode="pixel", color_jitter=None,
    )  # fmt: skip
    for transform in (ours, theirs):
        reseed()
        made = torch.stack([transform(PICTURE) for _ in range(20)])
        if transform is ours:
            first = made
    assert torch.equal(first, made) and first.shape == (20, 3, 16, 16)


def test_evaluation_sees_the_centre_as_timm_cuts_it(tmp_path):
    create_transform = require("timm.data", extra="vision").create_transform
    path = write_files(tmp_path, {f"{n}/0.png": encoded(size=(60, 40)) for n in "ab"})
    options = {"path": path, "image_size": 16, "validation_fraction": 0, "test_fraction": 0, "augment": False}
    usual = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    theirs = create_transform(16, crop_pct=0.8, interpolation="bicubic", **usual)
    image = Image.open(path / "a" / "0.png")
    ours = ImageFolder("train", crop_ratio=0.8, **options)[0][0]
    assert torch.allclose(ours, theirs(image), atol=1e-6)


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


def test_colours_of_grey_images_cannot_change():
    refuses("channels=1", training_transform, {"auto_augment": "rand-m9"}, 16, (0.5,), (0.5,))
    assert training_transform({"erase": 1.0}, 16, (0.5,), (0.5,))(PICTURE.convert("L")).shape == (1, 16, 16)
