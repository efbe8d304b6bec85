"""Images through the `datasets` library, from a small data set on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import encoded

from cached_lab.data import BadFile
from cached_lab.data.image_files import open_picture
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.huggingface_images import HuggingFaceImages

datasets = pytest.importorskip("datasets")


def rows(count: int, start: int = 0, column: str = "label", bad: tuple[int, ...] = ()) -> object:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            column: datasets.ClassLabel(names=["ant", "bee", "cat"]),
            "name": datasets.Value("string"),
        }
    )
    images = [{"bytes": b"" if i in bad else encoded(start + i), "path": f"{start + i}.png"} for i in range(count)]
    labels = [i % 3 for i in range(count)]
    content = {"image": images, column: labels, "name": [str(i) for i in range(count)]}
    return datasets.Dataset.from_dict(content, features=features)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    splits = {"train": rows(30), "valid": rows(6, 100), "test": rows(3, 200)}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    return str(tmp_path / "saved")


def test_splits_of_its_own(saved):
    sizes = {s: len(HuggingFaceImages(s, dataset=saved, image_size=8)) for s in ("train", "validation", "test")}
    assert sizes == {"train": 30, "validation": 6, "test": 3}
    test = create_dataset("huggingface_images", "test", dataset=saved, image_size=8)
    assert isinstance(test, HuggingFaceImages)
    assert test.class_names == ["ant", "bee", "cat"] and test.labels.tolist() == [0, 1, 2]
    assert torch.equal(test.pixels(1), test._view(open_picture(encoded(201), "")))
    train = HuggingFaceImages("train", dataset=saved, image_size=8, augmentation={"erase": 1.0})
    assert train.augment and not torch.equal(train[0][0], train[0][0])


def test_splits_that_are_missing_are_dealt_from_training(tmp_path):
    rows(60, column="fine_label").save_to_disk(str(tmp_path / "one"))
    splits = {
        s: HuggingFaceImages(s, dataset=str(tmp_path / "one"), image_size=8) for s in ("train", "validation", "test")
    }
    assert {s: np.bincount(d.labels).tolist() for s, d in splits.items()} == {
        "train": [16, 16, 16], "validation": [2, 2, 2], "test": [2, 2, 2],
    }  # fmt: skip
    names = {d.file(i) for d in splits.values() for i in range(len(d))}
    assert len(names) == 60


def test_a_bad_image_is_named(tmp_path):
    rows(6, bad=(4,)).save_to_disk(str(tmp_path / "one"))
    data = HuggingFaceImages("train", dataset=str(tmp_path / "one"), validation_fraction=0, test_fraction=0)
    assert data[3][1] == 0
    with pytest.raises(BadFile, match=r"4.png cannot be used as an image: the file is empty"):
        data[4]


def test_what_does_not_fit_is_refused(saved, tmp_path):
    with pytest.raises(ValueError, match=r"data.image='picture'"):
        HuggingFaceImages("train", dataset=saved, image="picture")
    with pytest.raises(ValueError, match=r"data.image='name'"):
        HuggingFaceImages("train", dataset=saved, image="name")
    with pytest.raises(ValueError, match=r"data.label='name'"):
        HuggingFaceImages("train", dataset=saved, label="name")
    with pytest.raises(ValueError, match="nowhere' cannot be loaded"):
        HuggingFaceImages("train", dataset=str(tmp_path / "nowhere"))
    hidden = rows(6).cast_column("label", datasets.Value("int64")).map(lambda row: {"label": -1})
    hidden.save_to_disk(str(tmp_path / "hidden"))
    with pytest.raises(ValueError, match=r"6 of 6 labels are hidden \(-1\)"):
        HuggingFaceImages("test", dataset=str(tmp_path / "hidden"))
