"""Mixup and CutMix of a training batch, through timm, the same for any number of processes and pieces.

Papers: mixup (Zhang et al., arXiv:1710.09412), CutMix (Yun et al., arXiv:1905.04899), by `timm.data.Mixup` with one
mixing weight per batch, as in DeiT (arXiv:2012.12877) and PVT (arXiv:2102.12122).

timm mixes row i with row B - 1 - i. Here consecutive rows of the data order, 2 i and 2 i + 1, are mixed, so that the
pairs do not depend on the division of a batch. The weight is a function of (seed, step), so that a resumed run repeats
it.

Legend: B rows, K classes, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cached_lab.training.loader import seeded
from cached_lab.training.settings import TrainingConfig
from cached_transformers.extras import require

_STREAM = 0x4D49  # seed word other than those of the data order, which is seeded by (seed, epoch)


class Mixing:
    """Turn a batch of images and classes into mixed images and shares of classes.

    Args:
        settings: `mixup`, `cutmix`, `seed`.
        classes: K.
    """

    def __init__(self, settings: TrainingConfig, classes: int) -> None:
        self.seed = settings.seed
        # The loss smooths labels: smoothing before and after a mean of labels are the same.
        self._mix = require("timm.data", extra="vision").Mixup(
            mixup_alpha=settings.mixup,
            cutmix_alpha=settings.cutmix,
            mode="batch",
            label_smoothing=0.0,
            num_classes=classes,
        )

    def __call__(self, batch: Any, device: torch.device, step: int) -> Any:
        """The batch of a step on `device`, its targets as shares (B, K) of classes (ValueError: it has no images)."""
        if batch.inputs.dim() != 4 or not batch.inputs.is_floating_point():
            raise ValueError("training.mixup and training.cutmix mix images; set both to 0 for other data")
        inputs_BCHW = batch.inputs.to(device, non_blocking=True)
        order_B = paired(len(inputs_BCHW)).to(device)
        targets_B = batch.targets.to(device, non_blocking=True)
        with seeded(self.seed, step, _STREAM):
            mixed_BCHW, shares_BK = self._mix(inputs_BCHW[order_B], targets_B[order_B])
        return batch._replace(inputs=mixed_BCHW, targets=shares_BK)


def paired(rows: int) -> Tensor:
    """An order in which rows 2 i and 2 i + 1 are equally far from the two ends: 0, 2, 4, ..., 5, 3, 1."""
    order = torch.arange(rows)
    return torch.cat([order[0::2], order[1::2].flip(0)])


def make_mixing(settings: TrainingConfig, classes: int, processes: int) -> Mixing | None:
    """The mixing of the settings; None when both kinds are off (ValueError: a piece has an odd number of rows)."""
    if not settings.mixup and not settings.cutmix:
        return None
    rows = settings.batch_size // (processes * settings.accumulate)
    if rows % 2:
        raise ValueError(
            f"training.mixup and training.cutmix mix pairs of rows: training.batch_size={settings.batch_size} over "
            f"{processes} processes x training.accumulate={settings.accumulate} leaves {rows} rows; make it even"
        )
    return Mixing(settings, classes)
