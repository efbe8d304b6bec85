"""Models of others with a memory on a device: timm, torch.nn, transformers; forward, gradient, generation, training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from devices.precision import AUTOCAST, GRADIENTS, VALUES, dtypes, gradients_near, near, placed, rounded
from integrations.hosts import BERT_DROPOUT, HOSTS, Host, hosts
from integrations.transformers_hosts import BERT, LLAMA, SEGMENT, VOCABULARY
from torch import Tensor

from cached_transformers import add_memory, replace_attention
from cached_transformers.state import named_tensors

pytestmark = pytest.mark.device
PLAIN = [host for host in HOSTS if host is not BERT_DROPOUT]


def made(host: Host) -> tuple[Any, dict[str, Any]]:
    """The host with its memory, and its inputs, on the CPU."""
    with torch.device("cpu"):
        return host.with_memory().eval(), host.given()


@dtypes
@hosts(PLAIN)
def test_a_host_is_what_it_is_in_float64(host: Host, dtype: torch.dtype, device: str) -> None:
    model, given = made(host)
    given = placed(given, "cpu", dtype)
    twin, ours = rounded(model, dtype), copy.deepcopy(model).to(device, dtype)
    with torch.device("cpu"):
        want = host.run(twin, placed(given, "cpu", torch.float64))
        want.square().mean().backward()
    got = host.run(ours, placed(given, device, dtype))
    got.float().square().mean().backward()
    assert got.device.type == device and got.dtype == dtype
    near(got, want, VALUES[dtype], "outputs")
    gradients_near(*([p.grad for p in m.parameters()] for m in (ours, twin)), GRADIENTS[dtype])


@hosts(PLAIN)
def test_a_memory_is_added_where_the_host_is(host: Host, device: str) -> None:
    """And trains there under autocast."""
    with torch.device("cpu"):
        model, given = host.build(), host.given()
    model = add_memory(model.to(device), "grc", **host.options)
    given = placed(given, device, torch.float32)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {device}
    optimizer = torch.optim.AdamW(model.train().parameters(), 1e-3)
    plain = host.run(copy.deepcopy(model), given)
    for step in range(2):
        with torch.autocast(device, torch.bfloat16):
            out = host.run(model, given)
        if step == 0:
            near(out, plain, AUTOCAST, "outputs")
        optimizer.zero_grad()
        out.float().square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()


@hosts(PLAIN[:1])
def test_a_host_is_compiled(host: Host, device: str) -> None:
    model, given = made(host)
    model, given = model.to(device), placed(given, device, torch.float32)
    want = host.run(model, given)
    compiled = torch.compile(model, backend="inductor" if device == "cuda" else "aot_eager", dynamic=False)
    near(host.run(compiled, given), want, VALUES[torch.float32], "outputs")
    torch.compiler.reset()


DECODERS = {"grc_stream": {"length": 4}, "rmt": {"length": 2}, "transformer_xl": {"length": 5}}


@dtypes
@pytest.mark.parametrize("memory", DECODERS)
def test_a_decoder_of_transformers_streams_and_generates(memory: str, dtype: torch.dtype, device: str) -> None:
    with torch.device("cpu"):
        model = LLAMA.with_memory(memory, segment_length=SEGMENT, **DECODERS[memory])
        ids = torch.randint(3, VOCABULARY, (2, 2 * SEGMENT + 2))
        want = rounded(model, dtype)(ids)
    ours = copy.deepcopy(model).to(device, dtype)
    got = ours(ids.to(device))
    near(got.logits, want.logits, VALUES[dtype], "logits")
    for (name, held), (_, wanted) in zip(*(named_tensors(o.memory_state) for o in (got, want)), strict=True):
        assert held.device.type == device, name
        if held.is_floating_point():
            near(held, wanted, VALUES[dtype], name)
    options: dict[str, Any] = {"max_new_tokens": SEGMENT + 2, "do_sample": False, "pad_token_id": 2}
    text = ours.generate(ids.to(device), attention_mask=torch.ones_like(ids).to(device), **options)
    assert text.device.type == device and text.shape[1] > ids.shape[1]


@dtypes
def test_an_attention_is_replaced_where_the_host_is(dtype: torch.dtype, device: str) -> None:
    with torch.device("cpu"):
        model, ids = BERT.build(), torch.randint(3, VOCABULARY, (2, 12))
    model = replace_attention(model.to(device, dtype), {"name": "longformer", "window": 4})
    out: Tensor = model(ids.to(device)).logits
    assert out.device.type == device and out.isfinite().all()
