"""The equations as the paper has them, against the layer that computes them in another way.

Legend: B rows, N tokens, M slots, H heads, D model width, C cache width.
"""

from __future__ import annotations

import pytest
import torch
from grc.test_twin import CANDIDATES, HEADS, ROWS, WIDTH, make_layer
from memories.harness import agree
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import GRCAttention
from cached_transformers.memories.grc import equations
from cached_transformers.memories.grc.equations import Candidate, candidate_of


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
