"""Detection and instance segmentation on data in COCO's format ("coco"): any categories, any number of images.

Paper: Lin et al., "Microsoft COCO: Common Objects in Context" (arXiv:1405.0312). pycocotools, the format's own library,
decodes masks. torchvision's CocoDetection reads only folders and checks no annotation.

Shape legend: N objects, C channels, H height, W width.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.image_files import BadFile
from cached_lab.data.samples import Sample, read_samples
from cached_lab.data.splits import check_split
from cached_lab.registries import DATASETS
from cached_transformers.extras import require

from .coco_annotations import Annotations
from .coco_files import decode_rgb, find_images, places, read_annotations

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
    archives there. Training leaves crowds and images without objects out, clips boxes to their image, drops and names
    objects without area, and mirrors half of the images. Evaluation keeps every image and the ground truth unchanged.

    Args:
        split: "train", "validation" or "test".
        path: folder, or one zip archive.
        train, validation, test: names of the splits; two may be the same.
        masks: true for items with masks, and without objects that lack one; null: if any object of the file has one.
        augment: mirror training images at random.
        image_ids: take only these images.

    Raises:
        FileNotFoundError: no annotations or no images.
        ValueError: contradictory annotations, missing images (named), or no image left; on access `BadFile`, a file
            that cannot be decoded (named).
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
        augment: bool = True,
        image_ids: Sequence[int] | None = None,
    ) -> None:
        for module in ("pycocotools.coco", "PIL.Image"):
            require(module, extra="detection")
        name = {"train": train, "validation": validation, "test": test}[check_split(split)]
        if name is None:
            raise FileNotFoundError(
                f"data.{split}=null: name its annotations, e.g. data.{split}={validation}, or set training.test=none"
            )
        self.split, self.augment = split, augment and split == "train"
        found = places(Path(path).expanduser())
        self.annotations = Annotations(*read_annotations(found, name))
        self.class_names, self.category_ids = self.annotations.class_names, self.annotations.category_ids
        self.classes = len(self.class_names)
        images, objects, source = self.annotations.images, self.annotations.objects, self.annotations.source
        there = any(one["masked"] for of_image in objects.values() for one in of_image)
        if masks and not there:
            raise ValueError(
                f"data.masks=true: no object of {source} has a usable segmentation; train a detector of boxes "
                "(retinanet, faster_rcnn) with data.masks=false"
            )
        self.masks = there and masks is not False
        if self.masks:
            for image, every in objects.items():  # an object without a usable segmentation has no mask to learn
                objects[image] = [one for one in every if one["masked"]]
                self.annotations.dropped += [one["id"] for one in every if not one["masked"]]
        if unknown := [number for number in image_ids or () if number not in images]:
            raise ValueError(f"data.image_ids={unknown[:5]}: not among the {len(images)} images of {source}")
        wanted = images if image_ids is None else set(image_ids)
        self.image_ids = [n for n in images if n in wanted and (split != "train" or objects[n])]
        if not self.image_ids:
            raise ValueError(f"{source} has no image with an object to learn; check its annotations, or data.image_ids")
        names = [images[number]["file_name"] for number in self.image_ids]
        self._files = find_images(found, name, names)
        if missing := [file for file in names if file not in self._files]:
            listed = ", ".join(str(self._files.root / file) for file in missing[:5])
            raise ValueError(f"{len(missing)} of {len(names)} image files are missing: {listed}; fetch them again")
        if split == "train" and (dropped := self.annotations.dropped):
            few = f"{dropped[:5]} and others" if len(dropped) > 5 else f"{dropped}"
            why = "without area in the image, or without a usable segmentation"
            warnings.warn(f"{source}: {len(dropped)} annotations are not learned, {why}: id {few}", stacklevel=2)

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        """Return an image, float (3, H, W) in 0..1, and its target.

        Raises:
            BadFile: the file cannot be read.
            IndexError: out of range.
        """
        number = self.image_ids[index]
        image_CHW, target = self.pixels(number), self.target(number)
        return mirrored(image_CHW, target) if self.augment and torch.rand(()) < 0.5 else (image_CHW, target)

    def pixels(self, number: int) -> Tensor:
        """Return the image with this id, float (3, H, W) in 0..1 (BadFile: the file cannot be read)."""
        record = self.annotations.images[number]
        label = str(self._files.root / record["file_name"])
        try:
            content = self._files.read(record["file_name"])
        except (OSError, ValueError) as error:
            raise BadFile(label, f"it cannot be read: {error}") from error
        pixels_HWC = decode_rgb(content, label, (record["height"], record["width"]))
        return torch.from_numpy(pixels_HWC).permute(2, 0, 1).float() / 255

    def target(self, number: int) -> Target:
        """Return the objects of the image with this id, without crowds."""
        objects = self.annotations.objects[number]
        target = {
            "boxes": torch.tensor([o["box"] for o in objects], dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor([o["class"] for o in objects], dtype=torch.long),
        }
        if self.masks:
            truth, record = self.annotations.truth, self.annotations.images[number]
            masks = [truth.annToMask(truth.anns[o["id"]]) for o in objects]
            stacked = np.stack(masks) if masks else np.zeros((0, record["height"], record["width"]), np.uint8)
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

    def samples(self) -> Iterator[Sample]:
        """Yield classes, objects, and some segmentations and images, for the fingerprint (`data/samples.py`)."""
        objects = [found for number in self.image_ids for found in self.annotations.objects[number]]
        yield json.dumps([self.class_names, self.image_ids, objects]).encode()
        annotations = self.annotations.truth.anns
        yield from read_samples(len(objects), lambda place: repr(annotations[objects[place]["id"]]).encode())
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
            "objects": sum(len(self.annotations.objects[number]) for number in self.image_ids),
            "dropped": len(self.annotations.dropped),
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
