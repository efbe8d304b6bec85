"""A cache with a stride: squares of tokens share a slot.

Legend: B rows, N tokens, C cache width.
"""

from __future__ import annotations

import pytest
import torch
from integrations.hosts import library

from cached_transformers import GRCAttention, add_memory, create_model
from cached_transformers.memories.grc.grc import GRC
from cached_transformers.memories.grc.shared_cache import caches


@pytest.mark.parametrize("height, width", [(4, 6), (5, 3)])
def test_a_slot_is_the_mean_of_its_square(height: int, width: int) -> None:
    memory = GRC(16, 2, height * width + 1, size=(height, width), prefix=1, stride=2, interpolation="area")
    x_BNC = torch.randn(3, height * width + 1, 8)
    slots_BMC = memory.cache.slots(x_BNC, None, (height, width))
    map_BHWC = x_BNC[:, 1:].unflatten(1, (height, width))
    rows, columns = -(-height // 2), -(-width // 2)
    assert memory.cache.cache_MC.shape == (rows * columns + 1, 8) and memory.cache.size == (rows, columns)
    torch.testing.assert_close(slots_BMC[:, 0], x_BNC[:, 0])
    for i in range(rows):
        for j in range(columns):
            # Of an odd side squares overlap by a token, so that none is left over.
            top, left = i * height // rows, j * width // columns
            square = map_BHWC[:, top : -(-(i + 1) * height // rows), left : -(-(j + 1) * width // columns)]
            torch.testing.assert_close(slots_BMC[:, 1 + i * columns + j], square.mean((1, 2)))


@pytest.mark.parametrize("stride, reduces", [(1, True), (2, True), (4, False)])
def test_keys_are_reduced_so_much_less(stride: int, reduces: bool) -> None:
    layer = GRCAttention(16, 2, 64, size=(8, 8), reduction=4, stride=stride, interpolation="area")
    assert isinstance(layer.memory, GRC) and (layer.memory.branch.reduction is not None) == reduces
    k_BHMF, _ = layer.memory.branch.keys_values(layer.memory.cache.cache_MC, layer.memory.cache.size)
    assert k_BHMF.shape == (1, 2, 4, 4)  # four keys, as the layer itself has of 64 tokens
    layer(torch.randn(2, 64, 16), size=(8, 8)).y_BND.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_length_of_the_users_is_no_map() -> None:
    sizes = {"image_size": 8, "patch_size": 2, "width": 16, "depth": 1, "heads": 2, "feed_forward": 16}
    model = create_model("vision_transformer", memory={"name": "grc", "length": 7}, **sizes)
    assert [(cache.length, cache.size) for cache in caches(model)] == [(7, None)]
    model(torch.randn(2, 3, 8, 8))


def test_hosts_tell_their_maps() -> None:
    library("timm")
    import timm

    model = add_memory(timm.create_model("pvt_v2_b0"), "grc", stride=2, interpolation="area", input_size=(64, 64))
    assert sorted({cache.length for cache in caches(model)}) == [1, 4, 16, 64]
    model.train()(torch.randn(1, 3, 64, 64)).sum().backward()
