"""Our models by name in timm: sizes, options, images of other sizes, feature maps, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import close_gates, library, memories, stored
from torch import Tensor, nn

from cached_transformers import add_memory, reset_caches
from cached_transformers.memories.grc.shared_cache import caches

_PYRAMID: dict[str, Any] = {"embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 2)}
_VIT: dict[str, Any] = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2}
_SWIN: dict[str, Any] = {"img_size": 112, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2)}
_SWIN["drop_path_rate"] = 0.0  # timm's default is 0.1
HOSTS: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": _VIT,
    "deit_small_patch16_224": _VIT,
    "swin_tiny_patch4_window7_224": _SWIN,
    "pvt_tiny": {"img_size": 64, **_PYRAMID},
    "pvt_v2_b2": {"img_size": 64, **_PYRAMID},
}
PYRAMIDS = ["pvt_tiny", "pvt_v2_b2"]
each = pytest.mark.parametrize("host", HOSTS)
cache = pytest.mark.parametrize("cache", ["grc", "attention_cache"])


@pytest.fixture(scope="module")
def timm() -> Any:
    found = library("timm")
    import cached_transformers.integrations.timm.timm_models  # noqa: F401

    return found


def build(
    timm: Any, host: str, cache: str | None = "grc", memory_options: dict[str, Any] | None = None, **options: Any
) -> Any:
    """A small model, with the same weights at each call."""
    options, more = {**HOSTS[host], "num_classes": 5, **options}, dict(memory_options or {})
    if host == "pvt_v2_b2":
        side = options.pop("img_size")
        more["input_size"] = (side, side)
    torch.manual_seed(0)
    model = timm.create_model(host, **options)
    return model if cache is None else add_memory(model, cache, **more)


def images(*size: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, 3, *size)


SIZES = {
    "vit_small_patch16_224": [197] * 12,
    "deit_small_patch16_224": [197] * 12,
    "swin_tiny_patch4_window7_224": [49] * 12,
    "pvt_tiny": [3136] * 2 + [784] * 2 + [196] * 2 + [50] * 2,
    "pvt_v2_b2": [3136] * 3 + [784] * 4 + [196] * 6 + [49] * 3,
}


@each
def test_slots_of_every_layer(timm: Any, host: str) -> None:
    """One slot a token of a 224-pixel image, unreduced in pyramids; one window a layer in Swin."""
    with torch.device("meta"):
        model = add_memory(timm.create_model(host), "grc")
    assert [c.length for c in caches(model)] == SIZES[host]
    assert all(c.size is not None and c.size[0] * c.size[1] + c.prefix == c.length for c in caches(model))


@each
@cache
def test_a_name_of_timm_is_the_host_with_the_memory(timm: Any, host: str, cache: str) -> None:
    ours, options = build(timm, host, cache), {**HOSTS[host], "num_classes": 5}
    torch.manual_seed(0)
    named = timm.create_model(f"{host}_{cache}", **options)
    assert list(caches(named))
    for (name, a), (other, b) in zip(ours.state_dict().items(), named.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    chosen = timm.create_model(f"{host}_{cache}", memory_options={"ratio": 1.0}, **options)
    assert [c.cache_MC.shape[1] for c in caches(chosen)] == [2 * c.cache_MC.shape[1] for c in caches(named)]
    with pytest.raises(ValueError, match="unknown option of memory"):
        timm.create_model(f"{host}_{cache}", memory_options={"ratios": 1.0}, **options)


def test_every_backbone_of_the_paper_has_a_name(timm: Any) -> None:
    names = set(timm.list_models(module="timm_models"))
    wanted = {"vit_small_patch16_224", "pvt_tiny", "pvt_small", "pvt_medium", "swin_tiny_patch4_window7_224"}
    wanted |= {f"pvt_v2_b{size}" for size in (2, 3, 4)}
    assert {f"{host}_{cache}" for host in wanted for cache in ("grc", "attention_cache")} <= names
    assert timm.models.get_pretrained_cfg("vit_small_patch16_224_grc").input_size == (3, 224, 224)


OTHER = {
    "vit_small_patch16_224": [(64, 64), (96, 96), (48, 80), (80, 48)],
    "deit_small_patch16_224": [(32, 128)],
    "swin_tiny_patch4_window7_224": [(112, 112), (140, 88), (56, 168)],
    "pvt_tiny": [(64, 64), (96, 96), (64, 96), (77, 45), (128, 32)],
    "pvt_v2_b2": [(64, 64), (96, 96), (64, 96), (77, 45), (128, 32)],
}
DYNAMIC: dict[str, dict[str, Any]] = {
    "vit_small_patch16_224": {"dynamic_img_size": True},
    "deit_small_patch16_224": {"dynamic_img_size": True},
    "swin_tiny_patch4_window7_224": {"strict_img_size": False},
}
VARIANTS = [{}, {"variant": "released"}, {"interpolation": "linear"}]


@pytest.mark.parametrize("memory_options", VARIANTS, ids=["paper", "released", "linear"])
@each
def test_images_of_other_sizes_in_training_and_evaluation(timm: Any, host: str, memory_options: dict[str, Any]) -> None:
    model = build(timm, host, memory_options=memory_options, **DYNAMIC.get(host, {}))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    goal = torch.randn(2, 5)
    for size in OTHER[host]:
        optimizer.zero_grad()
        loss = (model(images(*size)) - goal).square().mean()
        loss.backward()
        assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert all(c.isfinite().all() and c.abs().max() > 0.01 for c in stored(model))
    model.eval()
    kept = stored(model)
    with torch.no_grad():
        answers = [model(x) for x in (images(*size) for size in OTHER[host])]
        assert all(a.shape == (2, 5) and a.isfinite().all() for a in answers)
    assert all(torch.equal(a, b) for a, b in zip(stored(model), kept, strict=True))


@pytest.mark.parametrize("host", ["vit_small_patch16_224", "deit_small_patch16_224", *PYRAMIDS])
@pytest.mark.parametrize("size", [(96, 32), (48, 80), (128, 64)])
def test_the_cache_is_interpolated_as_a_map(timm: Any, host: str, size: tuple[int, int]) -> None:
    """What a cache takes in is the map of the image at hand, resized in both directions; class tokens pass."""
    model = build(timm, host, **{k: v for k, v in DYNAMIC.get(host, {}).items()})
    seen: list[tuple[Tensor, Tensor, Any]] = []
    for memory in memories(model):

        def noting(
            x: Tensor, padding: Any = None, of: Any = None, m: Any = memory, plain: Any = memory.cache.slots
        ) -> Any:
            out = plain(x, padding, of)
            seen.append((x.detach(), out.detach(), (of, m.cache.size, m.cache.prefix)))
            return out

        memory.cache.slots = noting  # type: ignore[method-assign]
    model(images(*size))
    assert len(seen) == len(memories(model))
    for x, slots, (of, to, prefix) in seen:
        strides = (4, 8, 16, 32) if host in PYRAMIDS else (16,)
        assert of in [tuple(-(-side // s) if host == "pvt_v2_b2" else side // s for side in size) for s in strides]
        assert x.shape[1] == of[0] * of[1] + prefix
        torch.testing.assert_close(slots[:, :prefix], x[:, :prefix])
        for i in range(to[0]):
            for j in range(to[1]):
                token = prefix + (i * of[0] // to[0]) * of[1] + j * of[1] // to[1]
                torch.testing.assert_close(slots[:, prefix + i * to[1] + j], x[:, token])


def test_vit_maps_are_those_of_the_last_images_not_of_a_square(timm: Any) -> None:
    """4 x 9 patches are as many as 6 x 6: only the image tells them apart."""
    model = build(timm, "vit_small_patch16_224", dynamic_img_size=True, memory_options={"variant": "released"})
    model.eval()
    x = images(64, 144)
    whole = model(x)
    turned = model(x.transpose(2, 3))
    assert not torch.allclose(whole, turned, atol=1e-4)
    for memory in memories(model):
        sizes: list[Any] = []
        memory.convolution.register_forward_pre_hook(lambda m, args, kept=sizes: kept.append(args[1]))  # type: ignore[union-attr]
        model(x)
        model(images(96, 96))
        model(x.transpose(2, 3))
        assert sizes == [(4, 9), (6, 6), (9, 4)]


def test_a_window_of_cache_does_not_depend_on_the_image_size(timm: Any) -> None:
    model = build(timm, "swin_tiny_patch4_window7_224", strict_img_size=False)
    for memory in memories(model):
        assert memory.cache.length == 49 and memory.cache.size == (7, 7) and memory.branch.relative_bias is None
    released = build(timm, "swin_tiny_patch4_window7_224", memory_options={"variant": "released"})
    for memory in memories(released):
        assert memory.branch.relative_bias is not None and memory.branch.relative_bias.window == (7, 7)


@each
def test_dropout_of_attention_and_missing_biases_hold_for_the_branch_too(timm: Any, host: str) -> None:
    model = build(timm, host, attn_drop_rate=0.25, qkv_bias=False)
    assert all(m.branch.dropout == 0.25 and m.branch.query.bias is None for m in memories(model))
    told = build(timm, host, attn_drop_rate=0.25, memory_options={"dropout": 0.0})
    assert all(m.branch.dropout == 0.0 and m.branch.query.bias is not None for m in memories(told))


@each
@cache
def test_feature_maps_are_those_of_the_plain_model(timm: Any, host: str, cache: str) -> None:
    chosen = {"features_only": True, "out_indices": (0, 1)} if "pvt" not in host else {"features_only": True}
    model, plain = (build(timm, host, c, **chosen) for c in (cache, None))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".memory." not in k})
    assert model.feature_info.channels() == plain.feature_info.channels()
    assert model.feature_info.reduction() == plain.feature_info.reduction()
    x = images(112, 112) if "swin" in host else images(64, 64)
    mine = model(x)
    assert any((a - b).abs().max() > 1e-5 for a, b in zip(mine, plain(x), strict=True))
    sum(m.square().mean() for m in mine).backward()
    close_gates(model)
    reset_caches(model)
    for a, b in zip(model.eval()(x), plain.eval()(x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("host", PYRAMIDS)
def test_pyramids_give_maps_for_detectors(timm: Any, host: str) -> None:
    model = build(timm, host, features_only=True)
    assert model.feature_info.reduction() == [4, 8, 16, 32]
    for height, width in ((64, 64), (96, 160), (224, 32)):
        maps = model(images(height, width))
        assert [m.shape[2:] for m in maps] == [(height // s, width // s) for s in (4, 8, 16, 32)]
        sum(m.mean() for m in maps).backward()
    sizes = [c.size for c in caches(model)]
    assert sizes == [(16, 16), (8, 8), (4, 4), (2, 2), (2, 2)]


def weights(model: nn.Module, path: Path) -> str:
    """Saved, after training steps that filled the caches."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    torch.save(model.state_dict(), path)
    return str(path)


