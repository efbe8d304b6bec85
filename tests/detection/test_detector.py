"""Detectors: what goes into torchvision's, what comes out of it, and the memory and weights of their backbone."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from common import refuses
from torch import nn

from cached_lab.tasks.detection.detector import load_backbone, make_body
from cached_transformers import add_memory, create_model
from cached_transformers.extras import require
from cached_transformers.memories.grc.shared_cache import caches

SMALL = {"min_size": 64, "max_size": 96, "fpn_channels": 16, "anchor_sizes": [8, 16, 32, 64, 128]}
FEW = {"rpn_pre_nms_top_n_train": 60, "rpn_post_nms_top_n_train": 30, "box_batch_size_per_image": 16}
FEW |= {"rpn_post_nms_top_n_test": 20, "rpn_pre_nms_top_n_test": 60}
GRC = {"name": "grc", "ratio": 0.5}
CACHES = {"memory": GRC, "cache_image_size": [64, 96]}


def small(name="retinanet", **options):
    torch.manual_seed(0)
    few = {} if name == "retinanet" else {"detector_options": FEW}
    return create_model(name, classes=3, backbone="pvt_v2_b0", **{**SMALL, **few, **options})


def batch(sizes=((50, 80), (90, 40))):
    torch.manual_seed(1)
    images = [torch.rand(3, *size) for size in sizes]
    targets = []
    for height, width in sizes:
        masks = torch.zeros(2, height, width, dtype=torch.uint8)
        masks[0, 5:30, 10:35], masks[1, 20:40, 3:20] = 1, 1
        boxes = torch.tensor([[10.0, 5, 35, 30], [3, 20, 20, 40]])
        targets.append({"boxes": boxes, "labels": torch.tensor([0, 2]), "masks": masks})
    return images, targets


def summed(losses):
    return torch.stack(list(losses.values())).sum()


@pytest.mark.parametrize("name", ["mask_rcnn", "faster_rcnn", "retinanet"])
def test_losses_in_training_and_detections_in_evaluation(name):
    model = small(name, **CACHES)
    images, targets = batch()
    losses = model(images, targets)
    assert set(losses) == set(model.losses) and all(torch.isfinite(loss) for loss in losses.values())
    summed(losses).backward()
    # A parameter without a gradient would stop training in several processes.
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    model.eval()
    for image, found in zip(images, model(images), strict=True):
        height, width = image.shape[1:]
        assert found["boxes"].shape == (len(found["scores"]), 4)
        assert all(0 <= label < 3 for label in found["labels"].tolist())
        assert ("masks" in found) == model.masks
        boxes = found["boxes"]
        assert (boxes >= 0).all() and (boxes[:, ::2] <= width).all() and (boxes[:, 1::2] <= height).all()
        if model.masks:
            assert found["masks"].shape == (len(boxes), 1, height, width)
    refuses("targets=None", model.train(), images)


@pytest.mark.parametrize(("name", "first"), [("mask_rcnn", 1), ("retinanet", 0)])
def test_classes_are_counted_as_torchvision_counts_them(name, first):
    model = small(name)
    seen = {}

    def note(module, args, kwargs=None):
        seen["labels"] = [target["labels"].tolist() for target in args[1]]

    handle = model.detector.register_forward_pre_hook(note)
    images, targets = batch()
    model(images, targets)
    handle.remove()
    assert seen["labels"] == [[first, 2 + first]] * 2
    assert targets[0]["labels"].tolist() == [0, 2]  # the caller's stay as they are
    answer = {"boxes": torch.zeros(2, 4), "scores": torch.ones(2), "labels": torch.tensor([first, 2 + first])}
    model.detector.forward = lambda images, targets=None: [answer]
    assert model.eval()(images[:1])[0]["labels"].tolist() == [0, 2]


@pytest.mark.parametrize("size", [(47, 91), (133, 61), (300, 500), (64, 64)])
def test_boxes_and_masks_come_back_in_pixels_of_the_original(size):
    """Ground truth found in the resized image comes back at its original place."""
    model = small("mask_rcnn").eval()
    height, width = size
    masks = torch.zeros(2, height, width, dtype=torch.uint8)
    truth = torch.tensor([[5, 7, 33, 40], [width - 30, height - 25, width, height]])
    for mask, (x1, y1, x2, y2) in zip(masks, truth.tolist(), strict=True):
        mask[y1:y2, x1:x2] = 1
    target = {"boxes": truth.float(), "labels": torch.tensor([1, 2]), "masks": masks}
    (resized,) = model.detector.transform([torch.rand(3, *size)], [dict(target)])[1]

    class Told(nn.Module):
        def forward(self, features, proposals, sizes, targets=None):
            assert max(sizes[0]) <= 96 and min(sizes[0]) <= 64
            whole = torch.ones(2, 1, 28, 28)  # a mask that fills its box
            return [{**resized, "scores": torch.ones(2), "masks": whole}], {}

    model.detector.roi_heads = Told()
    (found,) = model([torch.rand(3, *size)])
    torch.testing.assert_close(found["boxes"], truth.float(), atol=1e-3, rtol=0)
    assert found["masks"].shape == (2, 1, *size)
    for mask, true in zip(found["masks"][:, 0] > 0.5, masks.bool(), strict=True):
        assert (mask & true).sum() / (mask | true).sum() > 0.9  # a mask's edge lies within a pixel


def test_images_of_a_batch_are_padded_and_their_answers_do_not_mix():
    model = small("retinanet", detector_options={"score_thresh": 0.0, "detections_per_img": 5}).eval()
    seen = []
    model.detector.backbone.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    images, _ = batch(((64, 96), (64, 96)))
    together, alone = model(images), [model([image])[0] for image in images]
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left["boxes"], right["boxes"], atol=1e-3, rtol=1e-3)
    model([torch.rand(3, 50, 80), torch.rand(3, 90, 40)])
    assert seen == [(2, 3, 64, 96), (1, 3, 64, 96), (1, 3, 64, 96), (2, 3, 96, 96)]


def test_padded_to_a_square_an_image_has_the_same_answers_in_every_batch():
    few = {"score_thresh": 0.0, "detections_per_img": 5, "topk_candidates": 20}
    options = {"detector_options": few, "pad_to_square": True, **CACHES}
    model = small("retinanet", **options).eval()
    images, _ = batch()
    together, alone = model(images), [model([image])[0] for image in images]
    for left, right in zip(together, alone, strict=True):
        torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)
    model.detector.transform.size_divisible = 32  # without: the second image is padded by the first
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(images)[1]["boxes"], model(images[1:])[0]["boxes"], atol=1e-3, rtol=1e-3)
    refuses(r"max_size=100 .* 32; take 128", small, "retinanet", pad_to_square=True, max_size=100)


def test_a_closed_memory_is_no_memory():
    """With closed gates the cached detector equals the plain one, in training and evaluation."""
    cached, plain = small(**CACHES), small()
    for module in cached.modules():
        if hasattr(module, "close_gate"):
            module.close_gate()
    weights = {k: v for k, v in cached.state_dict().items() if ".memory." not in k}
    plain.load_state_dict(weights)
    images, targets = batch()
    for left, right in zip(cached(images, targets).items(), plain(images, targets).items(), strict=True):
        assert left[0] == right[0]
        torch.testing.assert_close(left[1], right[1])
    found = [model.eval()(images)[0]["scores"] for model in (cached, plain)]
    torch.testing.assert_close(*found)


def test_caches_are_written_in_training_and_frozen_in_evaluation():
    model = small(**CACHES)
    assert {cache.size for cache in caches(model)} == {(16, 24), (8, 12), (4, 6), (2, 3)}
    images, targets = batch()
    model(images, targets)
    model.eval()
    after = [cache.cache_MC.clone() for cache in caches(model)]
    assert all(cache.abs().max() > 0 for cache in after)
    first = model(images)
    model([torch.rand(3, 70, 33)])  # another size; nothing is kept of it
    for cache, before in zip(caches(model), after, strict=True):
        assert torch.equal(cache.cache_MC, before)
    second = model(images)
    assert all(torch.equal(first[0][key], second[0][key]) for key in first[0])
    model.train()(images, targets)
    model.eval()
    assert not all(torch.equal(c.cache_MC, before) for c, before in zip(caches(model), after, strict=True))


def test_maps_are_interpolated_to_the_cache_in_two_dimensions():
    """An image that varies only along its height leaves such a cache, for any shapes of the two maps."""
    model = small(memory={**GRC, "interpolation": "linear", "ratio": 1.0}, cache_image_size=[96, 32])
    body = model.detector.backbone.body
    stripes = torch.linspace(0, 1, 64)[:, None].expand(3, 64, 96)
    model([stripes], batch(((64, 96),))[1])
    model.eval()
    first = next(iter(caches(body)))
    grid = first.cache_MC.unflatten(0, first.size)
    inner = grid[4:-4, 2:-2]  # patches overlap, and see the border
    assert first.size == (24, 8)
    assert inner.std(0).mean() > 20 * inner.std(1).mean()


def classifier(memory=None, name="pvt_v2_b0", classes=7, **options):
    timm = require("timm", extra="vision")
    torch.manual_seed(5)
    model = timm.create_model(name, num_classes=classes, **options)
    if memory is not None:
        add_memory(model, memory)
        for cache in caches(model):
            cache.cache_MC.normal_()
    return model


def body_of(model):
    return model.detector.backbone.body.state_dict()


@pytest.mark.parametrize("form", ["safetensors", "torch", "nested"])
def test_weights_of_a_classifier(tmp_path, form):
    trained = classifier(GRC)
    weights = trained.state_dict()
    path = tmp_path / f"weights.{'safetensors' if form == 'safetensors' else 'pth'}"
    if form == "safetensors":
        safetensors.torch.save_file({f"model.{k}": v.contiguous() for k, v in weights.items()}, path)
    else:
        torch.save({"model": weights, "epoch": 3} if form == "nested" else weights, path)
    model = small(memory=GRC, checkpoint=str(path), cache_image_size=[64, 96])
    for name, value in body_of(model).items():
        if name.endswith("cache_MC"):
            assert not value.any()  # emptied; and they have another size than the classifier's
        else:
            assert torch.equal(value, weights[name])
    assert not any(name.startswith("head.") for name in body_of(model))


def test_weights_that_do_not_fit_are_named(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(classifier().state_dict(), path)
    refuses(r"(?s)does not fit .*model\.memory.*Missing key.*stages\.0", small, **CACHES, checkpoint=str(path))
    torch.save(classifier(GRC).state_dict(), path)
    refuses(r"(?s)model\.memory.*Unexpected key.*stages", small, checkpoint=str(path))
    torch.save(classifier(name="pvt_v2_b1").state_dict(), path)
    refuses(r"(?s)patch_embed\.proj\.weight.*64, 3, 7, 7.*32, 3", small, checkpoint=str(path))
    path.write_bytes(b"no weights at all")
    refuses(r"weights\.pth", small, checkpoint=str(path))
    torch.save({"lr": 0.1}, path)
    refuses(r"model\.checkpoint=.*weights\.pth", small, checkpoint=str(path))
    refuses(r"nothing\.pth", small, checkpoint=str(tmp_path / "nothing.pth"))
    refuses(str(tmp_path), small, checkpoint=str(tmp_path))


def test_published_pvt_weights_lose_their_class_token(tmp_path):
    weights = classifier(name="pvt_tiny").state_dict()
    body, stages, widths = make_body("pvt_tiny", (4, 8, 16, 32), {})
    assert (stages, widths) == ([0, 1, 2, 3], [64, 128, 320, 512])
    torch.save(weights, tmp_path / "pvt.pth")
    load_backbone(body, tmp_path / "pvt.pth")
    assert torch.equal(body.block3[1].attn.kv.weight, weights["block3.1.attn.kv.weight"])
    assert torch.equal(body.pos_embed4, weights["pos_embed4"][:, 1:]) and body.cls_token is None


def test_recomputed_activations_give_the_same_gradients():
    model = small(**CACHES)
    other = copy.deepcopy(model)
    other.set_activation_checkpointing()
    images, targets = batch()
    for one in (model, other):
        summed(one(images, targets)).backward()
    for (name, left), right in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, msg=name)
    for left, right in zip(caches(model.eval()), caches(other.eval()), strict=True):
        torch.testing.assert_close(left.cache_MC, right.cache_MC)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "pvt_v3"}, r"model\.backbone='pvt_v3'"),
        ({"backbone": "vit_tiny_patch16_224"}, r"maps at strides 16, 16.*needs one at each of \[8, 16, 32\]"),
        ({"min_size": 200}, r"min_size=200 must lie in 1\.\.max_size=96"),
        ({"cache_image_size": [64, 64]}, r"cache_image_size=\[64, 64\].*None"),
        ({"cache_image_size": [64], "memory": GRC}, r"cache_image_size=\[64\]"),
        ({"detector_options": {"score_tresh": 0.1}}, r"model\.detector_options.*score_tresh"),
        ({"classes": 0}, "classes=0 must be at least 1"),
    ],
)
def test_refusals(options, message):
    refuses(message, create_model, "retinanet", **{"classes": 3, "backbone": "pvt_v2_b0", **SMALL, **options})
