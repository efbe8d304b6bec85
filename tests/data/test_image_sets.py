"""Layouts of CIFAR-100, Tiny-ImageNet and ImageNet, and the packs that real data comes in."""

from __future__ import annotations

import lzma
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import class_folders, encoded, write_files, write_tar, write_tar_xz, write_zip

import cached_lab
from cached_lab.tasks import create_dataset
from cached_lab.tasks.classification.images import cifar
from cached_lab.tasks.classification.images.cifar import CIFAR10, CIFAR100, CLASSES
from cached_lab.tasks.classification.images.imagenet import ImageNet, TinyImageNet, read_labels

PIXEL = encoded(size=(1, 1))


def hundred(count: int, seed: int) -> np.ndarray:
    """Records (count, 3074) of CIFAR-100: coarse label, fine label, pixels."""
    made = np.random.default_rng(seed).integers(0, 256, (count, 3074), dtype=np.uint8)
    made[:, 0], made[:, 1] = np.arange(count) % 20, np.arange(count) % 100
    return made


class TestCIFAR:
    def test_a_record_of_cifar100_has_two_labels_and_the_fine_one_counts(self, tmp_path):
        hundred(200, 0).tofile(tmp_path / "train.bin")
        (tmp_path / "test.bin.xz").write_bytes(lzma.compress(hundred(100, 1).tobytes()))
        train = CIFAR100("train", path=tmp_path, validation_fraction=0.5)
        test = create_dataset("cifar100", "test", path=tmp_path)
        assert (len(train), len(test), test.classes) == (100, 100, 100)
        assert isinstance(test, CIFAR100)
        assert test.labels.tolist() == list(range(100)) and test.class_names[7] == "class 7"
        assert test.pixels(4).flatten().tolist() == hundred(100, 1)[4, 2:].tolist()
        write_files(tmp_path, {"fine_label_names.txt": "\n".join(f"n{i}" for i in range(100)).encode()})
        assert CIFAR100("test", path=tmp_path).class_names[7] == "n7"

    def test_a_record_of_cifar10_is_no_record_of_cifar100(self, tmp_path):
        (tmp_path / "test.bin").write_bytes(bytes(3073))
        with pytest.raises(ValueError, match=r"3073.*3074"):
            CIFAR100("test", path=tmp_path)

    @pytest.mark.parametrize("pack", [write_files, write_tar_xz, write_zip])
    def test_image_files_in_folders_or_an_archive(self, tmp_path, pack):
        files = {
            f"{side}/{name}/{i}.png": encoded(100 * c + i + 50 * (side == "test"), size=(32, 32))
            for side, count in (("train", 4), ("test", 2))
            for c, name in enumerate(CLASSES)
            for i in range(count)
        }
        path = tmp_path / {"write_files": "folder", "write_tar_xz": "a.tar.xz", "write_zip": "a.zip"}[pack.__name__]
        pack(path, files)
        splits = {s: CIFAR10(s, path=path, validation_fraction=0.25) for s in ("train", "validation", "test")}
        assert {s: len(data) for s, data in splits.items()} == {"train": 30, "validation": 10, "test": 20}
        again = CIFAR10("test", path=path)  # from the cache folder, where it is an archive
        assert torch.equal(again.pixels(13), splits["test"].pixels(13))
        import io

        from PIL import Image

        expected = np.asarray(Image.open(io.BytesIO(files["test/frog/1.png"]))).transpose(2, 0, 1)
        assert np.array_equal(again.pixels(13).numpy(), expected) and again.labels[13] == CLASSES.index("frog")

    def test_the_binaries_in_their_archive(self, tmp_path):
        made = np.zeros((20, 3073), dtype=np.uint8)
        made[:, 0] = np.arange(20) % 10
        files = {f"cifar-10-batches-bin/{n}": made.tobytes() for n in ("data_batch_1.bin", "test_batch.bin")}
        path = write_tar(tmp_path / "cifar-10-binary.tar", {**files, "cifar-10-batches-bin/readme.html": b"x"})
        assert len(CIFAR10("test", path=path)) == 20 and len(CIFAR10("train", path=path)) == 20

    def test_augmentation_by_timm(self, tmp_path):
        made = np.random.default_rng(0).integers(0, 256, (20, 3073), dtype=np.uint8)
        made[:, 0] = np.arange(20) % 10
        made.tofile(tmp_path / "data_batch_1.bin")
        options = {"crop": "padded", "auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.5}
        data = CIFAR10("train", path=tmp_path, validation_fraction=0, augmentation=options)
        torch.manual_seed(0)
        views = torch.stack([data[0][0] for _ in range(8)])
        assert views.shape == (8, 3, 32, 32) and len({view.numpy().tobytes() for view in views}) == 8

    def test_the_shared_packs(self, shared):
        exact = CIFAR10("test", path=shared / "data" / "cifar10")
        lossy = CIFAR10("test", path=shared / "data" / "cifar10-jpeg")
        assert (len(exact), len(lossy)) == (5000, 10000) and exact.class_names == lossy.class_names
        # The five thousand are among the ten thousand, but for the compression.
        thumbs = [d._images.reshape(len(d), 3, 4, 8, 4, 8).mean((3, 5)).reshape(len(d), -1) for d in (exact, lossy)]
        for row in range(0, 5000, 500):
            distance = np.abs(thumbs[1] - thumbs[0][row]).mean(1)
            assert distance.min() < 3 and lossy.labels[distance.argmin()] == exact.labels[row]


class TestReadingOnce:
    @staticmethod
    def files(copies: int) -> dict[str, bytes]:
        sides = {"train": copies, "test": 1}
        return {f"top/{s}/{name}/{i}.png": PIXEL for s, n in sides.items() for name in CLASSES for i in range(n)}

    @pytest.mark.parametrize("pack", [write_tar, write_zip])
    def test_the_work_on_names_grows_as_their_number(self, tmp_path, pack):
        """Counted in calls of the library's functions, so that neither the machine nor the decoder matters."""
        package, calls = str(Path(cached_lab.__file__).parent), {}
        for copies in (4, 40):
            path = pack(tmp_path / f"{copies}.{'tar' if pack is write_tar else 'zip'}", self.files(copies))
            counted = 0

            def count(frame, event, argument):
                nonlocal counted
                counted += event == "call" and frame.f_code.co_filename.startswith(package)

            sys.setprofile(count)
            try:
                CIFAR10("train", path=path, validation_fraction=0)
            finally:
                sys.setprofile(None)
            calls[copies] = counted
        assert calls[40] < 12 * calls[4]

    @pytest.mark.parametrize("pack", [write_files, write_zip])
    def test_image_files_are_decoded_once_for_all_splits_and_runs(self, tmp_path, pack, monkeypatch):
        path = pack(tmp_path / ("folder" if pack is write_files else "a.zip"), self.files(4))
        path = path / "top" if pack is write_files else path
        decode, names = cifar.open_picture, []
        monkeypatch.setattr(cifar, "open_picture", lambda content, name: names.append(name) or decode(content, name))
        made = [CIFAR10(split, path=path, validation_fraction=0.25) for split in ("train", "validation", "train")]
        assert len(names) == 40 and len(set(names)) == 40
        assert torch.equal(made[0].pixels(7), made[2].pixels(7)) and made[0].labels.tolist() == made[2].labels.tolist()

    def test_and_again_when_one_of_them_changes(self, tmp_path):
        path = write_files(tmp_path, self.files(4)) / "top"
        options = {"path": path, "validation_fraction": 0}
        before = CIFAR10("train", **options).pixels(5)
        (path / "train/automobile/1.png").write_bytes(encoded(3, size=(32, 32)))
        assert not torch.equal(CIFAR10("train", **options).pixels(5), before)
        (path / "train/automobile/9.png").write_bytes(PIXEL)
        assert len(CIFAR10("train", **options)) == 41


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
    words = "n01\tgoldfish, Carassius auratus\nn02\tshark\nn99\tnothing"
    return {**files, "val/val_annotations.txt": "\n".join(lines).encode(), "words.txt": words.encode()}


class TestTinyImageNet:
    @pytest.mark.parametrize("prefix", ["", "tiny-imagenet-200/"])
    def test_the_official_layout(self, tmp_path, prefix):
        files = {f"{prefix}{name}": content for name, content in tiny().items()}
        path = write_zip(tmp_path / "tiny-imagenet-200.zip", files) if prefix else write_files(tmp_path, files)
        splits = {
            s: TinyImageNet(s, path=path, image_size=8, validation_fraction=0.25)
            for s in ("train", "validation", "test")
        }
        assert {s: len(data) for s, data in splits.items()} == {"train": 9, "validation": 3, "test": 6}
        test = splits["test"]
        assert test.class_names == ["goldfish", "shark", "n03"]
        assert {test.file(i).name: int(test.labels[i]) for i in range(6)} == {
            "val_0.JPEG": 2, "val_1.JPEG": 0, "val_2.JPEG": 1, "val_3.JPEG": 2, "val_4.JPEG": 0, "val_5.JPEG": 1,
        }  # fmt: skip
        assert len(TinyImageNet("validation", path=path, image_size=8, validation_fraction=0)) == 6

    def test_annotations_and_files_must_agree(self, tmp_path):
        files = tiny()
        write_files(tmp_path, {**files, "val/images/val_6.JPEG": encoded(1)})
        with pytest.raises(ValueError, match=r"1.*val_6.JPEG"):
            TinyImageNet("test", path=tmp_path)
        (tmp_path / "val/images/val_6.JPEG").unlink()
        (tmp_path / "val/images/val_0.JPEG").unlink()
        with pytest.raises(ValueError, match=r"1.*val_0"):
            TinyImageNet("test", path=tmp_path)
        write_files(tmp_path, {"val/val_annotations.txt": b"val_1.JPEG\tn77"})
        with pytest.raises(ValueError, match="line 1: 'n77'"):
            TinyImageNet("test", path=tmp_path)

    def test_the_shared_pack(self, shared):
        path = shared / "data" / "tiny-imagenet-32"
        train = TinyImageNet("train", path=path, image_size=32)
        test = TinyImageNet("test", path=path, image_size=32)
        assert (len(train), len(test), train.classes) == (18000, 5000, 200)
        assert np.bincount(test.labels).tolist() == [25] * 200 and np.bincount(train.labels).tolist() == [90] * 200
        images = torch.stack([test[index][0] for index in range(0, 5000, 25)])
        assert images.shape == (200, 3, 32, 32) and abs(images.mean()) < 0.2 and abs(images.std() - 1) < 0.2
        assert "goldfish" in train.class_names


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
        [
            ("val.txt", ["{2}.JPEG 0", "{1}.JPEG 2", "{3}.JPEG 1", "{4}.JPEG 1"]),
            (
                "LOC_val_solution.csv",
                [
                    "ImageId,PredictionString",
                    "{3},n02 1 2 3 4 ",
                    "{1},n03 1 2 3 4 n03 5 6 7 8",
                    "{2},n01 8 1",
                    "{4},n02",
                ],
            ),
            ("imagenet_2012_validation_synset_labels.txt", ["n03", "n01", "n02", "n02"]),
        ],
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
        with pytest.raises(ValueError, match="val has classes that train/ has not: class0"):
            ImageNet("test", path=root)
        for c in range(3):
            (root / "val" / f"class{c}").rename(root / "val" / f"n0{c + 1}")
        assert ImageNet("test", path=root, image_size=8).labels.tolist() == [0, 0, 1, 1, 2, 2]

    def test_what_is_missing_is_named(self, root, tmp_path_factory):
        with pytest.raises(FileNotFoundError, match=r"no class folders, and there is no list of its classes: .*val"):
            ImageNet("test", path=root)
        empty = tmp_path_factory.mktemp("empty")
        with pytest.raises(FileNotFoundError, match=r"no folder train/ of <wnid>/ or <wnid>.tar; unpack"):
            ImageNet("train", path=empty)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("490\n361\n", "only numbers, whose order is unknown"),
            ("a.JPEG n01\n", r"lacks 1 of 2 images: b.JPEG"),
            ("a.JPEG n09\nb.JPEG n01", "line 1: 'n09' is none of the 2 classes"),
            ("n01\n", "names the classes of 1 images, but there are 2"),
        ],
    )
    def test_lists_that_do_not_fit(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=message):
            read_labels(text.encode(), tmp_path / "list.txt", ["a.JPEG", "b.JPEG"], ["n01", "n02"])


def test_a_tar_of_the_validation_images(tmp_path):
    write_files(tmp_path / "train", class_folders(2, 2))
    write_tar(tmp_path / "ILSVRC2012_img_val.tar", {f"v{i}.JPEG": encoded(i) for i in range(2)})
    (tmp_path / "val.txt").write_text("v0.JPEG 1\nv1.JPEG 0")
    data = ImageNet("test", path=tmp_path, image_size=8)
    assert data.labels.tolist() == [1, 0] and data[1][0].shape == (3, 8, 8)
    assert tarfile.is_tarfile(data.file(0).parent)
