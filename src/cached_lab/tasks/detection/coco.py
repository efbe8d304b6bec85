"""Detection and instance segmentation on data in COCO's format ("coco"): any categories, any number of images.

Paper: Lin et al., "Microsoft COCO: Common Objects in Context" (arXiv:1405.0312). Annotations are read and masks decoded
by pycocotools, the format's own library. torchvision's CocoDetection reads only folders and checks no annotation.

Shape legend: N objects, C channels, H height, W width.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.image_files import BadFile
from cached_lab.data.samples import Sample, read_samples
from cached_lab.data.splits import check_split
from cached_lab.registries import DATASETS
from cached_transformers.extras import require

from .coco_annotations import Annotations, decode_mask
from .coco_files import decode_rgb, find_images, read_annotations

Target = dict[str, Tensor]
"""boxes float (N, 4) as corners x1, y1, x2, y2 in pixels; labels long (N,); masks uint8 (N, H, W), if there are any."""


class DetectionBatch(NamedTuple):
    """A collated batch: images of any size, float (3, H, W) in 0..1, and one target each."""

    inputs: list[Tensor]
    targets: list[Target]


@DATASETS.register("coco", paper="arXiv:1405.0312")
class CocoDetection:
    """Objects in images with COCO-format annotations: folders or zip archives, any categories.

    A split is a name, as in COCO: of annotations/instances_NAME.json and of the images NAME/*.jpg, in `path` or in zip
    archives there. Training leaves crowds out, clips boxes to their image, drops and names objects without area, and
    mirrors half of the images. Evaluation keeps every image and the ground truth unchanged.

    Args:
        split: "train", "validation" or "test".
        path: folder, or one zip archive.
        train, validation, test: names of the splits; two may be the same.
        masks: true for items with masks, and without objects that lack one; null: if any object of the file has one.
        empty: training images without objects: "drop" or "keep" them.
        bad_files: missing or undecodable images: "stop" at the first, or "skip" them with a warning.
        augment: mirror training images at random.
        image_ids: take only these images. limit: take only the first images of the file.

    Raises:
        FileNotFoundError: no annotations or no images.
        ValueError: contradictory annotations (named), no image left, missing files with bad_files="stop"; on access
            `BadFile`, a file that cannot be decoded (named).
        ImportError: pycocotools or Pillow is not installed.
    """

    name = "coco"
    task = "detection"

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        train: str = "train2017",
        validation: str = "val2017",
        test: str | None = None,
        masks: bool | None = None,
        empty: Literal["drop", "keep"] = "drop",
        bad_files: Literal["stop", "skip"] = "stop",
        augment: bool = True,
        image_ids: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> None:
        for module in ("pycocotools.coco", "PIL.Image"):
            require(module, extra="detection")
        name = {"train": train, "validation": validation, "test": test}[check_split(split)]
        if name is None:
            raise FileNotFoundError(
                f"data.{split}=null: name its annotations, e.g. data.{split}={validation}, or set training.test=none"
            )
        self.split, self.bad_files, self.augment = split, bad_files, augment and split == "train"
        root = Path(path).expanduser()
        self.annotations = Annotations(*read_annotations(root, name))
        self.class_names, self.category_ids = self.annotations.class_names, self.annotations.category_ids
        self.classes = len(self.class_names)
        self.masks = self._with_masks(masks)
        self.image_ids = self._chosen(image_ids, limit, keep_empty=empty == "keep" or split != "train")
        names = {number: str(self.annotations.images[number]["file_name"]) for number in self.image_ids}
        self._files = find_images(root, name, names.values())
        self._check_present(names)
        if split == "train":
            for note in self.annotations.notes():
                warnings.warn(note, stacklevel=2)
        self._reported: set[int] = set()

    def _with_masks(self, wanted: bool | None) -> bool:
        there = len(self.annotations.unmasked) < sum(map(len, self.annotations.objects.values()))
        if wanted and not there:
            raise ValueError(
                f"data.masks=true: no object of {self.annotations.source} has a usable segmentation; train a detector "
                "of boxes (retinanet, faster_rcnn) with data.masks=false"
            )
        if there and wanted is not False:
            self.annotations.drop_unmasked()
            return True
        return False

    def _chosen(self, image_ids: Sequence[int] | None, limit: int | None, keep_empty: bool) -> list[int]:
        images, source = self.annotations.images, self.annotations.source
        unknown = [number for number in image_ids or () if number not in images]
        if unknown:
            raise ValueError(f"data.image_ids={unknown[:5]}: not among the {len(images)} images of {source}")
        if limit is not None and limit < 1:
            raise ValueError(f"data.limit={limit} must be at least 1, or null")
        wanted = images if image_ids is None else set(image_ids)
        found = [n for n in images if n in wanted and (keep_empty or self.annotations.objects.get(n))][:limit]
        if not found:
            raise ValueError(f"{source} has no image with an object to learn; data.empty=keep takes empty ones, too")
        return found

    def _check_present(self, names: dict[int, str]) -> None:
        missing = [number for number, name in names.items() if name not in self._files]
        if not missing:
            return
        listed = ", ".join(str(self._files.root / names[number]) for number in missing[:5])
        text = f"{len(missing)} of {len(names)} image files are missing: {listed}"
        self.image_ids = [number for number in self.image_ids if number not in set(missing)]
        if self.bad_files == "stop" or not self.image_ids:
            raise ValueError(f"{text}; fetch them, or continue without them by data.bad_files=skip")
        warnings.warn(f"{text}; they are left out", stacklevel=3)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        """Return an image, float (3, H, W) in 0..1, and its target.

        With bad_files="skip" an unreadable training image is replaced by the next readable one.

        Raises:
            BadFile: the file cannot be read.
            IndexError: out of range.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} images of {self.name!r}")
        number = self.image_ids[index]
        try:
            image_CHW = self.pixels(number)
        except BadFile as error:
            if self.bad_files == "stop" or self.split != "train":
                raise
            self.report(number, f"{error}; the next image is taken instead")
            if len(self._reported) == len(self):
                raise
            return self[(index + 1) % len(self)]
        target = self.target(number)
        return mirrored(image_CHW, target) if self.augment and torch.rand(()) < 0.5 else (image_CHW, target)

    def report(self, number: int, text: str) -> None:
        """Warn of an unreadable image, once."""
        if number not in self._reported:
            self._reported.add(number)
            warnings.warn(text, stacklevel=3)

    def pixels(self, number: int) -> Tensor:
        """Return the image with this id, float (3, H, W) in 0..1."""
        record = self.annotations.images[number]
        label = str(self._files.root / record["file_name"])
        try:
            content = self._files.read(record["file_name"])
        except Exception as error:  # a damaged archive raises errors of any type
            raise BadFile(label, f"it cannot be read: {error}") from error
        pixels_HWC = decode_rgb(content, label, (record["height"], record["width"]))
        return torch.from_numpy(pixels_HWC).permute(2, 0, 1).float() / 255

    def target(self, number: int) -> Target:
        """Return the objects of the image with this id, without crowds."""
        record, objects = self.annotations.images[number], self.annotations.objects.get(number, [])
        height, width = record["height"], record["width"]
        target = {
            "boxes": torch.tensor([o["box"] for o in objects], dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor([o["class"] for o in objects], dtype=torch.long),
        }
        if self.masks:
            masks = [decode_mask(o["segmentation"], height, width) for o in objects if o["segmentation"] is not None]
            stacked = np.stack(masks) if masks else np.zeros((0, height, width), np.uint8)
            target["masks"] = torch.from_numpy(stacked)
        return target

    def collate(self, items: Sequence[tuple[Tensor, Target]]) -> DetectionBatch:
        """Return a batch of images of their own sizes; the model resizes and pads them."""
        images, targets = zip(*items, strict=True)
        return DetectionBatch(list(images), list(targets))

    @property
    def groups(self) -> np.ndarray:
        """(size,): 1 for images at least as wide as high, else 0; batches of one group need less padding."""
        records = [self.annotations.images[number] for number in self.image_ids]
        return np.array([int(record["width"] >= record["height"]) for record in records], dtype=np.int64)

    def truth(self, image_ids: Sequence[int]) -> Any:
        """Return the ground truth of some images as a `pycocotools.coco.COCO`, with crowds."""
        return self.annotations.truth(image_ids)

    def samples(self) -> Iterator[Sample]:
        """Yield classes, boxes, and some images and masks, for the fingerprint of the data (`data/samples.py`)."""
        yield json.dumps([self.class_names, self.image_ids]).encode()
        objects = [found for number in self.image_ids for found in self.annotations.objects.get(number, [])]
        yield np.array([found["box"] for found in objects], dtype=np.float64)
        yield np.array([found["class"] for found in objects], dtype=np.int64)
        yield from read_samples(len(objects), lambda place: repr(objects[place]["segmentation"]).encode())
        names = [self.annotations.images[number]["file_name"] for number in self.image_ids]
        yield from read_samples(len(names), lambda place: self._files.read(names[place]))

    def describe(self) -> dict[str, object]:
        """Return facts for reports and for building a model."""
        return {
            "name": self.name,
            "split": self.split,
            "size": len(self),
            "classes": self.classes,
            "class_names": self.class_names,
            "objects": sum(len(self.annotations.objects.get(number, [])) for number in self.image_ids),
            "crowds": self.annotations.crowds,
            "dropped": {reason: len(ids) for reason, ids in self.annotations.dropped.items()},
            "masks": self.masks,
        }


def mirrored(image_CHW: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Exchange left and right of an image and its target."""
    width = image_CHW.shape[-1]
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    flipped = {**target, "boxes": torch.stack([width - x2, y1, width - x1, y2], 1)}
    if "masks" in target:
        flipped["masks"] = target["masks"].flip(-1)
    return image_CHW.flip(-1), flipped
