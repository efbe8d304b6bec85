"""Replay: the gradient of backpropagation through time from the activations of one segment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop_cases import ROWS, SEGMENT, assert_equal, batch, build, gradients, gradients_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cached_lab.experiments.costs.flops import saved_activation_bytes
from cached_lab.experiments.costs.live_bytes import LiveBytes
from cached_lab.training.distributed import in_group
from cached_transformers import state as states
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop, token_losses

MEMORIES: list[Any] = [
    {"name": "memformer", "length": 3},
    {"name": "rmt", "length": 3},
    {"name": "rmt", "length": 2, "cache": 4},
    {"name": "grc_stream", "length": 4},
    "transformer_xl",
    None,
]


def by_hand(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """The algorithm as it is written down, all windows one: forward without gradient, then segment by segment."""
    model.zero_grad()
    torch.manual_seed(5)
    pieces = list(zip(inputs.split(SEGMENT, 1), targets.split(SEGMENT, 1), strict=True))
    state, kept, total = model.init_state(ROWS), [], torch.zeros((), dtype=torch.float64)  # type: ignore[operator]
    with torch.no_grad():
        for piece in pieces:
            kept.append((piece, state, torch.get_rng_state()))
            losses, state, _ = token_losses(model, *piece, state)
            total += losses.sum() / targets.numel()
    handed = {name: torch.zeros_like(t) for name, t in states.named_tensors(state) if t.is_floating_point()}
    last = state
    for piece, before, random_state in reversed(kept):
        leaves = states.map_state(lambda t: t.clone().requires_grad_(t.is_floating_point()), before)
        torch.set_rng_state(random_state)
        losses, after, _ = token_losses(model, *piece, leaves)
        product = sum((t * handed[n]).sum() for n, t in states.named_tensors(after) if n in handed)
        (losses.sum() / targets.numel() + product).backward()
        named = [(n, t) for n, t in states.named_tensors(leaves) if n in handed]
        handed = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in named}
    return {"loss": total, **dict(states.named_tensors(last)), **gradients_of(model)}


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_replay_is_backpropagation_through_time_with_dropout_on(memory: Any, recompute: bool) -> None:
    model = build(memory, dropout=0.2, attention_dropout=0.1)
    model.set_activation_checkpointing(recompute)  # type: ignore[operator]
    inputs, targets = batch(5)
    padding = torch.zeros_like(inputs, dtype=torch.bool)
    padding[1, 7:] = True
    extra = (None, torch.tensor([True, False]), padding)
    for bptt in (1, 2, 5):
        plain, replay = SegmentLoop(model, SEGMENT, bptt), ReplayLoop(model, SEGMENT, bptt)
        assert_equal(gradients(replay, inputs, targets, *extra), gradients(plain, inputs, targets, *extra))
        assert_equal(gradients(replay, inputs, targets), gradients(plain, inputs, targets))


@pytest.mark.parametrize("memory", MEMORIES[:3], ids=str)
def test_replay_is_the_algorithm_written_down(memory: Any) -> None:
    model = build(memory, dropout=0.2)
    inputs, targets = batch(4)
    assert_equal(gradients(ReplayLoop(model, SEGMENT, 4), inputs, targets), by_hand(model, inputs, targets))


def test_without_the_random_state_the_gradient_would_be_another() -> None:
    """The test above can fail: other dropout masks give other gradients."""
    model = build(MEMORIES[0], dropout=0.2)
    inputs, targets = batch(4)
    loop = ReplayLoop(model, SEGMENT, 4)
    first = gradients(loop, inputs, targets)
    model.zero_grad()
    torch.manual_seed(6)
    loop(inputs, targets)[0].backward()
    other = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert max((first[n] - g).abs().max() for n, g in other.items()) > 1e-3


@pytest.mark.parametrize("memory", MEMORIES[:2], ids=str)
def test_memory_does_not_grow_with_the_number_of_segments(memory: Any) -> None:
    """Saved bytes and the peak of live bytes over forward and backward: T states against T segments' activations."""
    model = build(memory)
    saved, peak = {}, {}
    for kind in (SegmentLoop, ReplayLoop):
        for segments in (2, 16):
            inputs, targets = batch(segments)
            loop = kind(model, SEGMENT, segments)
            saved[kind, segments] = saved_activation_bytes(lambda: loop(inputs, targets), model, inputs, targets)  # noqa: B023
            model.zero_grad()
            loop(inputs, targets)[0].backward()  # gradients exist from here on
            with LiveBytes() as live:
                loop(inputs, targets)[0].backward()
            peak[kind, segments] = live.peak
    state = states.nbytes(model.init_state(ROWS))  # type: ignore[operator]
    assert saved[SegmentLoop, 16] > 7 * saved[SegmentLoop, 2]
    assert saved[ReplayLoop, 16] < saved[SegmentLoop, 2] / 20
    assert peak[SegmentLoop, 16] > 5 * peak[SegmentLoop, 2]
    grown = peak[ReplayLoop, 16] - peak[ReplayLoop, 2]
    assert grown < 14 * (6 * state + 1000), "more than states, their gradients and losses is kept of a segment"
    assert peak[ReplayLoop, 16] < peak[SegmentLoop, 16] / 4


def test_without_gradient_nothing_is_run_twice() -> None:
    model = build(MEMORIES[0]).eval()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    inputs, targets = batch(3)
    with torch.no_grad():
        loss, _ = ReplayLoop(model, SEGMENT)(inputs, targets)
        want, _ = SegmentLoop(model, SEGMENT)(inputs, targets)
    assert loss == want and len(calls) == 6
    ReplayLoop(model, SEGMENT)(inputs, targets)[0].backward()
    assert len(calls) == 6 + 2 * 3


def test_two_passes_over_a_batch() -> None:
    model = build(MEMORIES[1], dropout=0.2)
    inputs, targets = batch(3)
    loops = [kind(model, SEGMENT, 3, passes=2) for kind in (ReplayLoop, SegmentLoop)]
    assert_equal(*(gradients(loop, inputs, targets) for loop in loops))


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_data_parallel_wraps_the_loop(tmp_path: Path) -> None:
    """A parameter that reported its gradient once a segment would be refused."""
    model = build(MEMORIES[0], dropout=0.2)
    inputs, targets = batch(4)
    alone = gradients(SegmentLoop(model, SEGMENT, 4), inputs, targets)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def twice() -> None:
        loop = DistributedDataParallel(ReplayLoop(model, SEGMENT, 4))
        for _ in range(2):
            assert_equal(gradients(loop, inputs, targets), alone)

    in_group(twice, "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)


def test_a_compiled_model_can_be_replayed() -> None:
    model = build(MEMORIES[0], depth=1)
    inputs, targets = batch(3)
    plain = gradients(SegmentLoop(model, SEGMENT, 3), inputs, targets)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)
    assert_equal(gradients(ReplayLoop(compiled, SEGMENT, 3), inputs, targets), plain, 1e-10)  # type: ignore[arg-type]
