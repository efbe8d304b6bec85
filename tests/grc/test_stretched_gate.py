"""The update gate of `grc_stream` that can close: a slow twin of it, and slots that nothing wears off.

Legend: B rows, N tokens, M slots, C cache width.
"""

from __future__ import annotations

import math

import pytest
import torch
from memories.harness import agree
from torch import Tensor

from cached_transformers import create_model
from cached_transformers.memories.grc.equations import GateWeights, gate_update
from cached_transformers.memories.grc.stream import StreamGRC
from cached_transformers.memories.parts.options import gated


@pytest.mark.parametrize("x", [-9.0, -2.5, -2.0, 0.0, 1.5, 2.3, 2.5, 9.0])
def test_the_gate_is_cut_at_both_ends(x: float) -> None:
    x_ = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    got = gated(x_, "stretched")
    share = 1 / (1 + math.exp(-x))
    assert got.item() == pytest.approx(min(max(-0.1 + 1.2 * share, 0.0), 1.0), abs=1e-12)
    (slope,) = torch.autograd.grad(got, x_)
    inside = 1 / 12 < share < 11 / 12
    assert slope.item() == pytest.approx(1.2 * share * (1 - share) if inside else 0.0, abs=1e-12)


def one_slot(s: Tensor, slot: Tensor, weights: GateWeights) -> Tensor:
    """One slot, channel by channel, with tanh as the candidate."""
    width = len(s)
    of_tokens, of_cache = weights.tokens.split(width), weights.cache.split(width)
    b = weights.bias.split(width)
    new = []
    reset = [1 / (1 + torch.exp(-(of_tokens[1][c] @ s + of_cache[1][c] @ slot + b[1][c]))) for c in range(width)]
    for c in range(width):
        share = 1 / (1 + torch.exp(-(of_tokens[0][c] @ s + of_cache[0][c] @ slot + b[0][c])))
        update = min(max(-0.1 + 1.2 * share, torch.zeros_like(share)), torch.ones_like(share))
        fresh = torch.tanh(of_tokens[2][c] @ s + of_cache[2][c] @ (torch.stack(reset) * slot) + b[2][c])
        new.append((1 - update) * slot[c] + update * fresh)
    return torch.stack(new)


def test_an_update_is_that_of_a_slow_twin() -> None:
    rows, slots, width = 2, 3, 4
    leaves = [
        (2 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()
        for shape in ((rows, slots, width), (rows, slots, width), (12, width), (12,), (12, width))
    ]
    s_BMC, cache_BMC, tokens, bias, cache = leaves
    weights = GateWeights(tokens, bias, cache, None)
    got = gate_update(s_BMC, cache_BMC, weights, "tanh", update_gate="stretched")
    wanted = torch.stack(
        [torch.stack([one_slot(s_BMC[b, m], cache_BMC[b, m], weights) for m in range(slots)]) for b in range(rows)]
    )
    agree([got], [wanted], {str(i): t for i, t in enumerate(leaves)}, atol=1e-12, grads=1e-11)
    assert bool((got == cache_BMC).any()) and bool((got != cache_BMC).any())  # some are closed, and some are not


@pytest.mark.parametrize("update_gate", ["sigmoid", "stretched"])
def test_what_a_closed_gate_keeps_is_kept_to_the_last_bit(update_gate: str) -> None:
    """Left at -4 by all the text, a sigmoid wears off a fiftieth with every segment, and the stretched gate nothing."""
    memory = {"name": "grc_stream", "length": 4, "ratio": 1.0, "update_gate": update_gate}
    model = create_model(
        "language_model", vocabulary=5, width=8, depth=1, heads=2, feed_forward=8, memory=memory
    ).eval()
    (grc,) = (m for m in model.modules() if isinstance(m, StreamGRC))
    segments = [torch.randint(0, 5, (1, 4)) for _ in range(302)]
    with torch.no_grad():
        state = model(segments[0]).state
        state = model(segments[1], state).state  # the first segment is written when the second one reads
        grc.gates.from_tokens.weight[:8].zero_()
        grc.gates.from_cache.weight[:8].zero_()
        grc.gates.from_tokens.bias[:8] = -4.0
        written = state.layers[0].cache_BMC.clone()
        for segment in segments[2:]:
            state = model(segment, state).state
    held = state.layers[0].cache_BMC
    assert written.abs().max() > 0.1
    if update_gate == "stretched":
        assert torch.equal(held, written)
    else:
        likeness = torch.nn.functional.cosine_similarity(held.flatten(), written.flatten(), 0)
        assert (held - written).abs().max() > 0.1 and likeness < 0.9
