"""Sliding windows: each loss goes back through the same number of segments, against one run for each loss.

Legend: B rows, N tokens of all segments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from common import refuses
from loop_cases import ROWS, SEGMENT, VOCABULARY, assert_equal, batch, build, gradients, gradients_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from cached_lab.training.distributed import in_group
from cached_transformers import state as states
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop, token_losses

TOTAL, WINDOWS = 5, ("blocks", "sliding")
MEMORIES: list[Any] = [
    {"name": "rmt", "length": 2},
    {"name": "rmt", "length": 2, "cache": 3},
    {"name": "memformer", "length": 3},
    {"name": "grc_stream", "length": 3},
    {"name": "crtn", "segment": SEGMENT, "regions": 3, "topk": 2},
    {"name": "feedback", "length": 5},
    {"name": "block_retrieval", "sinks": 1, "recent": 3, "block": 2, "topk": 2},
    {"name": "compressive", "length": 3, "compressed": 2, "rate": 2},
    [{"name": "memorizing", "length": 8, "k": 3}, {"name": "grc_stream", "length": 3}],
]


def everything(segments: int = TOTAL) -> dict[str, Tensor]:
    padding, reset = torch.zeros_like(batch(segments)[0], dtype=torch.bool), torch.zeros(ROWS, segments).bool()
    padding[1, 9:13], reset[0, 2], reset[1, 3] = True, True, True
    return {"padding": padding, "reset": reset}


def twin(model: Any, window: int, state: Any = None, padding: Any = None, reset: Any = None) -> dict[str, Tensor]:
    """Return the loss of each segment separately, with the state before segment t - window as a constant."""
    model.zero_grad()
    inputs, targets = batch()
    if padding is not None:
        targets = targets.masked_fill(padding, -100)
    parts = [slice(i, i + SEGMENT) for i in range(0, inputs.shape[1], SEGMENT)]

    def read(t: int, before: Any) -> Any:
        more = {} if reset is None else {"reset": reset[:, t]}
        pad = None if padding is None else padding[:, parts[t]]
        return token_losses(model, inputs[:, parts[t]], targets[:, parts[t]], before, padding=pad, **more)

    before = [state]
    with torch.no_grad():
        for t in range(len(parts)):
            before.append(read(t, before[-1]).state)
    total = torch.zeros((), dtype=torch.float64)
    for t in range(len(parts)):
        first = max(t - window, 0)
        now = before[first]
        for j in range(first, t + 1):
            out = read(j, now)
            now = out.state
        loss = out.outputs.sum() / (targets != -100).sum() + out.auxiliary_loss / len(parts)
        loss.backward()
        total += loss.detach()
    return {"loss": total, **dict(states.named_tensors(before[-1])), **gradients_of(model)}


@pytest.mark.parametrize("memory", MEMORIES, ids=str)
def test_it_is_the_sum_over_losses_of_truncated_gradients(memory: Any) -> None:
    model = build(memory)
    for bptt in (2, 4):
        want = twin(model, bptt - 1)
        assert_equal(gradients(SegmentLoop(model, SEGMENT, bptt, bptt_window="sliding"), *batch()), want, 1e-10)
    more = everything()
    want = twin(model, 2, **more)
    assert_equal(gradients(SegmentLoop(model, SEGMENT, 3, bptt_window="sliding"), *batch(), **more), want, 1e-10)


def test_it_is_neither_blocks_nor_without_gradient_nor_compiled() -> None:
    """The tests above can fail: the first segment of a block gets no gradient from later blocks."""
    model = build(MEMORIES[0])
    blocks, sliding = (gradients(SegmentLoop(model, SEGMENT, 2, bptt_window=w), *batch()) for w in WINDOWS)
    assert blocks["loss"] == sliding["loss"]
    assert max((blocks[n] - sliding[n]).abs().max() for n, _ in model.named_parameters() if n in blocks) > 1e-3
    model = build(MEMORIES[0]).eval()
    with torch.no_grad():
        (a, _), (b, _) = (SegmentLoop(model, SEGMENT, 2, bptt_window=w)(*batch()) for w in WINDOWS)
    assert torch.equal(a, b)
    compiled: Any = torch.compile(build("rmt"), backend="eager")
    refuses("a compiled model frees its graph", SegmentLoop, compiled, SEGMENT, 2, bptt_window="sliding")
    SegmentLoop(compiled, SEGMENT, 1, bptt_window="sliding")


@pytest.mark.parametrize("memory", MEMORIES[:2], ids=str)
def test_without_reach_or_with_all_of_it_both_windows_are_one(memory: Any) -> None:
    model = build(memory)
    for bptt in (1, TOTAL, TOTAL + 3):
        blocks, sliding = (gradients(SegmentLoop(model, SEGMENT, bptt, bptt_window=w), *batch()) for w in WINDOWS)
        assert all(torch.equal(blocks[name], sliding[name]) for name in blocks | sliding)


@pytest.mark.parametrize("memory", [MEMORIES[0], MEMORIES[3]], ids=str)
def test_each_loss_reaches_as_far_as_it_may_and_no_farther(memory: Any) -> None:
    """Gradient of one segment's loss by the tokens of each segment."""
    model, (inputs, targets) = build(memory), batch()
    given: list[Tensor] = []

    def watched(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        given.append(out.detach().requires_grad_())
        return given[-1]

    embedding = next(m for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == VOCABULARY)
    handle = embedding.register_forward_hook(watched)
    for t in range(TOTAL):
        given.clear()
        only = torch.full_like(targets, -100)
        only[:, t * SEGMENT : (t + 1) * SEGMENT] = targets[:, t * SEGMENT : (t + 1) * SEGMENT]
        SegmentLoop(model, SEGMENT, 3, bptt_window="sliding")(inputs, only)[0].backward()
        reached = [j for j, g in enumerate(given) if g.grad is not None and g.grad.abs().max() > 0]
        assert reached == list(range(max(0, t - 2), t + 1))
    handle.remove()


def test_the_given_state_is_not_cut_off() -> None:
    """A trained initial state learns from the losses that reach the beginning, as with plain windows."""
    model = build(MEMORIES[0])
    read = states.detach(model(batch()[0][:, :SEGMENT], model.init_state(ROWS)).state)
    state = states.map_state(lambda t: t.requires_grad_(t.is_floating_point()), read)
    wanted = [t for _, t in states.named_tensors(state) if t.requires_grad]
    loss, _ = SegmentLoop(model, SEGMENT, 3, bptt_window="sliding")(*batch(), state)
    found = torch.autograd.grad(loss, wanted)
    inputs, targets = batch()
    now, reaching = state, torch.zeros((), dtype=torch.float64)
    for t in range(3):
        part = slice(t * SEGMENT, (t + 1) * SEGMENT)
        out = token_losses(model, inputs[:, part], targets[:, part], now)
        now, reaching = out.state, reaching + out.outputs.sum() / targets.numel()
    for a, b in zip(found, torch.autograd.grad(reaching, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        assert b.abs().max() > 1e-4


@pytest.mark.parametrize("memory", MEMORIES[:2], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_replay_gives_the_same_with_dropout_on(memory: Any, recompute: bool) -> None:
    model = build(memory, dropout=0.2, attention_dropout=0.1)
    want = gradients(SegmentLoop(model, SEGMENT, 3, bptt_window="sliding"), *batch(), **everything())
    model.set_activation_checkpointing(recompute)
    for kind in (SegmentLoop, ReplayLoop):
        assert_equal(gradients(kind(model, SEGMENT, 3, bptt_window="sliding"), *batch(), **everything()), want)


def test_what_it_costs() -> None:
    """Forward as ever; backward once for the weights, and for the state at most k times more, without the weights."""
    model = build({"name": "rmt", "length": 2}, width=32, feed_forward=128).float()
    inputs, targets = batch(8)

    def flops(bptt: int, window: str) -> tuple[int, int]:
        counts = []
        with FlopCounterMode(display=False) as counter:
            loss, _ = SegmentLoop(model, SEGMENT, bptt, bptt_window=window)(inputs, targets)
            counts.append(counter.get_total_flops())
            loss.backward()
            counts.append(counter.get_total_flops() - counts[0])
        return counts[0], counts[1]

    forward, backward = flops(8, "blocks")
    for window in (1, 2):
        again, back = flops(window + 1, "sliding")
        assert again == forward
        assert 1 + 0.3 * window < back / backward < 1 + 0.5 * window  # the docs say 0.4


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_data_parallel_and_sharding_wrap_the_loop(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model = build(MEMORIES[0], dropout=0.2)
    alone = gradients(SegmentLoop(model, SEGMENT, 3, bptt_window="sliding"), *batch())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def run() -> None:
        loop = DistributedDataParallel(SegmentLoop(model, SEGMENT, 3, bptt_window="sliding"))
        for _ in range(2):
            assert_equal(gradients(loop, *batch()), alone)
        sharded: Any = fully_shard(SegmentLoop(model, SEGMENT, 3, bptt_window="sliding"))
        found = gradients(sharded, *batch())
        assert_equal({name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in found.items()}, alone)
        inside = build(MEMORIES[0])
        fully_shard(inside.stack.blocks[0])
        refuses(r"stack.blocks.0", SegmentLoop(inside, SEGMENT, 3, bptt_window="sliding"), *batch())

    in_group(run, "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bptt_window": "slide"}, "did you mean 'sliding'"),
        ({"passes": 2}, r"bptt_window='sliding' is for one pass, .* take passes=1, not 2"),
        ({"schedule": "diagonal"}, r"take schedule='segments', not 'diagonal'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    memory = "grc_stream" if "schedule" in options else "rmt"
    refuses(message, SegmentLoop, build(memory), SEGMENT, 2, **{"bptt_window": "sliding", **options})
