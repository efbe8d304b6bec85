"""Detections drawn into their image: masks, boxes, class names and scores.

Legend: N detections, H height, W width of the image in pixels.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from cached_transformers.extras import require

MASK_THRESHOLD, MASK_OPACITY = 0.5, 0.45


def draw_detections(pixels_HWC: np.ndarray, found: Mapping[str, Tensor], names: Sequence[str]) -> Any:
    """The image as a PIL.Image with the detections in it, the best on top; each class has a colour of its own.

    Args:
        pixels_HWC: uint8 (H, W, 3).
        found: boxes (N, 4) as corners in pixels, labels (N,), scores (N,), and masks (N, 1, H, W) as probabilities
            where there are any.
        names: of the classes.
    """
    image_module, draw_module = require("PIL.Image", extra="vision"), require("PIL.ImageDraw", extra="vision")
    font_module = require("PIL.ImageFont", extra="vision")
    height, width = pixels_HWC.shape[:2]
    order = found["scores"].argsort().tolist()
    canvas = pixels_HWC.astype(np.float32)
    for index in order if "masks" in found else ():
        tint = np.array(class_colour(int(found["labels"][index])), dtype=np.float32)
        inside_HW = (found["masks"][index, 0] > MASK_THRESHOLD).cpu().numpy()
        canvas[inside_HW] = (1 - MASK_OPACITY) * canvas[inside_HW] + MASK_OPACITY * tint
        canvas[_edge(inside_HW)] = tint
    picture = image_module.fromarray(np.rint(canvas).astype(np.uint8))
    draw = draw_module.Draw(picture)
    size = max(10, min(height, width) // 30)
    font, line = font_module.load_default(size), max(1, min(height, width) // 200)
    for index in order:
        label = int(found["labels"][index])
        corners, colour = found["boxes"][index].tolist(), class_colour(label)
        draw.rectangle(corners, outline=colour, width=line)
        text = f"{names[label]} {float(found['scores'][index]):.2f}"
        _write(draw, text, corners, colour, font, (width, height))
    return picture


def class_colour(label: int) -> tuple[int, int, int]:
    """A bright colour; those of neighbouring classes lie a golden angle apart."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1.0, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def _edge(inside_HW: np.ndarray) -> np.ndarray:
    """Places of a mask with a neighbour outside it."""
    padded = np.pad(inside_HW, 1)
    core = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    edge: np.ndarray = inside_HW & ~core
    return edge


def _write(
    draw: Any, text: str, corners: Sequence[float], colour: tuple[int, int, int], font: Any, size: tuple[int, int]
) -> None:
    """The text on a ground of the colour: above the upper left corner, or below it where there is no room."""
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    wide, high = right - left + 4, bottom - top + 4
    x = min(max(corners[0], 0), max(size[0] - wide, 0))
    y = corners[1] - high if corners[1] >= high else min(max(corners[1], 0), max(size[1] - high, 0))
    draw.rectangle((x, y, x + wide, y + high), fill=colour)
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
    draw.text((x + 2 - left, y + 2 - top), text, fill=(0, 0, 0) if dark else (255, 255, 255), font=font)
