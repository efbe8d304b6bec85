"""Image files of any common kind to pictures; an error names the file.

Grey, palette, CMYK, 16-bit and transparent images become eight-bit colour (or grey) of the same size. Sixteen-bit grey
is scaled to eight bits; Pillow's own conversion clips it at 255, which gives a white picture.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np

from cached_transformers.extras import require

SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, KeyError, IndexError)
"""Errors of Pillow's decoders."""


class BadFile(ValueError):
    """An item whose file cannot be used; `bad_files: skip` leaves it out.

    Attributes:
        file: its name. reason: the error.
    """

    def __init__(self, file: object, reason: object) -> None:
        self.file, self.reason = str(file), " ".join(str(reason).split())
        message = f"{self.file} cannot be used as an image: {self.reason}"
        super().__init__(f"{message}; remove or replace the file, or set data.bad_files=skip")

    def __reduce__(self) -> tuple[type[BadFile], tuple[str, str]]:  # pickled by a loading process
        return BadFile, (self.file, self.reason)


def open_picture(content: bytes, name: object, channels: int = 3, *, upright: bool = True) -> Any:
    """Decode an image file to a PIL image, in mode RGB (`channels` 3) or L (1).

    Args:
        content: the whole file. name: of the file, for errors.
        upright: turn the picture as its EXIF entry says.

    Raises:
        BadFile: empty, truncated, of unknown format, or without a defined range of brightness.
    """
    image_module, operations = require("PIL.Image", extra="vision"), require("PIL.ImageOps", extra="vision")
    if not content:
        raise BadFile(name, "the file is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged EXIF and odd palettes do not matter while the pixels are there
            with image_module.open(io.BytesIO(content)) as opened:
                opened.load()
                picture = operations.exif_transpose(opened) if upright else opened
                if picture.mode == "F":
                    raise ValueError("its pixels are floating-point numbers, whose range is not known; save bytes")
                if picture.mode in ("I", "I;16", "I;16L", "I;16B", "I;16N"):
                    values = np.asarray(picture).astype(np.int64)
                    if values.min() < 0 or values.max() > 65535:
                        raise ValueError(
                            f"its pixels reach from {values.min()} to {values.max()}; 16 bits hold 0..65535"
                        )
                    picture = image_module.fromarray(np.round(values / 257).astype(np.uint8))
                return picture.convert("RGB" if channels == 3 else "L")
    except image_module.UnidentifiedImageError as error:
        raise BadFile(name, "it is of no image format that Pillow knows") from error
    except (*DAMAGE, image_module.DecompressionBombError) as error:
        raise BadFile(name, error) from error
