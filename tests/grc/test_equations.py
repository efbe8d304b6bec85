"""The equations of the paper, updates in blocks of rows, and caches with a stride.

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width.
"""

from __future__ import annotations

import pytest
import torch
from grc.test_twin import CANDIDATES, HEADS, ROWS, WIDTH, make_layer
from integrations.hosts import library
from memories.harness import agree
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import GRCAttention, add_memory, create_model
from cached_transformers.memories.grc import equations
from cached_transformers.memories.grc.equations import Candidate, GateWeights, candidate_of, mean_gate_update
from cached_transformers.memories.grc.grc import GRC
from cached_transformers.memories.grc.shared_cache import caches


def heads(t_BND: Tensor) -> Tensor:
    return t_BND.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def written_out(layer: GRCAttention, x_BND: Tensor, cache_MC: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 1 by `equations`: the layer's output and the new cache, of as many tokens as slots."""
    gates, branch = layer.memory.cache, layer.memory.branch
    s_BMC = x_BND[..., : gates.width]
    weight = torch.cat([gates.from_tokens.weight, gates.from_cache.weight], 1)
    linear = [
        lambda both, w=w, b=b: F.linear(both, w, b)
        for w, b in zip(weight.chunk(3), gates.from_tokens.bias.chunk(3), strict=True)
    ]
    norm = gates.weights.norm

    def candidate(both: Tensor) -> Tensor:
        return candidate_of(linear[2](both), gates.candidate, norm)

    new_MC = equations.new_cache(s_BMC, cache_MC.expand_as(s_BMC), *linear[:2], candidate).mean(0)
    q, k, v = (heads(t) for t in layer.qkv(x_BND).chunk(3, -1))
    k_mem, v_mem = (heads(t) for t in branch.key_value(new_MC)[None].split(gates.width, -1))
    o_mem = equations.recall(heads(branch.query(s_BMC)), k_mem, v_mem)
    o_self = equations.recall(q, k, v)  # the same attention, of the segment
    o_mem = F.pad(o_mem, (0, o_self.shape[-1] - o_mem.shape[-1]))
    o = equations.mix(o_mem, o_self, branch.gate_H)
    return layer.output(o.transpose(1, 2).flatten(2)), new_MC


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_the_layer_computes_the_paper_s_equations(candidate: Candidate, ratio: float) -> None:
    layer = make_layer(4, candidate=candidate, ratio=ratio)
    cache_MC = torch.randn(4, int(ratio * WIDTH), dtype=torch.float64)
    layer.memory.cache.cache_MC.copy_(cache_MC)
    x_BND = torch.randn(ROWS, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    expected, new_MC = written_out(layer, x_BND, cache_MC)
    leaves = {"x": x_BND, **dict(layer.named_parameters())}
    agree([layer(x_BND).y_BND], [expected], leaves, atol=1e-12, grads=1e-11, least=None)
    layer.memory.cache.commit()
    torch.testing.assert_close(layer.memory.cache.cache_MC, new_MC, rtol=0, atol=1e-12)


B, M, C, D = 5, 7, 4, 8


def update(candidate: Candidate, dtype: torch.dtype, marked: bool) -> list[Tensor]:
    """The new cache, and the gradients of tokens (a slice of wider ones) and of every weight."""
    torch.manual_seed(0)
    x_BMD = torch.randn(B, M, D).to(dtype).requires_grad_()
    tokens, bias, cache = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((12, C), (12,), (12, C)))
    scale, shift = (torch.randn(C).to(dtype).requires_grad_() for _ in range(2))
    norm = (scale, shift, 1e-5) if candidate == "norm" else None
    weight_B = torch.tensor([True, False, True, True, False]) if marked else None
    weights = GateWeights(tokens, bias, cache, norm)
    cache_MC = torch.randn(M, C, dtype=torch.promote_types(dtype, torch.float32))
    new_MC = mean_gate_update(x_BMD[..., :C], cache_MC, weights, candidate, weight_B)
    inputs = [x_BMD, tokens, bias, cache, *([scale, shift] if norm else [])]
    return [new_MC, *torch.autograd.grad((new_MC * torch.randn(M, C)).sum(), inputs)]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("candidate", ["norm", "tanh", "affine"])
@pytest.mark.parametrize("block", [1, 3 * C, M * C, 2 * M * C, 3 * M * C + 1])
def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch, candidate: Candidate, block: int, marked: bool) -> None:
    """Blocks of one slot, of some, of one row, of two and a rest, of three and a rest."""
    whole = update(candidate, torch.float64, marked)
    monkeypatch.setattr(equations, "LARGE", 0)
    monkeypatch.setattr(equations, "_BLOCK", block)
    blocks = list(equations._blocks(torch.zeros(B, M, C)))
    assert len(blocks) == {1: B * M, 3 * C: B * 3, M * C: B, 2 * M * C: 3, 3 * M * C + 1: 2}[block]
    for a, b in zip(update(candidate, torch.float64, marked), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_blocks_lose_no_digits_and_little_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(equations._blocks(torch.zeros(B, M, C))) == [(slice(0, B), slice(0, M))]
    exact = update("norm", torch.float64, False)
    whole = update("norm", torch.bfloat16, False)
    monkeypatch.setattr(equations, "LARGE", 0)
    monkeypatch.setattr(equations, "_BLOCK", C)
    for a, b, c in zip(update("norm", torch.bfloat16, False), whole, exact, strict=True):
        scale = c.abs().max()
        assert a.dtype == b.dtype and (a - c).abs().max() <= 2 * (b - c).abs().max() + 0.01 * scale


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


def test_hosts_tell_their_maps_and_a_length_is_none() -> None:
    library("timm")
    import timm

    model = add_memory(timm.create_model("pvt_v2_b0"), "grc", stride=2, interpolation="area", input_size=(64, 64))
    assert sorted({cache.length for cache in caches(model)}) == [1, 4, 16, 64]
    model.train()(torch.randn(1, 3, 64, 64)).sum().backward()
    sizes = {"image_size": 8, "patch_size": 2, "width": 16, "depth": 1, "heads": 2, "feed_forward": 16}
    model = create_model("vision_transformer", memory={"name": "grc", "length": 7}, **sizes)
    assert [(cache.length, cache.size) for cache in caches(model)] == [(7, None)]
    model(torch.randn(2, 3, 8, 8))
