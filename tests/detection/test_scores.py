"""Average precision is that of pycocotools, to the last digit, and answers reach it in its form."""

from __future__ import annotations

import contextlib
import io
import json
import math
import zipfile

import numpy as np
import pytest
import torch
from made import folder
from pycocotools import mask as codes
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from cached_lab.tasks import create_dataset
from cached_lab.tasks.detection.scores import PARTS, encode_masks, score, to_results


def given_detections(data, seed=0):
    """Ground truth of real images, moved about, partly mislabelled, partly missing, with scores."""
    random = np.random.default_rng(seed)
    answers = {}
    for number in data.image_ids:
        target, record = data.target(number), data.annotations.images[number]
        keep = torch.from_numpy(random.random(len(target["boxes"])) < 0.85)
        boxes, labels, masks = (target[key][keep] for key in ("boxes", "labels", "masks"))
        sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
        boxes = boxes + sides * torch.from_numpy(random.normal(0, 0.08, boxes.shape)).float()
        wrong = torch.from_numpy(random.random(len(labels)) < 0.1)
        labels = torch.where(wrong, (labels + 1) % data.classes, labels)
        shift = int(random.integers(0, 6))
        scores = torch.from_numpy(random.random(len(labels)))
        answers[number] = {"boxes": boxes, "labels": labels, "scores": scores}
        answers[number]["masks"] = masks.roll(shift, -1)[:, None].float() * 0.9
        assert masks.shape[1:] == (record["height"], record["width"])
    return answers


def test_it_equals_pycocotools_on_given_detections(shared, tmp_path):
    archive = shared / "data" / "coco-mini" / "coco-mini-val2017.zip"
    with zipfile.ZipFile(archive) as opened:
        (tmp_path / "truth.json").write_bytes(opened.read("annotations/instances_val2017.json"))
    data = create_dataset("coco", split="validation", path=shared / "data" / "coco-mini")
    results = {"box": [], "mask": []}
    for number, answer in given_detections(data).items():
        for kind, entries in to_results(answer, number, data.category_ids).items():
            results[kind] += entries
    ours = score(data.annotations.truth, results, data.image_ids)
    truth = COCO(str(tmp_path / "truth.json"))
    for kind, name in (("box", "bbox"), ("mask", "segm")):
        (tmp_path / "found.json").write_text(json.dumps(results[kind]), encoding="utf-8")
        judge = COCOeval(truth, truth.loadRes(str(tmp_path / "found.json")), name)
        judge.evaluate()
        judge.accumulate()
        with contextlib.redirect_stdout(io.StringIO()):
            judge.summarize()
        theirs = judge.stats[:6].tolist()
        assert [ours[f"{kind}_{part}"] for part in PARTS] == theirs
        assert 0.2 < theirs[0] < 0.9 and min(theirs) > 0


def perfect(data, numbers):
    results = {"box": [], "mask": []}
    for number in numbers:
        target = data.target(number)
        answer = {"boxes": target["boxes"], "labels": target["labels"], "masks": target["masks"][:, None].float()}
        answer["scores"] = torch.ones(len(target["labels"]))
        for kind, entries in to_results(answer, number, data.category_ids).items():
            results[kind] += entries
    return results


def test_truth_scores_one_nothing_scores_zero(tmp_path):
    data = create_dataset("coco", split="train", path=folder(tmp_path))
    truth = data.annotations.truth
    values = score(truth, perfect(data, data.image_ids), data.image_ids)
    assert values["box_ap"] == values["mask_ap"] == 1 and math.isnan(values["box_ap_large"])
    values = score(truth, {"box": [], "mask": []}, data.image_ids)
    assert values["box_ap"] == values["mask_ap"] == 0
    half = score(truth, perfect(data, data.image_ids[:3]), data.image_ids)
    assert 0 < half["box_ap"] < 1
    assert score(truth, perfect(data, data.image_ids[:3]), data.image_ids[:3])["box_ap"] == 1


def test_what_overlaps_a_crowd_counts_neither_way(tmp_path):
    data = create_dataset("coco", split="train", path=folder(tmp_path))
    first = data.annotations.truth.anns[1]
    found = perfect(data, data.image_ids)
    x, y, w, h = first["bbox"]
    entry = {"image_id": 100, "category_id": first["category_id"], "score": 2.0, "bbox": [x, y, w / 2, h]}
    found = {"box": [entry, *[e for e in found["box"] if e["image_id"] != 100 or e["bbox"] != [x, y, w, h]]]}
    wrong = score(data.annotations.truth, found, data.image_ids)["box_ap"]
    first["iscrowd"] = 1
    assert score(data.annotations.truth, found, data.image_ids)["box_ap"] == 1 > wrong


def test_results_in_pixels_of_the_image():
    masks = torch.zeros(2, 1, 20, 30)
    masks[0, 0, 2:8, 3:9] = 0.51
    masks[0, 0, 2:8, 9:12] = 0.5  # not above the threshold
    answer = {
        "boxes": torch.tensor([[3.0, 2.0, 9.0, 8.0], [0.5, 1.25, 29.5, 20.0]]),
        "labels": torch.tensor([1, 0]),
        "scores": torch.tensor([0.75, 0.5]),
        "masks": masks,
    }
    results = to_results(answer, 17, [7, 90])
    assert results["box"] == [
        {"image_id": 17, "category_id": 90, "score": 0.75, "bbox": [3.0, 2.0, 6.0, 6.0]},
        {"image_id": 17, "category_id": 7, "score": 0.5, "bbox": [0.5, 1.25, 29.0, 18.75]},
    ]
    code = results["mask"][0]["segmentation"]
    assert code["size"] == [20, 30] and json.dumps(code)
    assert np.array_equal(codes.decode(code), (masks[0, 0] > 0.5).numpy())
    assert codes.area(results["mask"][1]["segmentation"]) == 0
    assert encode_masks(masks[:0]) == []


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_answers_of_no_object(kind):
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "scores": torch.zeros(0)}
    empty["masks"] = torch.zeros(0, 1, 5, 6)
    assert to_results(empty, 1, [1])[kind] == []
