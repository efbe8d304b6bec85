"""Where annotations and images of a COCO-format data set lie: folders or archives, and pixels from their bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cached_lab.data.archives import Listing
from cached_lab.data.image_files import BadFile, open_picture


def read_annotations(root: Path, name: str) -> tuple[dict[str, Any], str]:
    """The annotations called `name` ("train2017"), and where they were found.

    Looked for below `root`: annotations/instances_NAME.json, instances_NAME.json, annotations/NAME.json, NAME.json and
    NAME/_annotations.coco.json; then members of these names in the zip archives there (or in `root` itself, when that
    is one).

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not JSON, or not the annotations of a detection data set.
    """
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; expected a folder or zip archive with COCO annotations")
    wanted = [f"annotations/instances_{name}.json", f"instances_{name}.json", f"annotations/{name}.json"]
    wanted += [f"{name}.json", f"{name}/_annotations.coco.json"]
    for relative in wanted:
        if (root / relative).is_file():
            return _parsed((root / relative).read_bytes(), str(root / relative)), str(root / relative)
    for archive in _archives(root):
        for relative in wanted:
            if relative in archive:
                label = str(archive.root / relative)
                return _parsed(archive.read(relative), label), label
    raise FileNotFoundError(
        f"{root} holds no annotations for {name!r}: looked for {', '.join(wanted)}, also in its zip archives; "
        "set data.train, data.validation and data.test to the names that the files have"
    )


def find_images(root: Path, name: str, examples: Iterable[str]) -> Listing:
    """The files of the images called `name`: the first folder or archive that holds at least one of `examples`.

    Looked for: the folders NAME, images/NAME, images and `root` itself, then the same places in zip archives.

    Raises:
        FileNotFoundError: there is none.
    """
    examples = list(examples)
    places = (name, f"images/{name}", "images", "")
    in_folders = (Listing(root / place) for place in places if (root / place).is_dir())
    in_archives = (archive.inside(place) for archive in _archives(root) for place in places)
    for files in itertools.chain(in_folders, in_archives):
        if any(example in files for example in examples):
            return files
    raise FileNotFoundError(
        f"{root} holds none of the {len(examples)} images of {name!r} (such as {examples[0] if examples else 'none'}): "
        f"expected them in {name}/, images/{name}/, images/ or beside the annotations, in folders or zip archives"
    )


def decode_rgb(content: bytes, label: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """Pixels uint8 (height, width, 3) of an image file of any kind that `open_picture` takes.

    With `size` (height, width) the image is taken as stored, or upright by its EXIF entry if only then it has that
    size; without, upright.

    Raises:
        BadFile: it cannot be decoded, or has another size.
    """
    picture = open_picture(content, label, stored_size=None if size is None else (size[1], size[0]))
    if size is not None and picture.size != (size[1], size[0]):
        wide, high = picture.size
        raise BadFile(label, f"it has {wide} x {high} pixels, its annotations say {size[1]} x {size[0]}")
    return np.array(picture)


def _archives(root: Path) -> Iterator[Listing]:
    return map(Listing, [root] if root.is_file() else sorted(root.glob("*.zip")))


def _parsed(content: bytes, label: str) -> dict[str, Any]:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{label} is not JSON: {error}; is it complete?") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{label} must hold a JSON object, not {type(tree).__name__}")
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(tree.get(key), list)]
    if missing:
        raise ValueError(f"{label} has no list {', '.join(missing)}: it is not the annotations of a detection data set")
    return tree
