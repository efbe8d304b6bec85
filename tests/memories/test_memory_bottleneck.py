"""MemBottleneck of the Memory Transformer: a slow twin, its cost, and refusals.

Legend: B rows, N tokens, M memory tokens, D model width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories.harness import HEADS, WIDTH, agree, attended, wild
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cached_transformers import create_model
from cached_transformers.models.stack_model import make_stack
from cached_transformers.models.stack_options import StackOptions

M, N, ROWS = 3, 5, 2
SPEC: dict[str, Any] = {"name": "memory_transformer", "length": M, "bottleneck": True}


def build(positions: str = "none", **options: Any) -> Any:
    made = StackOptions(WIDTH, 2, HEADS, 16, memory=SPEC, **options)
    return wild(make_stack(made, positions=positions)).eval()


def token(block: Any, x_D: Tensor, seen: list[Tensor]) -> Tensor:
    """One token through a block, which attends others by its own projections."""
    y_D = block.attention_norm(x_D + attended(block.attention, x_D, seen))
    return block.feed_forward_norm(y_D + block.feed_forward(y_D))  # type: ignore[no-any-return]


def twin(stack: Any, x_BND: Tensor, padding_BN: Tensor) -> Tensor:
    rows = []
    for x_ND, padding_N in zip(x_BND, padding_BN, strict=True):
        memory, tokens = list(stack.model_memory.initial_MD), list(x_ND)
        for block in stack.blocks:
            real = [t for t, pad in zip(tokens, padding_N, strict=True) if not pad]
            memory = [token(block.memory_block, m, [*memory, *real]) for m in memory]
            tokens = [token(block, t, memory) for t in tokens]
        rows.append(torch.stack([stack.norm(t) for t in tokens]))
    return torch.stack(rows)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_values_and_gradients_are_those_of_a_slow_twin(norm: str) -> None:
    stack = build(norm=norm)
    x = torch.randn(ROWS, N, WIDTH, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * N, [True, False, False, True, False]])
    used = {name: p for name, p in stack.named_parameters() if p.requires_grad}
    agree([stack(x, padding_BN=padding).outputs[~padding]], [twin(stack, x, padding)[~padding]], {"x": x, **used})


def test_attention_grows_with_the_segment_as_the_segment_does() -> None:
    stack = build().float()

    def flops(n: int) -> int:
        with FlopCounterMode(display=False) as counter:
            stack(torch.randn(1, n, WIDTH))
        return counter.get_total_flops()

    assert flops(400) - flops(300) == flops(300) - flops(200) > 0


def test_a_causal_model_and_a_core_without_other_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="bottleneck=True"):
        create_model("language_model", vocabulary=9, width=WIDTH, depth=1, heads=HEADS, feed_forward=8, memory=SPEC)
    with pytest.raises(ValueError, match="needs cross"):
        build(attention="bigbird")
