"""GRC in torchvision's Swin and Swin V2, whose layers are written out for it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from integrations.hosts import close_gates, library, stored
from torch import Tensor, nn

from cached_transformers import add_memory, remove_memory, replace_attention
from cached_transformers.memories.grc.grc import GRC

SIZES = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}


def swin(version: int) -> nn.Module:
    models = library("torchvision").models.swin_transformer
    more: dict[str, Any] = {}
    if version == 2:
        more = {"block": models.SwinTransformerBlockV2, "downsample_layer": models.PatchMergingV2}
    torch.manual_seed(0)
    model = models.SwinTransformer(**SIZES, stochastic_depth_prob=0.0, num_classes=3, **more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and tables that begin at zero
    return model


def images(*sides: int) -> Tensor:
    return torch.randn(2, 3, *sides, generator=torch.Generator().manual_seed(1))


versions = pytest.mark.parametrize("version", [1, 2])


@versions
@pytest.mark.parametrize("sides", [(32, 32), (36, 52), (16, 64)])
def test_behind_a_closed_gate_it_is_the_plain_model(version: int, sides: tuple[int, int]) -> None:
    """Maps that windows do not divide, and a last stage that is smaller than a window, among them."""
    plain, model = swin(version).eval(), add_memory(swin(version), "grc").eval()
    close_gates(model)
    x = images(*sides).requires_grad_()
    expected, found = plain(x), model(x)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (expected, found)]
    torch.testing.assert_close(grads[1], grads[0])


@versions
@pytest.mark.parametrize("memory", ["grc", "attention_cache", {"name": "grc", "variant": "released"}])
def test_it_trains_and_is_taken_away(version: int, memory: Any) -> None:
    plain, model, x = swin(version).eval(), add_memory(swin(version), memory).train(), images(32, 32)
    for _ in range(2):
        loss = model(x).square().mean()
    loss.backward()
    idle = [n for n, p in model.named_parameters() if "memory." in n and (p.grad is None or not p.grad.any())]
    assert not idle
    model.eval()
    assert all(cache.any() for cache in stored(model))
    twins: list[Any] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        torch.testing.assert_close(twin(x), model(x))
        assert (twin(x) - plain(x)).abs().max() > 1e-5
    remove_memory(model)
    assert torch.equal(model(x), plain(x)) and not any(isinstance(m, GRC) for m in model.modules())
    before = twins[0](x)
    remove_memory(twins[1])
    assert torch.equal(twins[0](x), before)  # the copies are their own


def test_it_compiles_in_one_graph() -> None:
    model, x = add_memory(swin(1), "grc").eval(), images(32, 32)
    run = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(x), model(x))


def test_its_attention_is_not_exchanged() -> None:
    with pytest.raises(ValueError, match="ShiftedWindowAttention"):
        replace_attention(swin(1), "linear")
