"""Images: what all image data sets share. Files in folders and archives are in `image_folder.py`.

Shape legend: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cached_transformers.data.base import Batch, LabelledDataset
from cached_transformers.data.decoding import BadFile, open_picture
from cached_transformers.extras import require

from .augmentation import INTERPOLATIONS, Augmentation, central_square, evaluation_view

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""The usual mean and deviation of each channel of ImageNet, for pixels in 0..1."""
_HALF = ((0.5,), (0.5,))
BadFiles = Literal["stop", "skip"]


class ImageDataset(LabelledDataset):
    """Images as normalised float tensors (C, H, W); subclasses say how a pixel array is obtained.

    Args:
        image_size: height and width in pixels.
        mean, std: one number a channel, of pixels scaled to 0..1; inputs are (pixel - mean) / std.
        augment: whether items of the training split are changed at random; other splits never are.
        shift: greatest shift in pixels, in either direction of either axis; what moves in is black. None takes an
            eighth of the size.
        flip: whether half of the augmented images are mirrored.
        augmentation: options of `Augmentation`, which then takes the place of `shift` and `flip`.
    """

    def __init__(
        self,
        name: str,
        split: str,
        labels: np.ndarray,
        *,
        class_names: Sequence[str],
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool,
        shift: int | None = None,
        flip: bool = True,
        augmentation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, split, labels, classes=len(class_names))
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(f"mean={tuple(mean)} and std={tuple(std)} need one number a channel each, std above 0")
        self.class_names = list(class_names)
        self.image_size = image_size
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.augment = augment and split == "train"
        self._shift = max(1, image_size // 8) if shift is None else shift
        self._flip = flip
        chosen = None if augmentation is None else Augmentation.from_options(augmentation)
        wanted = self.augment and chosen is not None
        self._transform = chosen.transform(image_size, self.mean, self.std) if wanted and chosen else None

    def pixels(self, index: int) -> Tensor:
        """Stored pixels of one item, uint8 (C, H, W), before augmentation and normalisation."""
        raise NotImplementedError("abstract: a data set of images reads its own pixels")

    def picture(self, index: int) -> Any:
        """One item as a PIL image in its own size, which is what an `Augmentation` begins with."""
        pixels_HWC = self.pixels(index).permute(1, 2, 0).numpy()
        grey = pixels_HWC.shape[-1] == 1
        return require("PIL.Image", extra="vision").fromarray(pixels_HWC[..., 0] if grey else pixels_HWC)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        position = self.position(index)
        label = int(self.labels[position])
        if self._transform is not None:
            return self._transform(self.picture(position)), label
        image_CHW = self.pixels(position).to(torch.float32) / 255
        if self.augment:
            image_CHW = random_shift(image_CHW, self._shift)
            if self._flip and torch.rand(()) < 0.5:
                image_CHW = image_CHW.flip(-1)
        image_CHW = (image_CHW - _per_channel(self.mean)) / _per_channel(self.std)
        return image_CHW, label

    def collate(self, items: Sequence[tuple[Tensor, int]]) -> Batch:
        """Stack images to (B, C, H, W)."""
        images, labels = zip(*items, strict=True)
        return Batch(torch.stack(images), torch.tensor(labels, dtype=torch.long), padding=None)

    def describe(self) -> dict[str, object]:
        return {
            **super().describe(),
            "image_size": self.image_size,
            "channels": len(self.mean),
            "mean": list(self.mean),
            "std": list(self.std),
            "class_names": self.class_names,
        }


class StoredImages(ImageDataset):
    """Images held in memory: `images` is uint8 (size, C, H, W); the other arguments are those of `ImageDataset`."""

    def __init__(self, name: str, split: str, images: np.ndarray, labels: np.ndarray, **options: Any) -> None:
        super().__init__(name, split, labels, image_size=images.shape[-1], **options)
        self._images = images

    def pixels(self, index: int) -> Tensor:
        return torch.from_numpy(self._images[index].copy())


class EncodedImages(ImageDataset):
    """Images decoded when they are asked for; subclasses say where the bytes of a file come from.

    Args:
        channels: 3 (colour) or 1 (grey).
        mean, std: default: those of ImageNet for colour, 0.5 for grey.
        crop_ratio: share of the shorter side that evaluation (and training without `augmentation`) sees: the image is
            resized and the centre cut out. None takes the largest central square, whole.
        interpolation: of that resizing.
        bad_files: what the loader does with a file that cannot be decoded: "stop" the run, or "skip" it. Training takes
            the next file instead, evaluation leaves it out; either way it is counted and named.
        others: see `ImageDataset`.

    Attributes:
        bad_found: files that were skipped so far, with what is wrong; the loader keeps it.
    """

    def __init__(
        self,
        name: str,
        split: str,
        labels: np.ndarray,
        *,
        image_size: int,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_ratio: float | None = None,
        interpolation: str = "bicubic",
        bad_files: BadFiles = "stop",
        **options: Any,
    ) -> None:
        check_view(image_size, channels, crop_ratio, interpolation, bad_files)
        usual_mean, usual_std = IMAGENET if channels == 3 else _HALF
        mean, std = usual_mean if mean is None else mean, usual_std if std is None else std
        if len(mean) != channels:
            raise ValueError(f"mean={tuple(mean)} must have one number for each of the {channels} channels")
        require("PIL.Image", extra="vision")
        super().__init__(name, split, labels, image_size=image_size, mean=mean, std=std, **options)
        self.bad_files = bad_files
        self.bad_found: dict[str, str] = {}
        self._channels = channels
        view = None if crop_ratio is None else evaluation_view(image_size, crop_ratio, interpolation, mean, std)
        self._view = view

    def encoded(self, index: int) -> tuple[bytes, object]:
        """The file of one item, and what errors call it."""
        raise NotImplementedError("abstract: a data set of files reads its own")

    def picture(self, index: int) -> Any:
        """One item as a PIL image, upright, in its own size.

        Raises:
            BadFile: the file (named) cannot be decoded.
        """
        try:
            content, name = self.encoded(index)
        except OSError as error:
            raise BadFile(error.filename or f"item {index} of {self.name!r}", error) from error
        return open_picture(content, name, self._channels)

    def pixels(self, index: int) -> Tensor:
        picture = self.picture(index)
        if self._view is not None:
            return self._view(picture)
        square = central_square(picture, self.image_size)
        pixels_HWC = np.array(square, dtype=np.uint8).reshape(self.image_size, self.image_size, self._channels)
        return torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous()


def check_view(image_size: int, channels: int, crop_ratio: float | None, interpolation: str, bad_files: str) -> None:
    """Refuse options of `EncodedImages` that are out of range (ValueError)."""
    if image_size < 1:
        raise ValueError(f"image_size={image_size} must be at least 1 pixel")
    if channels not in (1, 3):
        raise ValueError(f"channels={channels} must be 3 (colour) or 1 (grey)")
    if crop_ratio is not None and not 0 < crop_ratio <= 1:
        raise ValueError(f"crop_ratio={crop_ratio} must lie in (0, 1], e.g. 0.875, or be null for the whole square")
    if interpolation not in INTERPOLATIONS[:3]:
        raise ValueError(f"interpolation={interpolation!r} must be one of {', '.join(INTERPOLATIONS[:3])}")
    if bad_files not in ("stop", "skip"):
        raise ValueError(f"bad_files={bad_files!r} must be stop or skip")


def random_shift(image_CHW: Tensor, shift: int) -> Tensor:
    """Move an image by up to `shift` pixels along each axis, uniformly; zeros move in. Draws from torch's generator."""
    height, width = image_CHW.shape[-2:]
    down, right = torch.randint(0, 2 * shift + 1, (2,)).tolist()
    padded_CHW = torch.nn.functional.pad(image_CHW, (shift, shift, shift, shift))
    return padded_CHW[:, down : down + height, right : right + width]


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]
