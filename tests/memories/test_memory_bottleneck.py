"""MemBottleneck of the Memory Transformer: a slow twin, who hears of whom, its cost, and where it has no place.

Legend: B rows, N tokens, M memory tokens, D model width.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cached_transformers import create_model
from cached_transformers.models.stack_model import make_stack
from cached_transformers.models.stack_options import StackOptions

WIDTH, HEADS, M, N, ROWS, VOCABULARY = 8, 2, 3, 5, 2, 11
SPEC: dict[str, Any] = {"name": "memory_transformer", "length": M, "bottleneck": True}


def build(positions: str = "none", depth: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    made = StackOptions(WIDTH, depth, HEADS, 16, memory=SPEC, **options)
    stack = make_stack(made, positions=positions).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack.eval()


def attend(layer: Any, kv_from: Any, q_D: Tensor, seen: list[Tensor]) -> Tensor:
    """One token's attention over others, head by head, without positions."""
    e, q = WIDTH // HEADS, layer.qkv(layer.norm(q_D))[:WIDTH]
    kv = [kv_from.qkv(kv_from.norm(t))[WIDTH:] for t in seen]
    heads = []
    for h in range(HEADS):
        part, behind = slice(h * e, (h + 1) * e), slice(WIDTH + h * e, WIDTH + (h + 1) * e)
        weights = torch.stack([q[part] @ t[part] / math.sqrt(e) for t in kv]).softmax(0)
        heads.append(sum(w * t[behind] for w, t in zip(weights, kv, strict=True)))
    return layer.output(torch.cat(heads))  # type: ignore[arg-type, no-any-return]


def token(block: Any, x_D: Tensor, seen: list[Tensor]) -> Tensor:
    """One token through a block, which attends others by its own projections."""
    y_D = block.attention_norm(x_D + attend(block.attention, block.attention, x_D, seen))
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
    results = []
    for y in (stack(x, padding_BN=padding).outputs, twin(stack, x, padding)):
        y = y[~padding]
        loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
        used = {n: p for n, p in stack.named_parameters() if p.requires_grad}
        results.append((y, *torch.autograd.grad(loss, [x, *used.values()], allow_unused=True)))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-10)
        assert wanted is not None and wanted.abs().max() > 1e-9


def test_tokens_hear_of_one_another_through_the_memory_alone() -> None:
    """With values of the memory's tokens that say nothing, rows of a segment are read each by itself."""
    stack, x = build(), torch.randn(ROWS, N, WIDTH, dtype=torch.float64)
    changed = x.clone()
    changed[:, 0] *= -1
    told = (stack(changed).outputs - stack(x).outputs).abs().amax((0, 2))
    assert told[1:].min() > 1e-6
    with torch.no_grad():
        for block in stack.blocks:
            block.attention.qkv.weight[2 * WIDTH :] = 0
    told = (stack(changed).outputs - stack(x).outputs).abs().amax((0, 2))
    assert told[0] > 1e-3 and told[1:].max() < 1e-12


def test_attention_grows_with_the_segment_as_the_segment_does() -> None:
    stack = build().float()

    def flops(n: int) -> int:
        with FlopCounterMode(display=False) as counter:
            stack(torch.randn(1, n, WIDTH))
        return counter.get_total_flops()

    assert flops(400) - flops(300) == flops(300) - flops(200) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"control": True}, "bottleneck=True with control=True"),
        ({"cache": 4}, "bottleneck=True with cache=4"),
        ({"place": "back"}, "bottleneck=True with place='back'"),
    ],
)
def test_what_contradicts_it_is_refused(options: dict[str, Any], message: str) -> None:
    sizes = {"vocabulary": VOCABULARY, "classes": 2, "max_length": 8, "width": WIDTH, "depth": 1, "heads": HEADS}
    with pytest.raises(ValueError, match=message):
        create_model("sequence_classifier", **sizes, feed_forward=16, memory={**SPEC, **options})


def test_a_causal_model_and_a_core_without_other_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="bottleneck=True"):
        create_model("language_model", vocabulary=9, width=WIDTH, depth=1, heads=HEADS, feed_forward=8, memory=SPEC)
    with pytest.raises(ValueError, match="needs cross"):
        build(attention="bigbird")
