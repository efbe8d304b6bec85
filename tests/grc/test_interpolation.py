"""Interpolation of tokens to slots: the rule of each mode, padding at any place, and maps.

Legend: B rows, N tokens, M slots, C channels.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import GatedRecurrentCache
from cached_transformers.memories.grc import equations
from cached_transformers.memories.grc.shared_cache import SharedCache
from cached_transformers.memories.parts.interpolation import Interpolation, interpolate, nearest_map

MODES: tuple[Interpolation, ...] = ("nearest", "linear", "area")
modes = pytest.mark.parametrize("mode", MODES)
lengths = pytest.mark.parametrize(
    "tokens, length", [(7, 7), (7, 3), (3, 7), (12, 4), (4, 12), (1, 5), (5, 1), (197, 64)]
)


def slot_by_rule(x_NC: Tensor, slot: int, length: int, mode: Interpolation) -> Tensor:
    """One slot by the words of the module's docstring."""
    n = len(x_NC)
    if mode == "nearest":
        return x_NC[math.floor(slot * n / length)]
    if mode == "area":
        return x_NC[math.floor(slot * n / length) : math.ceil((slot + 1) * n / length)].mean(0)
    place = min(max((slot + 0.5) * n / length - 0.5, 0), n - 1)
    low = math.floor(place)
    high = min(low + 1, n - 1)
    return x_NC[low] * (1 - place + low) + x_NC[high] * (place - low)


@modes
@lengths
def test_rule(mode: Interpolation, tokens: int, length: int) -> None:
    x_BNC = torch.randn(2, tokens, 3, dtype=torch.float64)
    expected = torch.stack([torch.stack([slot_by_rule(x, i, length, mode) for i in range(length)]) for x in x_BNC])
    torch.testing.assert_close(interpolate(x_BNC, length, mode), expected, rtol=0, atol=1e-12)


PADDINGS = {
    "right": [[0, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]],
    "left": [[1, 1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1]],
}


@modes
@pytest.mark.parametrize("place", PADDINGS)
@pytest.mark.parametrize("length", [1, 4, 9, 14])
def test_a_padded_row_is_the_trimmed_row(mode: Interpolation, place: str, length: int) -> None:
    padding_BN = torch.tensor(PADDINGS[place]).bool()
    x_BNC = torch.randn(3, 9, 2, dtype=torch.float64).masked_fill(padding_BN[..., None], 1e9).requires_grad_()
    got = interpolate(x_BNC, length, mode, padding_BN)
    weight = torch.randn_like(got)
    (grad,) = torch.autograd.grad((got * weight).sum(), x_BNC)
    assert grad[padding_BN].abs().max() == 0 if padding_BN.any() else True
    for row in range(3):
        trimmed = x_BNC[row, ~padding_BN[row]][None].detach().requires_grad_()
        expected = interpolate(trimmed, length, mode)
        torch.testing.assert_close(got[row], expected[0], rtol=0, atol=1e-10)
        (wanted,) = torch.autograd.grad((expected[0] * weight[row]).sum(), trimmed)
        torch.testing.assert_close(grad[row, ~padding_BN[row]], wanted[0], rtol=0, atol=1e-10)


@modes
def test_a_row_of_padding_alone_gives_zeros_and_no_gradient(mode: Interpolation) -> None:
    x_BNC = torch.randn(2, 5, 3).masked_fill(torch.tensor([True, False])[:, None, None], torch.nan).requires_grad_()
    padding_BN = torch.tensor([[True] * 5, [False] * 5])
    got = interpolate(x_BNC, 4, mode, padding_BN)
    assert torch.equal(got[0], torch.zeros(4, 3))
    (grad,) = torch.autograd.grad(got.sum(), x_BNC)
    assert torch.equal(grad[0], torch.zeros(5, 3)) and grad[1].abs().max() > 0


@modes
def test_long_padded_rows_keep_their_digits_in_half_precision(mode: Interpolation) -> None:
    """A running sum in bfloat16 would have lost the digits of single tokens long before the end of the row."""
    x_BNC = torch.rand(1, 2000, 2) + 1
    padding_BN = torch.zeros(1, 2000, dtype=torch.bool)
    padding_BN[:, 1900:] = True
    exact = interpolate(x_BNC, 64, mode, padding_BN)
    rough = interpolate(x_BNC.bfloat16(), 64, mode, padding_BN)
    assert rough.dtype == torch.bfloat16
    tolerance = 0.02 if mode != "linear" else 0.05
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=tolerance)