def test_published_weights_of_pvt_load_by_name(timm: Any, tmp_path: Path) -> None:
    model = timm.create_model("pvt_tiny", img_size=64, **_PYRAMID)
    overlay = {"file": weights(model, tmp_path / "pvt_tiny.pth")}
    options = {"pretrained": True, "pretrained_cfg_overlay": overlay, **_PYRAMID}
    again = timm.create_model("pvt_tiny", img_size=64, **options)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())
    x = images(96, 96)
    other = timm.create_model("pvt_tiny", img_size=96, **options)
    torch.testing.assert_close(other.eval()(x), model.eval()(x))
    fewer = timm.create_model("pvt_tiny", img_size=64, num_classes=3, in_chans=1, **options)
    assert fewer(torch.randn(1, 1, 64, 64)).shape == (1, 3)
    torch.testing.assert_close(
        fewer.patch_embed1.proj.weight, model.patch_embed1.proj.weight.sum(1, keepdim=True), rtol=1e-5, atol=1e-5
    )
    features = timm.create_model("pvt_tiny", img_size=64, features_only=True, **options)
    for a, b in zip(features(x), model.forward_intermediates(x, intermediates_only=True), strict=True):
        torch.testing.assert_close(a, b)
    assert timm.get_pretrained_cfg("pvt_small").url.endswith("/v2/pvt_small.pth")
