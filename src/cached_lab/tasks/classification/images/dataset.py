"""Images with a label each: the base classes of all readers. A reader is a subclass whose fields are its options.

An item is a function of its index, and when augmented of seed, epoch and row, so that a run resumes bitwise in the
middle of an epoch (`training/loader.py`). Labels are known before any image is read, so that splits are stratified. A
file that cannot be decoded is named, or skipped and counted. torchvision's folders have neither the splits nor the rule
for bad files. Pillow decodes, timm augments.

Shape legend: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.dataset import Batch, LabelledDataset
from cached_lab.data.image_files import BadFile, open_picture
from cached_lab.data.samples import Sample, read_samples
from cached_lab.data.splits import check_fraction, check_split, items_of_split
from cached_transformers.extras import require

from .augmentation import training_transform

BadFiles = Literal["stop", "skip"]
_USUAL = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.5,), (0.5,))}
"""Mean and deviation of each channel of pixels in 0..1: of ImageNet for colour, and of grey images."""


class _Facts(LabelledDataset):
    """Facts that a reader sets, no options.

    Attributes:
        channels: 3 (colour) or 1 (grey).
        mean, std: one number per channel, of pixels in 0..1; inputs are (pixel - mean) / std. None is usual.
        shift: greatest shift in pixels along either axis; None takes an eighth of the size.
        flip: mirror half of the augmented images.
        no_augmentation: options used for `augmentation: null`; None is shift and flip.
    """

    channels: int = 3
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    shift: int | None = None
    flip: bool = True
    no_augmentation: Mapping[str, Any] | None = None
    image_size: int


@dataclass(eq=False, repr=False)
class ImageDataset(_Facts):
    """Images as normalised float tensors (C, H, W).

    Args:
        split: "train", "validation" or "test".
        augment: change training images at random. Other splits are never augmented.
        augmentation: options of `Augmentation`; null shifts and mirrors, with black moving in.
        validation_fraction: share of every class held out for validation, where the data have no such split.
        seed: of the deal of held-out images; independent of training seeds.

    Raises:
        ValueError: an option out of range, or a split without an image.
    """

    split: str
    _: KW_ONLY
    augment: bool = True
    augmentation: Mapping[str, Any] | None = None
    validation_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_split(self.split)
        for option in ("validation_fraction", "test_fraction"):
            if (fraction := getattr(self, option, None)) is not None:
                check_fraction(option, fraction)
        labels, self.class_names = self._load()
        super().__init__(self.name, self.split, labels, len(self.class_names))
        usual_mean, usual_std = _USUAL[self.channels]
        self.mean, self.std = mean, std = tuple(self.mean or usual_mean), tuple(self.std or usual_std)
        self._mean_C11, self._std_C11 = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (mean, std))
        self.augment = self.augment and self.split == "train"
        options = self.no_augmentation if self.augmentation is None else self.augmentation
        transform = None if options is None else training_transform(options, self.image_size, mean, std)
        self._transform = transform if self.augment else None

    def _load(self) -> tuple[np.ndarray, list[str]]:
        """Find the images of the split; return their labels, and the names of all classes."""
        raise NotImplementedError("abstract: a reader finds the images of a split")

    def _dealt(self, of: object, labels: np.ndarray, *held_out: str) -> np.ndarray:
        """Indices of the items of this split, with the `held_out` splits dealt from items with these labels."""
        shares = {split: getattr(self, f"{split}_fraction") for split in held_out}
        return items_of_split(of, labels, shares, self.seed, self.split)

    def pixels(self, index: int) -> Tensor:
        """Stored pixels of one item, uint8 (C, H, W), before augmentation and normalisation."""
        raise NotImplementedError("abstract: a data set of images reads its own pixels")

    def picture(self, index: int) -> Any:
        """One item as a PIL image in its own size, the input of an `Augmentation`."""
        raise NotImplementedError("abstract: a data set of images reads its own pictures")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        position = self.position(index)
        label = int(self.labels[position])
        if self._transform is not None:
            return self._transform(self.picture(position)), label
        image_CHW = self.pixels(position).to(torch.float32) / 255
        if self.augment:
            shift = max(1, self.image_size // 8) if self.shift is None else self.shift
            image_CHW = random_shift(image_CHW, shift)
            if self.flip and torch.rand(()) < 0.5:
                image_CHW = image_CHW.flip(-1)
        return (image_CHW - self._mean_C11) / self._std_C11, label

    def collate(self, items: Sequence[tuple[Tensor, int]]) -> Batch:
        """Stack images to (B, C, H, W)."""
        images, labels = zip(*items, strict=True)
        return Batch(torch.stack(images), torch.tensor(labels, dtype=torch.long), padding=None)

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            "image_size": self.image_size,
            "channels": self.channels,
            "mean": list(self.mean or ()),
            "std": list(self.std or ()),
            "class_names": self.class_names,
        }


@dataclass(kw_only=True, eq=False, repr=False)
class StoredImages(ImageDataset):
    """Images held in memory; subclasses read them in `_read`."""

    def _read(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Images uint8 (size, C, H, W) and labels of the split, and the names of all classes."""
        raise NotImplementedError("abstract: a reader finds the images of a split")

    def _load(self) -> tuple[np.ndarray, list[str]]:
        self._images, labels, names = self._read()
        self.image_size = self._images.shape[-1]
        return labels, names

    def pixels(self, index: int) -> Tensor:
        return torch.from_numpy(self._images[index].copy())

    def picture(self, index: int) -> Any:
        pixels_HWC = self._images[index].transpose(1, 2, 0)
        grey = self.channels == 1
        return require("PIL.Image", extra="vision").fromarray(pixels_HWC[..., 0] if grey else pixels_HWC.copy())

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        yield self._images


