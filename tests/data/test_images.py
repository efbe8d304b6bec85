"""Image data sets: folders of files, scikit-learn's digits, and their common options."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from common import refuses

from cached_lab.data import SPLITS, stratified_split
from cached_lab.data.dataset import LabelledDataset
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.class_folders import ImageFolder
from cached_lab.tasks.classification.images.small_images import Digits
from cached_lab.tasks.recipes import config_from_dict

MODEL = {"name": "vision_transformer", "patch_size": 4, "width": 16, "depth": 1, "heads": 2}
Image = pytest.importorskip("PIL.Image")


def paint(path: Path, colour: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (6, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """root/<class>/: 20 images of each of two classes."""
    for index in range(20):
        paint(tmp_path / "flat" / "cat" / f"{index:02}.png", (index, 0, 0))
        paint(tmp_path / "flat" / "dog" / f"{index:02}.png", (index, 99, 0))
    return tmp_path / "flat"


def test_shares_are_equal_in_every_class_and_majority_needs_labels():
    labels = np.array([0] * 40 + [1] * 20 + [2] * 100)
    parts = stratified_split(labels, {"validation": 0.1, "test": 0.2}, seed=3)
    counts = {name: np.bincount(labels[rows]).tolist() for name, rows in parts.items()}
    assert counts == {"train": [28, 14, 70], "validation": [4, 2, 10], "test": [8, 4, 20]}
    assert sorted(np.concatenate(list(parts.values()))) == list(range(160))
    one, same, other = (stratified_split(labels, {"test": 0.2}, seed)["test"].tolist() for seed in (0, 0, 1))
    assert one == same != other
    empty = LabelledDataset("nothing", "test", np.array([], dtype=int), classes=2)
    refuses("at least one label on each side", empty.baselines, empty)


OPTIONS = [("seed", "zero"), ("augment", "yes"), ("augmentation", 3), ("validation_fraction", "half")]
OPTIONS += [("crop_ratio", "wide"), ("image_size", 8.5), ("bad_files", "ignore"), ("crop_ration", 0.5)]


@pytest.mark.parametrize("name", ["image_shards", "imagenet"])
@pytest.mark.parametrize(("option", "value"), OPTIONS)
def test_options_are_checked_before_any_file_is_read(name, option, value):
    with pytest.raises(ValueError, match=rf"{option}.*{'crop_ratio' if option == 'crop_ration' else 'must be'}"):
        config_from_dict({"name": "x", "data": {"name": name, "path": "nowhere", option: value}, "model": MODEL})


class TestDigits:
    def test_splits_cover_the_set_once(self):
        from sklearn.datasets import load_digits

        splits = [create_dataset("digits", split, augment=False) for split in ("train", "validation", "test")]
        assert [len(split) for split in splits] == [1259, 269, 269]

        def identity(pixels: np.ndarray, label: int) -> tuple[bytes, int]:
            return np.round(pixels).astype(np.uint8).tobytes(), int(label)

        ours = [identity(s.pixels(i)[0].numpy() * (16 / 255), s.labels[i]) for s in splits for i in range(len(s))]
        digits = load_digits()
        assert sorted(ours) == sorted(map(identity, digits.images, digits.target))
        train, _, test = splits
        pixels = torch.stack([image for image, _ in train])
        assert pixels.mean().item() == pytest.approx(0, abs=1e-4) and pixels.std().item() == pytest.approx(1, abs=1e-3)
        assert (test.mean, test.std) == (train.mean, train.std)
        share = np.mean(test.labels == np.bincount(train.labels).argmax())
        assert test.baselines(train) == {"majority class": pytest.approx(share)}
        batch = test.collate([test[0], test[5]])
        assert batch.inputs.shape == (2, 1, 8, 8) and batch.targets.tolist() == [test[0][1], test[5][1]]

    def test_training_images_are_shifted_and_never_mirrored(self):
        dataset = Digits("train")
        padded_CHW = torch.nn.functional.pad(dataset.pixels(3).float() / 255, (1, 1, 1, 1))
        windows = [padded_CHW[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        allowed = {((window - dataset.mean[0]) / dataset.std[0]).numpy().tobytes() for window in windows}
        assert {dataset[3][0].numpy().tobytes() for _ in range(200)} == allowed and len(allowed) == 9

    @pytest.mark.parametrize("options", [{"split": "validation"}, {"split": "train", "augment": False}])
    def test_without_augmentation_items_repeat_and_no_random_number_is_drawn(self, options):
        dataset = Digits(**options)
        assert not dataset.augment
        before = torch.get_rng_state()
        assert torch.equal(dataset[0][0], dataset[0][0])
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": "valid"}, r"unknown split 'valid'; did you mean 'validation'\?"),
            ({"validation_fraction": 1.0}, r"validation_fraction=1.0 must lie in \[0, 1\)"),
            ({"test_fraction": -0.1}, r"test_fraction=-0.1 must lie in \[0, 1\)"),
            ({"validation_fraction": 0.6, "test_fraction": 0.6}, "must add up to less than 1"),
            ({"split": "test", "test_fraction": 0.0}, "leaves split 'test' empty"),
            ({"seed": -1}, "data.seed=-1 must not be negative"),
        ],
    )
    def test_bad_options(self, options, message):
        refuses(message, create_dataset, "digits", **{"split": "train", **options})


class TestImageFolder:
    def test_flat_folders_are_dealt_out(self, flat):
        splits = {split: ImageFolder(split, path=flat, image_size=4) for split in ("train", "validation", "test")}
        assert {split: len(data) for split, data in splits.items()} == {"train": 32, "validation": 4, "test": 4}
        files = [data.file(index) for data in splits.values() for index in range(len(data))]
        assert len(set(files)) == 40
        for data in splits.values():
            assert all(data.file(i).parent.name == data.class_names[data.labels[i]] for i in range(len(data)))

    def test_split_folders(self, tmp_path):
        for split, count in (("train", 10), ("val", 2), ("test", 1)):
            for name in ("a", "b"):
                for index in range(count):
                    paint(tmp_path / split / name / "deeper" / f"{index}.JPG")
        sizes = {s: len(ImageFolder(s, path=tmp_path, image_size=4)) for s in SPLITS}
        assert sizes == {"train": 20, "validation": 4, "test": 2}
        paint(tmp_path / "val" / "c" / "0.png")
        refuses(r"val has classes that .*train has not: c", ImageFolder, "validation", path=tmp_path)
        shutil.rmtree(tmp_path / "val")  # then validation is dealt from training
        splits = {s: ImageFolder(s, path=tmp_path, image_size=4) for s in SPLITS}
        assert {split: len(data) for split, data in splits.items()} == {"train": 18, "validation": 2, "test": 2}
        held_out = {splits["validation"].file(index) for index in range(2)}
        assert held_out.isdisjoint(splits["train"].file(index) for index in range(18))
        shutil.rmtree(tmp_path / "test")
        refuses("'test'", ImageFolder, "test", path=tmp_path, raises=FileNotFoundError)
        for split in ("val", "valid"):
            paint(tmp_path / split / "a" / "0.png")
        refuses("'validation'", ImageFolder, "train", path=tmp_path)

    @pytest.fixture
    def first(self, flat):
        """A reader of one training image."""

        def read(image, size, exif=None, **options):
            image.save(flat / "cat" / "00.png", **({"exif": exif} if exif else {}))
            return ImageFolder("train", path=flat, image_size=size, validation_fraction=0, test_fraction=0, **options)

        return read

    def test_normalisation_and_grey(self, first):
        data = first(Image.new("RGB", (6, 6), (255, 0, 51)), 4, augment=False)
        expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225]
        assert data[0][0].mean((1, 2)).tolist() == pytest.approx(expected, abs=1e-5) and data[0][1] == 0
        grey = first(Image.new("L", (6, 6), 255), 4, augment=False, channels=1)
        assert grey.describe()["channels"] == 1
        assert torch.equal(grey[0][0], torch.ones(1, 4, 4))  # (1 - 0.5) / 0.5
        assert first(Image.new("RGBA", (6, 6)), 4)[0][0].shape == (3, 4, 4)

    def test_the_upright_central_square_is_kept(self, first):
        image = Image.new("RGB", (30, 10), (255, 0, 0))
        image.paste((0, 255, 0), (10, 0, 20, 10))
        middle_CHW = first(image, 5).pixels(0)[:, 1:-1, 1:-1]  # the filter reaches beyond the border of the square
        assert middle_CHW.flatten(1).float().mean(1).tolist() == [0, 255, 0]
        image = Image.new("RGB", (8, 8), (0, 0, 0))
        image.paste((255, 255, 255), (0, 0, 8, 4))  # white above; turned by 180 degrees it is below
        exif = Image.Exif()
        exif[0x0112] = 3
        rows = first(image, 8, exif).pixels(0)[0].float().mean(1)
        assert rows[:4].tolist() == [0] * 4 and rows[4:].tolist() == [255] * 4

    def test_half_of_the_training_images_are_mirrored(self, first):
        image = Image.new("RGB", (8, 8), (0, 0, 0))
        image.paste((255, 255, 255), (0, 0, 4, 8))
        data = first(image, 8)
        data.shift = 0
        white_left = [bool(data[0][0][0, 0, 0] > data[0][0].mean()) for _ in range(200)]
        assert 60 < sum(white_left) < 140
        data.flip = False
        assert len({data[0][0].numpy().tobytes() for _ in range(20)}) == 1

    def test_missing_and_empty_folders(self, tmp_path):
        refuses(r"nowhere does not exist", ImageFolder, "train", path=tmp_path / "nowhere", raises=FileNotFoundError)
        (tmp_path / "root" / "cat").mkdir(parents=True)
        refuses("two or more classes; found cat", ImageFolder, "train", path=tmp_path / "root")
        (tmp_path / "root" / "dog").mkdir()
        (tmp_path / "root" / "dog" / "note.txt").touch()
        refuses(r"root holds no image; expected files .jpeg, .jpg, .png", ImageFolder, "train", path=tmp_path / "root")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"image_size": 0}, "image_size=0 must be at least 1 pixel"),
            ({"channels": 4}, r"channels=4 must be 3 \(colour\) or 1 \(grey\)"),
            ({"crop_ratio": 1.5}, r"crop_ratio=1.5 must lie in \(0, 1\]"),
        ],
    )
    def test_bad_options(self, flat, options, message):
        refuses(message, create_dataset, "image_folder", **{"split": "train", "path": flat, **options})
