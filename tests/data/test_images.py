"""Image data sets: folders of files, scikit-learn's digits, and their common options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cached_lab.data import stratified_split
from cached_lab.data.dataset import LabelledDataset
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.class_folders import ImageFolder
from cached_lab.tasks.classification.images.dataset import random_shift
from cached_lab.tasks.classification.images.digits import Digits
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


class TestStratifiedSplit:
    def test_shares_are_equal_in_every_class_and_nothing_is_lost(self):
        labels = np.array([0] * 40 + [1] * 20 + [2] * 100)
        parts = stratified_split(labels, {"validation": 0.1, "test": 0.2}, seed=3)
        assert [np.bincount(labels[parts[name]]).tolist() for name in ("train", "validation", "test")] == [
            [28, 14, 70],
            [4, 2, 10],
            [8, 4, 20],
        ]
        assert sorted(np.concatenate(list(parts.values()))) == list(range(160))

    def test_the_seed_decides(self):
        labels = np.zeros(50, dtype=int)
        one, same, other = (stratified_split(labels, {"test": 0.2}, seed)["test"].tolist() for seed in (0, 0, 1))
        assert one == same != other

    def test_nothing_left(self):
        with pytest.raises(ValueError, match="must add up to less than 1"):
            stratified_split(np.zeros(4, dtype=int), {"validation": 0.5, "test": 0.5}, 0)


class TestOptions:
    @pytest.mark.parametrize("name", ["digits", "image_shards", "imagenet"])
    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("seed", "zero"),
            ("augment", "yes"),
            ("augmentation", 3),
            ("validation_fraction", "half"),
            ("crop_ratio", "wide"),
            ("image_size", 8.5),
            ("bad_files", "ignore"),
        ],
    )
    def test_they_are_checked_by_type_before_any_file_is_read(self, name, option, value):
        path = {} if name == "digits" else {"path": "nowhere"}
        with pytest.raises(ValueError, match=option):
            config_from_dict({"name": "x", "data": {"name": name, **path, option: value}, "model": MODEL})

    def test_unknown_ones_are_refused_with_a_suggestion(self):
        with pytest.raises(ValueError, match=r"'imagenet'.*'crop_ration'.*'crop_ratio'"):
            create_dataset("imagenet", "train", path="x", crop_ration=0.5)
        with pytest.raises(ValueError, match=r"'tiny_imagenet'.*'mean'"):
            create_dataset("tiny_imagenet", "train", path="x", mean=[0.5])


class TestShift:
    def test_every_shift_occurs_and_nothing_else(self):
        image_CHW = torch.arange(1.0, 13.0).reshape(1, 3, 4)
        padded_CHW = torch.zeros(1, 5, 6)
        padded_CHW[:, 1:4, 1:5] = image_CHW
        allowed = {tuple(padded_CHW[0, y : y + 3, x : x + 4].flatten().tolist()) for y in range(3) for x in range(3)}
        seen = {tuple(random_shift(image_CHW, 1).flatten().tolist()) for _ in range(200)}
        assert seen == allowed and len(allowed) == 9


class TestDigits:
    def test_splits_cover_the_set_once(self):
        from sklearn.datasets import load_digits

        splits = [create_dataset("digits", split, augment=False) for split in ("train", "validation", "test")]
        assert sum(map(len, splits)) == 1797
        assert [len(split) for split in splits] == [1259, 269, 269]

        def identity(pixels: np.ndarray, label: int) -> tuple[bytes, int]:
            return np.round(pixels).astype(np.uint8).tobytes(), int(label)

        ours = [
            identity(split.pixels(index)[0].numpy() * (16 / 255), split.labels[index])  # type: ignore[attr-defined]
            for split in splits
            for index in range(len(split))
        ]
        digits = load_digits()
        assert sorted(ours) == sorted(map(identity, digits.images, digits.target))

    def test_training_pixels_are_normalised(self):
        train = Digits("train", augment=False)
        pixels = torch.stack([image for image, _ in train])  # type: ignore[attr-defined]
        assert pixels.mean().item() == pytest.approx(0, abs=1e-4) and pixels.std().item() == pytest.approx(1, abs=1e-3)
        test = Digits("test")
        assert (test.mean, test.std) == (train.mean, train.std)

    def test_describe_and_collate(self):
        dataset = Digits("test")
        facts = dataset.describe()
        assert {key: facts[key] for key in ("name", "split", "size", "classes", "image_size", "channels")} == {
            "name": "digits", "split": "test", "size": 269, "classes": 10, "image_size": 8, "channels": 1,
        }  # fmt: skip
        batch = dataset.collate([dataset[0], dataset[5]])
        assert batch.inputs.shape == (2, 1, 8, 8) and batch.padding is None
        assert batch.targets.tolist() == [dataset[0][1], dataset[5][1]]

    def test_shifted_digits_are_never_mirrored(self):
        dataset = Digits("train")
        pixels_CHW = dataset.pixels(3).float() / 255
        padded_CHW = torch.nn.functional.pad(pixels_CHW, (1, 1, 1, 1))
        allowed = [
            (padded_CHW[:, y : y + 8, x : x + 8] - dataset.mean[0]) / dataset.std[0] for y in range(3) for x in range(3)
        ]
        for _ in range(40):
            image_CHW, _ = dataset[3]
            assert any(torch.allclose(image_CHW, candidate) for candidate in allowed)

    @pytest.mark.parametrize(
        "options", [{"split": "validation"}, {"split": "test"}, {"split": "train", "augment": False}]
    )
    def test_without_augmentation_items_repeat_and_no_random_number_is_drawn(self, options):
        dataset = Digits(**options)
        assert not dataset.augment
        before = torch.get_rng_state()
        assert torch.equal(dataset[0][0], dataset[0][0])
        assert torch.equal(torch.get_rng_state(), before)

    def test_baseline(self):
        train, test = Digits("train"), Digits("test")
        majority = int(np.bincount(train.labels).argmax())
        share = sum(label == majority for label in test.labels) / len(test)
        assert test.baselines(train) == {"majority class": pytest.approx(share)}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"split": "valid"}, r"unknown split 'valid'; did you mean 'validation'\?"),
            ({"validation_fraction": 1.0}, r"validation_fraction=1.0 must lie in \[0, 1\)"),
            ({"test_fraction": -0.1}, r"test_fraction=-0.1 must lie in \[0, 1\)"),
            ({"validation_fraction": 0.6, "test_fraction": 0.6}, "must add up to less than 1"),
            ({"split": "test", "test_fraction": 0.0}, "leaves split 'test' empty"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            create_dataset("digits", **{"split": "train", **options})


class TestImageFolder:
    def test_flat_folders_are_dealt_out(self, flat):
        splits = {split: ImageFolder(split, path=flat, image_size=4) for split in ("train", "validation", "test")}
        assert {split: len(data) for split, data in splits.items()} == {"train": 32, "validation": 4, "test": 4}
        files = [data.file(index) for data in splits.values() for index in range(len(data))]
        assert len(set(files)) == 40
        assert splits["test"].class_names == ["cat", "dog"]
        for data in splits.values():
            assert all(data.file(i).parent.name == data.class_names[data.labels[i]] for i in range(len(data)))

    def test_split_folders(self, tmp_path):
        for split, count in (("train", 3), ("val", 2), ("test", 1)):
            for name in ("a", "b"):
                for index in range(count):
                    paint(tmp_path / split / name / "deeper" / f"{index}.JPG")
        sizes = {s: len(ImageFolder(s, path=tmp_path, image_size=4)) for s in ("train", "validation", "test")}
        assert sizes == {"train": 6, "validation": 4, "test": 2}

    def test_validation_is_dealt_from_training_when_it_has_no_folder(self, tmp_path):
        for name in ("a", "b"):
            for index in range(10):
                paint(tmp_path / "train" / name / f"{index}.png")
            paint(tmp_path / "test" / name / "0.png")
        splits = {s: ImageFolder(s, path=tmp_path, image_size=4) for s in ("train", "validation", "test")}
        assert {split: len(data) for split, data in splits.items()} == {"train": 18, "validation": 2, "test": 2}
        held_out = {splits["validation"].file(index) for index in range(2)}
        assert held_out.isdisjoint(splits["train"].file(index) for index in range(18))

    def test_normalisation(self, flat):
        paint(flat / "cat" / "00.png", (255, 0, 51))
        data = ImageFolder("train", path=flat, image_size=4, augment=False, validation_fraction=0, test_fraction=0)
        image_CHW, label = data[0]
        assert label == 0 and data.file(0).name == "00.png"
        expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225]
        assert image_CHW.mean((1, 2)).tolist() == pytest.approx(expected, abs=1e-5)

    def test_the_central_square_is_kept(self, flat):
        image = Image.new("RGB", (30, 10), (255, 0, 0))
        image.paste((0, 255, 0), (10, 0, 20, 10))
        image.save(flat / "cat" / "00.png")
        data = ImageFolder("train", path=flat, image_size=5, validation_fraction=0, test_fraction=0)
        middle_CHW = data.pixels(0)[:, 1:-1, 1:-1]  # the filter reaches a little beyond the border of the square
        assert middle_CHW.flatten(1).float().mean(1).tolist() == [0, 255, 0]

    def test_exif_orientation_is_honoured(self, flat):
        image = Image.new("RGB", (8, 8), (0, 0, 0))
        image.paste((255, 255, 255), (0, 0, 8, 4))  # white above; turned by 180 degrees it is below
        exif = Image.Exif()
        exif[0x0112] = 3
        image.save(flat / "cat" / "00.png", exif=exif)
        data = ImageFolder("train", path=flat, image_size=8, validation_fraction=0, test_fraction=0)
        rows = data.pixels(0)[0].float().mean(1)
        assert rows[:4].tolist() == [0] * 4 and rows[4:].tolist() == [255] * 4

    def test_grey(self, flat):
        Image.new("L", (6, 6), 255).save(flat / "cat" / "00.png")
        Image.new("RGBA", (6, 6), (255, 255, 255, 255)).save(flat / "cat" / "01.png")
        options = {"image_size": 4, "augment": False, "validation_fraction": 0, "test_fraction": 0}
        grey = ImageFolder("train", path=flat, channels=1, **options)
        assert grey[0][0].shape == (1, 4, 4) and grey.describe()["channels"] == 1
        assert torch.equal(grey[0][0], torch.ones(1, 4, 4))  # (1 - 0.5) / 0.5
        colour = ImageFolder("train", path=flat, **options)
        assert colour[0][0].shape == colour[1][0].shape == (3, 4, 4)

    def test_augmentation_mirrors_half_of_the_training_images(self, flat):
        image = Image.new("RGB", (8, 8), (0, 0, 0))
        image.paste((255, 255, 255), (0, 0, 4, 8))
        image.save(flat / "cat" / "00.png")
        data = ImageFolder("train", path=flat, image_size=8, validation_fraction=0, test_fraction=0)
        data.shift = 0
        white_left = [bool(data[0][0][0, 0, 0] > data[0][0].mean()) for _ in range(200)]
        assert 60 < sum(white_left) < 140
        still = ImageFolder("train", path=flat, image_size=8, validation_fraction=0, test_fraction=0)
        still.shift, still.flip = 0, False
        assert len({still[0][0].numpy().tobytes() for _ in range(20)}) == 1

    def test_missing_and_empty_folders(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
            ImageFolder("train", path=tmp_path / "nowhere")
        (tmp_path / "root").mkdir()
        with pytest.raises(
            ValueError, match="root must hold one folder for each of two or more classes; found no folder"
        ):
            ImageFolder("train", path=tmp_path / "root")
        (tmp_path / "root" / "cat").mkdir()
        with pytest.raises(ValueError, match="two or more classes; found cat"):
            ImageFolder("train", path=tmp_path / "root")
        (tmp_path / "root" / "dog").mkdir()
        (tmp_path / "root" / "dog" / "note.txt").touch()
        with pytest.raises(ValueError, match=r"root holds no image; expected files .jpeg, .jpg, .png"):
            ImageFolder("train", path=tmp_path / "root")

    def test_classes_unknown_to_training(self, tmp_path):
        for split, names in (("train", "ab"), ("val", "abc")):
            for name in names:
                paint(tmp_path / split / name / "0.png")
        with pytest.raises(ValueError, match=r"val has classes that .*train has not: c"):
            ImageFolder("validation", path=tmp_path)

    def test_two_folders_for_one_split(self, tmp_path):
        for split in ("train", "val", "valid"):
            paint(tmp_path / split / "a" / "0.png")
        with pytest.raises(ValueError, match="'validation'"):
            ImageFolder("train", path=tmp_path)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"image_size": 0}, "image_size=0 must be at least 1 pixel"),
            ({"channels": 4}, r"channels=4 must be 3 \(colour\) or 1 \(grey\)"),
            ({"seed": -1, "validation_fraction": 0.5}, "data.seed=-1 must not be negative"),
            (
                {"validation_fraction": 0.01, "split": "validation"},
                "by .* leaves split 'validation' empty",
            ),
        ],
    )
    def test_bad_options(self, flat, options, message):
        with pytest.raises(ValueError, match=message):
            create_dataset("image_folder", **{"split": "train", "path": flat, **options})


def test_majority_needs_labels():
    empty = LabelledDataset("nothing", "test", np.array([], dtype=int), classes=2)
    with pytest.raises(ValueError, match="at least one label on each side"):
        empty.baselines(empty)
