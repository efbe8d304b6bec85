"""Data in COCO's format: places, targets, and refused, dropped or repaired annotations."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch
from common import refuses
from made import folder, tree, write
from PIL import Image
from pycocotools import mask as codes

from cached_lab.data import BadFile
from cached_lab.tasks import create_dataset
from cached_lab.tasks.detection import coco_annotations
from cached_lab.tasks.detection.coco_files import decode_rgb
from cached_lab.training.loader import GroupedOrder, Share, training_batches


def load(root, split="train", **options):
    return create_dataset("coco", split=split, path=root, **options)


def changed(tmp_path, change, **options):
    """Made data after `change(annotations)`."""
    annotations, pictures = tree(**options)
    change(annotations)
    return write(tmp_path, annotations, pictures)


def packed(root, archive, *parts):
    """A zip of a data set, or of some folders of it."""
    with zipfile.ZipFile(archive, "w") as made:
        for path in sorted(root.rglob("*.*")):
            if not parts or path.parent.name in parts:
                made.write(path, path.relative_to(root))
    return archive


def test_folders_one_archive_and_an_archive_each_give_the_same(tmp_path):
    root = folder(tmp_path / "plain")
    one, each = packed(root, tmp_path / "one.zip"), tmp_path / "each"
    each.mkdir()
    for part in ("annotations", "train2017", "val2017"):
        packed(root, each / f"{part}.zip", part)
    for split in ("train", "validation"):
        items = [load(place, split, augment=False) for place in (root, one, each)]
        assert [len(data) for data in items] == [6, 6, 6]
        for index in range(6):
            (image, target), *others = (data[index] for data in items)
            for other, its_target in others:
                assert torch.equal(image, other)
                assert all(torch.equal(target[key], its_target[key]) for key in ("boxes", "labels", "masks"))


def test_annotations_beside_the_images_are_found(tmp_path):
    root = folder(tmp_path)
    for name in ("train", "valid"):
        shutil.move(root / ("train2017" if name == "train" else "val2017"), root / name)
    for old, new in (("train2017", "train"), ("val2017", "valid")):
        shutil.move(root / "annotations" / f"instances_{old}.json", root / new / "_annotations.coco.json")
    data = load(root, "validation", train="train", validation="valid")
    assert len(data) == 6 and data[0][0].shape == (3, 48, 64)


def test_what_is_not_there_is_said(tmp_path):
    root = folder(tmp_path)
    refuses(r"'train2014'.*annotations/instances", load, root, train="train2014", raises=FileNotFoundError)
    refuses(r"data\.test=null.*training\.test=none", load, root, "test", raises=FileNotFoundError)
    refuses("does not exist", load, tmp_path / "nowhere", raises=FileNotFoundError)
    shutil.rmtree(root / "train2017")
    refuses(r"6.*'train2017'.*000", load, root, raises=FileNotFoundError)
    (root / "annotations" / "instances_val2017.json").write_text("{", encoding="utf-8")
    refuses(r"instances_val2017\.json", load, root, "validation")


def test_real_coco(shared):
    """Counts of the data's own description; masks and boxes as pycocotools reads them."""
    data = load(shared / "data" / "coco-mini", augment=False)
    facts = data.describe()
    assert len(data.annotations.images) == 258 and facts["classes"] == 80
    assert facts["objects"] == 2148 - 23 and facts["dropped"] == 0
    assert len(load(shared / "data" / "coco-mini", "validation")) == 128
    theirs = data.annotations.truth
    for number in data.image_ids[::25]:
        image, target = data[data.image_ids.index(number)]
        record = data.annotations.images[number]
        assert image.shape == (3, record["height"], record["width"]) and image.min() >= 0 and image.max() <= 1
        objects = theirs.loadAnns(theirs.getAnnIds(number, iscrowd=False))
        assert target["masks"].shape[0] == len(objects) == len(target["boxes"])
        for mask, box, label, raw in zip(target["masks"], target["boxes"], target["labels"], objects, strict=True):
            assert np.array_equal(mask.numpy(), theirs.annToMask(raw))
            x, y, w, h = raw["bbox"]
            assert box.tolist() == pytest.approx([x, y, x + w, y + h], abs=1e-3)
            assert data.category_ids[label] == raw["category_id"]


def test_half_of_the_images_are_mirrored_with_what_is_in_them(tmp_path):
    root = folder(tmp_path)
    plain, data = load(root, augment=False), load(root)
    assert data.class_names == ["red", "green", "blue"] and data.category_ids == [5, 10, 15]
    assert data.augment and not load(root, "validation").augment
    seen = set()
    for draw in range(8):
        torch.manual_seed(draw)
        image, target = data[0]
        original, its_target = plain[0]
        flipped = not torch.equal(image, original)
        seen.add(flipped)
        if flipped:
            assert torch.equal(image, original.flip(-1))
            assert torch.equal(target["masks"], its_target["masks"].flip(-1))
        for mask, box in zip(target["masks"], target["boxes"], strict=True):  # either way a box bounds its mask
            rows, columns = mask.nonzero().unbind(1)
            bounds = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert box.tolist() == [float(bound) for bound in bounds]
    assert seen == {True, False}


