"""PVT: published sizes and names, a twin written out, images of all sizes, and what timm's conventions promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses, stirred
from integrations.hosts import library
from torch import Tensor
from torch.nn import functional as F

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers import add_memory
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights
from cached_transformers.models.pvt.layers import SpatialReductionAttention, resize_positions

DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}
PUBLISHED = {"tiny": (13.2e6, 1.9e9), "small": (24.5e6, 3.8e9), "medium": (44.2e6, 6.7e9), "large": (61.4e6, 9.8e9)}
"""Parameters and multiply-adds (arXiv:2102.12122, table 2 and the repository's list)."""

SMALL: dict[str, Any] = {"img_size": 64, "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "num_classes": 5}
SMALL |= {"mlp_ratios": (2, 3, 2, 1), "depths": (1, 2, 1, 1)}


def small(**options: Any) -> PyramidVisionTransformer:
    return PyramidVisionTransformer(**{**SMALL, **options})


def published_shapes(depths: tuple[int, ...], side: int = 224, classes: int = 1000) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a published checkpoint, from the structure of whai362/PVT, classification/pvt.py."""
    dims, ratios, reductions = (64, 128, 320, 512), (8, 8, 4, 4), (8, 4, 2, 1)
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, 512)}

    def linear(name: str, outputs: int, *inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, *inputs), (outputs,)

    channels, side = 3, side * 2
    for stage, (d, f, r) in enumerate(zip(dims, ratios, reductions, strict=True), 1):
        patch = 4 if stage == 1 else 2
        side = side // 8 if stage == 1 else side // 2
        cells = side * side + (stage == 4)
        shapes[f"pos_embed{stage}"] = (1, cells, d)
        linear(f"patch_embed{stage}.proj", d, channels, patch, patch)
        linear(f"patch_embed{stage}.norm", d)
        for i in range(depths[stage - 1]):
            block = f"block{stage}.{i}"
            linear(f"{block}.norm1", d)
            linear(f"{block}.attn.q", d, d)
            linear(f"{block}.attn.kv", 2 * d, d)
            linear(f"{block}.attn.proj", d, d)
            if r > 1:
                linear(f"{block}.attn.sr", d, d, r, r)
                linear(f"{block}.attn.norm", d)
            linear(f"{block}.norm2", d)
            linear(f"{block}.mlp.fc1", f * d, d)
            linear(f"{block}.mlp.fc2", d, f * d)
        channels = d
    linear("norm", 512)
    linear("head", classes, 512)
    return shapes


@pytest.mark.parametrize("size", DEPTHS)
def test_names_shapes_and_number_of_parameters_are_the_published_ones(size: str) -> None:
    with torch.device("meta"):
        model = PyramidVisionTransformer(depths=DEPTHS[size])
    shapes = published_shapes(DEPTHS[size])
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == shapes
    total = sum(p.numel() for p in model.parameters())
    assert total == sum(torch.Size(s).numel() for s in shapes.values())
    assert round(total / 1e6, 1) == PUBLISHED[size][0] / 1e6


@pytest.mark.parametrize("size", DEPTHS)
def test_multiply_adds_are_the_published_ones(size: str) -> None:
    """Counted, and by hand: the repository's get_flops.py adds the products 2 N R D to linear maps and convolutions."""
    model, images = PyramidVisionTransformer(depths=DEPTHS[size]), torch.zeros(1, 3, 224, 224)
    counted = count_flops(model, images, mode="train", shapes_only=True)
    by_hand, channels = 512 * 1000, 3
    for stage, (d, f, r) in enumerate(zip((64, 128, 320, 512), (8, 8, 4, 4), (8, 4, 2, 1), strict=True)):
        cells = (56 >> stage) ** 2
        n = cells + (stage == 3)
        m = cells // r**2 if r > 1 else n
        block = 2 * n * d * d + 2 * m * d * d + 2 * n * m * d + 2 * n * d * f * d + (n * d * d if r > 1 else 0)
        by_hand += cells * d * channels * (16 if stage == 0 else 4) + DEPTHS[size][stage] * block
        channels = d
    assert counted == 2 * by_hand
    assert round(counted / 2e9, 1) == PUBLISHED[size][1] / 1e9


def twin(model: PyramidVisionTransformer, x: Tensor) -> Tensor:
    """The forward pass of the original, written out from the state dict, with softmax in full."""
    w = dict(model.named_parameters())

    def linear(name: str, value: Tensor) -> Tensor:
        return value @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, value: Tensor, eps: float = 1e-5) -> Tensor:
        centred = value - value.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    for stage in range(1, 5):
        entry = f"patch_embed{stage}"
        x = F.conv2d(x, w[f"{entry}.proj.weight"], w[f"{entry}.proj.bias"], stride=4 if stage == 1 else 2)
        rows, d, h, wide = x.shape
        x = norm(f"{entry}.norm", x.flatten(2).transpose(1, 2))
        side = 64 // 2 ** (stage + 1)
        positions, prefix = w[f"pos_embed{stage}"], int(stage == 4)
        image = positions[:, prefix:].reshape(1, side, side, d).permute(0, 3, 1, 2)
        image = F.interpolate(image, size=(h, wide), mode="bilinear", align_corners=False)
        cells = image.flatten(2).transpose(1, 2)
        if prefix:
            x = torch.cat([w["cls_token"].expand(rows, 1, d), x], 1)
        x = x + torch.cat([positions[:, :prefix], cells], 1)
        for i in range(SMALL["depths"][stage - 1]):
            block, heads, ratio = f"block{stage}.{i}", SMALL["num_heads"][stage - 1], (8, 4, 2, 1)[stage - 1]
            inner = norm(f"{block}.norm1", x, 1e-6)
            source = inner
            if ratio > 1:
                image = inner.transpose(1, 2).reshape(rows, d, h, wide)
                image = F.conv2d(image, w[f"{block}.attn.sr.weight"], w[f"{block}.attn.sr.bias"], stride=ratio)
                source = norm(f"{block}.attn.norm", image.flatten(2).transpose(1, 2))
            q = linear(f"{block}.attn.q", inner)
            k, v = linear(f"{block}.attn.kv", source).chunk(2, -1)
            parts = []
            for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
                parts.append((a @ b.mT / (d // heads) ** 0.5).softmax(-1) @ c)
            x = x + linear(f"{block}.attn.proj", torch.cat(parts, -1))
            hidden = F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x, 1e-6)))
            x = x + linear(f"{block}.mlp.fc2", hidden)
        if stage < 4:
            x = x.transpose(1, 2).reshape(rows, d, h, wide)
    return linear("head", norm("norm", x, 1e-6)[:, 0])


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (32, 128), (77, 45)])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_and_gradients_are_those_of_the_twin(size: tuple[int, int], training: bool) -> None:
    """32 x 128 has as many patches as 64 x 64, and needs other positions all the same."""
    model = stirred(small(), 0.3).double().train(training)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    weights = torch.randn(2, 5, dtype=torch.float64)
    ours, theirs = model(images), twin(model, images)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    parameters = list(model.parameters())
    found = (torch.autograd.grad((y * weights).sum(), parameters) for y in (ours, theirs))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-9)


