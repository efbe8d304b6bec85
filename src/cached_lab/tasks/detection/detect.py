"""Detections of one image: as tensors, in COCO's format of results, and as a drawing.

Legend: N detections, H height, W width of the image in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cached_transformers.extras import require

from .scores import MASK_THRESHOLD, to_results

MASK_OPACITY = 0.45


@torch.no_grad()
def detect(model: nn.Module, pixels_HWC: np.ndarray, threshold: float, device: torch.device) -> dict[str, Tensor]:
    """Return detections of one image, uint8 (H, W, 3), with scores of at least `threshold`, on the CPU."""
    image_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1).float() / 255
    (found,) = model([image_CHW.to(device)])
    keep = found["scores"] >= threshold
    return {key: value[keep].cpu() for key, value in found.items()}


def as_record(found: dict[str, Tensor], size: tuple[int, ...], categories: list[dict[str, Any]]) -> dict[str, Any]:
    """Return detections as plain numbers and texts: size of the image, and an entry each."""
    results = to_results(found, 0, [record["id"] for record in categories])
    entries = []
    for index, box in enumerate(results["box"]):
        name = categories[int(found["labels"][index])]["name"]
        entry = {"class": name, **{key: box[key] for key in ("category_id", "score", "bbox")}}
        if "mask" in results:
            entry["segmentation"] = results["mask"][index]["segmentation"]
        entries.append(entry)
    return {"height": size[0], "width": size[1], "detections": entries}


def draw_detections(pixels_HWC: np.ndarray, found: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """Draw masks, boxes, class names and scores into the image.

    Args:
        pixels_HWC: uint8 (H, W, 3).
        found: boxes (N, 4) as corners in pixels, labels (N,), scores (N,), and masks (N, 1, H, W) as probabilities, if
            there are any.
        names: of the classes.

    Returns:
        A PIL.Image.
    """
    draw = require("torchvision.utils", extra="vision")
    labels = found["labels"].tolist()
    image_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous()
    if labels and "masks" in found:
        inside_NHW = found["masks"][:, 0] > MASK_THRESHOLD
        image_CHW = draw.draw_segmentation_masks(image_CHW, inside_NHW, MASK_OPACITY)
    if labels:
        texts = [f"{names[label]} {score:.2f}" for label, score in zip(labels, found["scores"].tolist(), strict=True)]
        image_CHW = draw.draw_bounding_boxes(image_CHW, found["boxes"], texts)
    return require("PIL.Image", extra="vision").fromarray(image_CHW.permute(1, 2, 0).numpy())
