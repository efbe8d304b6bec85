"""Memories whose state changes with each token, read token by token: every option, rows at different places."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cached_transformers.interfaces.incremental import advance, open_segment, read_segment
from cached_transformers.interfaces.memory import Query, Trace
from cached_transformers.linear_maps import side_by_side
from cached_transformers.memories.parts.factory import create_memory

D, H, FIRST = 8, 2, 3


@pytest.mark.parametrize("first", [1, FIRST, 8])
@pytest.mark.parametrize(
    "memory",
    [
        {"name": "titans", "chunk": 4, "limit": 0.05, "gates": "stretched", "loss": "huber", "bound": 0.1},
        {"name": "titans", "chunk": 4, "layers": 2, "loss": "lp", "nets": 4},
        {"name": "ttt", "mini_batch": 4, "limit": 0.02, "model": "mlp"},
        {"name": "ttt", "mini_batch": 4, "limit": 0.02},
        {"name": "memory_caching", "slots": 3},
        {"name": "memory_caching", "slots": 3, "read": "residual"},
        {"name": "memory_caching", "slots": 2, "read": "sparse", "topk": 1, "start": "restart"},
        {"name": "titans", "chunk": 4, "mix": "sum", "nets": 1},
        {
            "name": "memory_caching",
            "slots": 3,
            "over": {"name": "ttt", "mini_batch": 4, "model": "mlp"},
            "read": "soup",
        },
    ],
    ids=str,
)
def test_rows_with_unequal_pasts_read_tokens_alone(memory: dict[str, Any], first: int) -> None:
    """Row 0 has 9 tokens of two segments behind it, row 1 has 3 of one, row 2 none."""
    torch.manual_seed(0)
    module = create_memory(memory, D, H).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = module.init_state(3, torch.zeros(1, dtype=torch.float64))
    for lengths in ([6, 0, 0], [3, 3, 0]):
        padding_BN = torch.arange(6) >= torch.tensor(lengths)[:, None]
        query = drawn(6)._replace(padding_BN=padding_BN)
        reading = read_segment(module, state, query, None)
        state, _ = module.write(state, Trace(query.x_BND, query.x_BND, query, reading))
    query = drawn(13)
    whole = read_segment(module, state, query, None)
    opened = open_segment(module, state, None, None)
    for start, end in [(0, first), *((t, t + 1) for t in range(first, 13))]:
        x, *heads = (t[..., start:end, :] for t in (query.x_BND, query.q_BHNE, query.k_BHNE, query.v_BHNE))
        part = Query(x, heads[0], k_BHNE=heads[1], v_BHNE=heads[2])
        found = module.read(opened, part, None)
        expected = whole.output_BHNE[:, :, start:end]
        torch.testing.assert_close(found.output_BHNE, expected, rtol=0, atol=1e-10)
        y_BHNE = part.q_BHNE + 1
        mixed = module.combine(y_BHNE, part, found), module.combine(y_BHNE, part, whole._replace(output_BHNE=expected))
        torch.testing.assert_close(*mixed, rtol=0, atol=1e-10)
        trace, kept = Trace(part.x_BND, part.x_BND, part, found), opened
        opened = advance(module, opened, part.x_BND, [trace])
        again = module.read(kept, part, None)  # a fork still reads the earlier opened value
        torch.testing.assert_close(again.output_BHNE, found.output_BHNE, rtol=0, atol=0)


def drawn(tokens: int) -> Query:
    q, k, v = torch.randn(3, 3, H, tokens, D // H, dtype=torch.float64)
    return Query(torch.randn(3, tokens, D, dtype=torch.float64), q, k_BHNE=k, v_BHNE=v)


def test_linear_maps_side_by_side_are_their_calls() -> None:
    """Plain maps, with and without a bias, and one that only a call applies."""
    linears = [nn.Linear(5, 3), nn.Linear(5, 2, bias=False), nn.Linear(5, 4)]
    linears[2].register_forward_hook(lambda module, given, out: 2 * out)
    x = torch.randn(7, 5)
    expected = torch.cat([linear(x) for linear in linears], -1)
    torch.testing.assert_close(side_by_side(linears)(x), expected)
