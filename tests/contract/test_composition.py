"""A layer memory and a model memory in one stack: each does its part, and the rules of state hold for both together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contract_cases import HEADS, ROWS, SEGMENT, WIDTH
from torch import Tensor, nn

from cached_transformers import state as states
from cached_transformers.interfaces.memory import LayerMemory, ModelMemory
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import Stack
from cached_transformers.memories import RMT, Memformer, TransformerXL
from cached_transformers.memories.grc.stream import StreamGRC
from cached_transformers.positions import RotaryPositions


def make(layer: type[LayerMemory] | None, spanning: type[ModelMemory] | None) -> Stack:
    torch.manual_seed(0)
    memory: Any = None if spanning is None else spanning(WIDTH, HEADS, length=3)  # type: ignore[call-arg]
    options = {"relative": False} if layer is TransformerXL else {}

    def block(_: int) -> Block:
        attention = SelfAttention(
            WIDTH,
            HEADS,
            memory=None if layer is None else layer(WIDTH, HEADS, length=8, **options),  # type: ignore[call-arg]
            positions=RotaryPositions(WIDTH // HEADS),
            norm=nn.LayerNorm(WIDTH),
            causal=True,
        )
        slots = memory.slot_attention(0) if spanning is Memformer else None
        return Block(attention, FeedForward(WIDTH, WIDTH, norm=nn.LayerNorm(WIDTH)), slot_attention=slots)

    return Stack(block, 2, model_memory=memory, width=WIDTH).eval()


def run(stack: Stack, segments: list[Tensor]) -> list[Any]:
    state, outs = stack.init_state(ROWS), []
    for segment in segments:
        outs.append(stack(segment, state))
        state = outs[-1].state
    return outs


@pytest.mark.parametrize("layer", [TransformerXL, StreamGRC])
@pytest.mark.parametrize("spanning", [RMT, Memformer])
def test_two_memories_in_one_stack(layer: type[LayerMemory], spanning: type[ModelMemory]) -> None:
    segments = list(torch.randn(4, ROWS, SEGMENT, WIDTH))
    changed = [segments[0].flip(0), *segments[1:]]
    stack = make(layer, spanning)
    outs, others = run(stack, segments), run(stack, changed)
    assert all(states.signature(out.state) == states.signature(stack.init_state(ROWS)) for out in outs)
    last, other = outs[0].state, others[0].state
    parts = {"both": other, "layers": last._replace(layers=other.layers), "model": last._replace(model=other.model)}
    for name, state in parts.items():  # what either memory holds reaches the next segment's outputs
        assert (stack(segments[1], state).outputs - outs[1].outputs).abs().max() > 1e-4, name
    late = [*segments[:3], torch.cat([segments[3][:, :2], segments[0][:, 2:]], 1)]
    torch.testing.assert_close(run(stack, late)[3].outputs[:, :2], outs[3].outputs[:, :2], rtol=0, atol=1e-6)
