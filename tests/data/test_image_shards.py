"""Tar shards: labels beside images, or a tar for each class; the same items as a folder gives, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data.pictures import encoded, write_tar
from refusals import refuses

from cached_lab.data import BadFile
from cached_lab.data.image_files import open_picture
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.image_shards import ImageShards

LABELS = [2, 0, 1, 1, 0, 2]


def examples(start: int = 0, labels: list[int] = LABELS) -> dict[str, bytes]:
    files = {}
    for i, label in enumerate(labels):
        files[f"{start + i:06}.jpg"] = encoded(start + i, kind="JPEG")
        files[f"{start + i:06}.cls"] = str(label).encode()
    return files


@pytest.fixture
def folder(tmp_path):
    write_tar(tmp_path / "made-train-000000.tar", examples())
    write_tar(tmp_path / "made-train-000001.tar", examples(100))
    write_tar(tmp_path / "made-validation-000000.tar", examples(200, labels=[1, 2]))
    return tmp_path


def test_images_and_labels_of_all_shards(folder):
    train = ImageShards("train", path=folder, image_size=8)
    assert len(train) == 12 and train.labels.tolist() == LABELS * 2 and train.classes == 3
    image_CHW, label = train[7]
    assert image_CHW.shape == (3, 8, 8) and label == 0 and train.augment
    validation, test = (create_dataset("image_shards", s, path=folder, image_size=8) for s in ("validation", "test"))
    assert isinstance(validation, ImageShards) and isinstance(test, ImageShards)
    assert validation.labels.tolist() == test.labels.tolist() == [1, 2]  # nothing else is there to report on
    assert torch.equal(validation[1][0], test[1][0])
    assert torch.equal(test.pixels(1), test._view(open_picture(encoded(201, kind="JPEG"), "")))
    assert train.file(7) == f"{folder / 'made-train-000001.tar'}:000101.jpg"


def test_a_tar_for_each_class(tmp_path):
    for c, name in enumerate(("n02", "n01", "n03")):
        write_tar(tmp_path / f"{name}.tar", {f"{name}_{i}.JPEG": encoded(10 * c + i) for i in range(10)})
    splits = {s: ImageShards(s, path=tmp_path, label="tar", image_size=8) for s in ("train", "validation", "test")}
    assert {s: np.bincount(d.labels).tolist() for s, d in splits.items()} == {
        "train": [8, 8, 8], "validation": [1, 1, 1], "test": [1, 1, 1],
    }  # fmt: skip
    assert splits["test"].class_names == ["n01", "n02", "n03"]
    names = {d.file(i) for d in splits.values() for i in range(len(d))}
    assert len(names) == 30 and all(n.split(":")[1][:3] == n.split("/")[-1][:3] for n in names)


class TestBadShards:
    def test_examples_without_label_or_image(self, tmp_path):
        files = examples()
        del files["000001.cls"], files["000004.jpg"]
        write_tar(tmp_path / "train-0.tar", files)
        refuses(r"2.*000001.*000004", ImageShards, "train", path=tmp_path)

    def test_labels_that_are_none(self, tmp_path):
        write_tar(tmp_path / "train-0.tar", {**examples(), "000003.cls": b"cat"})
        refuses(r"0.*000003.*'cat'", ImageShards, "train", path=tmp_path)

    def test_labels_out_of_range(self, folder):
        refuses(r"000000.*data.classes", ImageShards, "train", path=folder, classes=2)

    def test_classes_without_an_image(self, folder):
        refuses("1 of its classes have no image: class 3", ImageShards, "train", path=folder, classes=4)
        with pytest.warns(RuntimeWarning, match="1 of its classes have no image: class 3"):
            assert ImageShards("train", path=folder, classes=4, bad_files="skip").classes == 4

    def test_an_image_that_cannot_be_decoded_is_named(self, folder):
        write_tar(folder / "made-train-000000.tar", {**examples(), "000002.jpg": b""})
        data = ImageShards("train", path=folder, image_size=8)
        with pytest.raises(BadFile, match=r"000000.*000002"):
            data[2]

    def test_no_shards(self, tmp_path):
        refuses(r"no \.tar for training", ImageShards, "train", path=tmp_path, error=FileNotFoundError)
        write_tar(tmp_path / "val-0.tar", examples())
        refuses(r"no \.tar for training", ImageShards, "test", path=tmp_path, error=FileNotFoundError)

    def test_a_split_without_shards_is_dealt_by_its_share(self, tmp_path):
        write_tar(tmp_path / "train-0.tar", examples())
        options = {"path": tmp_path, "validation_fraction": 0.5, "test_fraction": 0.0}
        assert [len(ImageShards(split, **options)) for split in ("train", "validation")] == [3, 3]
        refuses(r"data.test_fraction=0.1", ImageShards, "test", **options)
        write_tar(tmp_path / "test-0.tar", examples(50))
        assert [len(ImageShards(split, **options)) for split in ("train", "validation", "test")] == [3, 3, 6]
        assert len(ImageShards("validation", path=tmp_path)) == 6
