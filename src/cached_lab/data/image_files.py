"""Image files to pictures: every kind that turns up in real collections, and an error that names the file otherwise.

Grey, palette, CMYK, 16-bit and transparent images become eight-bit colour (or grey) of the same size. Sixteen-bit grey
is scaled to eight bits: Pillow's own conversion cuts it off at 255, which leaves a white picture.
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
_SIXTEEN = ("I", "I;16", "I;16L", "I;16B", "I;16N")


class BadFile(ValueError):
    """An item whose file cannot be used. Loading goes on without it where `bad_files: skip` says so.

    Attributes:
        file: its name. reason: what is wrong.
    """

    def __init__(self, file: object, reason: object) -> None:
        self.file, self.reason = str(file), " ".join(str(reason).split())
        message = f"{self.file} cannot be used as an image: {self.reason}"
        super().__init__(f"{message}; remove or replace the file, or set data.bad_files=skip")

    def __reduce__(self) -> tuple[type[BadFile], tuple[str, str]]:  # so that it comes whole from a loading process
        return BadFile, (self.file, self.reason)


def open_picture(content: bytes, name: object, channels: int = 3, *, stored_size: tuple[int, int] | None = None) -> Any:
    """A PIL image, upright, in mode RGB (`channels` 3) or L (1), from the bytes of an image file.

    Args:
        content: the whole file. name: what errors call it.
        stored_size: (width, height); a picture that is stored with this size is not turned, whatever its EXIF entry
            says, since somebody measured it so.

    Raises:
        BadFile: empty, truncated, of unknown format, or of a kind that has no defined range of brightness.
    """
    image_module, operations = require("PIL.Image", extra="vision"), require("PIL.ImageOps", extra="vision")
    if not content:
        raise BadFile(name, "the file is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            # Damaged EXIF and odd palettes are no reason to speak: what matters is whether there are pixels.
            warnings.simplefilter("ignore")
            with image_module.open(io.BytesIO(content)) as opened:
                opened.load()
                picture = opened if opened.size == stored_size else operations.exif_transpose(opened)
                return _eight_bits(picture, image_module).convert("RGB" if channels == 3 else "L")
    except image_module.UnidentifiedImageError as error:
        raise BadFile(name, "it is of no image format that Pillow knows") from error
    # Pillow's decoders raise all of these for damaged files.
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, KeyError, IndexError) as error:
        raise BadFile(name, error) from error
    except image_module.DecompressionBombError as error:
        raise BadFile(name, error) from error


def _eight_bits(picture: Any, image_module: Any) -> Any:
    """Sixteen-bit grey as eight bits; other modes as they are."""
    if picture.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is not known; save it with 8 or 16 bits")
    if picture.mode not in _SIXTEEN:
        return picture
    values = np.asarray(picture).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its pixels reach from {values.min()} to {values.max()}; 16 bits hold 0..65535")
    return image_module.fromarray(np.round(values / 257).astype(np.uint8))
