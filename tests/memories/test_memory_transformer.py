"""Memory Transformer: a slow twin, limiting cases, weights of its own, both kinds of model, bottleneck.

Legend: B rows, N tokens, M memory tokens, D model width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses
from memories import harness
from memories.harness import HEADS, WIDTH, agree, attended, logit, project, segments, wild
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cached_transformers import create_model
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block, MemoryWeights
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import Stack
from cached_transformers.memories.memory_transformer import MemoryTransformer
from cached_transformers.models.stack_model import make_stack
from cached_transformers.models.stack_options import StackOptions

M, N, ROWS = 3, 5, 2


def build(name: str = "language_model", *, memory: bool = True, positions: str | None = None, **options: Any) -> Any:
    sizes = {} if name == "language_model" else {"classes": 3, "max_length": 2 * N}
    spec = {"name": "memory_transformer", "length": M, **options} if memory else None
    given = {} if positions is None else {"positions": positions}
    return harness.build(spec, model=name, scale=0.2, **sizes, **given).eval()


def tokens(seed: int = 0) -> Tensor:
    return segments(1, ROWS, N, seed)[0]


def twin(model: Any, x_BND: Tensor, *, causal: bool, place: str, mask: str, control: bool) -> Tensor:
    """Outputs of the segment's tokens from the pre-norm stack without positions, in loops."""
    stack, memory = model.stack, model.stack.model_memory.initial_MD
    rows = []
    for segment in x_BND:
        n = len(segment)
        x = [*memory, *segment] if place == "front" else [*segment, *memory]
        mine = [i < M if place == "front" else i >= n for i in range(M + n)]
        for block in stack.blocks:
            attention = [block.memory_weights.attention if control and own else block.attention for own in mine]
            forward = [block.memory_weights.feed_forward if control and own else block.feed_forward for own in mine]
            qkv = [project(a, t) for a, t in zip(attention, x, strict=True)]
            new = []
            for i, t in enumerate(x):
                sees = [j for j in range(M + n) if not causal or j <= i or (mask == "full" and mine[i] and mine[j])]
                heads = []
                for h in range(HEADS):
                    weights = torch.stack([logit(None, qkv[i][0][h], qkv[j][1][h], h) for j in sees]).softmax(0)
                    heads.append(weights @ torch.stack([qkv[j][2][h] for j in sees]))
                y = t + attention[i].output(torch.cat(heads))
                new.append(y + forward[i](y))
            x = new
        rows.append(torch.stack([stack.norm(t) for t, own in zip(x, mine, strict=True) if not own]))
    return torch.stack(rows)


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize(
    ("causal", "place", "mask"),
    [(True, "front", "full"), (True, "front", "causal"), (False, "front", "full"), (False, "back", "full")],
)
def test_values_and_gradients_are_those_of_a_slow_twin(causal: bool, place: str, mask: str, control: bool) -> None:
    options = {"place": place, "mask": mask, "control": control, "positions": "none"}
    model = build("language_model" if causal else "sequence_classifier", **options)
    x = torch.randn(ROWS, N, WIDTH, dtype=torch.float64, requires_grad=True)
    got = model.stack(x).outputs
    want = twin(model, x, causal=causal, place=place, mask=mask, control=control)
    agree([got], [want], {"x": x, **dict(model.stack.named_parameters())}, least=None)


def last_rows(model: nn.Module, x_BND: Tensor) -> Tensor:
    """What the last layer makes of memory and segment."""
    seen: list[Tensor] = []
    handle = model.stack.blocks[-1].register_forward_hook(lambda _m, _i, out: seen.append(out[0]))  # type: ignore[index, union-attr, operator]
    model.stack(x_BND)  # type: ignore[operator]
    handle.remove()
    return seen[0]


