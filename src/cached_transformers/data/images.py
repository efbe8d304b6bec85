"""Images: what all image data sets share, and folders of image files ("image_folder").

Shape legend: B batch, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..extras import require
from ..registry import DATASETS
from .base import SPLIT_WORDS, SPLITS, Batch, LabelledDataset, check_fraction, check_split, stratified_split

SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # the usual per-channel mean and deviation of ImageNet
_HALF = ((0.5,), (0.5,))


class ImageDataset(LabelledDataset):
    """Images as normalised float tensors (C, H, W); subclasses say how a pixel array is obtained.

    Args:
        image_size: height and width in pixels.
        mean, std: one number a channel, of pixels scaled to 0..1; inputs are (pixel - mean) / std.
        augment: whether items of the training split are shifted (and flipped) at random; other splits never are.
        shift: greatest shift in pixels, in either direction of either axis; what moves in is black.
        flip: whether half of the augmented images are mirrored.
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
        shift: int,
        flip: bool,
    ) -> None:
        super().__init__(name, split, labels, classes=len(class_names))
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise ValueError(f"mean={tuple(mean)} and std={tuple(std)} need one number a channel each, std above 0")
        self.class_names = list(class_names)
        self.image_size = image_size
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.augment = augment and split == "train"
        self._shift = shift
        self._flip = flip

    def pixels(self, index: int) -> Tensor:
        """Stored pixels of one item, uint8 (C, H, W), before augmentation and normalisation."""
        raise NotImplementedError("abstract: a data set of images reads its own pixels")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        position = self.position(index)
        image_CHW = self.pixels(position).to(torch.float32) / 255
        if self.augment:
            image_CHW = random_shift(image_CHW, self._shift)
            if self._flip and torch.rand(()) < 0.5:
                image_CHW = image_CHW.flip(-1)
        image_CHW = (image_CHW - _per_channel(self.mean)) / _per_channel(self.std)
        return image_CHW, int(self.labels[position])

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


@DATASETS.register("image_folder")
class ImageFolder(ImageDataset):
    """Classify image files (.jpg, .jpeg, .png) laid out as root/<class>/ or as root/<split>/<class>/.

    Without split folders every class is dealt out by `validation_fraction` and `test_fraction`. With split folders
    (`train`, and `val` or `validation`, and `test`) these are used; when there is none for validation, it is dealt
    from `train` by `validation_fraction`. Classes are the folder names in alphabetical order. A file is decoded when
    its item is asked for: turned as its EXIF entry says, and its largest central square is resized (bicubic).

    Args:
        split: "train", "validation" or "test".
        path: the root folder.
        image_size: height and width of an input in pixels.
        channels: 3 (colour) or 1 (grey).
        mean, std: of pixels in 0..1, one number a channel; default: those of ImageNet for colour, 0.5 for grey.
        augment: shift by up to `shift` pixels and mirror (with `flip`) training images at random.
        validation_fraction, test_fraction: shares held out where the folders do not say.
        seed: decides which files are held out.

    Raises:
        FileNotFoundError: no such folder, or none for the split.
        ValueError: no image, fewer than two classes, a class that training does not have; on access, a file that
            cannot be decoded (named).
        ImportError: Pillow is not installed.
    """

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        image_size: int = 224,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augment: bool = True,
        shift: int = 4,
        flip: bool = True,
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        if image_size < 1:
            raise ValueError(f"image_size={image_size} must be at least 1 pixel")
        if channels not in (1, 3):
            raise ValueError(f"channels={channels} must be 3 (colour) or 1 (grey)")
        usual_mean, usual_std = _IMAGENET if channels == 3 else _HALF
        mean, std = usual_mean if mean is None else mean, usual_std if std is None else std
        if len(mean) != channels:
            raise ValueError(f"mean={tuple(mean)} must have one number for each of the {channels} channels")
        require("PIL.Image", extra="vision")
        fractions = {
            "validation": check_fraction("validation_fraction", validation_fraction),
            "test": check_fraction("test_fraction", test_fraction),
        }
        self._files, labels, names = _files_of_split(Path(path).expanduser(), check_split(split), fractions, seed)
        self._channels = channels
        super().__init__(
            "image_folder",
            split,
            labels,
            class_names=names,
            image_size=image_size,
            mean=mean,
            std=std,
            augment=augment,
            shift=shift,
            flip=flip,
        )

    def file(self, index: int) -> Path:
        """The file of one item."""
        return self._files[self.position(index)]

    def pixels(self, index: int) -> Tensor:
        return decode(self.file(index), self.image_size, self._channels)


