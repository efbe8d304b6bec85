"""Small data in the folders and files that the pages' commands name, in the places of the reader's own."""

from __future__ import annotations

from pathlib import Path

from cli.made import make_cifar10
from detection import made as shapes
from translation.made import write_corpus

TEXTS = ("FILE", "my_book.txt", "book.txt", "another_book.txt")
CORPORA = ("FOLDER", "wikitext-2", "FOLDER_OF_WIKITEXT_2", "multi30k", "FOLDER_OF_MULTI30K")
SPLITS = {"wiki": "wiki.{}.tokens", "ptb": "ptb.{}.txt"}
"""Folders of a text in three files, and what these are called."""
DETECTION = ("FOLDER", "coco")
LEARNED_BY_HEART = (572, 605, 620, 650, 12448, 133030)
"""Numbers of the images that the recipes coco_overfit_* name."""


def make_folders(root: Path) -> Path:
    """Write them all; returns `root`."""
    for name in CORPORA:
        write_corpus(root / name)
    book = (root / "FOLDER" / "train.en").read_text(encoding="utf-8")
    for name in CORPORA:
        for split in ("train", "valid", "test"):
            (root / name / f"wiki.{split}.tokens").write_text(book, encoding="utf-8")
        for language in ("de", "en"):
            test = root / name / f"test.{language}"
            test.rename(test.with_name(f"test_2016_flickr.{language}"))
    for name in TEXTS:
        (root / name).write_text(book[:3000], encoding="utf-8")
    for name, file in SPLITS.items():
        (root / name).mkdir()
        for split in ("train", "valid", "test"):
            (root / name / file.format(split)).write_text(book, encoding="utf-8")
    for name in DETECTION:
        for split in ("train2017", "val2017"):
            annotations, pictures = shapes.tree()
            for old, (image, new) in enumerate(zip(annotations["images"], LEARNED_BY_HEART, strict=True), 100):
                image["id"] = new
                for record in annotations["annotations"]:
                    record["image_id"] = new if record["image_id"] == old else record["image_id"]
            shapes.write(root / name, annotations, pictures, split)
    make_cifar10(root / "FOLDER_OF_CIFAR_10")
    return root
