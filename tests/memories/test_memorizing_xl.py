"""Memorizing Transformers with a Transformer-XL cache (arXiv:2203.08913, the rows of its tables with both), as a list.

Every layer has the cache, one upper layer the store too, and its gate mixes the store's result with attention over
cache and segment. A segment is stored when it has been read, as in google-research/meliad: what the cache still holds
is found in the store, too.

Legend: N tokens, M slots, H heads, E head width, D model width.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from memories import harness
from memories.harness import HEADS, WIDTH, agree
from torch import Tensor, nn

from cached_transformers import state as states
from cached_transformers.interfaces.memory import Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories import create_memory
from cached_transformers.memories.parts.composite import SideBySide
from cached_transformers.positions import RotaryPositions

ROWS = 2
XL = {"name": "transformer_xl", "length": 7, "relative": False}
STORE = {"name": "memorizing", "length": 24, "k": 3}


def build(memory: Any) -> Any:
    """A model in which each weight of the same name has the same value."""
    model = harness.build(memory, scale=0, depth=4, positions="rotary")
    for name, parameter in model.named_parameters():
        seed = sum(name.replace(".members.0", "").replace(".members.1", "").encode())
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).double())
    return model.eval()


def twin(layer: SelfAttention, inputs: list[Tensor], paddings: list[Tensor], resets: list[bool]) -> list[Tensor]:
    """One row, token by token: the cache is attended with positions, what is stored without."""
    cache, knn = layer.memory.members  # type: ignore[union-attr]
    turn = lambda t_E, place: layer.positions.rotate(t_E[None, None, None], torch.tensor([[[place]]]))[0, 0, 0]  # noqa: E731
    past: list[tuple[Tensor, int]] = []
    stored: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(HEADS)]
    clock, found = 0, []
    for x_ND, padding, reset in zip(inputs, paddings, resets, strict=True):
        if reset:
            past, stored, clock = [], [[] for _ in range(HEADS)], 0
        places = [clock + i for i in range(len(x_ND))]
        real = [i for i in range(len(x_ND)) if not padding[i]]
        q, k, v = (layer.qkv(x_ND)[:, i * WIDTH : (i + 1) * WIDTH].unflatten(-1, (HEADS, -1)) for i in range(3))
        rows = []
        for i in range(len(x_ND)):
            heads = []
            for h in range(HEADS):
                pairs = []
                for old_D, place in past:
                    old = layer.qkv(old_D).view(3, HEADS, -1)
                    pairs.append((turn(old[1, h], place), old[2, h]))
                pairs += [(turn(k[j, h], places[j]), v[j, h]) for j in real if j <= i]
                y = torch.zeros(WIDTH // HEADS, dtype=x_ND.dtype)
                if pairs:
                    logits = torch.stack([turn(q[i, h], places[i]) @ key for key, _ in pairs])
                    y = (logits / math.sqrt(WIDTH // HEADS)).softmax(0) @ torch.stack([value for _, value in pairs])
                if stored[h]:
                    direction = q[i, h] / q[i, h].norm()
                    best = sorted(stored[h], key=lambda e, d=direction: -float((d @ e[0]).detach()))[: knn.k]
                    logits = knn.scale_H[h].abs() * torch.stack([direction @ key for key, _ in best])
                    gate = knn.gate_H[h].sigmoid()
                    y = gate * (logits.softmax(0) @ torch.stack([value for _, value in best])) + (1 - gate) * y
                heads.append(y)
            rows.append(layer.output(torch.cat(heads)))
        found.append(torch.stack(rows))
        past = [*past, *((x_ND[j].detach(), places[j]) for j in real)][-cache.length :]
        for h in range(HEADS):
            fresh = [((k[j, h] / k[j, h].norm()).detach(), v[j, h].detach()) for j in real]
            stored[h] = [*stored[h], *fresh][-knn.length :]
        clock += len(x_ND)
    return found


@pytest.mark.usefixtures("double")
def test_a_layer_is_what_loops_compute() -> None:
    """Values and gradients, with padding, a reset, and a cache that is longer than some segments."""
    pair = [create_memory(XL, WIDTH, HEADS), create_memory({**STORE, "length": 11}, WIDTH, HEADS)]
    layer = SelfAttention(
        WIDTH,
        HEADS,
        memory=SideBySide(pair),  # type: ignore[arg-type]
        positions=RotaryPositions(WIDTH // HEADS),
        causal=True,
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.6)
    shapes, resets = [5, 3, 9, 4, 5], [torch.tensor([False, i == 3]) for i in range(5)]
    inputs = [torch.randn(ROWS, n, WIDTH) for n in shapes]
    paddings = [torch.rand(ROWS, n) < 0.25 for n in shapes]
    fresh = layer.init_state(ROWS, inputs[0])
    state, clock_B, found = fresh, torch.zeros(ROWS, dtype=torch.long), []
    for x, padding, reset in zip(inputs, paddings, resets, strict=True):
        state, clock_B = states.reset(state, fresh, reset), clock_B.masked_fill(reset, 0)
        places = (clock_B[:, None] + torch.arange(x.shape[1]))[..., None]
        attended = layer(x, places, state=state, padding_BN=padding)
        found.append(attended.y_BND)
        state, _ = layer.write(state, Trace(x, attended.y_BND, attended.query, attended.reading), attended.core_state)
        clock_B = clock_B + x.shape[1]
    by_row = [
        twin(layer, [x[b] for x in inputs], [p[b] for p in paddings], [bool(r[b]) for r in resets]) for b in range(ROWS)
    ]
    expected = [torch.stack(rows) for rows in zip(*by_row, strict=True)]
    agree(*([y[~p] for y, p in zip(ys, paddings, strict=True)] for ys in (found, expected)), layer, least=1e-4)