def test_crowds_are_not_learned(tmp_path):
    data = load(changed(tmp_path, having("annotations", "iscrowd", 1)), augment=False)
    assert len(data[0][1]["boxes"]) == 1 and len(data[1][1]["boxes"]) == 2
    truth = data.annotations.truth
    assert [a["iscrowd"] for a in truth.loadAnns(truth.getAnnIds(100))] == [1, 0]


def test_boxes_are_clipped_and_empty_ones_dropped_counted_and_named(tmp_path):
    def spoil(annotations):
        boxes = [[-10, -5, 30, 25], [60, 40, 100, 100], [5, 5, 0, 10], [5, 5, 10, -3], [500, 5, 10, 10]]
        for record, box in zip(annotations["annotations"], boxes, strict=False):
            record["bbox"] = box

    with pytest.warns(UserWarning, match=r"3 annotations are not learned, .*: id \[11, 12, 21\]"):
        data = load(changed(tmp_path, spoil), augment=False)
    assert data[0][1]["boxes"].tolist() == [[0, 0, 20, 20], [60, 40, 64, 48]]
    assert data.image_ids == [100, 102, 103, 104, 105]  # 101 has lost both of its objects
    assert data.describe()["dropped"] == 3


def test_unusable_segmentations(tmp_path):
    def spoil(annotations):
        shapes = [[[1, 2, 3, 4]], {"size": [3, 3], "counts": [9]}, None]
        for record, found in zip(annotations["annotations"], shapes, strict=False):
            record["segmentation"] = found

    root = changed(tmp_path, spoil)
    with pytest.warns(UserWarning, match=r"3 annotations are not learned.*: id \[1, 2, 11\]"):
        data = load(root, augment=False)
    assert data.masks and data.image_ids[0] == 101 and len(data[0][1]["masks"]) == 1
    boxes = load(root, augment=False, masks=False)
    assert "masks" not in boxes[0][1] and len(boxes[0][1]["boxes"]) == 2


def test_boxes_alone(tmp_path):
    def spoil(annotations):
        for record in annotations["annotations"]:
            del record["segmentation"], record["area"], record["iscrowd"]

    root = changed(tmp_path, spoil)
    data = load(root)
    assert not data.masks and "masks" not in data[0][1]
    record = data.annotations.truth.anns[1]
    assert record["area"] == record["bbox"][2] * record["bbox"][3] and record["iscrowd"] == 0
    refuses(r"data\.masks=true", load, root, masks=True)


def test_images_without_objects(tmp_path):
    def empty(annotations):
        annotations["annotations"] = [a for a in annotations["annotations"] if a["image_id"] != 102]

    root = changed(tmp_path, empty)
    assert 102 not in load(root).image_ids
    # Evaluation is on all images: a detection in an empty one is a mistake.
    data = load(root, "validation", validation="train2017")
    assert data.image_ids[2] == 102
    assert [data[2][1][k].shape for k in ("boxes", "labels", "masks")] == [(0, 4), (0,), (0, 40, 72)]


def test_some_images_alone(tmp_path):
    root = folder(tmp_path)
    assert load(root, image_ids=[104, 101]).image_ids == [101, 104]
    refuses(r"data\.image_ids", load, root, image_ids=[101, 7])


def having(kind, key, value, place=0):
    def change(annotations):
        annotations[kind][place][key] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (having("annotations", "category_id", 77, 3), r"category_id=77 of annotation 12: .* of 5, 10, 15"),
        (having("annotations", "image_id", 9, 3), r"image_id=9 of annotation 12"),
        (having("images", "id", 100, 1), "id=100 repeats in images"),
        (having("annotations", "id", 1, 1), "id=1 repeats in annotations"),
        (having("categories", "name", "red"), "name=red repeats in categories"),
        (having("annotations", "bbox", [1, 2, float("nan"), 4]), r"bbox=\[1, 2, nan, 4\] of annotation 1:"),
        (having("annotations", "bbox", [1, 2, 3]), r"bbox=\[1, 2, 3\] of annotation 1:"),
        (lambda tree: tree["images"][2].pop("height"), r"image 102: .*\(72, None\)"),
        (having("images", "width", True), r"image 100: .*\(True, 48\)"),
        (having("images", "height", 10**9), "image 100: .*1000000000"),
        (having("images", "file_name", 3), "image 100: .*file_name=3"),
        (lambda tree: tree["images"].insert(0, 3), "TypeError"),
        (lambda tree: tree["annotations"].append("x"), "TypeError"),
        (lambda tree: tree.pop("categories"), "'categories'"),
        (having("annotations", "image_id", {}), "TypeError"),
        (having("annotations", "bbox", [10**400, 0, 1, 1]), "OverflowError"),
        (having("annotations", "area", -1), r"area=-1 of annotation 1"),
        (having("annotations", "iscrowd", "no"), r"iscrowd='no' of annotation 1: must be 0 or 1"),
    ],
)
def test_contradictions_and_values_of_another_type_are_refused_by_name(tmp_path, change, message):
    file = changed(tmp_path, lambda tree: None) / "annotations" / "instances_train2017.json"
    annotations = json.loads(file.read_text(encoding="utf-8"))
    change(annotations)
    file.write_text(json.dumps(annotations), encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path)
    assert file.name in str(caught.value)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"size": [48, 64], "counts": [1, 2]},
        {"size": [48, 64], "counts": [-5, 48 * 64 + 5]},
        {"size": [48, 64], "counts": [1.0, 48 * 64 - 1]},
        {"size": [48, 64], "counts": [10**30]},
        {"size": [48, 64], "counts": "zz~"},
        {"size": [48, 64], "counts": "0000"},
        {"size": [48, 64], "counts": "\u00ff"},
        [[0, 0, 1e300, 0, 1, 1]],
        [[0, 0, 1e6, 0, 0, 1e6] * 40],
        [[0, 0, "a", 0, 1, 1]],
    ],
)
def test_a_code_that_leaves_the_image_never_reaches_pycocotools(tmp_path, spoiled):
    root = changed(tmp_path, having("annotations", "segmentation", spoiled))
    with pytest.warns(UserWarning, match=r"usable segmentation: id \[1\]"):
        data = load(root, masks=True)
    assert len(data.target(100)["masks"]) == 1
    data.annotations.truth.annToMask(data.annotations.truth.anns[1])


