"""What a trained detector finds in one image, as tensors and as COCO's format of results has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .scores import to_results


@torch.no_grad()
def detect(model: nn.Module, pixels_HWC: np.ndarray, threshold: float, device: torch.device) -> dict[str, Tensor]:
    """Detections of one image, uint8 (H, W, 3), with scores of at least `threshold`, on the CPU."""
    image_CHW = torch.from_numpy(pixels_HWC).permute(2, 0, 1).float() / 255
    (found,) = model([image_CHW.to(device)])
    keep = found["scores"] >= threshold
    return {key: value[keep].cpu() for key, value in found.items()}


def as_record(found: dict[str, Tensor], size: tuple[int, ...], categories: list[dict[str, Any]]) -> dict[str, Any]:
    """Detections as plain numbers and texts: size of the image, and an entry each."""
    results = to_results(found, 0, [record["id"] for record in categories])
    entries = []
    for index, box in enumerate(results["box"]):
        name = categories[int(found["labels"][index])]["name"]
        entry = {"class": name, **{key: box[key] for key in ("category_id", "score", "bbox")}}
        if "mask" in results:
            entry["segmentation"] = results["mask"][index]["segmentation"]
        entries.append(entry)
    return {"height": size[0], "width": size[1], "detections": entries}