def test_weights_of_its_own_that_are_the_blocks_are_no_weights_of_its_own() -> None:
    shared, separate = build(), build(control=True)
    weights = shared.state_dict()
    separate.load_state_dict({**separate.state_dict(), **weights})
    assert (separate(tokens()).outputs - shared(tokens()).outputs).abs().max() > 1e-3
    for block in separate.stack.blocks:  # type: ignore[union-attr]
        block.memory_weights.copy_from(block)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(separate(tokens()).outputs, shared(tokens()).outputs, rtol=0, atol=1e-12)
    with torch.no_grad():
        separate.stack.blocks[0].attention.qkv.weight.mul_(2)  # type: ignore[index, union-attr, operator]
    x = torch.randn(ROWS, N, WIDTH, dtype=torch.float64)
    rows = [last_rows(model, x)[:, :M] for model in (separate, shared)]
    # They see each other alone, with weights that did not change.
    torch.testing.assert_close(*rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", ["front", "back"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "alibi"])
def test_a_classifier_reads_its_class_token_and_padding_changes_nothing(place: str, positions: str) -> None:
    model = build("sequence_classifier", place=place, positions=positions)
    inputs = tokens()
    padding = F.pad(torch.zeros_like(inputs, dtype=torch.bool), (0, 3), value=True)
    plain = build("sequence_classifier", positions=positions, memory=False)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    out = model(inputs).outputs
    assert out.shape == (ROWS, 3) and (out - plain(inputs).outputs).abs().max() > 1e-3
    torch.testing.assert_close(model(F.pad(inputs, (0, 3)), padding=padding).outputs, out, rtol=0, atol=1e-6)
    # A memory that no token attends leaves the model as it was: positions have not shifted.
    for block in model.stack.blocks:  # type: ignore[union-attr]
        block.attention.register_forward_pre_hook(hide_memory(place), with_kwargs=True)
    torch.testing.assert_close(model(inputs).outputs, plain(inputs).outputs, rtol=0, atol=1e-6)


def hide_memory(place: str) -> Any:
    def hook(_: nn.Module, given: Any, options: dict[str, Any]) -> Any:
        total = given[0].shape[1]
        memory = torch.arange(total) < M if place == "front" else torch.arange(total) >= total - M
        return given, {**options, "visible_NN": ~memory[None] | torch.eye(total, dtype=torch.bool)}

    return hook


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("positions", ["relative", "rotary"])
def test_with_a_cache_it_is_rmt_that_never_writes(mask: str, positions: str) -> None:
    """What RMT writes behind a causal segment is forgotten before the next one: values and gradients are the same."""
    ours = build(cache=4, mask=mask, positions=positions)
    theirs = harness.build({"name": "rmt", "length": M, "cache": 4, "mask": mask}, positions=positions).eval()
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected and all(".norm" in name and "model_memory" in name for name in missing)
    state = other = None
    total = torch.zeros(2, dtype=torch.float64)
    for seed in range(3):
        ids = tokens(seed)
        logits, state, _ = ours(ids, state)
        expected, other, _ = theirs(ids, other)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        other = other._replace(model=theirs.init_state(ROWS).model)
        total = total + torch.stack([logits.square().sum(), expected.square().sum()])
    names = dict(theirs.named_parameters())
    pairs = [(p, names[name]) for name, p in ours.named_parameters()]
    mine = torch.autograd.grad(total[0], [p for p, _ in pairs], retain_graph=True)
    for gradient, twin_gradient in zip(mine, torch.autograd.grad(total[1], [q for _, q in pairs]), strict=True):
        torch.testing.assert_close(gradient, twin_gradient, rtol=0, atol=1e-9)


def test_blocks_that_cannot_hold_its_weights_or_a_bottleneck_are_refused() -> None:
    def block(_: int) -> Block:
        return Block(SelfAttention(WIDTH, HEADS), FeedForward(WIDTH, WIDTH))

    memory = MemoryTransformer(WIDTH, HEADS, control=True, causal=False)
    refuses("MemoryTransformer", Stack, block, 1, model_memory=memory)
    attention, forward = SelfAttention(WIDTH, HEADS, reduction=nn.Identity()), FeedForward(WIDTH, WIDTH)
    refuses("memory_weights", Block, attention, forward, memory_weights=MemoryWeights(attention, forward))
    stack = bottleneck_of().float()

    def flops(n: int) -> int:
        with FlopCounterMode(display=False) as counter:
            stack(torch.randn(1, n, WIDTH))
        return counter.get_total_flops()

    assert flops(400) - flops(300) == flops(300) - flops(200) > 0
    with pytest.raises(ValueError, match="bottleneck=True"):
        create_model("language_model", vocabulary=9, width=WIDTH, depth=1, heads=HEADS, feed_forward=8, memory=SPEC)
    refuses("needs cross", bottleneck_of, attention="bigbird")


SPEC: dict[str, Any] = {"name": "memory_transformer", "length": M, "bottleneck": True}


def bottleneck_of(positions: str = "none", **options: Any) -> Any:
    made = StackOptions(WIDTH, 2, HEADS, 16, memory=SPEC, **options)
    return wild(make_stack(made, positions=positions)).eval()


def token(block: Any, x_D: Tensor, seen: list[Tensor]) -> Tensor:
    """One token through a block, which attends others by its own projections."""
    y_D = block.attention_norm(x_D + attended(block.attention, x_D, seen))
    return block.feed_forward_norm(y_D + block.feed_forward(y_D))  # type: ignore[no-any-return]


def narrow_twin(stack: Any, x_BND: Tensor, padding_BN: Tensor) -> Tensor:
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
def test_a_bottleneck_is_its_slow_twin(norm: str) -> None:
    stack = bottleneck_of(norm=norm)
    x = torch.randn(ROWS, N, WIDTH, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * N, [True, False, False, True, False]])
    used = {name: p for name, p in stack.named_parameters() if p.requires_grad}
    agree(
        [stack(x, padding_BN=padding).outputs[~padding]], [narrow_twin(stack, x, padding)[~padding]], {"x": x, **used}
    )
