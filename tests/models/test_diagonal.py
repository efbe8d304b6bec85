"""Diagonal batching equals sequential segments, in fewer calls of the blocks; and refusals.

The slow twin is the plain order itself: the same model, segment by segment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract.contract_cases import MAIN, ROWS, SEGMENT, STREAMS, VOCABULARY, Case, cases
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from cached_lab.training.distributed import in_group
from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.interfaces.memory import Tokens
from cached_transformers.layers.block import Block
from cached_transformers.layers.vmap_blocks import VmapBlocks, group_equal
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.loops.streaming import read_stream
from cached_transformers.models.diagonal import read_diagonally
from cached_transformers.models.segments import read_segments
from cached_transformers.models.state_tuning import tune_initial_state

DEPTH = 3
ALONE = {
    **{name: "no two layers could run at once" for name in ("bigbird", "sparse_transformer")},
    "routing": "buffer attention.core.sums_HCE is written",
    "sac": "lstm_cell",
}
"""Attentions whose layers are not run at once, and why: a pattern for each layer, statistics, no rule of vmap."""


LAYERED = [case for case in STREAMS if case.in_layers]
PLAIN, XL, GRC = (
    next(case for case in LAYERED if (case.memory, case.attention) == (memory, "softmax"))
    for memory in ("none", "transformer_xl", "grc_stream")
)


def build(case: Case, **options: Any) -> Any:
    return case.build(**{"depth": DEPTH, **options}).double()


def batch(tokens: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCABULARY, (ROWS, tokens + 1), generator=torch.Generator().manual_seed(3))
    return text[:, :-1], text[:, 1:]


def seen(model: Any, loop: nn.Module, *arguments: Any) -> dict[str, Tensor]:
    """Loss, auxiliary loss, state and gradients of one call."""
    model.zero_grad()
    loss, state = loop(*arguments)
    loss.backward()
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    auxiliary = getattr(loop, "module", loop).auxiliary_loss
    return {"loss": loss.detach(), "auxiliary": auxiliary, **dict(states.named_tensors(state)), **found}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """An unused weight has no gradient in one order, and zeros in stacked weights."""
    for name in a.keys() | b.keys():
        if name not in a or name not in b:
            assert name.startswith("gradient of") and not (a | b)[name].any(), name
            continue
        assert a[name].stride() == b[name].stride() or name.startswith("gradient of")
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def both(model: Any, arguments: tuple[Any, ...], bptt: int = 2, tolerance: float = 1e-10) -> dict[str, Tensor]:
    """Compare the two orders of a loop."""
    plain = seen(model, SegmentLoop(model, SEGMENT, bptt), *arguments)
    assert_same(plain, seen(model, SegmentLoop(model, SEGMENT, bptt, schedule="diagonal"), *arguments), tolerance)
    return plain


def everything(segments: int) -> tuple[Any, ...]:
    """A batch with a short last segment, padding in the middle and at the end, and resets."""
    inputs, targets = batch(segments * SEGMENT - 2)
    padding = torch.zeros_like(inputs, dtype=torch.bool)
    padding[1, -3:] = padding[2, SEGMENT - 2 : SEGMENT] = padding[0, SEGMENT : 2 * SEGMENT] = True
    reset_BS = torch.zeros(ROWS, segments, dtype=torch.bool)
    reset_BS[0, 1] = reset_BS[2, 2] = reset_BS[1, 0] = True
    return inputs, targets, None, reset_BS, padding


@cases(LAYERED, slow=lambda case: case.attention not in ("delta_net", "reformer") and case not in MAIN)
def test_loss_state_and_gradients_are_those_of_one_segment_after_the_other(case: Case) -> None:
    model = build(case)
    if case.attention in ALONE:
        with pytest.raises(ValueError, match=ALONE[case.attention]):
            SegmentLoop(model, SEGMENT, schedule="diagonal")(*batch(2 * SEGMENT))
        return
    both(model, everything(5))
    inputs, targets = batch(2 * SEGMENT)
    _, state = SegmentLoop(model, SEGMENT)(inputs, targets)
    both(model, (*batch(4 * SEGMENT + 1), state), bptt=3)


@pytest.mark.parametrize("case", [XL, GRC], ids=str)
@pytest.mark.parametrize("segments", [1, 2, 3, 9])
def test_more_and_fewer_segments_than_layers(case: Case, segments: int) -> None:
    """Windows of the gradient: none, one or several end in the batch."""
    model = build(case)
    apart = [both(model, batch(segments * SEGMENT), bptt) for bptt in (1, 4, 9)]
    if case is GRC and segments == 9:
        with pytest.raises(AssertionError, match="gradient of"):
            assert_same(apart[0], apart[1])  # a window that ended elsewhere would be found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each call of a block."""
    made: list[int] = []
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda *given, **options: made.append(1) or forward(*given, **options))
    return made


