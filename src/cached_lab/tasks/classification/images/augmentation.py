"""Random changes to training images: timm's transforms under the names of a recipe.

Papers: random resized crops (Szegedy et al., arXiv:1409.4842), AutoAugment (arXiv:1805.09501), RandAugment
(arXiv:1909.13719), random erasing (arXiv:1708.04896), combined as in DeiT (arXiv:2012.12877). The transforms of
`timm.data.create_transform` draw from the generators of Python, numpy and torch, which `training/loader.py` seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cached_transformers.annotations import check_type, hints_of
from cached_transformers.extras import require
from cached_transformers.registry import unknown_name


@dataclass(frozen=True)
class Augmentation:
    """Random changes to a training image (`data.augmentation` of a recipe); the defaults crop and mirror.

    Attributes:
        scale: range of the area of a random part, which is resized to the input size, as a share of the image's.
        flip: probability of mirroring left and right.
        auto_augment: timm's description, such as "rand-m9-mstd0.5-inc1" (RandAugment) or "original" (AutoAugment).
        interpolation: of the crop; "random" takes bicubic or bilinear for each image.
        erase: probability of random erasing. erase_mode: the fill: "pixel" (noise), "const" (the mean) or "rand" (one
            colour).
    """

    scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5
    auto_augment: str | None = None
    interpolation: Literal["bicubic", "bilinear", "nearest", "random"] = "bicubic"
    erase: float = 0.0
    erase_mode: Literal["pixel", "const", "rand"] = "pixel"

    def __post_init__(self) -> None:
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.augmentation.{name}={getattr(self, name)} is a probability: 0..1")
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"data.augmentation.scale={list(self.scale)} must be two shares, 0 < low <= high <= 1")


def training_transform(options: Mapping[str, Any], size: int, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Build a function from a PIL image to a normalised tensor (C, size, size).

    Args:
        options: of `Augmentation`, as in a recipe.

    Raises:
        ValueError: an unknown option (with a suggestion), a value out of range or of another type, an `auto_augment`
            that timm does not know, or a change of colours for grey images.
    """
    hints = hints_of(Augmentation)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in options.items():
        if key not in hints:
            raise ValueError(unknown_name("option of data.augmentation", key, list(hints)))
        value = check_type(f"data.augmentation.{key}", value, hints[key])
        values[key] = tuple(map(float, value)) if isinstance(value, list | tuple) else value
    chosen = Augmentation(**values)
    if len(mean) == 1 and chosen.auto_augment:
        raise ValueError("data.augmentation.auto_augment needs colours; leave it out with channels=1")
    try:
        return require("timm.data", extra="vision").create_transform(
            size,
            is_training=True,
            scale=chosen.scale,
            hflip=chosen.flip,
            color_jitter=None,
            auto_augment=chosen.auto_augment,
            interpolation=chosen.interpolation,
            mean=tuple(mean),
            std=tuple(std),
            re_prob=chosen.erase,
            re_mode=chosen.erase_mode,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(
            f"data.augmentation.auto_augment={chosen.auto_augment!r} is none of timm's descriptions ({error!r}); "
            "take rand-m9-mstd0.5-inc1, augmix-m3-w3, original, v0 or 3a"
        ) from error
