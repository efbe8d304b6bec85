"""Caches in checkpoints, copies and averages of weights; caches of another length; models made without storage."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from grc.small_vit import cached_layer, equal, images, kinds, settled, small_vit, step, stored
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from cached_transformers import GRCAttention, add_memory, resize_caches
from cached_transformers.extras import require
from cached_transformers.memories.parts.interpolation import interpolate


def saved(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, through a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def assert_same_future(a: nn.Module, b: nn.Module) -> None:
    for index in range(10, 13):
        for x, y in zip(step(a, images(index)), step(b, images(index)), strict=True):
            assert torch.equal(x, y)
        assert equal(settled(a), settled(b))


@kinds
def test_a_checkpoint_in_mid_training_holds_the_pending_proposal(options: dict[str, Any]) -> None:
    model = small_vit(**options)
    step(model, images(0)), step(model, images(1))
    pending = settled(model)
    assert not equal(pending, stored(model))
    state = saved(model)
    assert equal([v for k, v in state.items() if k.endswith("cache_MC")], pending)
    restored = small_vit(**options)
    restored(images(5))  # a proposal of its own, which must not come back
    restored.load_state_dict(state)
    assert equal(settled(restored), pending)
    assert_same_future(model, restored)


@kinds
def test_saving_does_not_change_training(options: dict[str, Any]) -> None:
    model, twin = small_vit(**options), small_vit(**options)
    for index in range(3):
        step(model, images(index)), step(twin, images(index))
        model.state_dict()
    assert_same_future(model, twin)


def test_a_stale_proposal_in_an_average_never_overwrites() -> None:
    model = small_vit()
    step(model, images(0))
    average = AveragedModel(model)  # in mid-training: a proposal is pending
    for index in range(1, 4):
        step(model, images(index))
        average.update_parameters(model)
    followed = stored(average)  # copies of the live model's buffers
    assert equal(followed, stored(model))
    average.eval()
    assert equal(stored(average), followed)
    average.state_dict()
    assert equal(stored(average), followed)


@pytest.fixture(scope="module")
def timm_utils() -> Any:
    require("timm", extra="vision")
    return pytest.importorskip("timm.utils")


@pytest.mark.parametrize(("kind", "copied"), [("ModelEmaV2", False), ("ModelEmaV3", False), ("ModelEmaV3", True)])
def test_timm_averages_caches_with_the_weights(timm_utils: Any, kind: str, copied: bool) -> None:
    """timm averages every float of the state dict, or copies buffers; no two of them are mixed up."""
    model = small_vit()
    step(model, images(0))
    ema = getattr(timm_utils, kind)(model, decay=0.75, **({"exclude_buffers": True} if copied else {}))
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    for index in range(1, 4):
        step(model, images(index))
        live = model.state_dict()
        ema.update(model)
        parts = {k: 1 if copied and "cache_MC" in k else 0.25 for k in live}
        expected = {k: (1 - parts[k]) * v + parts[k] * live[k] for k, v in expected.items()}
    assert not ema.module.training
    ema.module.eval()
    for name, value in ema.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    fresh = small_vit().eval()
    fresh.load_state_dict(expected)
    with torch.no_grad():  # no keys and values of an older average
        torch.testing.assert_close(ema.module(images(5)).outputs, fresh(images(5)).outputs, rtol=0, atol=1e-6)


def test_a_cache_of_another_length_is_refused_with_the_ways_out() -> None:
    short, long = GRCAttention(8, 2, 4), GRCAttention(8, 2, 6)
    with pytest.raises(ValueError, match=r"memory\.cache\.cache_MC.*6,.*4,") as error:
        short.load_state_dict(long.state_dict())
    text = str(error.value)
    for way in ("length=6", "resize_caches(model, 6)", "resize_caches(model, 4)", "reset_caches(model)"):
        assert way in text


@pytest.mark.parametrize("name", ["grc", "attention_cache"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "area"])
def test_the_first_way_out_resizes(mode: Any, name: str) -> None:
    short, long = (cached_layer(8, 2, length, interpolation=mode, name=name) for length in (4, 6))
    long(torch.randn(2, 6, 8))
    state = saved(long)
    resize_caches(short, 6)
    short.load_state_dict(state)
    assert torch.equal(short.memory.cache.cache_MC, state["memory.cache.cache_MC"])
    resize_caches(short, 4)
    expected = interpolate(state["memory.cache.cache_MC"][None], 4, "nearest" if mode == "nearest" else "linear")[0]
    assert torch.equal(short.memory.cache.cache_MC, expected)
    assert short.memory.cache.length == 4
    short(torch.randn(2, 4, 8)).y_BND.sum().backward()  # and it trains on
    assert short.state_dict()["memory.cache.cache_MC"].shape == (4, 4)


def test_resizing_commits_first_and_takes_maps_as_maps() -> None:
    layer = GRCAttention(8, 2, 13, size=(3, 4), prefix=1)
    layer(torch.randn(2, 13, 8), size=(3, 4))
    pending = settled(layer)[0]
    resize_caches(layer, 25, size=(6, 4))
    got = layer.memory.cache.cache_MC
    assert torch.equal(got[0], pending[0])  # the class token
    assert torch.equal(got[1:].view(6, 4, 4), pending[1:].view(3, 4, 4).repeat_interleave(2, 0))
    assert equal(settled(layer), [got])
    with pytest.raises(ValueError, match="length=20"):
        resize_caches(layer, 20, size=(6, 4))
    assert layer.memory.cache.length == 25


@pytest.mark.parametrize("name", ["grc", "attention_cache"])
def test_resizing_in_evaluation_is_seen_at_once(name: str) -> None:
    layer = cached_layer(8, 2, 6, name=name)
    layer(torch.randn(2, 6, 8))
    layer.eval()
    x_BND = torch.randn(2, 6, 8)
    with torch.no_grad():
        for length in (3, 6):
            layer(x_BND)
            resize_caches(layer, length)
            got = layer(x_BND).y_BND
            assert torch.equal(got, layer.eval()(x_BND).y_BND)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return small_vit()


def test_models_on_meta_half_precision_and_hosts_without_memory_load() -> None:
    model, twin = on_meta(), small_vit()
    step(twin, images(0))
    model.to_empty(device="cpu")
    model.load_state_dict(saved(twin))
    assert_same_future(model, twin)
    host = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    plain = saved(host)
    model = add_memory(host, "grc", length=4)
    result = model.load_state_dict(plain, strict=False)
    assert not result.unexpected_keys and all(".memory." in key for key in result.missing_keys)
    model, twin = on_meta(), small_vit()
    step(twin, images(0))
    state = {name: value.bfloat16() for name, value in saved(twin).items()}
    model.load_state_dict(state, assign=True)
    assert model.head.weight.dtype == torch.bfloat16
    assert all(cache.dtype == torch.float32 for cache in settled(model))
    model(images(1).bfloat16())
    assert all(c.dtype == torch.float32 and c.isfinite().all() for c in settled(model))