@pytest.mark.parametrize(("segments", "groups"), [(1, 3), (2, 4), (9, 11)])
def test_one_call_a_diagonal(calls: list[int], segments: int, groups: int) -> None:
    """L + S - 1 groups instead of L S blocks."""
    model = build(XL)
    SegmentLoop(model, SEGMENT)(*batch(segments * SEGMENT))
    assert len(calls) == DEPTH * segments
    calls.clear()
    SegmentLoop(model, SEGMENT, schedule="diagonal")(*batch(segments * SEGMENT))
    assert len(calls) == groups == DEPTH + segments - 1


def test_layers_of_another_kind_run_beside_the_others(calls: list[int]) -> None:
    """The one layer with a store, and every second one with experts, which count what they drop."""
    inputs, targets = batch(5 * SEGMENT)
    memorizing = next(case for case in LAYERED if case.memory == "memorizing")
    model = build(memorizing, depth=4)
    assert group_equal(list(model.stack.blocks)) == [[0, 1, 3], [2]]
    SegmentLoop(model, SEGMENT, schedule="diagonal")(inputs, targets)
    assert len(calls) == (4 + 5 - 1) + 5  # a group of three on each diagonal, and the fourth with each segment
    model = build(XL, depth=4, experts=2)
    assert group_equal(list(model.stack.blocks)) == [[0, 2], [1], [3]]
    plain = both(model, everything(5))
    assert plain["auxiliary"] != 0


def test_attention_checkpointing_weights_in_common_and_adaptive_losses() -> None:
    options: dict[str, Any] = {"shared_biases": True, "cutoffs": [5], "norm": "post"}
    model = build(XL, **options)
    kept = both(model, everything(4))
    model.set_activation_checkpointing()
    assert_same(kept, both(model, everything(4)))


def test_every_layer_drops_for_itself() -> None:
    """Layers with the same weights and inputs; in evaluation they agree."""
    model = build(PLAIN, dropout=0.5, attention_dropout=0.5)
    first, *others = model.stack.blocks
    for block in others:
        block.load_state_dict(first.state_dict())
    x_BND = torch.randn(ROWS, SEGMENT, 16, dtype=torch.float64)
    tokens = Tokens(x_BND, torch.arange(SEGMENT)[None, :, None].expand(ROWS, -1, -1), consecutive=True)
    for training in (True, False):
        a, b, c = VmapBlocks(model.stack.train(training), [0, 1, 2]).run(0, [tokens] * 3, [()] * 3)
        assert torch.equal(a.x_BND, b.x_BND) is torch.equal(b.x_BND, c.x_BND) is not training


def test_under_autocast_it_differs_by_rounding() -> None:
    model = build(XL).float()
    inputs, targets = batch(4 * SEGMENT)
    with torch.autocast("cpu", torch.bfloat16):
        loops = (SegmentLoop(model, SEGMENT, schedule=schedule) for schedule in ("segments", "diagonal"))
        plain, diagonal = (loop(inputs, targets)[0] for loop in loops)
    assert abs(plain - diagonal) < 1e-2


