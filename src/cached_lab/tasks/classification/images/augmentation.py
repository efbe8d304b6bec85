"""Random changes to training images, and the view that evaluation takes: timm's transforms under names of a recipe.

Papers: random resized crops (Szegedy et al., arXiv:1409.4842), AutoAugment (arXiv:1805.09501), RandAugment
(arXiv:1909.13719), random erasing (arXiv:1708.04896), put together as in DeiT (arXiv:2012.12877). The work is done by
`timm.data.create_transform`. It draws from the generators of Python, numpy and torch; whoever loads the item seeds
them, see `training/loader.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cached_transformers.annotations import check_type
from cached_transformers.extras import require
from cached_transformers.registry import unknown_name

INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "random")


@dataclass(frozen=True)
class Augmentation:
    """How a training image is changed (`data.augmentation` of a recipe). The defaults crop and mirror, no more.

    Attributes:
        crop: "resized", a random part of the image resized to the input size; or "padded", the whole image at that
            size, shifted by up to `padding` pixels (for images as small as the input).
        scale, aspect: range of the part's area, as a share of the image's, and of its width over its height.
        padding: pixels, for padded crops.
        flip: probability of mirroring left and right.
        color_jitter: strength of changes of brightness, contrast and saturation; not used beside `auto_augment`.
        auto_augment: timm's description, such as "rand-m9-mstd0.5-inc1" (RandAugment) or "original" (AutoAugment).
        interpolation: "bicubic", "bilinear", "nearest", or "random" (one of the first two for each image).
        erase: probability of random erasing. erase_mode: what is put there: "pixel" (noise), "const" (black after
            normalisation: the mean) or "rand" (one colour). erase_count: most places.
    """

    crop: Literal["resized", "padded"] = "resized"
    scale: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (0.75, 4 / 3)
    padding: int = 4
    flip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    interpolation: str = "bicubic"
    erase: float = 0.0
    erase_mode: Literal["pixel", "const", "rand"] = "pixel"
    erase_count: int = 1

    def __post_init__(self) -> None:
        _one_of("crop", self.crop, ("resized", "padded"))
        _one_of("interpolation", self.interpolation, INTERPOLATIONS)
        _one_of("erase_mode", self.erase_mode, ("pixel", "const", "rand"))
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.augmentation.{name}={getattr(self, name)} is a probability: 0..1")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"data.augmentation.scale={list(self.scale)} must be two shares, 0 < low <= high <= 1")
        if not 0 < self.aspect[0] <= self.aspect[1]:
            raise ValueError(f"data.augmentation.aspect={list(self.aspect)} must be two numbers, 0 < low <= high")
        if self.color_jitter < 0 or self.padding < 0 or self.erase_count < 1:
            raise ValueError(
                f"data.augmentation: color_jitter={self.color_jitter} and padding={self.padding} must not be negative, "
                f"and erase_count={self.erase_count} must be at least 1"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Augmentation:
        """From the mapping in a recipe.

        Raises:
            ValueError: an unknown key (with a suggestion), or a value out of range or of another type.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, value in options.items():
            if key not in defaults:
                raise ValueError(unknown_name("option of data.augmentation", key, list(defaults)))
            path, default = f"data.augmentation.{key}", defaults[key]
            if isinstance(default, tuple):
                numbers = isinstance(value, (list, tuple)) and all(isinstance(x, (int, float)) for x in value)
                if not numbers or len(value) != 2:
                    raise ValueError(f"{path}={value!r} must be a list of two numbers")
                values[key] = (float(value[0]), float(value[1]))
            elif value is not None or default is not None:
                values[key] = check_type(path, value, str if default is None else type(default))
        return cls(**values)

    def transform(self, size: int, mean: Sequence[float], std: Sequence[float]) -> Any:
        """A function from a PIL image to a normalised tensor (C, size, size).

        Raises:
            ValueError: `auto_augment` describes nothing that timm knows, or the images are grey.
        """
        data = require("timm.data", extra="vision")
        if len(mean) == 1 and (self.auto_augment or self.color_jitter):
            raise ValueError(
                "data.augmentation: auto_augment and color_jitter change colours; leave them out with channels=1"
            )
        try:
            built = data.create_transform(
                size,
                is_training=True,
                scale=tuple(self.scale),
                ratio=tuple(self.aspect),
                hflip=self.flip,
                color_jitter=self.color_jitter or None,
                auto_augment=self.auto_augment,
                interpolation=self.interpolation,
                mean=tuple(mean),
                std=tuple(std),
                re_prob=self.erase,
                re_mode=self.erase_mode,
                re_count=self.erase_count,
            )
        except (AssertionError, KeyError, ValueError) as error:
            raise ValueError(
                f"data.augmentation.auto_augment={self.auto_augment!r} is none of timm's descriptions ({error!r}); "
                "take rand-m9-mstd0.5-inc1, augmix-m3-w3, original, v0 or 3a"
            ) from error
        if self.crop == "padded":
            built.transforms[0:1] = _padded_crop(size, self.padding)
        return built


def _padded_crop(size: int, padding: int) -> list[Any]:
    """Stands in the place of timm's resized crop: the central square at `size`, shifted; black moves in."""
    transforms = require("torchvision.transforms", extra="vision")
    return [_CentralSquare(size), transforms.RandomCrop(size, padding=padding)]


@dataclass(frozen=True)
class _CentralSquare:
    size: int

    def __call__(self, picture: Any) -> Any:
        return central_square(picture, self.size)


def central_square(picture: Any, size: int) -> Any:
    """The largest central square of a PIL image at `size` x `size` (bicubic)."""
    if picture.size == (size, size):
        return picture
    operations, image_module = require("PIL.ImageOps", extra="vision"), require("PIL.Image", extra="vision")
    return operations.fit(picture, (size, size), image_module.Resampling.BICUBIC)


def evaluation_view(
    size: int, crop_ratio: float, interpolation: str, mean: Sequence[float], std: Sequence[float]
) -> Any:
    """A function from a PIL image to pixels uint8 (C, size, size): timm's evaluation transform, not normalised.

    The shorter side is resized to `size / crop_ratio` and the centre cut out.
    """
    data = require("timm.data", extra="vision")
    return data.create_transform(
        size,
        is_training=False,
        crop_pct=crop_ratio,
        interpolation=interpolation,
        mean=tuple(mean),
        std=tuple(std),
        normalize=False,
    )


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(unknown_name(f"data.augmentation.{name}", value, list(known)))
