"""Models of others with another attention, compiled and exported: one graph, the values and gradients of eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.hosts import BERT_SDPA, ENCODER_PADDED, HF_VIT, MHA_VALUES, PVT, SWIN, VIT, Host

from cached_transformers import add_memory, replace_attention, reset_caches

pytestmark = pytest.mark.usefixtures("cores")

QUICK = [(VIT, "grc"), (BERT_SDPA, None), (MHA_VALUES, "grc")]
MORE = [
    (host, memory)
    for host in (VIT, BERT_SDPA, ENCODER_PADDED, MHA_VALUES, HF_VIT, SWIN, PVT)
    for memory in (None, "grc")
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prepared(host: Host, memory: str | None, **options: Any) -> Any:
    name = {SWIN: "test_biased_window", PVT: "test_tempered"}.get(host, "test_window")
    model = replace_attention(host.build(), name)
    return model if memory is None else add_memory(model, memory, **{**host.options, **options})


def check_one_graph(host: Host, model: Any) -> None:
    run = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    grads = []
    for call in (run, model):  # the cache of a memory is still empty at both calls
        model.zero_grad()
        host.run(call, host.given()).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        reset_caches(model)
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def check_export(host: Host, model: Any, strict: bool) -> None:
    given = host.given(1)
    model.eval()
    with torch.no_grad():
        expected = host.run(model, given)
        exported = torch.export.export(model, (), given, strict=strict).module()
        torch.testing.assert_close(host.run(exported, given), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("host", "memory"), QUICK, ids=str)
def test_one_graph(host: Host, memory: str | None) -> None:
    check_one_graph(host, prepared(host, memory))


@pytest.mark.parametrize(("host", "memory"), QUICK, ids=str)
def test_export(host: Host, memory: str | None) -> None:
    check_export(host, prepared(host, memory), strict=False)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "memory"), MORE, ids=str)
def test_one_graph_and_export_of_all(host: Host, memory: str | None) -> None:
    check_one_graph(host, prepared(host, memory))
    for strict in (False, True):
        check_export(host, prepared(host, memory), strict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "options"), [("attention_cache", {}), ("grc", {"variant": "released"}), ("convolution", {})]
)
def test_other_memories(memory: str, options: dict[str, Any]) -> None:
    check_one_graph(VIT, prepared(VIT, memory, **options))
    check_export(VIT, prepared(VIT, memory, **options), strict=False)
