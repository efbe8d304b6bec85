"""Files of a COCO-format data set, in folders or zip archives, and pixels from their bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cached_lab.data.archives import Listing
from cached_lab.data.image_files import BadFile, open_picture


def places(root: Path) -> list[Listing]:
    """Return the folder or archive `root`, and the zip archives in a folder (FileNotFoundError: there is none)."""
    return [Listing(root), *map(Listing, sorted(root.glob("*.zip")))]


def read_annotations(found: Sequence[Listing], name: str) -> tuple[dict[str, Any], str]:
    """Return the annotations called `name` ("train2017") and their path.

    Candidates: annotations/instances_NAME.json, annotations/NAME.json and NAME/_annotations.coco.json.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not JSON, or not the annotations of a detection data set.
    """
    wanted = [f"annotations/instances_{name}.json", f"annotations/{name}.json", f"{name}/_annotations.coco.json"]
    place, file = next(((place, file) for place in found for file in wanted if file in place), (None, ""))
    if place is None:
        raise FileNotFoundError(
            f"{found[0].root} holds no annotations for {name!r}: looked for {', '.join(wanted)}, also in its zip "
            "archives; set data.train, data.validation and data.test to the names that the files have"
        )
    label = str(place.root / file)
    try:
        tree = json.loads(place.read(file))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{label} is not JSON: {error}; is it complete?") from error
    if not isinstance(tree, dict) or not all(isinstance(tree.get(k), list) for k in ("images", "annotations")):
        raise ValueError(f"{label} has no lists images and annotations: it is not of a detection data set")
    return tree, label


def find_images(found: Sequence[Listing], name: str, files: Sequence[str]) -> Listing:
    """Return the folder or archive of the images called `name`, by the first that holds any of `files`.

    Candidates: NAME/, images/NAME/, images/ and the root.

    Raises:
        FileNotFoundError: there is none.
    """
    for place in found:
        for folder in (name, f"images/{name}", "images", ""):
            inside = place.inside(folder)
            if any(file in inside for file in files):
                return inside
    raise FileNotFoundError(
        f"{found[0].root} holds none of the {len(files)} images of {name!r} (such as {files[:1]}): expected them in "
        f"{name}/, images/{name}/, images/ or beside the annotations, in folders or zip archives"
    )


def decode_rgb(content: bytes, label: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """Decode an image file of any kind that `open_picture` takes to pixels uint8 (height, width, 3).

    Args:
        size: (height, width) of annotations, which are measured in the image as stored; without it, the image is turned
            upright by its EXIF entry.

    Raises:
        BadFile: it cannot be decoded, or has another size.
    """
    pixels_HWC = np.array(open_picture(content, label, upright=size is None))
    if size not in (None, pixels_HWC.shape[:2]):
        raise BadFile(label, f"it has {pixels_HWC.shape[:2]} (height, width) pixels, its annotations say {size}")
    return pixels_HWC
