"""Checked annotations in COCO's format (cocodataset.org, "format of the data"; arXiv:1405.0312).

Contradictions, which would give wrong scores, are refused by name. Boxes are clipped to their image; unusable objects
are dropped, counted and named. pycocotools leaves pixels that a run-length code does not reach undefined, so runs are
summed up before it sees a code.

Legend: H height, W width of an image in pixels.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from cached_transformers.extras import require

_FURTHEST = 1 << 16
"""Most pixels from an image's corner to a point of a polygon, whose outline pycocotools holds whole."""


class Annotations:
    """Annotations of one file.

    Args:
        tree: the parsed file. source: its name in messages.

    Attributes:
        truth: a `pycocotools.coco.COCO` that equals the file, except that missing areas, crowd flags and unusable
            segmentations are filled in (the area of the box, no crowd, the box itself).
        images: records by id, in the order of the file.
        category_ids, class_names: in order of id; class c is `category_ids[c]`.
        objects: by image id, the objects to learn, without crowds: `id`, `class`, `box` (x1, y1, x2, y2 within the
            image), and `masked`, True for a usable segmentation.
        dropped: ids of annotations without area in their image, or without a usable mask.

    Raises:
        ValueError: a contradiction; the message names the entry and the file.
    """

    def __init__(self, tree: Mapping[str, Any], source: str) -> None:
        self.source = source
        try:
            categories = sorted(tree["categories"], key=lambda record: record["id"])
            self.category_ids = [int(record["id"]) for record in categories]
            self.class_names = [str(record["name"]) for record in categories]
            self.images: dict[int, dict[str, Any]] = {record["id"]: record for record in tree["images"]}
            for kind, key in (("images", "id"), ("annotations", "id"), ("categories", "id"), ("categories", "name")):
                counts = Counter(record[key] for record in tree[kind])
                if repeated := [value for value, count in counts.items() if count > 1]:
                    raise ValueError(f"{key}={_some(repeated)} repeats in {kind}; make every {key} unique")
            for number, record in self.images.items():
                sides, file = (record.get("width"), record.get("height")), record.get("file_name")
                if not all(type(side) is int and 0 < side < 1 << 16 for side in sides) or not isinstance(file, str):
                    raise ValueError(f"image {number}: (width, height)={sides} must be pixels, file_name={file!r} text")
            self.objects: dict[int, list[dict[str, Any]]] = {number: [] for number in self.images}
            self.dropped: list[Any] = []
            annotations = [self._checked(record) for record in tree["annotations"]]
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"{source} is not in COCO's format: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        self.truth = as_coco({**tree, "annotations": annotations})

    def _checked(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return an annotation for the ground truth, and add its object."""
        number, box, area, crowd = int(record["id"]), record["bbox"], record.get("area"), record.get("iscrowd") or 0
        for key, known in (("category_id", self.category_ids), ("image_id", self.images)):
            if record[key] not in known:
                raise ValueError(f"{key}={record[key]!r} of annotation {number}: must be an id of {_some(list(known))}")
        if len(box) != 4 or not all(map(math.isfinite, box)):
            raise ValueError(f"bbox={box} of annotation {number}: must be four finite numbers: x, y, width, height")
        if area is not None and not 0 <= area < math.inf:
            raise ValueError(f"area={area!r} of annotation {number}: must be a number of pixels, or be left out")
        if crowd not in (0, 1):
            raise ValueError(f"iscrowd={crowd!r} of annotation {number}: must be 0 or 1")
        image = self.images[record["image_id"]]
        x1, y1, x2, y2 = clipped(box, image["height"], image["width"])
        usable = usable_segmentation(record.get("segmentation"), image["height"], image["width"])
        if not crowd and (x2 <= x1 or y2 <= y1):
            self.dropped.append(number)
        elif not crowd:
            found = {"id": record["id"], "class": self.category_ids.index(record["category_id"])}
            self.objects[image["id"]].append({**found, "box": (x1, y1, x2, y2), "masked": usable is not None})
        return {
            **record,
            "iscrowd": int(crowd),
            "area": box[2] * box[3] if area is None else area,
            "segmentation": [[x1, y1, x2, y1, x2, y2, x1, y2]] if usable is None else usable,
        }


def as_coco(tree: dict[str, Any]) -> Any:
    """Return a `pycocotools.coco.COCO` of images, annotations and categories, without its printing."""
    coco = require("pycocotools.coco", extra="detection").COCO()
    coco.dataset = {"info": {}, **tree}
    with redirect_stdout(StringIO()):
        coco.createIndex()
    return coco


def clipped(box: Iterable[float], height: int, width: int) -> tuple[float, float, float, float]:
    """Return corners (x1, y1, x2, y2) of a box (x, y, width, height) in the image; a negative side counts as zero."""
    x, y, w, h = (float(value) for value in box)
    x1, x2 = min(max(x, 0.0), width), min(max(x + max(w, 0.0), 0.0), width)
    y1, y2 = min(max(y, 0.0), height), min(max(y + max(h, 0.0), 0.0), height)
    return x1, y1, x2, y2


def usable_segmentation(segmentation: Any, height: int, width: int) -> Any:
    """Return polygons of three points or more, or a run-length code that fills the image; None if unusable."""
    if isinstance(segmentation, Mapping):
        fits = segmentation.get("size") == [height, width]
        try:
            counts = segmentation.get("counts")
            runs = [operator.index(run) for run in counts] if isinstance(counts, list) else _uncompressed(counts)
            return segmentation if fits and min(runs) >= 0 and sum(runs) == height * width else None
        except (TypeError, ValueError):
            return None
    if not isinstance(segmentation, list):
        return None
    # pycocotools would read four numbers as a box.
    polygons = [p for p in segmentation if isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0]
    near = (type(value) in (int, float) and abs(value) <= _FURTHEST for polygon in polygons for value in polygon)
    return polygons if polygons and all(near) else None


def _uncompressed(code: Any) -> list[int]:
    """Return the runs of a compressed code.

    A character holds five bits of a number, the lowest first, and a flag for more; the last one's highest bit is the
    sign. From the fourth number on they are differences to the number before the last.
    """
    runs: list[int] = []
    value = shift = 0
    for character in code.encode("ascii") if isinstance(code, str) else code:
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            value -= (bits >> 4 & 1) << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return runs


def _some(values: list[Any]) -> str:
    more = f" and {len(values) - 5} more" if len(values) > 5 else ""
    return ", ".join(str(value) for value in values[:5]) + more