@dataclass(kw_only=True, eq=False, repr=False)
class EncodedImages(ImageDataset):
    """Images decoded on access; subclasses return the bytes of a file in `encoded`.

    Args:
        image_size: height and width of an input in pixels.
        crop_ratio: share of the shorter side kept in evaluation (and in training without `augmentation`), timm's
            crop_pct: the image is resized (bicubic) and its centre cropped. 1 is the largest central square.
        bad_files: "stop" at a file that cannot be decoded and at a class without a training image, or "skip" them.
            Training takes the next file instead, evaluation leaves the file out; both count and name it.
        others: see `ImageDataset`.

    Attributes:
        bad_found: skipped files and their errors, filled by the loader.

    Raises:
        ValueError: an option out of range; on access `BadFile` for a file that cannot be decoded (named).
        ImportError: Pillow is not installed.
    """

    image_size: int = 224
    crop_ratio: float = 1.0
    bad_files: BadFiles = "stop"

    def __post_init__(self) -> None:
        if self.image_size < 1:
            raise ValueError(f"image_size={self.image_size} must be at least 1 pixel")
        if self.channels not in _USUAL:
            raise ValueError(f"channels={self.channels} must be 3 (colour) or 1 (grey)")
        if not 0 < self.crop_ratio <= 1:
            raise ValueError(f"crop_ratio={self.crop_ratio} must lie in (0, 1]; 1 is the whole square")
        require("PIL.Image", extra="vision")
        super().__post_init__()
        self.bad_found: dict[str, str] = {}
        options = {"crop_pct": self.crop_ratio, "interpolation": "bicubic", "normalize": False}
        # Pixels uint8 (C, size, size).
        self._view = require("timm.data", extra="vision").create_transform(
            self.image_size, is_training=False, **options
        )

    def encoded(self, index: int) -> bytes:
        """The content of the file of one item."""
        raise NotImplementedError("abstract: a data set of files reads its own")

    def file(self, index: int) -> object:
        """The name of the file of one item, for errors."""
        raise NotImplementedError("abstract: a data set of files names its own")

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        yield from read_samples(len(self), self.encoded)

    def picture(self, index: int) -> Any:
        """One item as an upright PIL image in its own size (BadFile: the file cannot be decoded)."""
        try:
            return open_picture(self.encoded(index), "", self.channels)
        except BadFile as error:
            raise BadFile(self.file(index), error.reason) from error
        except (OSError, ValueError) as error:  # e.g. a damaged member of an archive
            raise BadFile(self.file(index), error) from error

    def pixels(self, index: int) -> Tensor:
        return self._view(self.picture(index))  # type: ignore[no-any-return]


def random_shift(image_CHW: Tensor, shift: int) -> Tensor:
    """Move an image by up to `shift` pixels along each axis, uniformly; zeros move in. Draws from torch's generator."""
    height, width = image_CHW.shape[-2:]
    down, right = torch.randint(0, 2 * shift + 1, (2,)).tolist()
    padded_CHW = torch.nn.functional.pad(image_CHW, (shift, shift, shift, shift))
    return padded_CHW[:, down : down + height, right : right + width]
