"""Image files of every kind, those that cannot be read; shards; layouts of Tiny-ImageNet and ImageNet."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from common import refuses
from data.pictures import class_folders, encoded, saved, write_files, write_tar, write_zip
from PIL import Image

from cached_lab.data import SPLITS, BadFile
from cached_lab.data.image_files import open_picture
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images.class_folders import ImageFolder, ImageNet, TinyImageNet, read_labels
from cached_lab.tasks.classification.images.image_shards import ImageShards

RAMP = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)


def opened(content: bytes, channels: int = 3) -> np.ndarray:
    return np.asarray(open_picture(content, "file", channels))


def test_grey_is_three_channels_and_unknown_ranges_are_refused():
    pixels = opened(saved(Image.fromarray(RAMP)))
    assert pixels.shape == (8, 8, 3) and all(np.array_equal(pixels[..., c], RAMP) for c in range(3))
    with pytest.raises(BadFile, match="floating-point numbers, whose range is not known"):
        open_picture(saved(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "x.tif")


def test_sixteen_bits_are_scaled_not_cut_off():
    wide = (RAMP.astype(np.uint16) * 257).reshape(8, 8)
    content = saved(Image.fromarray(wide))
    with Image.open(io.BytesIO(content)) as image:
        assert image.mode.startswith("I")
    assert np.array_equal(opened(content)[..., 0], RAMP)
    assert np.array_equal(opened(content, channels=1), RAMP)


def test_palette_cmyk_and_transparency():
    colour = Image.new("RGB", (4, 4), (200, 40, 90))
    assert opened(saved(colour.quantize(4))).reshape(-1, 3).tolist() == [[200, 40, 90]] * 16
    cmyk = opened(saved(colour.convert("CMYK"), "JPEG", quality=100))
    assert cmyk.shape == (4, 4, 3) and np.abs(cmyk.astype(int) - [200, 40, 90]).max() < 8
    clear = Image.new("RGBA", (4, 4), (200, 40, 90, 0))
    assert opened(saved(clear)).reshape(-1, 3).tolist() == [[200, 40, 90]] * 16
    one_bit = Image.fromarray(RAMP > 100)
    assert np.array_equal(opened(saved(one_bit), channels=1), np.where(RAMP > 100, 255, 0))


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (40, 7)])
def test_tiny_and_long_images(tmp_path, size):
    write_files(tmp_path, {f"{name}/0.png": encoded(size=size) for name in "ab"})
    options = {"path": tmp_path, "image_size": 16, "validation_fraction": 0, "test_fraction": 0}
    for more in ({}, {"crop_ratio": 0.875}, {"augmentation": {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 1.0}}):
        image_CHW, _ = ImageFolder("train", **options, **more)[0]
        assert image_CHW.shape == (3, 16, 16) and image_CHW.isfinite().all()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"<html>not found</html>", "of no image format"),
        (encoded(size=(64, 64), kind="JPEG")[:-900], "truncated"),
        (encoded(size=(64, 64))[:3000], "truncated"),
    ],
)
def test_files_that_cannot_be_read_are_named(content, reason):
    with pytest.raises(BadFile, match="shard:image cannot be used as an image: ") as found:
        open_picture(content, "shard:image")
    assert reason in str(found.value) and "data.bad_files=skip" in str(found.value)
    again = pickle.loads(pickle.dumps(found.value))
    assert (again.file, again.reason, str(again)) == (found.value.file, found.value.reason, str(found.value))


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
        refuses(r"no \.tar for training", ImageShards, "train", path=tmp_path, raises=FileNotFoundError)
        write_tar(tmp_path / "val-0.tar", examples())
        refuses(r"no \.tar for training", ImageShards, "test", path=tmp_path, raises=FileNotFoundError)

    def test_a_split_without_shards_is_dealt_by_its_share(self, tmp_path):
        write_tar(tmp_path / "train-0.tar", examples())
        options = {"path": tmp_path, "validation_fraction": 0.5, "test_fraction": 0.0}
        assert [len(ImageShards(split, **options)) for split in ("train", "validation")] == [3, 3]
        refuses(r"data.test_fraction=0.1", ImageShards, "test", **options)
        write_tar(tmp_path / "test-0.tar", examples(50))
        assert [len(ImageShards(split, **options)) for split in ("train", "validation", "test")] == [3, 3, 6]
        assert len(ImageShards("validation", path=tmp_path)) == 6


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
        refuses(r"val has no class folders; .*val.txt", ImageNet, "test", path=root, raises=FileNotFoundError)
        empty = tmp_path_factory.mktemp("empty")
        refuses(r"folders train/ \(of <wnid>/ or <wnid>.tar\)", ImageNet, "train", path=empty, raises=FileNotFoundError)

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