@modes
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("size, to_size", [((4, 6), (2, 3)), ((3, 3), (5, 7)), ((6, 4), (3, 4))])
def test_maps_are_resized_in_two_dimensions_and_class_tokens_pass(
    mode: Interpolation, prefix: int, size: tuple[int, int], to_size: tuple[int, int]
) -> None:
    image_BCHW = torch.randn(2, 3, *size)
    classes_BNC = torch.randn(2, prefix, 3)
    x_BNC = torch.cat([classes_BNC, image_BCHW.flatten(2).transpose(1, 2)], 1)
    length = to_size[0] * to_size[1] + prefix
    got = interpolate(x_BNC, length, mode, size=size, to_size=to_size, prefix=prefix)
    expected = {
        "nearest": lambda: F.interpolate(image_BCHW, to_size, mode="nearest"),
        "linear": lambda: F.interpolate(image_BCHW, to_size, mode="bilinear", align_corners=False),
        "area": lambda: F.adaptive_avg_pool2d(image_BCHW, to_size),
    }[mode]()
    assert torch.equal(got[:, :prefix], classes_BNC)
    torch.testing.assert_close(got[:, prefix:], expected.flatten(2).transpose(1, 2), rtol=0, atol=1e-6)


def test_a_turned_map_is_resized_and_not_reread() -> None:
    """A map with the same cells in another shape: one dimension would keep the raster order and scramble the rows."""
    x_BNC = torch.arange(8.0).view(1, 8, 1)
    got = interpolate(x_BNC, 8, "nearest", size=(2, 4), to_size=(4, 2))
    assert got.flatten().tolist() == [0, 2, 0, 2, 4, 6, 4, 6]
    assert torch.equal(interpolate(x_BNC, 8, "nearest"), x_BNC)


def test_tokens_slots_prefix_and_padding_must_fit_the_map() -> None:
    with pytest.raises(ValueError, match=r"10 tokens are not a map of 3 x 4 after 1 class token"):
        interpolate(torch.randn(1, 10, 2), 4, size=(3, 4), to_size=(2, 2), prefix=1)
    padding_BN = torch.zeros(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="takes no padding mask; build the cache without a map size"):
        interpolate(torch.randn(1, 4, 2), 4, "nearest", padding_BN, size=(2, 2), to_size=(2, 2))
    with pytest.raises(ValueError, match="length=5"):
        GatedRecurrentCache(4, 5, size=(2, 2))


FEW = torch.arange(5) >= torch.tensor([5, 2, 0, 4])[:, None]


@pytest.mark.parametrize("padding", [None, FEW, FEW.flip(1)], ids=["all", "behind", "front"])
@pytest.mark.parametrize("block", [1 << 17, 48])
def test_fewer_tokens_than_slots_are_mapped_before_they_are_spread(
    padding: Tensor | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients are those of spreading first, at once and by blocks, with any values in the padding."""
    monkeypatch.setattr(equations, "_BLOCK", block)
    monkeypatch.setattr(equations, "LARGE", 1 << 19 if block > 48 else 10)
    cache = GatedRecurrentCache(6, 16).double()
    x_BNC = torch.randn(4, 5, 6, dtype=torch.float64)
    dirty_BNC = x_BNC if padding is None else x_BNC.masked_fill(padding[..., None], torch.nan)
    dirty_BNC.requires_grad_()
    weight_MC = torch.randn(16, 6, dtype=torch.float64)
    cache.cache_MC.normal_()
    found = []
    for update in (cache.mean_update, functools.partial(SharedCache.mean_update, cache)):
        new_MC = update(dirty_BNC, padding, None, cache.cache_MC)
        leaves = (dirty_BNC, *cache.parameters())
        found.append((new_MC, *torch.autograd.grad((new_MC * weight_MC).sum(), leaves)))
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    spread_BMN = nearest_map(x_BNC, 16, padding)
    torch.testing.assert_close(spread_BMN @ x_BNC, interpolate(x_BNC, 16, "nearest", padding), rtol=0, atol=0)
