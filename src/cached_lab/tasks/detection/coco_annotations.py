"""Checked and cleaned annotations in COCO's format (cocodataset.org, "format of the data"; arXiv:1405.0312).

Contradictions are refused by name: repeated ids, unknown categories or images, values of another type. Boxes are
clipped to their image, missing areas and crowd flags filled in. Unusable objects are dropped, counted and named.
pycocotools writes to any address that a run-length code names, so codes are checked before it sees them.

Legend: H height, W width of an image in pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, NoReturn

import numpy as np

from cached_transformers.extras import require

_KEYS = {"images": ("id",), "annotations": ("id", "image_id", "category_id"), "categories": ("id",)}
_MOST_PIXELS = 1 << 31
_FURTHEST, _LONGEST = 1 << 20, 1 << 24
"""Most pixels from an image's corner to a point of a polygon, and along a polygon, which pycocotools holds whole."""


class Annotations:
    """Annotations of one file.

    Args:
        tree: the parsed file. source: its name in messages.

    Attributes:
        images: records by id, in the order of the file.
        category_ids, class_names: in order of id; class c is `category_ids[c]`.
        objects: by image id, the objects to learn: `class`, `box` (x1, y1, x2, y2 within the image), `segmentation`
            (None if unusable), and the `id`. Crowds are not among them.
        crowds: number of crowd regions.
        dropped: ids of dropped annotations by reason.
        unmasked: ids of objects without a usable segmentation.

    Raises:
        ValueError: a contradiction; the message names the entry and the file.
    """

    def __init__(self, tree: Mapping[str, Any], source: str) -> None:
        self.tree, self.source = tree, source
        for kind in _KEYS:
            self._check_records(kind)
        categories = sorted(tree["categories"], key=lambda record: record["id"])
        if not categories:
            raise ValueError(f"{source}: categories=[]: a detector needs at least one")
        self.category_ids = [int(record["id"]) for record in categories]
        self.class_names = [str(record["name"]) for record in categories]
        self.images: dict[int, dict[str, Any]] = {record["id"]: record for record in tree["images"]}
        classes = {number: index for index, number in enumerate(self.category_ids)}
        for key, known in (("category_id", classes), ("image_id", self.images)):
            if strange := [record for record in tree["annotations"] if record[key] not in known]:
                values, ids = _some(sorted({str(r[key]) for r in strange})), _some([r["id"] for r in strange])
                have = f" of {_some(self.category_ids)}" if key == "category_id" else ""
                raise ValueError(
                    f"{source}: {key}={values} of {len(strange)} annotations (id {ids}): must be an id{have}; add the "
                    "missing entries or remove the annotations"
                )
        self.objects: dict[int, list[dict[str, Any]]] = {}
        self.dropped: dict[str, list[int]] = {}
        self.unmasked: list[int] = []
        self.crowds = 0
        for record in tree["annotations"]:
            self._add(record, classes)

    def _check_records(self, kind: str) -> None:
        """Refuse values of another type than the format's, and repeated ids and names."""
        records = self.tree[kind]
        for place, record in enumerate(records):
            where = f"{kind}[{place}]"
            if not isinstance(record, dict):
                self._refuse(where, record, "must be an object")
            for key in _KEYS[kind]:
                text = isinstance(record.get(key), str) and (kind == "images" or key == "image_id")
                if not text and not _is_whole(record.get(key)):
                    self._refuse(f"{where}.{key}", record.get(key), "must be a whole number")
            if kind == "categories" and not isinstance(record.get("name"), (str, int, float)):
                self._refuse(f"{where}.name", record.get("name"), "must be text")
            if kind == "images":
                sides = (record.get("width"), record.get("height"))
                whole = all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sides)
                if not whole or math.prod(sides) > _MOST_PIXELS:  # type: ignore[arg-type]
                    rule = f"must be positive whole numbers, of {_MOST_PIXELS:,} pixels at most"
                    self._refuse(f"images[{place}] (id {record['id']}).(width, height)", sides, rule)
                if not isinstance(record.get("file_name"), str):
                    self._refuse(f"{where}.file_name", record.get("file_name"), "must be text")
        if len({isinstance(record["id"], str) for record in records}) > 1:
            raise ValueError(f"{self.source}: ids of {kind} mix text and numbers; give all a number")
        for key in ("id", "name") if kind == "categories" else ("id",):
            repeated = [value for value, count in Counter(record[key] for record in records).items() if count > 1]
            if repeated:
                raise ValueError(f"{self.source}: {key}={_some(repeated)} repeats in {kind}; make every {key} unique")

    def _refuse(self, where: str, value: Any, rule: str) -> NoReturn:
        raise ValueError(f"{self.source}: {where}={_shown(value)}: {rule}")

    def _add(self, record: dict[str, Any], classes: Mapping[int, int]) -> None:
        number, image = int(record["id"]), self.images[record["image_id"]]
        box, area, crowd = record.get("bbox"), record.get("area"), record.get("iscrowd")
        where = f"annotation {number}."
        if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(map(_finite, box)):
            self._refuse(f"{where}bbox", box, "must be four finite numbers: x, y, width, height")
        if area is not None and not (_finite(area) and area >= 0):
            self._refuse(f"{where}area", area, "must be a finite number of pixels, 0 or more, or be left out")
        if crowd is not None and not (isinstance(crowd, (int, float)) and crowd in (0, 1)):
            self._refuse(f"{where}iscrowd", crowd, "must be 0 or 1")
        if crowd:
            self.crowds += 1
            return
        x1, y1, x2, y2 = clipped(box, image["height"], image["width"])
        if x2 <= x1 or y2 <= y1:
            outside = box[2] > 0 and box[3] > 0
            self._drop("box outside the image" if outside else "box of zero area", number)
            return
        segmentation = usable_segmentation(record.get("segmentation"), image["height"], image["width"])
        if segmentation is None:
            self.unmasked.append(number)
        found = {"id": number, "class": classes[record["category_id"]], "box": (x1, y1, x2, y2)}
        self.objects.setdefault(record["image_id"], []).append({**found, "segmentation": segmentation})

    def _drop(self, reason: str, number: int) -> None:
        self.dropped.setdefault(reason, []).append(number)

    def drop_unmasked(self) -> None:
        """Drop the objects without a usable segmentation, which have no mask to learn."""
        gone = set(self.unmasked)
        for number in self.unmasked:
            self._drop("no usable segmentation", number)
        self.objects = {i: [o for o in objects if o["id"] not in gone] for i, objects in self.objects.items()}
        self.unmasked = []

    def notes(self) -> list[str]:
        """Return one sentence per reason for dropped annotations."""
        return [
            f"{self.source}: {len(ids)} annotations dropped from training ({reason}): id {_some(ids)}"
            for reason, ids in self.dropped.items()
        ]

    def truth(self, image_ids: Iterable[int]) -> Any:
        """Return the ground truth of some images as a `pycocotools.coco.COCO`.

        It equals the file, except that missing or unusable areas, crowd flags and segmentations are filled in (the area
        of the box, no crowd, the box itself).
        """
        chosen = set(image_ids)
        annotations = []
        for record in self.tree["annotations"]:
            if record["image_id"] in chosen:
                image, (x, y, w, h) = self.images[record["image_id"]], record["bbox"]
                area = record.get("area")
                known = {"iscrowd": int(record.get("iscrowd") or 0), "area": w * h if area is None else area}
                usable = usable_segmentation(record.get("segmentation"), image["height"], image["width"])
                x1, y1, x2, y2 = clipped((x, y, w, h), image["height"], image["width"])
                known["segmentation"] = [[x1, y1, x2, y1, x2, y2, x1, y2]] if usable is None else usable
                annotations.append({**record, **known})
        images = [image for number, image in self.images.items() if number in chosen]
        return as_coco({"images": images, "annotations": annotations, "categories": self.tree["categories"]})


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
        size = segmentation.get("size")
        fits = isinstance(size, (list, tuple)) and list(size) == [height, width]
        return segmentation if fits and _fills(segmentation.get("counts"), height * width) else None
    if not isinstance(segmentation, list):
        return None
    # pycocotools would read four numbers as a box.
    polygons = [p for p in segmentation if isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0]
    return polygons if polygons and all(map(_drawable, polygons)) else None


