"""Checked and cleaned annotations in COCO's format (cocodataset.org, "format of the data"; arXiv:1405.0312).

What contradicts itself is refused by name: ids that occur twice, objects of categories or images that do not exist,
values of another type than the format has. What can be mended is: boxes are clipped to their image, missing areas and
crowd flags filled in. Objects that nothing can be learned from are dropped, counted and named. pycocotools writes where
a run-length code says, however far, so that codes are checked before it sees them.

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
_MOST_PIXELS = 1 << 31
_FURTHEST = 1 << 20
"""Pixels from the corner of an image at which a point of a polygon may lie."""
_LONGEST = 1 << 24
"""Pixels along a polygon: pycocotools holds them all."""


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
            self._refuse_strange(kind)
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

    def _refuse_strange(self, kind: str) -> None:
        """Refuse entries of another type than the format has (ValueError); text is an id of images alone."""
        texts = {isinstance(record, dict) and isinstance(record.get("id"), str) for record in self.tree[kind]}
        if len(texts) > 1:
            raise ValueError(f"{self.source}: of {kind}, some have text for an id and some have not; give all a number")
        for place, record in enumerate(self.tree[kind]):
            if not isinstance(record, dict):
                raise ValueError(f"{self.source}: entry {place} of {kind} is {_shown(record)}; it must be an object")
            for key in ("id", "image_id", "category_id") if kind == "annotations" else ("id",):
                value = record.get(key)
                named = isinstance(value, str) and (kind == "images" or key == "image_id")
                if value is not None and not named and not _is_whole(value):
                    raise ValueError(
                        f"{self.source}: entry {place} of {kind} has {key} {_shown(value)}; it must be a whole number"
                    )
            if kind == "categories" and not isinstance(record.get("name"), (str, int, float, type(None))):
                raise ValueError(
                    f"{self.source}: category {record.get('id')} has name {_shown(record['name'])}; it must be text"
                )

    def _checked_image(self, record: dict[str, Any]) -> dict[str, Any]:
        sides = (record.get("width"), record.get("height"))
        whole = all(isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sides)
        if not isinstance(record.get("file_name"), str) or not whole or math.prod(sides) > _MOST_PIXELS:  # type: ignore[arg-type]
            raise ValueError(
                f"{self.source}: image {record.get('id')} needs a file_name and a positive whole width and height, of "
                f"{_MOST_PIXELS:,} pixels at most, got {_shown(record.get('file_name'))}, {_shown(sides[0])} and "
                f"{_shown(sides[1])}"
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
        box, area, crowd = record.get("bbox"), record.get("area"), record.get("iscrowd")
        if not isinstance(box, (list, tuple)) or len(box) != 4 or not all(_finite(value) for value in box):
            raise ValueError(
                f"{self.source}: annotation {number} has bbox {_shown(box)}; it must be four finite numbers: "
                "x, y, width, height"
            )
        if area is not None and not (_finite(area) and area >= 0):
            raise ValueError(
                f"{self.source}: annotation {number} has area {_shown(area)}; it must be a finite number of pixels, 0 "
                "or more, or be left out"
            )
        if crowd is not None and not (isinstance(crowd, (int, float)) and crowd in (0, 1)):
            raise ValueError(f"{self.source}: annotation {number} has iscrowd {_shown(crowd)}; it must be 0 or 1")
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
                area = record.get("area")
                known = {"iscrowd": int(record.get("iscrowd") or 0), "area": w * h if area is None else area}
                usable = usable_segmentation(record.get("segmentation"), image["height"], image["width"])
                x1, y1, x2, y2 = clipped((x, y, w, h), image["height"], image["width"])
                known["segmentation"] = [[x1, y1, x2, y1, x2, y2, x1, y2]] if usable is None else usable
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
    """Polygons of three points or more, or a run-length code that fills the image; None when nothing of that is
    left."""
    if isinstance(segmentation, Mapping):
        size = segmentation.get("size")
        fits = isinstance(size, (list, tuple)) and list(size) == [height, width]
        return segmentation if fits and _fills(segmentation.get("counts"), height * width) else None
    if not isinstance(segmentation, list):
        return None
    # pycocotools would take four numbers for a box.
    polygons = [p for p in segmentation if isinstance(p, list) and len(p) >= 6 and len(p) % 2 == 0]
    return polygons if polygons and all(map(_drawable, polygons)) else None


def _fills(counts: Any, pixels: int) -> bool:
    """Whether the runs of a code, compressed or not, are of the image's pixels, all of them and no more."""
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
    """Runs (N,) of a compressed code (ValueError: it is none).

    A character holds five bits of a number, the lowest first, and whether more follow; the last one's highest bit is
    the sign. From the fourth number on they are differences to the one before the last.
    """
    bits_C = np.frombuffer(code, dtype=np.uint8).astype(np.int64) - 48
    if not len(bits_C) or bits_C.min() < 0 or bits_C.max() > 63 or bits_C[-1] & 32:
        raise ValueError("no run-length code")
    last_C = (bits_C & 32) == 0
    begin_C = np.concatenate([[True], last_C[:-1]])
    number_C = np.cumsum(begin_C) - 1
    place_C = np.arange(len(bits_C)) - np.flatnonzero(begin_C)[number_C]
    if place_C.max() > 6:
        raise ValueError("no run is so long")
    shifted_C = (bits_C & 31) << (5 * place_C)
    runs_N = np.add.reduceat(shifted_C, np.flatnonzero(begin_C))
    negative_N = (bits_C[last_C] & 16) != 0
    runs_N -= np.where(negative_N, 1 << (5 * (place_C[last_C] + 1)), 0)
    runs_N[1::2] = np.cumsum(runs_N[1::2])
    runs_N[2::2] = np.cumsum(runs_N[2::2])
    return runs_N


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


def _drawable(values: list[Any]) -> bool:
    """Whether all points of a polygon are numbers not too far away, and not too far from one another."""
    try:  # one call for a polygon: a large file has millions of numbers
        points_N2 = np.asarray(values, dtype=np.float64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        return False
    near = bool((np.abs(points_N2) <= _FURTHEST).all())  # False where one is not a number
    return near and float(np.abs(np.diff(points_N2, axis=0, append=points_N2[:1])).sum()) <= _LONGEST


def _is_whole(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and abs(value) < 1 << 63


def _shown(value: Any) -> str:
    """A value in a message, not longer than a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of too many digits, or a list too deep
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all others
        return False


def _some(values: list[Any]) -> str:
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(str(value) for value in values[:_SHOWN]) + more