def test_feature_maps_are_the_stages_without_the_class_token() -> None:
    model = stirred(small(), 0.3).eval()
    images = torch.randn(2, 3, 96, 64)
    tokens, maps = model.forward_intermediates(images)
    assert [tuple(m.shape) for m in maps] == [(2, 8, 24, 16), (2, 16, 12, 8), (2, 24, 6, 4), (2, 32, 3, 2)]
    assert [(f["num_chs"], f["reduction"]) for f in model.feature_info] == [(8, 4), (16, 8), (24, 16), (32, 32)]
    torch.testing.assert_close(tokens, model.forward_features(images))
    torch.testing.assert_close(model.norm(maps[3].flatten(2).mT), tokens[:, 1:])
    normed = model.forward_intermediates(images, norm=True, intermediates_only=True)
    torch.testing.assert_close(normed[3].flatten(2).mT, tokens[:, 1:])
    assert all(torch.equal(a, b) for a, b in zip(normed[:3], maps[:3], strict=True))
    two = model.forward_intermediates(images, indices=[1, -1], intermediates_only=True)
    assert all(torch.equal(a, maps[i]) for a, i in zip(two, (1, 3), strict=True))
    early, first = model.forward_intermediates(images, indices=[0, 1], stop_early=True)
    assert torch.equal(early.mT.unflatten(2, (12, 8)), maps[1]) and torch.equal(first[0], maps[0])


def test_pruning_keeps_the_maps_and_layers_have_their_rates() -> None:
    model = stirred(small(), 0.3).eval()
    images = torch.randn(2, 3, 64, 64)
    expected = model.forward_intermediates(images, intermediates_only=True)
    assert model.prune_intermediate_layers([0, 2], prune_norm=True) == [0, 2]
    assert not [n for n, _ in model.named_parameters() if "4" in n.split(".")[0] or n.split(".")[0] in ("norm", "head")]
    assert "cls_token" not in model.state_dict()
    maps = model.forward_intermediates(images, indices=[0, 2], intermediates_only=True)
    assert torch.equal(maps[0], expected[0]) and torch.equal(maps[1], expected[2])
    model = small()
    order = library("timm").models.group_parameters(model, model.group_matcher(), reverse=True)
    assert order["cls_token"] == order["patch_embed1.proj.weight"] == order["pos_embed1"] == 0
    inside = [order[f"block{s}.{i}.attn.q.weight"] for s, n in enumerate(SMALL["depths"], 1) for i in range(n)]
    assert inside == sorted(set(inside)) and order["norm.weight"] == inside[-1]
    assert order["patch_embed2.proj.weight"] == order["block2.0.attn.q.weight"]


