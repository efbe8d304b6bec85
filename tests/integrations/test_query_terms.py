"""A term that a memory adds to the queries of a host: in the right channels of every family, or refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations import families as F
from integrations import transformers_hosts as T
from integrations.hosts import library
from torch import nn

from cached_transformers import add_memory, load_pretrained, remove_memory
from cached_transformers.interfaces.memory import Context, Reading
from cached_transformers.memories.delta_mem import DeltaMem
from cached_transformers.registry import MEMORIES

DELTA: dict[str, Any] = {"name": "delta_mem", "half_life": 4.0}
SEGMENTS: dict[str, Any] = {"name": "delta_mem", "write": "segment"}
both = pytest.mark.parametrize("memory", [DELTA, SEGMENTS], ids=["token", "segment"])
NORMS = (".q_norm", ".q_layernorm")
"""Modules that normalise queries after the term; HunYuan's is after rotation, and memories get queries before."""


def first_memory(model: Any) -> DeltaMem:
    return next(m for m in model.modules() if isinstance(m, DeltaMem))


@pytest.mark.parametrize("family", F.DECODERS, ids=str)
@torch.no_grad()
def test_a_term_reaches_the_queries_of_a_family_and_nothing_else(family: F.Family) -> None:
    model = family.with_memory({"name": "delta_mem", "correct": ["queries"]}, segment_length=None)
    memory, ids, found = first_memory(model), F.words(), []
    assert memory.query_DC is not None
    columns = memory.query_DC / memory.query_DC.norm(dim=0).clamp(min=1e-9)
    assert (columns.norm(dim=0) > 0.99).all()  # of the host
    term = torch.linspace(-1, 1, memory.query_DC.shape[0])
    write: Any = memory.write
    memory.write = lambda state, trace: found.append(trace.query) or write(state, trace)  # type: ignore[method-assign]
    own: Any = memory.read
    for share in (0.0, 1.0):
        memory.read = lambda *given, s=share: own(*given)._replace(query_BND=(s * term).expand(*ids.shape, -1))  # type: ignore
        found.append(model(ids).logits)
    (plain, before), (moved, after) = ((found[0], found[1]), (found[2], found[3]))
    assert torch.equal(plain.k_BHNE, moved.k_BHNE) and torch.equal(plain.v_BHNE, moved.v_BHNE)
    difference = (moved.q_BHNE - plain.q_BHNE).transpose(1, 2).flatten(2)
    if family.name != "hunyuan_v1_dense" and any(name.endswith(NORMS) for name, _ in model.named_modules()):
        assert (difference.abs().amax((0, 1)) > 1e-3).all()
    else:
        torch.testing.assert_close(difference, term.expand_as(difference), rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-4


@T.architectures(T.DECODERS)
@both
@torch.no_grad()
def test_a_closed_one_is_the_host_to_the_bit(host: T.Architecture, memory: dict[str, Any]) -> None:
    plain, model, ids = host.build(), host.with_memory(memory, segment_length=T.SEGMENT), T.words(2, 3 * T.SEGMENT)
    expected = torch.cat([plain(piece).logits for piece in ids.split(T.SEGMENT, 1)], 1)
    assert not torch.equal(model(ids).logits, expected)
    for module in model.modules():
        if isinstance(module, DeltaMem):
            module.close_gate()
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(remove_memory(model)(ids).logits, plain(ids).logits)


@T.architectures(T.DECODERS)
@both
@torch.no_grad()
def test_each_step_of_generate_reads_something(
    host: T.Architecture, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The released code read 0 in each of these steps, and nothing failed."""
    model, norms, own = host.with_memory(memory, segment_length=T.SEGMENT), [], DeltaMem.read

    def read(*given: Any) -> Reading:
        reading = own(*given)
        assert reading.query_BND is not None
        norms.append((given[2].x_BND.shape[1], reading.query_BND.norm(dim=-1).min(), reading.carry.read_BNC.norm()))
        return reading

    monkeypatch.setattr(DeltaMem, "read", read)
    past = model(T.words(2, 2 * T.SEGMENT)).memory_state
    norms.clear()
    model.generate(T.words(2, 2), memory_state=past, max_new_tokens=T.SEGMENT, min_new_tokens=T.SEGMENT, pad_token_id=0)
    assert sum(tokens == 1 for tokens, *_ in norms) >= 2
    assert all(term > 1e-6 and found > 1e-5 for _, term, found in norms)


@T.architectures(T.DECODERS)
@both
def test_all_of_it_learns_beside_a_frozen_host(host: T.Architecture, memory: dict[str, Any]) -> None:
    """P begins with columns of the host, so that the first step reaches the maps as well."""
    model = host.build().requires_grad_(False)
    add_memory(model, memory, segment_length=T.SEGMENT)
    ids = T.words(2, 3 * T.SEGMENT)
    model.train()(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == ("memory" in name), name


@T.architectures(T.DECODERS)
@both
@torch.no_grad()
def test_it_is_saved_and_loaded(host: T.Architecture, memory: dict[str, Any], tmp_path: Path) -> None:
    model, ids = T.awaken(host.with_memory(memory, segment_length=T.SEGMENT)), T.words(2, 3 * T.SEGMENT)
    model.save_pretrained(tmp_path)
    assert torch.equal(load_pretrained(tmp_path).eval()(ids).logits, model(ids).logits)


@pytest.mark.filterwarnings("ignore::UserWarning")
@T.architectures(T.DECODERS)
def test_an_adapter_of_the_map_of_queries_learns_beside_it(host: T.Architecture) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    library("transformers")
    target = "c_attn" if host is T.GPT2 else "q_proj"
    config = peft.LoraConfig(r=2, target_modules=[target], modules_to_save=["memory"], init_lora_weights=False)
    model, ids = (
        peft.get_peft_model(T.awaken(host.with_memory(DELTA, segment_length=T.SEGMENT)), config),
        T.words(2, 15),
    )
    model.train()(ids, labels=ids).loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert any("lora" in n for n in gradients) and any("query_DC" in n for n in gradients)
    assert all(g is not None and g.any() for g in gradients.values())
    with torch.no_grad():
        beside = model.eval()(ids).logits
        for module in model.modules():
            if isinstance(module, DeltaMem):
                module.close_gate()
        assert (model(ids).logits - beside).abs().max() > 1e-4
        closed = model(ids).logits
        torch.testing.assert_close(model.merge_and_unload()(ids).logits, closed, rtol=0, atol=1e-5)


@T.architectures(T.DECODERS)
@torch.no_grad()
def test_a_map_that_is_not_called_is_told(host: T.Architecture) -> None:
    """Nothing is left out in silence, as when a fused forward uses the weights only."""
    model, ids = host.with_memory({**DELTA, "correct": ["queries"]}, segment_length=None), T.words(2, 5)
    name = "c_attn" if host is T.GPT2 else "q_proj"
    module = next(m for n, m in model.named_modules() if n.endswith(f".{name}"))
    original, hooks = module.forward, module._forward_hooks.copy()
    module.forward = lambda x: original(x)
    model(ids)  # a replaced forward is still a call
    module._forward_hooks.clear()
    refuses(f"the memory of .* had no part in this forward: .*{name}", model, ids)
    module._forward_hooks.update(hooks)
    model(ids)


@torch.no_grad()
def test_threads_of_copies_do_not_share_a_term() -> None:
    model, ids = T.LLAMA.with_memory(DELTA, segment_length=T.SEGMENT), T.words(2, 15)
    twin = copy.deepcopy(model)
    expected = model(ids).logits
    first_memory(model).close_gate()
    assert torch.equal(twin(ids).logits, expected) and not torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_half_the_digits_keep_a_matrix_of_float32() -> None:
    model, ids = T.LLAMA.with_memory(DELTA, segment_length=T.SEGMENT).bfloat16(), T.words(2, 15)
    out = model(ids)
    assert out.logits.dtype == torch.bfloat16 and out.memory_state.layers[0].matrix_BSVK.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        state = T.LLAMA.with_memory(DELTA, segment_length=T.SEGMENT)(ids).memory_state
    assert state.layers[0].matrix_BSVK.dtype == torch.float32


def encoder() -> nn.Module:
    return T.BERT.build()


def image_model() -> nn.Module:
    timm = library("timm")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
    return timm.create_model("vit_small_patch16_224", **sizes)  # type: ignore[no-any-return]


def plain_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)


@pytest.mark.parametrize("build", [encoder, image_model, plain_encoder])
def test_hosts_whose_queries_have_no_place_for_it_refuse(build: Any) -> None:
    model = build()
    options = {"segment_length": 5} if build is encoder else {}
    with pytest.raises(ValueError, match=r"memory 'delta_mem' needs (queries|state) \(.*which \w+ does not give; .*"):
        add_memory(model, "delta_mem", **options)
    if build is not plain_encoder:
        with pytest.raises(ValueError, match=r"needs queries .* take correct=\('output',\)"):
            add_memory(model, "delta_mem", **options)
        assert isinstance(first_memory(add_memory(model, "delta_mem", correct=["output"], **options)), DeltaMem)


class Offering(DeltaMem):
    """Offers slots that its needs do not name."""

    def read(self, *given: Any) -> Reading:
        slots = torch.zeros(2, 2, 1, 4)
        context = Context(slots, slots, torch.zeros(2, 1, 1), torch.ones(2, 1, dtype=torch.bool))
        return super().read(*given)._replace(context=context)


class Silent(DeltaMem):
    """Has a term for queries that its needs do not name."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.needs = frozenset({"state", "head"})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Offering, "memory Offering offers a context .* add 'context'"),
        (Silent, "memory Silent offers .* add 'queries'"),
    ],
)
def test_what_no_layer_would_use_is_told(kind: type[DeltaMem], message: str) -> None:
    MEMORIES.register(kind.__name__.lower(), paper=None, title="", state="", cost="")(kind)
    try:
        refuses(message, T.LLAMA.with_memory(kind.__name__.lower(), segment_length=None), T.words(2, 5))
    finally:
        del MEMORIES._entries[kind.__name__.lower()]
