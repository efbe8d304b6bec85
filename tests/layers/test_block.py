"""Blocks and stacks: order of sublayers, states, and small parts.

Legend: B rows, N tokens, M slots, H heads, E head width, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from common import refuses
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.attention import Attention
from cached_transformers.interfaces.memory import (
    BlockRunner,
    Context,
    Entry,
    LayerMemory,
    ModelMemory,
    Query,
    Reading,
    Tokens,
    Trace,
)
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block
from cached_transformers.layers.feed_forward import DropPath, FeedForward
from cached_transformers.layers.reduction import PooledReduction, SpatialReduction
from cached_transformers.layers.stack import Stack
from cached_transformers.memories.memformer import SlotAttention

D, H = 8, 2


class Count(NamedTuple):
    segments_B: Tensor


class Counting(LayerMemory):
    """Counts the segments of each row; its auxiliary loss is a given number."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self.loss = loss
        self.traces: list[Trace] = []

    def init_state(self, batch_size: int, like: Tensor) -> Count:
        return Count(torch.zeros(batch_size, dtype=torch.long))

    def write(self, state: Count, trace: Trace) -> tuple[Count, Tensor]:
        self.traces.append(trace)
        return Count(state.segments_B + 1), torch.tensor(self.loss)


class Spanning(ModelMemory):
    """Offers a context and slots to every layer, and sees all traces at the end."""

    needs = frozenset({"state", "context", "slots"})

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers

    def init_state(self, batch_size: int, like: Tensor) -> Count:
        return Count(torch.zeros(batch_size, dtype=torch.long))

    def enter(self, state: Any, tokens: Tokens) -> Entry:
        rows = tokens.x_BND.shape[0]
        generator = torch.Generator().manual_seed(0)
        k, v = torch.randn(2, 1, H, 3, D // H, generator=generator)
        context = Context(k, v, torch.zeros(1, 3, 1, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool))
        slots_BMD = torch.randn(rows, 2, D, generator=generator)
        self.inputs = tokens.inputs_BN
        return Entry(tokens, [context] * self.layers, (slots_BMD,))

    def exit(self, state: Count, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, Count, Tensor]:
        self.traces = traces
        return x_BND, Count(state.segments_B + 1), torch.tensor(100.0)


def make_block(memory: LayerMemory | None = None, slots: bool = False, drop_path: float = 0.0) -> Block:
    return Block(
        SelfAttention(D, H, memory=memory, norm=nn.LayerNorm(D)),
        FeedForward(D, 2 * D, norm=nn.LayerNorm(D)),
        slot_attention=SlotAttention(D, H) if slots else None,
        drop_path=drop_path,
    )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Multi-head softmax attention of (B, N, D) by slices of the width."""
    heads = []
    for part in (slice(0, D // H), slice(D // H, D)):
        heads.append((q[..., part] @ k[..., part].mT / math.sqrt(D // H)).softmax(-1) @ v[..., part])
    return torch.cat(heads, -1)


def test_a_block_is_attention_slots_and_feed_forward_each_behind_a_norm_and_a_residual() -> None:
    block, x, slots = make_block(slots=True), torch.randn(3, 5, D), torch.randn(3, 2, D)
    a, s, f = block.attention, block.slot_attention, block.feed_forward
    assert s is not None
    y = x + a.output(attend(*a.qkv(a.norm(x)).chunk(3, -1)))
    y = y + s.output(attend(s.query(s.norm(y)), *s.key_value(slots).chunk(2, -1)))
    y = y + f.leave(F.gelu(f.enter(f.norm(y))))
    got, state, trace, loss = block(x, slots=(slots,))
    torch.testing.assert_close(got, y, rtol=0, atol=1e-5)
    assert state == () and loss is None
    assert torch.equal(trace.x_BND, x) and torch.equal(trace.y_BND, got)
    assert torch.equal(trace.query.x_BND, a.norm(x))


def test_empty_slots_are_no_slots_whatever_they_hold() -> None:
    layer, x, slots = SlotAttention(D, H), torch.randn(3, 5, D), torch.randn(3, 4, D)
    nn.init.ones_(layer.output.bias)
    valid = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    y = layer(x, torch.where(valid[..., None], slots, torch.nan), valid)
    torch.testing.assert_close(y[:1], layer(x[:1], slots[:1, ::2]), rtol=0, atol=1e-6)
    assert (y[1] == 0).all()
    torch.testing.assert_close(y[2:], layer(x[2:], slots[2:]), rtol=0, atol=1e-6)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_a_stack_threads_states_traces_and_losses() -> None:
    layers, spanning = [Counting(1.0), Counting(10.0)], Spanning(2)
    stack = Stack(lambda i: make_block(layers[i], slots=True), 2, model_memory=spanning, width=D)
    x, raw = torch.randn(3, 5, D), torch.zeros(3, 5, dtype=torch.long)
    out = stack(x, inputs=raw)
    out = stack(x, out.state, inputs=raw)
    assert out.auxiliary_loss.item() == 111
    assert out.state.clock_B.tolist() == [10] * 3
    assert [s.segments_B.tolist() for s in (out.state.model, *out.state.layers)] == [[2] * 3] * 3
    assert spanning.inputs is raw and len(spanning.traces) == 2
    assert torch.equal(spanning.traces[0].y_BND, spanning.traces[1].x_BND)
    last = layers[1].traces[-1]
    assert last.query.positions_BNP is not None and last.query.positions_BNP[0, :, 0].tolist() == [5, 6, 7, 8, 9]
    torch.testing.assert_close(out.outputs, F.layer_norm(last.y_BND, (D,)))


class Sliced(Counting):
    """Returns a view of a longer buffer, as a queue does that drops its oldest entries."""

    def init_state(self, batch_size: int, like: Tensor) -> Count:
        return Count(torch.zeros(1, dtype=torch.long).expand(batch_size))

    def write(self, state: Count, trace: Trace) -> tuple[Count, Tensor]:
        return Count(torch.arange(2 * len(state.segments_B))[::2]), torch.tensor(0.0)


def test_what_leaves_a_stack_has_the_layout_of_what_enters() -> None:
    stack = Stack(lambda _: make_block(Sliced(0.0)), 1)
    state = stack.init_state(3)
    for part in (state, stack(torch.randn(3, 2, D), state).state):
        assert part.layers[0].segments_B.stride() == (1,)


def test_the_context_of_a_model_memory_reaches_every_layer() -> None:
    x = torch.randn(2, 5, D)
    told = []
    for memory in (ModelMemory(), Spanning()):
        torch.manual_seed(0)
        stack = Stack(lambda _: make_block(slots=True), 1, model_memory=memory)
        nn.init.zeros_(stack.blocks[0].slot_attention.output.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(stack.blocks[0].slot_attention.output.bias)  # type: ignore[union-attr, arg-type]
        told.append(stack(x).outputs)
    assert (told[0] - told[1]).abs().max() > 1e-2


class Apart(Spanning):
    """Another context for each layer, in steps of two tokens, after a preview of the segment."""

    needs = frozenset({"state", "context"})

    def __init__(self) -> None:
        super().__init__(2)
        self.calls: list[str] = []

    def run(self, state: Count, tokens: Tokens, through: BlockRunner) -> tuple[list[Tensor], Count, None]:
        through(Entry(tokens), write=False)
        steps: list[Tensor] = []
        for part in tokens.split(2):
            step, state, _ = super().run(state, part, through)
            steps += step
        self.calls.append(f"{len(through.layers)} layers, {len(steps)} steps")
        return steps, state, None

    def enter(self, state: Any, tokens: Tokens) -> Entry:
        places, valid = torch.zeros(1, 3, 1, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
        full = torch.full((1, H, 3, D // H), 1.0)
        return Entry(tokens, [Context(full, full, places, valid), None])


def test_a_memory_may_go_in_steps_and_offer_each_layer_its_own_context() -> None:
    memory, seen, counting = Apart(), [], [Counting(1.0), Counting(3.0)]
    stack = Stack(lambda i: make_block(counting[i]), 2, model_memory=memory)
    for block in stack.blocks:
        block.attention.core.register_forward_hook(
            lambda m, args, kwargs, out: seen.append(kwargs["context"] is not None), with_kwargs=True
        )
    out = stack(torch.randn(3, 5, D))
    assert out.outputs.shape == (3, 5, D) and out.auxiliary_loss.item() == pytest.approx(4)  # the mean over the steps
    out = stack(torch.randn(3, 1, D), out.state)
    assert memory.calls == ["2 layers, 3 steps", "2 layers, 1 steps"]
    # Of the previews nothing is kept.
    assert [s.segments_B.tolist() for s in (out.state.model, *out.state.layers)] == [[4] * 3] * 3
    assert out.state.clock_B.tolist() == [6] * 3
    assert seen == [False, False, *[True, False] * 3, False, False, True, False]
    positions = [trace.query.positions_BNP[0, :, 0].tolist() for trace in counting[0].traces]  # type: ignore[index]
    assert positions == [[0, 1, 2, 3, 4], [0, 1], [2, 3], [4], [5], [5]]


def test_a_trace_of_some_tokens_keeps_the_weights_of_the_context_and_of_those_tokens() -> None:
    x, weights = torch.randn(1, 4, D), torch.arange(14.0).view(1, 1, 2, 7)  # of the last queries of these tokens
    heads = torch.randn(1, H, 4, D // H)
    trace = Trace(x, x, Query(x, heads, k_BHNE=heads), Reading(), weights).narrow(1, 2)
    assert trace.weights_BHWL[0, 0].tolist() == [[0, 1, 2, 4, 5], [7, 8, 9, 11, 12]]
    assert torch.equal(trace.x_BND, x[:, 1:3]) and torch.equal(trace.query.k_BHNE, heads[:, :, 1:3])


def test_a_stack_needs_a_layer_and_blocks_that_serve_its_memory() -> None:
    refuses("depth=0", Stack, lambda _: make_block(), 0)
    refuses("memory Spanning offers slots", Stack, lambda _: make_block(), 1, model_memory=Spanning())
    mixing = lambda _: Block(SelfAttention(D, H, core=Mixer()), FeedForward(D, D))  # noqa: E731
    refuses("OffersContext", Stack, mixing, 1, model_memory=OffersContext())


class OffersContext(ModelMemory):
    needs = frozenset({"context"})


class Mixer(Attention):
    """A core without any of the optional abilities."""


def test_the_default_memories_change_nothing() -> None:
    x, query, memory = torch.randn(2, 3, D), Query(torch.randn(2, 3, D)), LayerMemory()
    assert memory.init_state(2, x) == () and memory.read((), query, None) == Reading()
    heads = x.view(2, 3, H, -1).transpose(1, 2)
    assert memory.combine(heads, query, Reading()) is heads
    assert torch.equal(memory.project(heads, query, Reading(), lambda y: y, None), x)
    spanning = ModelMemory()
    assert spanning.next_pass("z", ["a", "b"]) == "b" and not spanning.rereads
    assert spanning.enter((), Tokens(x, x)) == Entry(Tokens(x, x))


def test_drop_path_drops_whole_rows_and_keeps_the_mean() -> None:
    x = torch.ones(4000, 2, 3)
    y = DropPath(0.25)(x)
    kept = y[:, 0, 0] > 0
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / 0.75)) and (y[~kept] == 0).all()
    assert kept.float().mean() == pytest.approx(0.75, abs=0.03)
    assert torch.equal(DropPath(0.25).eval()(x), x) and DropPath(0.0)(x) is x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DropPath(1.0), r"drop_path=1.0 must lie in \[0, 1\)"),
        (lambda: FeedForward(4, 8, activation="gelo"), "activation='gelo' must be one of gelu, gelu_tanh, relu"),
        (lambda: SpatialReduction(4, 2)(torch.randn(1, 6, 4)), r"6 tokens need the size .* got size=None"),
        (lambda: PooledReduction(4, 2)(torch.randn(1, 6, 4), (2, 2)), r"6 tokens need the size .* got size=\(2, 2\)"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    refuses(message, make)


def test_reductions_see_each_cell_once_or_are_a_linear_map() -> None:
    layer, x = SpatialReduction(4, 2), torch.randn(2, 8, 4)
    got = layer(x, (2, 4))
    cells = [[0, 1, 4, 5], [2, 3, 6, 7]]
    weight = layer.convolution.weight.flatten(2)  # out, in, cell
    want = torch.stack([torch.einsum("bcd,edc->be", x[:, c], weight) + layer.convolution.bias for c in cells], 1)
    torch.testing.assert_close(got, F.layer_norm(want, (4,)), rtol=0, atol=1e-5)
    layer, x = PooledReduction(4, 2), torch.randn(2, 4, 4)
    linear = x @ layer.convolution.weight[..., 0, 0].T + layer.convolution.bias
    torch.testing.assert_close(layer(x, (2, 2)), F.gelu(F.layer_norm(linear, (4,))), rtol=0, atol=1e-5)
    assert layer(torch.randn(2, 35, 4), (5, 7)).shape == (2, 4, 4)
