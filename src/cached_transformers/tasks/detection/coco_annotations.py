"""Checked and cleaned annotations in COCO's format (cocodataset.org, "format of the data"; arXiv:1405.0312).

What contradicts itself is refused by name: ids that occur twice, objects of categories or images that do not exist.
What can be mended is: boxes are clipped to their image, missing areas and crowd flags filled in. Objects that nothing
can be learned from are dropped, counted and named.

Legend: H height, W width of an image in pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np

from cached_transformers.extras import require

_SHOWN = 5


class Annotations:
    """Annotations of one file.

    Args:
        tree: the parsed file. source: what to call it in messages.

    Attributes:
        images: records by id, in the order of the file.
        category_ids, class_names: in order of id; class c is `category_ids[c]`.
        objects: by image id what can be learned: `class`, `box` (x1, y1, x2, y2 within the image), `segmentation`
            (None without a usable one), and the `id`. Crowds are not among them.
        crowds: number of crowd regions.
        dropped: by reason, ids of annotations that are no objects to learn.
        unmasked: ids of objects without a usable segmentation.

    Raises:
        ValueError: see above; the message names ids and file.
    """

    def __init__(self, tree: Mapping[str, Any], source: str) -> None:
        self.tree, self.source = tree, source
        for kind in ("images", "annotations", "categories"):
            self._refuse_repeated(kind, [record.get("id") for record in tree[kind]], "id")
        self._refuse_repeated("categories", [record.get("name") for record in tree["categories"]], "name")
        categories = sorted(tree["categories"], key=lambda record: record["id"])
        if not categories:
            raise ValueError(f"{source} lists no category; a detector needs at least one")
        self.category_ids = [int(record["id"]) for record in categories]
        self.class_names = [str(record["name"]) for record in categories]
        self.images: dict[int, dict[str, Any]] = {
            record["id"]: self._checked_image(record) for record in tree["images"]
        }
        classes = {number: index for index, number in enumerate(self.category_ids)}
        self._refuse_strangers("category_id", classes, "categories")
        self._refuse_strangers("image_id", self.images, "images")
        self.objects: dict[int, list[dict[str, Any]]] = {}
        self.dropped: dict[str, list[int]] = {}
        self.unmasked: list[int] = []
        self.crowds = 0
        for record in tree["annotations"]:
            self._add(record, classes)

    def _checked_image(self, record: dict[str, Any]) -> dict[str, Any]:
        sides = (record.get("width"), record.get("height"))
        if not isinstance(record.get("file_name"), str) or not all(isinstance(s, int) and s > 0 for s in sides):
            raise ValueError(
                f"{self.source}: image {record.get('id')} needs a file_name and a positive whole width and height, "
                f"got {record.get('file_name')!r}, {sides[0]!r} and {sides[1]!r}"
            )
        return record

    def _refuse_repeated(self, kind: str, values: list[Any], what: str) -> None:
        if None in values:
            raise ValueError(f"{self.source}: entry {values.index(None)} of {kind} has no {what}")
        repeated = [value for value, count in Counter(values).items() if count > 1]
        if repeated:
            raise ValueError(
                f"{self.source}: {what} {_some(repeated)} occurs more than once in {kind}; every {what} must be unique"
            )

    def _refuse_strangers(self, key: str, known: Mapping[int, Any], kind: str) -> None:
        strange = [a for a in self.tree["annotations"] if a.get(key) not in known]
        if strange:
            ids = _some(sorted({str(a.get(key)) for a in strange}))
            named = [f"{n} {c!r}" for n, c in zip(self.category_ids, self.class_names, strict=True)]
            have = f" ({_some(named)})" if key == "category_id" else ""
            raise ValueError(
                f"{self.source}: {len(strange)} annotations (id {_some([a['id'] for a in strange])}) have {key} {ids}, "
                f"which is not in {kind}{have}; add the missing entries or remove the annotations"
            )

    def _add(self, record: dict[str, Any], classes: Mapping[int, int]) -> None:
        number, image = int(record["id"]), self.images[record["image_id"]]
        box = record.get("bbox")
        if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(_finite(value) for value in box):
            raise ValueError(
                f"{self.source}: annotation {number} has bbox {box!r}; it must be four finite numbers: "
                "x, y, width, height"
            )
        if record.get("iscrowd"):
            self.crowds += 1
            return
        x1, y1, x2, y2 = clipped(box, image["height"], image["width"])
        if x2 <= x1 or y2 <= y1:
            outside = box[2] > 0 and box[3] > 0
            self.drop("box outside the image" if outside else "box of zero area", number)
            return
        segmentation = usable_segmentation(record.get("segmentation"), image["height"], image["width"])
        if segmentation is None:
            self.unmasked.append(number)
        found = {"id": number, "class": classes[record["category_id"]], "box": (x1, y1, x2, y2)}
        self.objects.setdefault(record["image_id"], []).append({**found, "segmentation": segmentation})

    def drop(self, reason: str, number: int) -> None:
        """Note an annotation that is no object to learn."""
        self.dropped.setdefault(reason, []).append(number)

    def drop_unmasked(self) -> None:
        """Drop the objects without a usable segmentation: there is no mask to learn from them."""
        gone = set(self.unmasked)
        for number in self.unmasked:
            self.drop("no usable segmentation", number)
        self.objects = {i: [o for o in objects if o["id"] not in gone] for i, objects in self.objects.items()}
        self.unmasked = []

    def notes(self) -> list[str]:
        """What was dropped, in words: one sentence a reason."""
        return [
            f"{self.source}: {len(ids)} annotations dropped from training ({reason}): id {_some(ids)}"
            for reason, ids in self.dropped.items()
        ]

    def truth(self, image_ids: Iterable[int]) -> Any:
        """Ground truth of some images as a `pycocotools.coco.COCO`.

        It is the file as it is; areas, crowd flags and segmentations are filled in where they are absent or unusable
        (the area of the box, no crowd, the box itself).
        """
        chosen = set(image_ids)
        annotations = []
        for record in self.tree["annotations"]:
            if record["image_id"] in chosen:
                image, (x, y, w, h) = self.images[record["image_id"]], record["bbox"]
                known = {"iscrowd": int(record.get("iscrowd") or 0), "area": record.get("area", w * h)}
                if usable_segmentation(record.get("segmentation"), image["height"], image["width"]) is None:
                    known["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
                annotations.append({**record, **known})
        images = [image for number, image in self.images.items() if number in chosen]
        return as_coco({"images": images, "annotations": annotations, "categories": self.tree["categories"]})


def as_coco(tree: dict[str, Any]) -> Any:
    """A `pycocotools.coco.COCO` of a tree of images, annotations and categories, without its printing."""
    coco = require("pycocotools.coco", extra="detection").COCO()
    coco.dataset = {"info": {}, **tree}
    with redirect_stdout(StringIO()):
        coco.createIndex()
    return coco


def clipped(box: Iterable[float], height: int, width: int) -> tuple[float, float, float, float]:
    """Corners (x1, y1, x2, y2) of a box (x, y, width, height), moved into the image; a negative side counts as zero."""
    x, y, w, h = (float(value) for value in box)
    x1, x2 = min(max(x, 0.0), width), min(max(x + max(w, 0.0), 0.0), width)
    y1, y2 = min(max(y, 0.0), height), min(max(y + max(h, 0.0), 0.0), height)
    return x1, y1, x2, y2


def usable_segmentation(segmentation: Any, height: int, width: int) -> Any:
    """Polygons of three points or more, or a run-length code of the image's size; None when nothing of that is left."""
    if isinstance(segmentation, Mapping):
        size = segmentation.get("size")
        fits = isinstance(size, (list, tuple)) and list(size) == [height, width]
        return segmentation if fits and isinstance(segmentation.get("counts"), (list, str, bytes)) else None
    if not isinstance(segmentation, list):
        return None
    # pycocotools would take four numbers for a box.
    polygons = [p for p in segmentation if isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0]
    return polygons if polygons and all(map(_all_finite, polygons)) else None


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """uint8 (H, W) of polygons (their union) or of a run-length code, compressed or not."""
    codes = require("pycocotools.mask", extra="detection")
    if isinstance(segmentation, list):
        code = codes.merge(codes.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        code = codes.frPyObjects(dict(segmentation), height, width)
    else:
        code = dict(segmentation)
    mask: np.ndarray = codes.decode(code)
    return mask


def _all_finite(values: list[Any]) -> bool:
    try:  # one call for a polygon: a large file has millions of numbers
        return bool(np.isfinite(np.asarray(values, dtype=np.float64)).all())
    except (TypeError, ValueError):
        return False


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _some(values: list[Any]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(str(value) for value in values[:_SHOWN]) + more