def test_buffers_may_be_read_and_the_initial_state_is_trained() -> None:
    """Statistics are written only in training; without gradient, tensors have no version counter."""
    model = build(next(case for case in LAYERED if case.attention == "routing")).eval()
    inputs, targets = batch(4 * SEGMENT)
    plain, loop = (SegmentLoop(model, SEGMENT, schedule=s) for s in ("segments", "diagonal"))
    with torch.inference_mode():
        torch.testing.assert_close(plain(inputs, targets)[0], loop(inputs, targets)[0], rtol=0, atol=1e-10)
    model = build(GRC)
    tune_initial_state(model, batch(2 * SEGMENT)[0][:1], segment_length=SEGMENT)
    plain = both(model, everything(4))
    assert any(name.startswith("gradient of stack.") and g.any() for name, g in plain.items())


def test_a_sequence_classifier_reads_pieces_of_a_text() -> None:
    model = create_model(
        "sequence_classifier",
        **{"vocabulary": VOCABULARY, "classes": 3, "max_length": SEGMENT, "width": 16, "depth": DEPTH, "heads": 2},
        **{"feed_forward": 32, "memory": {"name": "transformer_xl", "length": 4}},
    ).double()
    inputs, _ = batch(4 * SEGMENT)
    pieces = [(part, None, None) for part in inputs.split(SEGMENT, 1)]
    diagonal = list(read_diagonally(model, pieces))
    plain = list(read_segments(lambda piece, state, _: model(piece[0], state), pieces, model.init_state(ROWS)))
    torch.testing.assert_close(plain, diagonal, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="logits of classes, not losses of tokens"):
        list(read_diagonally(model, [(inputs[:, :SEGMENT], inputs[:, :SEGMENT], None)]))


def test_a_stream_is_read_ahead_by_as_many_segments_as_there_are_layers() -> None:
    """Flat memory: no more are on their way. And every yield has the state with which reading goes on."""
    model, taken = build(XL), 0
    text = batch(10 * SEGMENT - 1)[0][0].tolist()

    def pieces() -> Iterator[list[int]]:
        nonlocal taken
        for token in text:
            taken += 1
            yield [token]

    plain = list(read_stream(model, [text], SEGMENT))
    for index, now in enumerate(read_stream(model, pieces(), SEGMENT, schedule="diagonal")):
        assert taken <= (index + DEPTH) * SEGMENT + 1 and torch.is_grad_enabled()
        want = plain[index]
        assert now[:5] == pytest.approx(want[:5], abs=1e-9)
        torch.testing.assert_close(now.state, want.state)
        if index == 3:
            middle = now
    rest = list(read_stream(model, [text[middle.consumed :]], SEGMENT, start=middle, schedule="diagonal"))
    assert rest[-1].nats == pytest.approx(plain[-1].nats) and len(rest) == len(plain) - 4


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
def test_data_parallel_and_sharding_wrap_the_loop(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    model = build(GRC)
    arguments = everything(4)
    alone = seen(model, SegmentLoop(model, SEGMENT, 2), *arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def run() -> None:
        loop = DistributedDataParallel(SegmentLoop(model, SEGMENT, 2, schedule="diagonal"))
        for _ in range(2):
            assert_same(alone, seen(model, loop, *arguments))
        sharded: Any = fully_shard(SegmentLoop(model, SEGMENT, 2, schedule="diagonal"))
        found = seen(model, sharded, *arguments)
        assert_same(alone, {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in found.items()})

    in_group(run, "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)


@pytest.mark.parametrize("case", [XL, pytest.param(GRC, marks=pytest.mark.slow)], ids=str)
def test_a_compiled_loop_is_one_graph(case: Case) -> None:
    model = build(case, depth=2)
    loop = SegmentLoop(model, SEGMENT, 1, schedule="diagonal")
    compiled: Any = torch.compile(loop, fullgraph=True, backend="aot_eager" if case is GRC else "eager", dynamic=False)
    inputs, targets = batch(2 * SEGMENT)
    plain = seen(model, SegmentLoop(model, SEGMENT, 1), inputs, targets)
    assert_same(plain, seen(model, compiled, inputs, targets))
    assert counters["stats"]["unique_graphs"] == 1
