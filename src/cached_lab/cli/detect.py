"""`cached detect`: draw boxes and masks that a trained detector finds in images, and write them as JSON.

For each image FOLDER/NAME.png holds the drawing and FOLDER/NAME.json the detections: boxes as (x, y, width, height) in
pixels of the image, and masks as run-length codes, both as in COCO's format of results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .arguments import run_arguments

ARGUMENTS = (
    *run_arguments(" of a detector"),
    ("images IMAGE+", Path, "image files"),
    ("--out FOLDER", Path, "folder of the drawings (default: RUN/detections)"),
    ("--threshold S", 0.5, "lowest score that counts"),
)


def run(arguments: argparse.Namespace) -> int:
    """Write a drawing and a JSON file for each image; return 2, after all other images, if one cannot be read."""
    from cached_lab.data.image_files import BadFile
    from cached_lab.experiments.load import load_run, read_categories
    from cached_lab.tasks.detection.coco_files import decode_rgb
    from cached_lab.tasks.detection.detect import as_record, detect, draw_detections
    from cached_lab.training.distributed import pick_device

    if not 0 <= arguments.threshold <= 1:
        raise ValueError(f"--threshold {arguments.threshold} must lie in 0..1; it is the lowest score that counts")
    if absent := [str(path) for path in arguments.images if not path.is_file()]:
        raise FileNotFoundError(f"{', '.join(absent)}: no such file; give image files (a shell expands folder/*.jpg)")
    categories = read_categories(arguments.folder)
    device = pick_device(arguments.device)
    _, model, step = load_run(arguments.folder, arguments.checkpoint)
    model.to(device).eval()
    folder = arguments.out or arguments.folder / "detections"
    folder.mkdir(parents=True, exist_ok=True)
    origin = {"run": str(arguments.folder), "step": step, "threshold": arguments.threshold}
    failed, taken = 0, set[str]()
    for path in arguments.images:
        try:
            pixels_HWC = decode_rgb(path.read_bytes(), str(path))
        except BadFile as error:
            print(f"error: {error}", file=sys.stderr)
            failed += 1
            continue
        found = detect(model, pixels_HWC, arguments.threshold, device)
        numbered = (f"{path.stem}_{number}" if number > 1 else path.stem for number in range(1, len(taken) + 2))
        name = next(name for name in numbered if name not in taken)
        taken.add(name)
        target = folder / name
        draw_detections(pixels_HWC, found, [record["name"] for record in categories]).save(f"{target}.png")
        record = {"image": str(path), **origin, **as_record(found, pixels_HWC.shape[:2], categories)}
        Path(f"{target}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        listed = ", ".join(f"{d['class']} {d['score']:.2f}" for d in record["detections"][:8])
        print(f"{path}: {len(record['detections'])} objects ({listed or 'none'}) -> {target}.png")
    return 2 if failed else 0