def test_without_class_token_as_in_detection() -> None:
    """The last map then has attention only among cells, and a classification checkpoint loads."""
    whole, model = stirred(small(), 0.3), small(class_token=False, num_classes=0)
    weights = published_weights(whole.state_dict(), model)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not missing and sorted(unexpected) == ["head.bias", "head.weight"]
    assert torch.equal(model.pos_embed4, whole.pos_embed4[:, 1:])
    images = torch.randn(2, 3, 64, 64)
    ours, theirs = (m.forward_intermediates(images, intermediates_only=True) for m in (model, whole))
    assert all(torch.equal(a, b) for a, b in zip(ours[:3], theirs[:3], strict=True))
    assert ours[3].shape == theirs[3].shape and not torch.allclose(ours[3], theirs[3], atol=1e-3)
    torch.testing.assert_close(model(images), model.forward_features(images).mean(1))


def test_positions_of_other_sizes_no_square_map_and_half_precision() -> None:
    """Positions interpolated when loading, or at each pass: the same model."""
    model, larger = stirred(small(), 0.3).eval(), small(img_size=(96, 160)).eval()
    larger.load_state_dict(published_weights({"model": model.state_dict()}, larger))
    images = torch.randn(2, 3, 96, 160)
    torch.testing.assert_close(larger(images), model(images))
    oblong, model = small(img_size=(96, 32)), small()
    refuses(r"pos_embed1.*192.*16.*16", published_weights, oblong.state_dict(), model)
    same = small(img_size=(96, 32))
    same.load_state_dict(published_weights(oblong.state_dict(), same))
    positions = torch.randn(1, 17, 8)
    half = resize_positions(positions.bfloat16(), (4, 4), (6, 5), prefix=1)
    whole = resize_positions(positions, (4, 4), (6, 5), prefix=1)
    assert half.dtype == torch.bfloat16 and half.shape == (1, 31, 8)
    torch.testing.assert_close(half.float(), whole, rtol=0.02, atol=0.02)


def test_drop_path_grows_over_the_blocks_and_rests_in_evaluation() -> None:
    model = stirred(small(drop_path_rate=0.4), 0.3)
    rates = [b.drop_path.rate for i in range(1, 5) for b in getattr(model, f"block{i}")]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    block, x = model.block4[0], torch.randn(64, 5, 32)
    y = block(x, (2, 2))
    attended = x + block.attn(block.norm1(x), (2, 2)) / 0.6
    both = attended + block.mlp(block.norm2(attended)) / 0.6
    for expected, share in ((x, 0.16), (attended, 0.24), (both, 0.36)):
        rows = ((y - expected).abs().amax((1, 2)) < 1e-4).sum()
        assert 0.3 * share < rows / 64 < 3 * share
    images = torch.randn(2, 3, 64, 64)
    model.eval()
    assert torch.equal(model(images), model(images))


def test_activation_checkpointing_computes_the_same_with_fewer_activations_kept() -> None:
    plain, model = small(), small()
    model.load_state_dict(plain.state_dict())
    for m in (plain, model):
        torch.manual_seed(1)
        add_memory(m, "grc")
    model.set_grad_checkpointing()
    images = torch.randn(2, 3, 64, 64)
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(images).square().sum().backward()
    torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in (plain, model)))
    torch.testing.assert_close(dict(plain.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_heads() -> None:
    model = stirred(small(), 0.3).eval()
    images = torch.randn(2, 3, 64, 64)
    tokens = model.forward_features(images)
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    model.reset_classifier(7, "avg")
    torch.testing.assert_close(model(images), model.head(tokens[:, 1:].mean(1)))
    assert model.get_classifier().out_features == model.num_classes == 7 and not model.head.training
    model.reset_classifier(0, "")
    assert torch.equal(model(images), tokens)
    assert small(num_classes=0)(images).shape == (2, 32)
    assert model.no_weight_decay() == {"cls_token"}


@pytest.mark.parametrize(
    "options, message",
    [
        ({"img_size": 24}, r"images of 24 x 24 pixels are smaller than 32 x 32"),
        ({"depths": (1, 2)}, "must have one length"),
        ({"global_pool": "max"}, r"global_pool='max' must be one of 'token', 'avg', ''"),
        ({"global_pool": "token", "class_token": False}, "there is no class token"),
        ({"num_heads": (1, 3, 3, 4)}, "width 16 must be a positive multiple of num_heads=3"),
        ({"sr_ratios": (8, 4, 2, 2)}, "sr_ratio=2"),
        ({"drop_path_rate": 1.0}, r"drop_path=1.0 must lie in \[0, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, small, **options)


def test_images_too_small_are_refused_and_biases_may_be_absent() -> None:
    model = small()
    refuses(r"31.*64.*32.*32", model, torch.randn(1, 3, 31, 64))
    refuses("indices=5", model.forward_intermediates, torch.randn(1, 3, 64, 64), indices=5)
    refuses("output_fmt='NLC'", model.forward_intermediates, torch.randn(1, 3, 64, 64), output_fmt="NLC")
    assert model(torch.randn(1, 3, 32, 33)).shape == (1, 5)
    layer = SpatialReductionAttention(8, 2, sr_ratio=2, qkv_bias=False)
    assert layer.q.bias is None and layer.kv.bias is None
    assert layer(torch.randn(2, 16, 8), (4, 4)).shape == (2, 16, 8)
