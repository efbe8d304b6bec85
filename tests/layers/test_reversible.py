"""Reversible stacks against two streams that are simply computed, and what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cached_lab.experiments.costs.flops import saved_activation_bytes
from cached_transformers import create_model
from cached_transformers.memories.grc.shared_cache import caches, commit_caches
from cached_transformers.models.stack_model import make_stack
from cached_transformers.models.stack_options import StackOptions

CASES: dict[str, dict[str, Any]] = {
    "exact": {"attention": "softmax"},
    "causal": {"attention": "softmax", "causal": True, "positions": "rotary"},
    "dropout": {"attention": "softmax", "dropout": 0.2, "attention_dropout": 0.2, "drop_path": 0.3},
    "reformer": {"attention": {"name": "reformer", "chunk": 4, "buckets": 4}, "shared_query_key": True},
    "auxiliary loss": {"attention": {"name": "routing", "clusters": 2, "window": 4, "commitment": 0.5}},
    "shared projections": {"attention": {"name": "linformer", "slots": 4, "sharing": "keys_values"}},
    "grc": {"attention": "softmax", "memory": {"name": "grc", "length": 9}},
    "grc, released": {"attention": "softmax", "memory": {"name": "grc", "length": 9, "variant": "released"}},
}


def stack_of(reversible: bool, depth: int = 3, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    layers = {name: options.pop(name) for name in ("causal", "positions") if name in options}
    made_of = StackOptions(16, depth, 2, 24, reversible=reversible, **options)
    return make_stack(made_of, length=9, prefix=0, gives=("token_map",), **layers).double()  # 3 x 3


def two_streams(stack: Any, x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The definition, with ordinary autograd."""
    padding = options.get("padding_BN")
    first = second = x if padding is None else x.masked_fill(padding[..., None], 0)
    loss = x.new_zeros(())
    state = stack.init_state(len(x), x)
    positions = stack.clock_positions(state, x.shape[1], padding)
    for block in stack.blocks:
        attended = block.attention(second, positions, state=(), **options)
        first = first + block.drop_path(attended.y_BND)
        second = second + block.drop_path(block.feed_forward(first))
        loss = loss if attended.auxiliary_loss is None else loss + attended.auxiliary_loss
    return stack.norm((first + second) / 2), loss


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_values_and_gradients_are_those_of_two_streams(case: str, padded: bool) -> None:
    padding = torch.arange(9) >= torch.tensor([9, 6, 4])[:, None] if padded else None
    got = []
    for reversible in (True, False):
        stack = stack_of(reversible, **CASES[case])
        results: list[Tensor] = []
        for step in range(2):
            x = torch.randn(3, 9, 16, dtype=torch.double, requires_grad=True)
            torch.manual_seed(step)
            x.data.normal_()
            if reversible:
                out = stack(x, padding_BN=padding)
                y, loss = out.outputs, out.auxiliary_loss
            else:
                y, loss = two_streams(stack, x, padding_BN=padding)
            after = torch.rand(3)  # the generator goes on as if nothing had been computed again
            stack.zero_grad()
            (y.square().sum() + 3 * loss).backward()
            results += [y.detach(), loss.detach(), x.grad, after, torch.rand(3)]
            results += [p.grad for p in stack.parameters() if p.grad is not None]
        commit_caches(stack)
        got.append([*results, *(cache.cache_MC for cache in caches(stack)), *stack.buffers()])
    assert len(got[0]) == len(got[1])
    torch.testing.assert_close(*got, rtol=0, atol=1e-10)


def test_it_keeps_as_much_at_any_depth_and_is_compiled() -> None:
    x = torch.randn(3, 9, 16, dtype=torch.double, requires_grad=True)
    kept = {}
    for reversible in (True, False):
        for depth in (2, 8):
            stack = stack_of(reversible, depth, attention="softmax")
            kept[reversible, depth] = saved_activation_bytes(lambda stack=stack: stack(x).outputs)
    assert kept[True, 8] == kept[True, 2] < kept[False, 2]
    assert kept[False, 8] > 3 * kept[False, 2]
    stack, reference = (stack_of(True, attention="softmax") for _ in range(2))
    x = torch.randn(3, 9, 16, dtype=torch.double)
    for run in (torch.compile(stack, fullgraph=True, backend="aot_eager"), reference):
        run(x).outputs.square().sum().backward()
    for a, b in zip(stack.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-10)


def test_mixed_precision_is_repeated_as_it_was() -> None:
    grads = []
    for reversible in (True, False):
        stack = stack_of(reversible, attention="softmax").float()
        x = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            y = stack(x).outputs if reversible else two_streams(stack, x)[0]
        y.float().square().sum().backward()
        grads.append([p.grad for p in stack.parameters()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm() + 1e-6  # a rounding of bfloat16 that fell otherwise


@pytest.mark.parametrize("name", ["language_model", "sequence_classifier", "vision_transformer"])
def test_every_model_has_the_option(name: str) -> None:
    sizes: dict[str, dict[str, Any]] = {
        "language_model": {"vocabulary": 7},
        "sequence_classifier": {"vocabulary": 7, "classes": 3, "max_length": 9},
        "vision_transformer": {"image_size": 8, "patch_size": 4, "classes": 3},
    }
    inputs = torch.randn(2, 3, 8, 8) if name == "vision_transformer" else torch.randint(0, 7, (2, 9))
    model = create_model(name, width=16, depth=2, heads=2, feed_forward=24, reversible=True, **sizes[name])
    trained = model(inputs).outputs
    trained.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(inputs).outputs, trained)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"memory": {"name": "transformer_xl", "length": 4}}, "TransformerXL carries a state"),
        ({"memory": {"name": "grc_stream", "length": 4}}, "StreamGRC carries a state"),
        ({"memory": {"name": "rmt", "length": 4}}, "RMT spans the layers"),
        ({"norm": "post"}, "take norm='pre'"),
    ],
)
def test_what_cannot_be_undone_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"reversible=True: .*{reason}.*set_activation_checkpointing"):
        stack_of(True, attention="softmax", causal=True, **options)
