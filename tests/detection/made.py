"""A small data set in COCO's format: coloured shapes on noise, with polygons and run-length codes mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as codes

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 230)}
SIZES = [(48, 64), (64, 48), (40, 72), (56, 56), (72, 40), (48, 64)]


def tree(count: int = 6, objects: int = 2, categories: int = 3, seed: int = 0) -> tuple[dict[str, Any], list[Any]]:
    """Annotations and pixels of `count` images; category ids are 5, 10, 15, ... in another order than their entries."""
    random = np.random.default_rng(seed)
    images, annotations, pictures = [], [], []
    for index in range(count):
        height, width = SIZES[index % len(SIZES)]
        picture = random.integers(90, 130, (height, width, 3), dtype=np.uint8)
        images.append({"id": 100 + index, "file_name": f"{index:03}.png", "height": height, "width": width})
        for number in range(objects):
            x, y = int(random.integers(0, width // 2)), int(random.integers(0, height // 2))
            w, h = int(random.integers(12, width // 2 + 1)), int(random.integers(12, height // 2 + 1))
            label = int(random.integers(0, 3))
            picture[y : y + h, x : x + w] = list(COLOURS.values())[label]
            record = {"id": 10 * index + number + 1, "image_id": 100 + index, "category_id": 5 * (label + 1)}
            record |= {"bbox": [x, y, w, h], "area": float(w * h), "iscrowd": 0}
            annotations.append(record | {"segmentation": shape(number, (x, y, w, h), (height, width))})
        pictures.append(picture)
    named = [*COLOURS, *(f"thing {n}" for n in range(3, categories))]
    records = [{"id": 5 * (n + 1), "name": name} for n, name in enumerate(named)]
    return {"images": images, "annotations": annotations, "categories": records[::-1]}, pictures


def shape(kind: int, box: tuple[int, int, int, int], size: tuple[int, int]) -> Any:
    """The rectangle as a polygon, an uncompressed or a compressed run-length code."""
    x, y, w, h = box
    if kind % 3 == 0:
        return [[x, y, x + w, y, x + w, y + h, x, y + h]]
    mask = np.zeros(size, dtype=np.uint8)
    mask[y : y + h, x : x + w] = 1
    if kind % 3 == 1:
        flat = mask.flatten(order="F")
        edges = np.flatnonzero(np.diff(flat, prepend=0)) if flat.any() else np.array([], dtype=int)
        counts = np.diff(np.concatenate([[0], edges, [len(flat)]]))
        return {"size": list(size), "counts": counts.tolist()}
    code = codes.encode(np.asfortranarray(mask))
    return {"size": list(size), "counts": code["counts"].decode()}


def write(root: Path, annotations: dict[str, Any], pictures: list[np.ndarray], name: str = "train2017") -> Path:
    """The data set as a folder; returns `root`."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / name).mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{name}.json").write_text(json.dumps(annotations), encoding="utf-8")
    for record, picture in zip(annotations["images"], pictures, strict=True):
        Image.fromarray(picture).save(root / name / record["file_name"])
    return root


def folder(root: Path, **options: Any) -> Path:
    """Training and validation split of made data."""
    for seed, name in enumerate(("train2017", "val2017")):
        write(root, *tree(seed=seed, **options), name)
    return root
