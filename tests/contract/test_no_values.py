"""On the meta device, which has shapes and no values: nothing is made on another device than its input, nothing looks.

What runs here makes its tensors where its input is, and no step of it waits for a GPU to know a number.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from attentions.cases import build as build_core
from attentions.test_battery import NAMES, able, causal_forms, inputs
from contract.contract_cases import CASES, Case, cases, stream

AUTOCAST, ENABLED = torch.autocast, torch.is_autocast_enabled


@pytest.fixture(autouse=True)
def _autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors are the one kind that autocast does not know."""

    def autocast(kind: str, *arguments: Any, **options: Any) -> Any:
        return contextlib.nullcontext() if kind == "meta" else AUTOCAST(kind, *arguments, **options)

    monkeypatch.setattr(torch, "autocast", autocast)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": kind != "meta" and ENABLED(kind))


@cases([case for case in CASES if case.attention == "softmax"])
def test_a_memory_reads_writes_and_learns(case: Case) -> None:
    model = case.build_shallow().to("meta")
    given = [segment.to("meta") for segment in case.segments(2)]
    outs = list(stream(model, given)) if case.language else [model(given[0])]
    torch.stack([out.outputs.sum() + out.auxiliary_loss for out in outs]).sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


@cases([case for case in CASES if case.attention == "softmax"])
def test_a_model_is_built_where_the_default_device_is(case: Case) -> None:
    with torch.device("meta"):
        model = case.build_shallow()
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}


@pytest.mark.parametrize("name", NAMES)
def test_a_core_attends_and_learns(name: str) -> None:
    for causal in causal_forms(name):
        core, given = build_core(name).train().to("meta"), {key: t.to("meta") for key, t in inputs(13).items()}
        q, k, v, x = (t.requires_grad_() for t in given.values())
        core(q, k, v, causal=causal, x_BND=x).out_BHNV.sum().backward()
        assert v.grad is not None and v.grad.is_meta


@able("exact_padding")
def test_a_core_takes_padding(name: str) -> None:
    padding = torch.zeros(2, 13, dtype=torch.bool, device="meta")
    for causal in causal_forms(name):
        core, given = build_core(name).to("meta"), {key: t.to("meta") for key, t in inputs(13).items()}
        q, k, v, x = given.values()
        assert core(q, k, v, causal=causal, x_BND=x, key_padding_mask=padding).out_BHNV.is_meta
