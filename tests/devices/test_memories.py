"""Every registered memory on a device: outputs, states, gradients, generation, compiled, under autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attentions.cases import CASES as ATTENTION_CASES
from attentions.cases import Case as AttentionCase
from contract.contract_cases import CASES, COMPILED, SEGMENT, STREAMS, Case, cases, stream
from devices.precision import AUTOCAST, GRADIENTS, VALUES, dtypes, gradients_near, near, placed, rounded
from devices.precision import COMPILED as AS_EAGER
from torch import Tensor, nn

from cached_transformers import state as states
from cached_transformers.layers.stack import ModelOutput

pytestmark = pytest.mark.device
CPU = "cpu"
INDUCTOR = frozenset({"none", "grc", "grc_stream", "transformer_xl", "rmt"})
CHOOSERS = frozenset({"memorizing", "crtn", "compressive/most_used"})
"""Memories that choose slots: in bfloat16 what is nearly equal comes in another order."""


def exact(case: Case, dtype: torch.dtype) -> bool:
    """Whether rounding cannot make the case choose otherwise."""
    if dtype == torch.float32:
        return case.attention != "sac"  # which takes the best few of all pairs, 8 times a layer
    attention = ATTENTION_CASES.get(case.attention, AttentionCase())
    return not ("precision" in attention.exempt or {case.memory, case.name} & CHOOSERS)


def inputs(case: Case) -> list[Tensor]:
    """Of two segments; made on the CPU, so that they are the same everywhere."""
    with torch.device(CPU):
        return case.segments(2)


def built(case: Case) -> nn.Module:
    """On the CPU, without dropout."""
    with torch.device(CPU):
        return case.build().eval()


def answers(case: Case, model: nn.Module, given: list[Tensor]) -> list[ModelOutput]:
    return list(stream(model, given)) if case.language else [model(given[0])]


def total(outs: list[ModelOutput]) -> Tensor:
    return torch.stack([out.outputs.float().square().mean() + out.auxiliary_loss for out in outs]).sum()


@dtypes
@cases(CASES)
def test_it_is_what_it_is_in_float64(case: Case, dtype: torch.dtype, device: str) -> None:
    model = built(case)
    twin, ours = rounded(model, dtype), copy.deepcopy(model).to(device, dtype)
    given = [placed(t, CPU, dtype) for t in inputs(case)]
    with torch.device(CPU):
        want = answers(case, twin, [placed(t, CPU, torch.float64) for t in given])
        total(want).backward()
    got = answers(case, ours, [placed(t, device, dtype) for t in given])
    total(got).backward()
    assert all(out.outputs.device.type == device for out in got)
    for a, b in zip(got, want, strict=True):
        assert a.outputs.isfinite().all()
        for (name, held), (_, wanted) in zip(states.named_tensors(a.state), states.named_tensors(b.state), strict=True):
            assert held.device.type == device
            if exact(case, dtype) and held.is_floating_point():
                near(held, wanted, VALUES[dtype], name)
        if exact(case, dtype):
            near(a.outputs, b.outputs, VALUES[dtype], "outputs")
    if exact(case, dtype):
        gradients_near(*([p.grad for p in m.parameters()] for m in (ours, twin)), GRADIENTS[dtype])


@dtypes
@cases(STREAMS)
def test_generation_meets_the_segments_of_training(case: Case, dtype: torch.dtype, device: str) -> None:
    """The scores are those of the text read by segments in float64; on the device with its own state, to be kept."""
    model = built(case)
    ours: Any = copy.deepcopy(model).to(device, dtype)
    prompt = torch.cat(inputs(case), 1)[:, : SEGMENT + 2]
    found = ours.generate(prompt.to(device), tokens=SEGMENT + 3, segment_length=SEGMENT, temperature=0)
    assert found.tokens.device.type == device and found.scores.isfinite().all()
    if not exact(case, dtype):
        return
    text = torch.cat([prompt, found.tokens.cpu()], 1)
    with torch.device(CPU), torch.no_grad():
        outs = list(stream(rounded(model, dtype), list(text[:, :-1].split(SEGMENT, 1))))
    logp_BNV = torch.cat([out.outputs for out in outs], 1).log_softmax(-1)[:, prompt.shape[1] - 1 :]
    chosen = logp_BNV.gather(-1, text[:, prompt.shape[1] :, None])[..., 0]
    near(found.scores, chosen.sum(1), VALUES[dtype], "scores")
    again = ours.generate(found.tokens[:, -1:], found.state, tokens=2, segment_length=SEGMENT, temperature=0)
    assert again.tokens.shape == (len(prompt), 2)


@cases([case for case in CASES if case.attention == "softmax"])
def test_it_trains_under_autocast(case: Case, device: str) -> None:
    model = built(case).to(device).train()
    given = [placed(t, device, torch.float32) for t in inputs(case)]
    plain = answers(case, copy.deepcopy(model), given)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(3):
        with torch.autocast(device, torch.bfloat16):
            outs = answers(case, model, given)
            loss = total(outs)
        if step == 0 and exact(case, torch.bfloat16):
            near(outs[0].outputs, plain[0].outputs, AUTOCAST, "outputs")
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert all(p.dtype == torch.float32 for p in model.parameters())


@cases([case for case in COMPILED if case.attention == "softmax" and "/" not in case.memory])
def test_it_is_compiled_as_one_graph(case: Case, device: str) -> None:
    with torch.device(CPU):
        model = case.build_shallow().eval()
    given = [placed(t, device, torch.float32) for t in inputs(case)]
    model = model.to(device)
    want = answers(case, copy.deepcopy(model), given)
    # Real compilation takes many seconds a case: of a few, and not on the CPU, where other tests do it.
    backend = "inductor" if device == "cuda" and case.memory in INDUCTOR else "aot_eager"
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    state, got = model.init_state(len(given[0])) if case.language else None, []  # type: ignore[operator]
    for segment in given if case.language else given[:1]:
        got.append(compiled(segment, state) if case.language else compiled(segment))
        state = got[-1].state
    for a, b in zip(got, want, strict=True):
        near(a.outputs, b.outputs, AS_EAGER, "outputs")
    total(got).backward()
    assert any(p.grad is not None for p in model.parameters())
    torch.compiler.reset()


@cases([case for case in STREAMS if case.attention == "softmax"])
def test_a_state_goes_from_device_to_file_to_device(case: Case, device: str, tmp_path: Any) -> None:
    model = built(case).to(device)
    with torch.no_grad():
        *_, last = stream(model, [placed(t, device, torch.float32) for t in inputs(case)])
    states.save(last.state, tmp_path / "state.safetensors")
    back = states.load(tmp_path / "state.safetensors", last.state)
    for (name, a), (_, b) in zip(states.named_tensors(back), states.named_tensors(last.state), strict=True):
        assert a.device == b.device and torch.equal(a, b), name
