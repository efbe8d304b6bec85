"""Layouts of Tiny-ImageNet and ImageNet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data.pictures import class_folders, encoded, write_files, write_tar, write_zip
from refusals import refuses

from cached_lab.data import SPLITS
from cached_lab.tasks.classification.images.class_folders import ImageNet, TinyImageNet, read_labels


def tiny(boxes: bool = True) -> dict[str, bytes]:
    """The official layout of Tiny-ImageNet with three classes."""
    names = ["n03", "n01", "n02"]
    files = {
        f"train/{n}/images/{n}_{i}.JPEG": encoded(10 * c + i, kind="JPEG")
        for c, n in enumerate(names)
        for i in range(4)
    }
    files |= {f"val/images/val_{i}.JPEG": encoded(500 + i, kind="JPEG") for i in range(6)}
    files |= {"test/images/test_0.JPEG": encoded(900, kind="JPEG"), "wnids.txt": "\n".join(names).encode()}
    lines = [f"val_{i}.JPEG\t{names[i % 3]}" + ("\t0\t0\t5\t5" if boxes else "") for i in reversed(range(6))]
    return {**files, "val/val_annotations.txt": "\n".join(lines).encode()}


SOLUTION = ["ImageId,PredictionString", "{3},n02 1 2 3 4 ", "{1},n03 1 2 3 4 n03 5 6 7 8", "{2},n01 8 1", "{4},n02"]


class TestTinyImageNet:
    @pytest.mark.parametrize("prefix", ["", "tiny-imagenet-200/"])
    def test_the_official_layout(self, tmp_path, prefix):
        files = {f"{prefix}{name}": content for name, content in tiny().items()}
        path = write_zip(tmp_path / "tiny-imagenet-200.zip", files) if prefix else write_files(tmp_path, files)
        splits = {s: TinyImageNet(s, path=path, image_size=8, validation_fraction=0.25) for s in SPLITS}
        assert {s: len(data) for s, data in splits.items()} == {"train": 9, "validation": 3, "test": 6}
        test = splits["test"]
        assert test.class_names == ["n01", "n02", "n03"]
        assert {test.file(i).name: int(test.labels[i]) for i in range(6)} == {
            "val_0.JPEG": 2, "val_1.JPEG": 0, "val_2.JPEG": 1, "val_3.JPEG": 2, "val_4.JPEG": 0, "val_5.JPEG": 1,
        }  # fmt: skip
        assert len(TinyImageNet("validation", path=path, image_size=8, validation_fraction=0)) == 6

    def test_annotations_and_files_must_agree(self, tmp_path):
        files = tiny()
        write_files(tmp_path, {**files, "val/images/val_6.JPEG": encoded(1)})
        refuses(r"1.*val_6", TinyImageNet, "test", path=tmp_path)
        (tmp_path / "val/images/val_6.JPEG").unlink()
        (tmp_path / "val/images/val_0.JPEG").unlink()
        refuses(r"1.*val_0", TinyImageNet, "test", path=tmp_path)
        write_files(tmp_path, {"val/val_annotations.txt": b"val_1.JPEG\tn77"})
        refuses("line 1: 'n77'", TinyImageNet, "test", path=tmp_path)

    def test_the_shared_pack(self, shared):
        path = shared / "data" / "tiny-imagenet-32"
        train = TinyImageNet("train", path=path, image_size=32)
        test = TinyImageNet("test", path=path, image_size=32)
        assert (len(train), len(test), train.classes) == (18000, 5000, 200)
        assert np.bincount(test.labels).tolist() == [25] * 200 and np.bincount(train.labels).tolist() == [90] * 200
        images = torch.stack([test[index][0] for index in range(0, 5000, 25)])
        assert images.shape == (200, 3, 32, 32) and abs(images.mean()) < 0.2 and abs(images.std() - 1) < 0.2


class TestImageNet:
    @pytest.fixture
    def root(self, tmp_path):
        """Two classes packed, one as a folder; val/ flat."""
        for c, name in enumerate(("n01", "n02")):
            write_tar(tmp_path / "train" / f"{name}.tar", {f"{name}_{i}.JPEG": encoded(9 * c + i) for i in range(4)})
        write_files(tmp_path / "train", {f"n03/n03_{i}.JPEG": encoded(50 + i) for i in range(4)})
        return write_files(tmp_path, {f"val/ILSVRC2012_val_{i:08}.JPEG": encoded(70 + i) for i in range(1, 5)})

    @pytest.mark.parametrize(
        ("name", "lines"),
        [("val.txt", ["{2}.JPEG 0", "{1}.JPEG 2", "{3}.JPEG 1", "{4}.JPEG 1"]), ("LOC_val_solution.csv", SOLUTION)],
    )
    def test_lists_of_the_validation_images(self, root, name, lines):
        images = [f"ILSVRC2012_val_{i:08}" for i in range(5)]
        (root / name).write_text("".join(f"{line.format(*images)}\n" for line in lines))
        for split in ("validation", "test"):
            data = ImageNet(split, path=root, image_size=8)
            assert data.labels.tolist() == [2, 0, 1, 1] and data.class_names == ["n01", "n02", "n03"]
        train = ImageNet("train", path=root, image_size=8)
        assert np.bincount(train.labels).tolist() == [4, 4, 4] and train.augment
        assert train[11][0].shape == (3, 8, 8) and train.file(0).as_posix().endswith("train/n01/n01_0.JPEG")
        held = ImageNet("validation", path=root, image_size=8, validation_fraction=0.25)
        assert np.bincount(held.labels).tolist() == [1, 1, 1]
        assert len(ImageNet("train", path=root, image_size=8, validation_fraction=0.25)) == 9

    def test_validation_in_class_folders(self, root):
        for file in (root / "val").iterdir():
            file.rename(root / file.name)
        write_files(root / "val", class_folders(3, 2))
        refuses(r"val has classes that .*train has not: class0", ImageNet, "test", path=root)
        for c in range(3):
            (root / "val" / f"class{c}").rename(root / "val" / f"n0{c + 1}")
        assert ImageNet("test", path=root, image_size=8).labels.tolist() == [0, 0, 1, 1, 2, 2]

    def test_what_is_missing_is_named(self, root, tmp_path_factory):
        refuses(r"val has no class folders; .*val.txt", ImageNet, "test", path=root, error=FileNotFoundError)
        empty = tmp_path_factory.mktemp("empty")
        refuses(r"folders train/ \(of <wnid>/ or <wnid>.tar\)", ImageNet, "train", path=empty, error=FileNotFoundError)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a.JPEG n01\n", r"lacks 1 of 2 images: b"),
            ("a.JPEG n01\nb.JPEG 1\nc.JPEG 1", r"namely 1 of 2 images: c"),
            ("a.JPEG n09\nb.JPEG n01", "line 1: 'n09' is none of the 2 classes"),
            ("n01\n", "line 1: '' is none"),
        ],
    )
    def test_lists_that_do_not_fit(self, tmp_path, text, message):
        refuses(message, read_labels, text.encode(), tmp_path / "list.txt", ["a.JPEG", "b.JPEG"], ["n01", "n02"])


def test_a_tar_of_the_validation_images(tmp_path):
    write_files(tmp_path / "train", class_folders(2, 2))
    write_tar(tmp_path / "ILSVRC2012_img_val.tar", {f"v{i}.JPEG": encoded(i) for i in range(2)})
    (tmp_path / "val.txt").write_text("v0.JPEG 1\nv1.JPEG 0")
    data = ImageNet("test", path=tmp_path, image_size=8)
    assert data.labels.tolist() == [1, 0] and data[1][0].shape == (3, 8, 8)
    assert data.file(0).parent.name == "ILSVRC2012_img_val"
