"""Small valid inputs of every data source: a maker for each, and options to read its files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.pictures import encoded, packed_tar, packed_zip, write_files

TEXT = (
    "\n".join(f"the {a} cat saw {b} small dogs on a hill number {a * b} ." for a in range(6) for b in range(7)) + "\n"
)
GERMAN = "\n".join(f"die {a} Katze sah {b} kleine Hunde ." for a in range(2) for b in range(6)) + "\n"
ENGLISH = "\n".join(f"the {a} cat saw {b} small dogs ." for a in range(2) for b in range(6)) + "\n"
LISTOPS = "Source\tTarget\r\n" + "".join(f"( ( ( [MAX {a} ) {b} ) ] )\t{max(a, b)}\r\n" for a in (1, 5) for b in (2, 7))


PACK = {"": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@dataclass(frozen=True)
class Source:
    """A data source.

    Attributes:
        dataset: the registered name. make: puts the files into a folder.
        path: of the data in that folder. options: of the data set beside it.
    """

    dataset: str
    make: Callable[[Path], None]
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Options of the data set that reads the files in this folder."""
        return {"path": str(folder / self.path), **self.options}


def picture(number: int, kind: str = "PNG") -> bytes:
    """An image file of 8 x 8 pixels."""
    return encoded(number, (8, 8), kind)


def _classes(*splits: str, each: int = 4, suffix: str = "png") -> dict[str, bytes]:
    kind = {"png": "PNG", "jpg": "JPEG", "JPEG": "JPEG"}[suffix]
    return {
        f"{split}/{name}/{number}.{suffix}": picture(number + 9 * place, kind)
        for split in splits
        for place, name in enumerate(("n01", "n02"))
        for number in range(each)
    }


def _folder(folder: Path) -> None:
    write_files(folder, _classes("train", "val", "test"))


