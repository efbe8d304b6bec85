"""A layer memory and a model memory in one stack; and a memory in a file outside the package."""

from __future__ import annotations

from typing import Any

import contract.outside_memory  # noqa: F401  (registers it)
import pytest
import torch
from contract.contract_cases import HEADS, ROWS, SEGMENT, WIDTH
from memories.harness import build, paddings, run, segments
from torch import Tensor, nn

from cached_lab.cli.main import main
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


def outputs_of(stack: Stack, segments: list[Tensor]) -> list[Any]:
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
    outs, others = outputs_of(stack, segments), outputs_of(stack, changed)
    assert all(states.signature(out.state) == states.signature(stack.init_state(ROWS)) for out in outs)
    last, other = outs[0].state, others[0].state
    parts = {"both": other, "layers": last._replace(layers=other.layers), "model": last._replace(model=other.model)}
    for name, state in parts.items():  # what either memory holds reaches the next segment's outputs
        assert (stack(segments[1], state).outputs - outs[1].outputs).abs().max() > 1e-4, name
    late = [*segments[:3], torch.cat([segments[3][:, :2], segments[0][:, 2:]], 1)]
    torch.testing.assert_close(outputs_of(stack, late)[3].outputs[:, :2], outs[3].outputs[:, :2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("delta", [False, True])
def test_it_is_the_built_in_memory_of_the_same_equations(delta: bool) -> None:
    ours = build({"name": "infini", "update": "delta" if delta else "linear"})
    outside = build({"name": "outside_infini", "delta": delta})
    outside.load_state_dict(ours.state_dict())
    given = segments(4), None, paddings(4)
    for hidden, got, want in zip(paddings(4), run(outside, *given), run(ours, *given), strict=True):
        torch.testing.assert_close(got.outputs[~hidden], want.outputs[~hidden], rtol=0, atol=1e-10)


def test_it_is_listed_and_explained_as_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "memories"]) == 0
    assert "outside_infini" in capsys.readouterr().out
    assert main(["explain", "outside_infini"]) == 0
    said = capsys.readouterr().out
    for line in ("outside_infini (memory)", "A matrix per head", "arXiv:2404.07143", "M' = M + s(K)^T V"):
        assert line in said
    assert "delta: bool = False" in said and "initial_gate: float = 0.0" in said
