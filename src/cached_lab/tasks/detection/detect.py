"""Detections of one image: as tensors, in COCO's format of results, and as a drawing.

Legend: N detections, H height, W width of the image in pixels.
"""

from __future__ import annotations

import colorsys
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
    """Draw masks, boxes, class names and scores into the image, best scores on top, one colour per class.

    Args:
        pixels_HWC: uint8 (H, W, 3).
        found: boxes (N, 4) as corners in pixels, labels (N,), scores (N,), and masks (N, 1, H, W) as probabilities, if
            there are any.
        names: of the classes.

    Returns:
        A PIL.Image.
    """
    image_module, draw_module, font_module = (
        require(f"PIL.{name}", extra="vision") for name in ("Image", "ImageDraw", "ImageFont")
    )
    height, width = pixels_HWC.shape[:2]
    order = found["scores"].argsort().tolist()
    canvas = pixels_HWC.astype(np.float32)
    for index in order if "masks" in found else ():
        tint = np.array(class_colour(int(found["labels"][index])), dtype=np.float32)
        inside_HW = (found["masks"][index, 0] > MASK_THRESHOLD).cpu().numpy()
        canvas[inside_HW] = (1 - MASK_OPACITY) * canvas[inside_HW] + MASK_OPACITY * tint
        around = np.pad(inside_HW, 1)
        core_HW = around[:-2, 1:-1] & around[2:, 1:-1] & around[1:-1, :-2] & around[1:-1, 2:]
        canvas[inside_HW & ~core_HW] = tint
    picture = image_module.fromarray(np.rint(canvas).astype(np.uint8))
    draw = draw_module.Draw(picture)
    font, line = font_module.load_default(max(10, min(height, width) // 30)), max(1, min(height, width) // 200)
    for index in order:
        label, (x1, y1, x2, y2) = int(found["labels"][index]), found["boxes"][index].tolist()
        colour = class_colour(label)
        draw.rectangle((x1, y1, x2, y2), outline=colour, width=line)
        text = f"{names[label]} {float(found['scores'][index]):.2f}"
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        wide, high = right - left + 4, bottom - top + 4
        x = min(max(x1, 0), max(width - wide, 0))
        y = y1 - high if y1 >= high else min(max(y1, 0), max(height - high, 0))  # above the box, if there is room
        draw.rectangle((x, y, x + wide, y + high), fill=colour)
        dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
        draw.text((x + 2 - left, y + 2 - top), text, fill=(0, 0, 0) if dark else (255, 255, 255), font=font)
    return picture


def class_colour(label: int) -> tuple[int, int, int]:
    """Return a bright colour; hues of neighbouring classes differ by a golden angle."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1.0, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)