def test_codes_and_images_are_read_as_pycocotools_and_annotators_did():
    random = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        mask = (random.random((37, 300)) < share).astype(np.uint8)
        code = codes.encode(np.asfortranarray(mask))["counts"]
        flat = np.concatenate([[0], mask.flatten(order="F")])
        edges = np.flatnonzero(np.diff(flat))
        wanted = np.diff(np.concatenate([[0], edges, [mask.size]]))
        assert np.array_equal(coco_annotations._uncompressed(code), wanted)
    picture = Image.fromarray(np.arange(32, dtype=np.uint8).reshape(4, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", exif=exif)
    assert decode_rgb(buffer.getvalue(), "x", (4, 8)).shape == (4, 8, 3)
    refuses(r"\(4, 8\).*\(8, 4\)", decode_rgb, buffer.getvalue(), "x", (8, 4), raises=BadFile)
    assert decode_rgb(buffer.getvalue(), "x").shape == (8, 4, 3)


def test_missing_and_damaged_files_are_named(tmp_path):
    root = folder(tmp_path)
    whole = (root / "train2017" / "001.png").read_bytes()
    (root / "train2017" / "001.png").write_bytes(whole[: len(whole) // 2])
    (root / "train2017" / "002.png").write_bytes(b"")
    Image.new("RGB", (10, 10)).save(root / "train2017" / "003.png")
    data = load(root, augment=False)
    for index, message in ((1, "cannot be used"), (2, r"is empty \(0 bytes\)"), (3, r"\(10, 10\) .* its annot")):
        with pytest.raises(BadFile, match=rf"00{index}\.png.*{message}"):
            data[index]
    for name in ("001", "004"):
        (root / "train2017" / f"{name}.png").unlink()
    refuses(r"2.*001.*004", load, root)


def test_archives_are_read_by_several_processes(tmp_path):
    data = load(packed(folder(tmp_path / "plain"), tmp_path / "data.zip"))
    data[0]  # opens the archive before the workers start
    pickle.loads(pickle.dumps(data))[1]
    alone, shared = (training_batches(data, GroupedOrder(data.groups, 2, 0), workers) for workers in (0, 2))
    for _ in range(4):
        for left, right in zip(next(alone).inputs, next(shared).inputs, strict=True):
            assert torch.equal(left, right)


def test_batches_hold_images_of_one_kind_and_every_row_has_its_turn():
    groups = np.array([0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0])  # 5 high, 8 wide
    order = GroupedOrder(groups, 3, seed=1)
    for epoch in range(3):
        batches = [order.rows(4 * epoch + position) for position in range(4)]
        assert {key[0] for batch in batches for key in batch} == {epoch}
        rows = [index for batch in batches for _, index in batch]
        assert len(set(rows)) == len(rows) == 12
        mixed = [len({int(groups[index]) for _, index in batch}) == 2 for batch in batches]
        assert sum(mixed) <= 1  # two rows of the high and two of the wide are left over
    later = GroupedOrder(groups, 3, seed=1)
    assert later.rows(7) == order.rows(7) and later.rows(2) == order.rows(2)
    starts = [order.rows(4 * epoch) for epoch in range(20)]
    assert {int(groups[batch[0][1]]) for batch in starts} == {0, 1}  # kinds come in no fixed order


def test_processes_and_pieces_share_a_grouped_batch():
    groups = np.arange(16) % 2
    whole = GroupedOrder(groups, 4, seed=3).rows(2)
    pieces = []
    for rank in range(2):
        stream = iter(GroupedOrder(groups, 4, 3, 2, Share(rank, 2, 2)))
        pieces += [next(stream) for _ in range(2)]
    assert [key for piece in pieces for key in piece] == whole and all(len(piece) == 1 for piece in pieces)