def decode_mask(segmentation: Any, height: int, width: int) -> np.ndarray:
    """Decode the union of polygons, or a run-length code, compressed or not, to uint8 (H, W)."""
    codes = require("pycocotools.mask", extra="detection")
    if isinstance(segmentation, list):
        code = codes.merge(codes.frPyObjects(segmentation, height, width))
    elif isinstance(segmentation["counts"], list):
        code = codes.frPyObjects(dict(segmentation), height, width)
    else:
        code = dict(segmentation)
    mask: np.ndarray = codes.decode(code)
    return mask


def _fills(counts: Any, pixels: int) -> bool:
    """Return True if the runs of a code, compressed or not, cover exactly the image's pixels."""
    if isinstance(counts, (str, bytes)):
        try:
            runs_N = _uncompressed(counts.encode("ascii") if isinstance(counts, str) else counts)
        except ValueError:
            return False
    elif isinstance(counts, list) and all(type(run) is int and 0 <= run <= pixels for run in counts):
        runs_N = np.array(counts, dtype=np.int64)
    else:
        return False
    return bool(len(runs_N) and runs_N.min() >= 0 and runs_N.max() <= pixels and runs_N.sum() == pixels)


def _uncompressed(code: bytes) -> np.ndarray:
    """Decode the runs (N,) of a compressed code, or raise ValueError.

    A character holds five bits of a number, the lowest first, and a flag for more; the last one's highest bit is the
    sign. From the fourth number on they are differences to the number before the last.
    """
    bits_C = np.frombuffer(code, dtype=np.uint8).astype(np.int64) - 48
    if not len(bits_C) or bits_C.min() < 0 or bits_C.max() > 63 or bits_C[-1] & 32:
        raise ValueError("no run-length code")
    last_C = (bits_C & 32) == 0
    begin_C = np.concatenate([[True], last_C[:-1]])
    number_C = np.cumsum(begin_C) - 1
    place_C = np.arange(len(bits_C)) - np.flatnonzero(begin_C)[number_C]
    if place_C.max() > 6:
        raise ValueError("a run is too long")
    shifted_C = (bits_C & 31) << (5 * place_C)
    runs_N = np.add.reduceat(shifted_C, np.flatnonzero(begin_C))
    negative_N = (bits_C[last_C] & 16) != 0
    runs_N -= np.where(negative_N, 1 << (5 * (place_C[last_C] + 1)), 0)
    runs_N[1::2] = np.cumsum(runs_N[1::2])
    runs_N[2::2] = np.cumsum(runs_N[2::2])
    return runs_N


def _drawable(values: list[Any]) -> bool:
    """Return True if all points of a polygon are numbers near the image and near one another."""
    try:  # one call per polygon: a large file has millions of numbers
        points_N2 = np.asarray(values, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        return False
    near = bool((np.abs(points_N2) <= _FURTHEST).all())  # False for NaN
    return near and float(np.abs(np.diff(points_N2, axis=0, append=points_N2[:1])).sum()) <= _LONGEST


def _is_whole(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and abs(value) < 1 << 63


def _finite(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _shown(value: Any) -> str:
    """Return a value for a message, at most a line long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with too many digits, or a list too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _some(values: list[Any]) -> str:
    more = f" and {len(values) - 5} more" if len(values) > 5 else ""
    return ", ".join(str(value) for value in values[:5]) + more