def decode(file: Path, image_size: int, channels: int) -> Tensor:
    """Pixels of an image file, uint8 (channels, image_size, image_size): upright, central square, bicubic.

    Raises:
        ValueError: the file (named) cannot be decoded.
    """
    image_module, operations = require("PIL.Image", extra="vision"), require("PIL.ImageOps", extra="vision")
    try:
        with image_module.open(file) as opened:
            upright = operations.exif_transpose(opened).convert("RGB" if channels == 3 else "L")
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise ValueError(f"{file} cannot be decoded as an image: {error}; remove or replace the file") from error
    square = operations.fit(upright, (image_size, image_size), image_module.Resampling.BICUBIC)
    pixels_HWC = np.array(square, dtype=np.uint8).reshape(image_size, image_size, channels)
    return torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous()


def random_shift(image_CHW: Tensor, shift: int) -> Tensor:
    """Move an image by up to `shift` pixels along each axis, uniformly; zeros move in. Draws from torch's generator."""
    height, width = image_CHW.shape[-2:]
    down, right = torch.randint(0, 2 * shift + 1, (2,)).tolist()
    padded_CHW = torch.nn.functional.pad(image_CHW, (shift, shift, shift, shift))
    return padded_CHW[:, down : down + height, right : right + width]


def _per_channel(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def _files_of_split(
    root: Path, split: str, fractions: dict[str, float], seed: int
) -> tuple[list[Path], np.ndarray, list[str]]:
    """Files, labels and class names of a split."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root} does not exist; expected a folder of root/<class>/*.jpg or *.png")
    folders = {name: _split_folder(root, name) for name in SPLITS}
    train = folders["train"]
    names = _class_names(train or root)
    if train is None:
        return _dealt(root, names, split, fractions, seed)
    own = folders[split]
    if own is None and split == "test":
        present = ", ".join(sorted(folder.name for folder in folders.values() if folder))
        message = f"{root} has no folder for split 'test', only {present}"
        raise FileNotFoundError(f"{message}; add one, or train with training.test=none")
    if folders["validation"] is None and split != "test":
        return _dealt(train, names, split, {"validation": fractions["validation"]}, seed)
    assert own is not None
    foreign = sorted(set(_class_names(own)) - set(names))
    if foreign:
        raise ValueError(f"{own} has classes that {train} has not: {', '.join(foreign[:5])}")
    return *_labelled(own, names), names


def _dealt(
    folder: Path, names: list[str], split: str, fractions: dict[str, float], seed: int
) -> tuple[list[Path], np.ndarray, list[str]]:
    files, labels = _labelled(folder, names)
    chosen = stratified_split(labels, fractions, seed)[split]
    if not len(chosen):
        message = f"no image of {folder} falls into split {split!r}"
        raise ValueError(f"{message}: it has {len(files)} images, dealt out by {fractions}; raise {split}_fraction")
    return [files[index] for index in chosen], labels[chosen], names


def _split_folder(root: Path, split: str) -> Path | None:
    found = [folder for folder in _subfolders(root) if folder.name.lower() in SPLIT_WORDS[split]]
    if len(found) > 1:
        raise ValueError(f"{root} has several folders for split {split!r}: {', '.join(f.name for f in found)}")
    return found[0] if found else None


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_names(folder: Path) -> list[str]:
    names = [subfolder.name for subfolder in _subfolders(folder)]
    if len(names) < 2:
        found = ", ".join(names) or "no folder"
        raise ValueError(f"{folder} must hold one folder for each of two or more classes; found {found}")
    return names


def _labelled(folder: Path, names: list[str]) -> tuple[list[Path], np.ndarray]:
    """All image files below the class folders, in a fixed order, with their labels."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        here = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in SUFFIXES)
        files += here
        labels += [label] * len(here)
    if not files:
        raise ValueError(f"{folder} holds no image; expected files {', '.join(sorted(SUFFIXES))} in its class folders")
    return files, np.array(labels, dtype=np.int64)