def _archive(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        files = {f"all/{name}": content for name, content in _classes("train", "val", "test").items()}
        write_files(folder, {name: packed_zip(files) if name.endswith(".zip") else gzip.compress(packed_tar(files))})

    return make


def _shards(label: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for split in ("train", "val", "test"):
            if label == "tar":
                for name in ("n01", "n02"):
                    images = {f"{number}.jpg": picture(number, "JPEG") for number in range(4)}
                    write_files(folder, {f"{split}/{name}.tar": packed_tar(images)})
                continue
            files: dict[str, bytes] = {}
            for number in range(6):
                files[f"{number:04}.png"] = picture(number)
                files[f"{number:04}.cls"] = str(number % 2).encode()
            write_files(folder, {f"{split}-000.tar": packed_tar(files)})

    return make


def _imagenet(folder: Path) -> None:
    for name in ("n01", "n02"):
        images = {f"{name}_{number}.JPEG": picture(number, "JPEG") for number in range(4)}
        write_files(folder, {f"train/{name}.tar": packed_tar(images)})
    write_files(folder, {f"val/v{number}.JPEG": picture(number, "JPEG") for number in range(4)})
    write_files(folder, {"val.txt": "".join(f"v{number}.JPEG {number % 2}\n" for number in range(4)).encode()})


def _tiny_imagenet(folder: Path) -> None:
    images = {name.replace("/n0", "/n0").rpartition("/")[0] + f"/images/{name.rpartition('/')[2]}": content
              for name, content in _classes("train", suffix="JPEG").items()}  # fmt: skip
    write_files(folder, images)
    write_files(folder, {f"val/images/v{number}.JPEG": picture(number, "JPEG") for number in range(4)})
    listed = "".join(f"v{number}.JPEG\tn0{number % 2 + 1}\t0\t0\t8\t8\n" for number in range(4))
    write_files(folder, {"val/val_annotations.txt": listed.encode(), "words.txt": b"n01\tcat, feline\nn02\tdog\n"})


def _cifar(folder: Path) -> None:
    pixels = (bytes((number * 7 + p) % 256 for p in range(3072)) for number in range(6))
    records = b"".join(bytes([number % 2]) + row for number, row in enumerate(pixels))
    write_files(folder, {f"{name}.bin": records for name in ("data_batch_1", "test_batch")})


def _coco(archive: bool) -> Callable[[Path], None]:
    def tree(begin: int) -> dict[str, Any]:
        images, annotations = [], []
        for number in range(begin, begin + 4):
            images.append({"id": number, "file_name": f"{number}.png", "width": 8, "height": 8})
            polygon = [1.0, 1.0, 6.0, 1.0, 6.0, 5.0, 1.0, 5.0]
            rest = {"image_id": number, "category_id": 1 + number % 2, "iscrowd": 0}
            annotations.append(
                {"id": 10 * number + 1, "bbox": [1, 1, 5, 4], "area": 20.0, "segmentation": [polygon], **rest}
            )
            counts = {"size": [8, 8], "counts": [10, 4, 50]}
            annotations.append({"id": 10 * number + 2, "bbox": [1, 2, 1, 4], "area": 4, "segmentation": counts, **rest})
            coded = {"size": [8, 8], "counts": ":4b1"}
            annotations.append({"id": 10 * number + 3, "bbox": [1, 2, 1, 4], "area": 4, "segmentation": coded, **rest})
        crowd = {"id": 9999, "image_id": begin, "category_id": 1, "bbox": [0, 0, 8, 8], "area": 64, "iscrowd": 1}
        annotations.append({**crowd, "segmentation": {"size": [8, 8], "counts": [0, 64]}})
        return {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
        }

    def make(folder: Path) -> None:
        files: dict[str, bytes] = {}
        for split, begin in (("train2017", 1), ("val2017", 5)):
            files[f"annotations/instances_{split}.json"] = json.dumps(tree(begin)).encode()
            files |= {f"{split}/{number}.png": picture(number) for number in range(begin, begin + 4)}
        write_files(folder, {"coco.zip": packed_zip(files)} if archive else files)

    return make


def _listops(folder: Path) -> None:
    write_files(folder, {f"basic_{part}.tsv": LISTOPS.encode() for part in ("train", "val", "test")})


def _texts(
    suffix: str, train: str = "train.txt", valid: str = "valid.txt", test: str = "test.txt"
) -> Callable[[Path], None]:
    pack = PACK[suffix]
    return lambda folder: write_files(folder, {f"{name}{suffix}": pack(TEXT.encode()) for name in (train, valid, test)})


def _one(name: str, content: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda folder: write_files(folder, {name: content()})


def _pairs(suffix: str) -> Callable[[Path], None]:
    files = {
        f"{split}.{language}{suffix}": PACK[suffix](text.encode())
        for split in ("train", "valid", "test")
        for language, text in (("en", ENGLISH), ("de", GERMAN))
    }
    return lambda folder: write_files(folder, files)


def _table(folder: Path) -> None:
    rows = "".join(f"{a}\t{b}\n" for a, b in zip(ENGLISH.splitlines(), GERMAN.splitlines(), strict=True))
    write_files(folder, {f"{split}.tsv": f"en\tde\n{rows}".encode() for split in ("train", "valid", "test")})


def _pairs_archive(folder: Path) -> None:
    _pairs("")(folder)
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    for file in folder.iterdir():
        file.unlink()
    write_files(folder, {"pairs.tar": packed_tar(files)})


_IMAGES = {"image_size": 8, "validation_fraction": 0.25}
_SHARDS = {"image_size": 8}
_LANGUAGES = {"source": "en", "target": "de", "vocabulary_size": 270, "max_length": 64}

SOURCES: dict[str, Source] = {
    "image_folder": Source("image_folder", _folder, "", {**_IMAGES, "bad_files": "stop"}),
    "image_folder_skip": Source("image_folder", _folder, "", {**_IMAGES, "bad_files": "skip"}),
    "image_folder_gz": Source("image_folder", _archive("i.tar.gz"), "i.tar.gz", _IMAGES),
    "image_folder_zip": Source("image_folder", _archive("i.zip"), "i.zip", {**_IMAGES, "bad_files": "skip"}),
    "image_shards_cls": Source("image_shards", _shards("cls"), "", _SHARDS),
    "image_shards_tar": Source("image_shards", _shards("tar"), "", {**_SHARDS, "label": "tar", "bad_files": "skip"}),
    "imagenet": Source("imagenet", _imagenet, "", {"image_size": 8, "bad_files": "skip"}),
    "tiny_imagenet": Source("tiny_imagenet", _tiny_imagenet, "", {**_IMAGES, "bad_files": "skip"}),
    "cifar10": Source("cifar10", _cifar, "", {"validation_fraction": 0.4}),
    "coco": Source("coco", _coco(False), "", {"test": "val2017"}),
    "coco_zip": Source("coco", _coco(True), "coco.zip", {"test": "val2017"}),
    "listops_tsv": Source("listops_tsv", _listops),
    "text": Source("text", _texts("")),
    "text_bpe": Source("text", _one("a.txt", TEXT.encode), "a.txt", {"tokenizer": "bpe", "vocabulary_size": 260}),
    "text_xz": Source("text", _texts(".xz"), "", {"tokenizer": "byte"}),
    "text_zip": Source("text", _one("t.zip", lambda: packed_zip({"a.txt": TEXT.encode()})), "t.zip"),
    "text_tgz": Source("text", _one("t.tgz", lambda: gzip.compress(packed_tar({"a.txt": TEXT.encode()}))), "t.tgz"),
    "wikitext2": Source("wikitext2", _texts("", "wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")),
    "ptb": Source("ptb", _texts("", "ptb.train.txt", "ptb.valid.txt", "ptb.test.txt")),
    "enwik8": Source("enwik8", _one("enwik8.zip", lambda: packed_zip({"enwik8": TEXT.encode()})), "enwik8.zip"),
    "translation": Source("translation", _pairs(""), "", _LANGUAGES),
    "translation_tsv": Source("translation", _table, "", _LANGUAGES),
    "translation_tar": Source("translation", _pairs_archive, "pairs.tar", _LANGUAGES),
    "multi30k": Source("multi30k", _pairs(".bz2"), "", {"test": "test", "vocabulary_size": 270, "max_length": 64}),
    "iwslt14": Source("iwslt14", _pairs(".xz"), "", {"vocabulary_size": 270, "max_length": 64}),
    "denoising": Source("denoising", _texts(".gz"), "", {"tokenizer": "word", "max_length": 16}),
}  # fmt: skip
"""By what a case calls it. `listops` and `digits` read no file; the hub's is read by a library."""
