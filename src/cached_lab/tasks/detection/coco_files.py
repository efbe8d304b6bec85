"""Files of a COCO-format data set, in folders or archives, and pixels from their bytes."""

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
    """Return the annotations called `name` ("train2017") and their path.

    Candidates below `root`: annotations/instances_NAME.json, instances_NAME.json, annotations/NAME.json, NAME.json and
    NAME/_annotations.coco.json; then members of these names in the zip archives there (or in `root` itself, if it is
    one).

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not JSON, or not the annotations of a detection data set.
    """
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; expected a folder or zip archive with COCO annotations")
    wanted = [f"annotations/instances_{name}.json", f"instances_{name}.json", f"annotations/{name}.json"]
    wanted += [f"{name}.json", f"{name}/_annotations.coco.json"]
    in_folder = ((root / path, (root / path).read_bytes) for path in wanted if (root / path).is_file())
    in_archives = (
        (archive.root / path, lambda archive=archive, path=path: archive.read(path))
        for archive in _archives(root)
        for path in wanted
        if path in archive
    )
    label, read = next(itertools.chain(in_folder, in_archives), (None, None))
    if label is None or read is None:
        raise FileNotFoundError(
            f"{root} holds no annotations for {name!r}: looked for {', '.join(wanted)}, also in its zip archives; "
            "set data.train, data.validation and data.test to the names that the files have"
        )
    try:
        tree = json.loads(read())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{label} is not JSON: {error}; is it complete?") from error
    found = tree if isinstance(tree, dict) else {}
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(found.get(key), list)]
    if missing:
        raise ValueError(f"{label} has no list {', '.join(missing)}: it is not the annotations of a detection data set")
    return found, str(label)


def find_images(root: Path, name: str, examples: Iterable[str]) -> Listing:
    """Return the files of the images called `name`: the first folder or archive with at least one of `examples`.

    Candidates: the folders NAME, images/NAME, images and `root` itself, then the same places in zip archives.

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
    """Decode an image file of any kind that `open_picture` takes to pixels uint8 (height, width, 3).

    The image is turned upright by its EXIF entry, unless it already has the given `size` (height, width) as stored.

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
