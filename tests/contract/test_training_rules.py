"""Rules of training: recomputation, gradients, closed gates, precision, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from contract.contract_cases import CASES, MAIN, ROWS, SEGMENT, STREAMS, WIDTH, Case, cases, stream
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cached_transformers import state as states
from cached_transformers.interfaces.memory import LayerMemory
from cached_transformers.layers.grc_attention import GRCAttention
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.grc.shared_cache import caches, commit_caches
from cached_transformers.memories.parts.composite import members_of


def train(case: Case, model: nn.Module, steps: int = 2) -> list[dict[str, Tensor]]:
    """Loss and gradients of each step of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    record = []
    for step in range(steps):
        torch.manual_seed(step)  # dropout
        optimizer.zero_grad()
        loss = case.loss(model, step)
        loss.backward()
        optimizer.step()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        record.append({"loss": loss.detach(), **grads})
    commit_caches(model)
    return record


@cases()
def test_recomputing_activations_changes_neither_losses_nor_gradients_nor_caches(case: Case) -> None:
    kept, recomputed = case.build(dropout=0.1).double(), case.build(dropout=0.1).double()
    recomputed.set_activation_checkpointing(True)  # type: ignore[operator]
    calls = {kept: 0, recomputed: 0}
    for model in calls:
        model.stack.blocks[0].register_forward_pre_hook(  # type: ignore[index, union-attr, operator]
            lambda *_, model=model: calls.update({model: calls[model] + 1})
        )
    torch.testing.assert_close(train(case, kept), train(case, recomputed), rtol=0, atol=1e-7)
    torch.testing.assert_close(dict(kept.state_dict()), dict(recomputed.state_dict()), rtol=0, atol=1e-7)
    assert calls[kept] > 0 and (calls[recomputed] == 2 * calls[kept] or case.exempt("recomputes"))


@pytest.mark.parametrize("variant", ["algorithm1", "released"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_grc_layer_under_either_kind_of_checkpointing(variant: str, reentrant: bool) -> None:
    def steps(recompute: bool) -> list[Tensor]:
        torch.manual_seed(2)
        layer = GRCAttention(WIDTH, 2, 9, norm=nn.LayerNorm(WIDTH), variant=variant)
        seen = []
        for _ in range(3):
            x = torch.randn(ROWS, 9, WIDTH, requires_grad=True)
            run = lambda x: layer(x).y_BND  # noqa: E731
            y = checkpoint(run, x, use_reentrant=reentrant) if recompute else run(x)
            layer.zero_grad()
            y.square().mean().backward()
            seen += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        return [*seen, *(v.clone() for v in layer.state_dict().values())]

    torch.testing.assert_close(steps(False), steps(True), rtol=0, atol=1e-6)


@cases(rule="learns")
def test_every_parameter_learns(case: Case) -> None:
    model = case.build()
    for step in range(2):  # the gates of an empty cache have nothing to forget, so the second step counts
        model.zero_grad()
        case.loss(model, step, segments=3).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} got no gradient"
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-8, f"{name}: gradient is zero"


@cases([case for case in CASES if case.in_layers and case.memory != "none"])
def test_a_closed_gate_is_the_plain_model(case: Case) -> None:
    model = case.build().double()
    memories = model.stack.layer_memories()  # type: ignore[union-attr, operator]
    # a memory with a branch for an option has no gate without it
    gates = [type(m).close_gate if getattr(m, "branch", m) else None for m in members_of(memories[0])]
    if any(close in (None, LayerMemory.close_gate) for close in gates):
        with pytest.raises(ValueError, match="has no gate to close; remove the memory instead"):
            memories[0].close_gate()
        return
    for memory in memories:
        memory.close_gate()
    plain = case.build(memory=False).double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    for training in (True, False):
        inputs = _cast(case.segments(3), torch.float64)
        found = [[out.outputs for out in stream(m.train(training), inputs)] for m in (model, plain)]
        torch.testing.assert_close(*found, rtol=0, atol=1e-10)


@cases(MAIN)
def test_models_of_another_precision(case: Case) -> None:
    inputs = case.segments(3)
    reference = [out.outputs.detach() for out in stream(case.build(), inputs)]
    for dtype, tolerance in {torch.bfloat16: 0.3, torch.float16: 0.05, torch.float64: 1e-4}.items():
        model = case.build().to(dtype)
        for out, exact in zip(stream(model, _cast(inputs, dtype)), reference, strict=True):
            assert out.outputs.dtype == dtype and out.outputs.isfinite().all()
            if not case.exempt("precision"):
                torch.testing.assert_close(out.outputs.float(), exact, rtol=0, atol=tolerance)
        out.outputs.square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None), dtype
        commit_caches(model)
        for cache in caches(model):
            assert cache.cache_MC.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert cache.cache_MC.abs().max() > 0


def _cast(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) if x.is_floating_point() else x for x in inputs]


@cases(MAIN)
def test_autocast_trains(case: Case) -> None:
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = case.loss(model, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    assert all(cache.cache_MC.dtype == torch.float32 for cache in caches(model))
    fresh = states.signature(model.init_state(ROWS))  # type: ignore[operator]
    with torch.autocast("cpu", torch.bfloat16):
        assert all(states.signature(out.state) == fresh for out in stream(model, case.segments(2)))


@cases(MAIN)
def test_a_copy_is_equal_and_independent(case: Case) -> None:
    model = case.build()
    case.loss(model, 0).backward()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    inputs = case.segments(2, seed=1)
    outs, *others = ([out.outputs for out in stream(m, inputs)] for m in (model, *twins))
    torch.testing.assert_close(others, [outs] * 2, rtol=0, atol=0)
    before = [{k: v.clone() for k, v in twin.state_dict().items()} for twin in twins]
    train(case, model, 1)
    torch.testing.assert_close([dict(twin.state_dict()) for twin in twins], before, rtol=0, atol=0)
    with torch.no_grad():
        told, *unaware = (next(stream(m.eval(), inputs[:1])).outputs for m in (model, *twins))
    assert not any(torch.equal(told, other) for other in unaware)


@cases([case for case in STREAMS if not case.exempt("bptt")], rule="remembers")
def test_the_loop_cuts_the_gradient_where_bptt_says(case: Case) -> None:
    """The loss of the last segment reaches the segments of its own window, and nothing earlier."""
    model = case.build()
    tokens = torch.cat(case.segments(4), 1)
    targets = torch.full_like(tokens, -100)
    targets[:, 3 * SEGMENT :] = tokens[:, 3 * SEGMENT :]
    for bptt, reached in {2: [2, 3], 3: [3], 4: [0, 1, 2, 3]}.items():
        inputs: list[Tensor] = []
        handle = model.embedding.register_forward_hook(
            lambda _m, _i, y, inputs=inputs: (y.retain_grad(), inputs.append(y))[1]
        )
        SegmentLoop(model, SEGMENT, bptt)(tokens, targets)[0].backward()
        handle.remove()
        expected = [3] if case.contract.detached else reached
        assert [i for i, x in enumerate(inputs) if x.grad is not None and x.grad.abs().max() > 0] == expected
