"""Average precision by pycocotools, and its format of results.

Paper: Lin et al., "Microsoft COCO" (arXiv:1405.0312); AP is the mean over IoU thresholds .50, .55, ..., .95 and over
classes of the area under the precision-recall curve, with at most 100 detections per image. Detections that overlap
crowd regions are ignored. Small, medium and large areas are below 32^2, up to 96^2, and above, in original pixels.

Legend: N detections of one image, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import numpy as np
from torch import Tensor

from cached_transformers.extras import require

from .coco_annotations import as_coco

PARTS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
"""The first six of COCOeval's statistics."""
MASK_THRESHOLD = 0.5

Results = dict[str, list[dict[str, Any]]]
"""By kind ("box", "mask") entries in COCO's format of results."""


def to_results(found: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int]) -> Results:
    """Return COCO results of one image.

    Args:
        found: boxes (N, 4) as corners in pixels, scores (N,), labels (N,) as class indices, and masks (N, 1, H, W) as
            probabilities, if there are any.
        category_ids: category of each class.
    """
    boxes_N4 = found["boxes"].detach().float().cpu().double()
    sides_N4 = boxes_N4.clone()
    sides_N4[:, 2:] -= boxes_N4[:, :2]
    facts = [
        {"image_id": image_id, "category_id": category_ids[label], "score": score}
        for label, score in zip(found["labels"].tolist(), found["scores"].tolist(), strict=True)
    ]
    results: Results = {"box": [{**f, "bbox": box} for f, box in zip(facts, sides_N4.tolist(), strict=True)]}
    if "masks" in found:
        codes = encode_masks(found["masks"])
        results["mask"] = [{**f, "segmentation": code} for f, code in zip(facts, codes, strict=True)]
    return results


def encode_masks(masks_N1HW: Tensor) -> list[dict[str, Any]]:
    """Return compressed run-length codes (size, counts as text) of probabilities above 0.5."""
    masks_NHW = (masks_N1HW[:, 0] > MASK_THRESHOLD).cpu().numpy().astype(np.uint8)
    codes = require("pycocotools.mask", extra="detection").encode(np.asfortranarray(masks_NHW.transpose(1, 2, 0)))
    return [{"size": list(code["size"]), "counts": code["counts"].decode()} for code in codes]


def score(truth: Any, results: Results, image_ids: Sequence[int]) -> dict[str, float]:
    """Return average precisions in 0..1, for each kind in `results`: box_ap, box_ap50, ..., mask_ap_large.

    Args:
        truth: a `pycocotools.coco.COCO`. image_ids: the scored images.

    Returns:
        Values are NaN for ranges of areas without an object in the ground truth.
    """
    evaluation = require("pycocotools.cocoeval", extra="detection")
    values: dict[str, float] = {}
    for kind, entries in results.items():
        with redirect_stdout(StringIO()):
            if entries:
                found = truth.loadRes([dict(entry) for entry in entries])  # it changes them
            else:  # it needs a first entry
                found = as_coco({**truth.dataset, "annotations": []})
            judge = evaluation.COCOeval(truth, found, {"box": "bbox", "mask": "segm"}[kind])
            judge.params.imgIds = sorted(image_ids)
            judge.evaluate()
            judge.accumulate()
            judge.summarize()
        for part, value in zip(PARTS, judge.stats, strict=False):
            values[f"{kind}_{part}"] = float(value) if value >= 0 else math.nan
    return values
