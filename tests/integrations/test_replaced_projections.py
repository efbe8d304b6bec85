"""Modules of a host that others replace after add_memory: the memory follows, or it is said that it does not act."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import refuses
from integrations import hosts
from integrations.hosts import library
from integrations.transformers_hosts import DECODERS, GPT2, LLAMA, Architecture, architectures, awaken, stream, words
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import add_memory, remove_memory
from cached_transformers.linear_maps import matrix_of, plain_weights

IDS = words(2, 13)
STREAMING = ["grc_stream", "memorizing", "rmt"]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits  # type: ignore[no-any-return]


def decoder_layers(model: Any) -> Any:
    return [m for m in model.modules() if type(m).__name__ in ("GPT2Attention", "LlamaAttention")]


def other(linear: Any, seed: int = 7) -> Any:
    """A module of the same kind with other weights."""
    torch.manual_seed(seed)
    new = copy.deepcopy(linear)
    vars(new).pop("forward", None)
    new._forward_hooks.clear()
    with torch.no_grad():
        for p in new.parameters():
            p.normal_(0, 0.3)
    return new


class PackedLinear(nn.Linear):
    """A subclass that computes in another way, with a weight that is none of its parameters, as 4-bit layers have."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, like.bias is not None)
        self.packed, self.bias = like.weight.detach().clone(), like.bias
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.packed, self.bias)


def quantised(model: nn.Module) -> Any:
    torch_ao = pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization any more")
    return torch_ao.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
class TestQuantised:
    @architectures(DECODERS)
    @pytest.mark.parametrize("memory", STREAMING)
    def test_decoders_keep_their_memory(self, host: Architecture, memory: str) -> None:
        model = awaken(stream(host, memory))
        ours, plain = quantised(model), quantised(host.build())
        effect = (logits(model) - logits(host.build())).abs().max()
        assert (logits(ours) - logits(model)).abs().max() < 0.1 * effect
        assert torch.equal(logits(ours), logits(copy.deepcopy(ours)))
        assert torch.equal(logits(remove_memory(ours)), logits(plain))
        assert not any(m._forward_hooks or "forward" in vars(m) for m in ours.modules())

    @hosts.hosts([hosts.VIT, hosts.BERT_SDPA, hosts.ENCODER])
    @pytest.mark.parametrize("mix", ["heads", "outputs"])
    def test_encoders_keep_their_memory(self, host: hosts.Host, mix: str) -> None:
        model = host.with_memory(mix=mix)
        hosts.train(host, model)
        ours, given = quantised(model.eval()), host.given()
        assert any("quantized" in type(m).__module__ for n, m in ours.named_modules() if "memory" in n)
        with torch.no_grad():
            exact = host.run(model, given)
            assert (host.run(ours, given) - exact).abs().max() < 0.1 * (exact - _closed(host, model, given)).abs().max()
            if host is hosts.ENCODER:  # torch's own does not run when it is quantised
                return
            removed = host.run(remove_memory(ours), given)
            assert torch.equal(removed, host.run(quantised(remove_memory(model)), given))


def _closed(host: hosts.Host, model: nn.Module, given: dict[str, Any]) -> Tensor:
    closed = copy.deepcopy(model)
    hosts.close_gates(closed)
    return host.run(closed, given)


@pytest.mark.parametrize("memory", STREAMING)
def test_a_host_of_packed_weights_gets_a_memory_of_the_model_s_dtype(memory: str) -> None:
    """As one that was loaded in 4 bits."""

    def packed(model: Any) -> Any:
        for layer in decoder_layers(model):
            for name in ("o_proj", "q_proj", "k_proj", "v_proj"):
                setattr(layer, name, PackedLinear(getattr(layer, name)))
        return model

    def with_memory(model: Any) -> Any:
        return awaken(add_memory(model, memory, length=4, segment_length=5))

    torch.testing.assert_close(logits(with_memory(packed(LLAMA.build()))), logits(with_memory(LLAMA.build())))


@architectures(DECODERS)
@pytest.mark.parametrize("memory", STREAMING)
def test_projections_of_other_weights_are_as_if_they_had_been_there(host: Architecture, memory: str) -> None:
    """The output projection, and what queries, keys and values come from."""

    def exchange(model: Any) -> Any:
        for layer in decoder_layers(model):
            for name in ("c_proj", "c_attn") if host is GPT2 else ("o_proj", "q_proj", "k_proj", "v_proj"):
                setattr(layer, name, other(getattr(layer, name)))
        return model

    def with_memory(model: Any) -> Any:
        options = {"length": 4} if memory == "grc_stream" else {"length": 3}
        return awaken(add_memory(model, memory, segment_length=5, **options))

    before, after = with_memory(exchange(host.build())), exchange(with_memory(host.build()))
    assert torch.equal(logits(after), logits(before))
    plain = exchange(host.build())
    assert (logits(after) - logits(plain)).abs().max() > 1e-3
    assert torch.equal(logits(remove_memory(after)), logits(plain))
    assert not any(m._forward_hooks or "forward" in vars(m) for m in after.modules())


PROJECTIONS: dict[str, Callable[[Any], list[tuple[Any, str]]]] = {
    "vit": lambda model: [(block.attn, "proj") for block in model.blocks],
    "swin": lambda model: [(b.attn, "proj") for layer in model.layers for b in layer.blocks],
    "bert_sdpa": lambda model: [(layer.attention.output, "dense") for layer in model.encoder.layer],
    "hf_vit": lambda model: [(m, "o_proj") for m in model.modules() if type(m).__name__ == "ViTAttention"],
}


@hosts.hosts([hosts.VIT, hosts.SWIN, hosts.BERT_SDPA, hosts.HF_VIT])
def test_the_memory_of_an_encoder_follows(host: hosts.Host) -> None:
    model, given = host.with_memory(), host.given()
    hosts.train(host, model)
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        exact = host.run(model, given)
        for parent, name in PROJECTIONS[host.name](model):
            setattr(parent, name, PackedLinear(getattr(parent, name)))
        torch.testing.assert_close(host.run(model, given), exact, rtol=0, atol=1e-6)
        for parent, name in PROJECTIONS[host.name](model):
            old = getattr(parent, name)
            setattr(parent, name, other(nn.Linear(old.in_features, len(old.bias))))
        changed = host.run(model, given)
        assert (changed - exact).abs().max() > 1e-3
        assert (changed - _closed(host, model, given)).abs().max() > 1e-4
    assert names == [name for name, _ in model.named_parameters()]
    hosts.train(host, model)  # the gradient goes through the projection
    assert all(p.grad is not None and p.grad.any() for name, p in model.named_parameters() if "memory" in name)


def test_a_model_that_followed_is_copied_pickled_and_compiled() -> None:
    model, given = hosts.VIT.with_memory(), hosts.VIT.given()
    hosts.train(hosts.VIT, model)
    model.eval()
    with torch.no_grad():
        layer = model.blocks[0].attn
        layer.proj = other(nn.Linear(32, 32))
        compiled = torch.compile(copy.deepcopy(layer), backend="eager", fullgraph=True)
        x_BND = torch.randn(2, 17, 32)
        torch.testing.assert_close(compiled(x_BND), layer(x_BND))
        exact = hosts.VIT.run(model, given)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for again in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(hosts.VIT.run(again, given), exact)
            again.blocks[1].attn.proj = other(nn.Linear(32, 32))
            assert (hosts.VIT.run(again, given) - _closed(hosts.VIT, again, given)).abs().max() > 1e-4
        assert torch.equal(hosts.VIT.run(model, given), exact)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_forward_that_accelerate_wraps_stays_in_the_way(first: bool) -> None:
    """As it wraps those of models that are spread over devices."""
    library("transformers")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    class Counted(accelerate.hooks.ModelHook):  # type: ignore[misc, name-defined]
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            Counted.calls += 1
            return args, kwargs

    def hook(model: Any) -> Any:
        for layer in decoder_layers(model):
            accelerate.hooks.add_hook_to_module(layer.o_proj, Counted())
        return model

    def with_memory(model: Any) -> Any:
        return awaken(add_memory(model, "memorizing", length=16, k=4, layer=1, segment_length=None))

    model = with_memory(hook(LLAMA.build())) if first else hook(with_memory(LLAMA.build()))
    assert torch.equal(logits(model), logits(with_memory(LLAMA.build())))
    assert Counted.calls == 2
    assert torch.equal(logits(remove_memory(model)), logits(LLAMA.build()))
    assert Counted.calls == 4


def test_a_layer_that_goes_past_its_projection_is_refused() -> None:
    model, given = hosts.VIT.with_memory(), hosts.VIT.given()
    layer = model.blocks[1].attn
    layer.proj.forward = lambda x: F.linear(x, layer.proj.weight, layer.proj.bias)
    said = r"the memory of Attention had no part in this forward: Attention.proj, a Linear, was not called as a module"
    refuses(said, hosts.VIT.run, model, given)
    del layer.proj.forward
    layer.proj = other(nn.Linear(32, 32))
    hosts.VIT.run(model, given)
    layer.forward = lambda x, **_: F.linear(x, layer.proj.weight)
    refuses("remove_memory", hosts.VIT.run, model, given)


def test_a_layer_that_goes_past_its_queries_is_refused() -> None:
    model = stream(LLAMA, "memorizing")
    for layer in decoder_layers(model):
        layer.forward = lambda hidden_states, o_proj=layer.o_proj, **_: (o_proj(hidden_states), None)
    refuses(r"LlamaAttention.q_proj", logits, model)


def test_a_projection_behind_its_layer_is_watched_too() -> None:
    """BERT's lies beside its attention."""
    model, given = hosts.BERT_SDPA.with_memory(), hosts.BERT_SDPA.given()
    output = model.encoder.layer[0].attention.output
    output.forward = lambda hidden, x: output.LayerNorm(hidden + x)
    refuses(r"BertSelfAttention.*BertAttention.output.dense", hosts.BERT_SDPA.run, model, given)


def test_a_projection_that_the_model_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from integrations import test_refusals as strangers

    from cached_transformers import register_adapter
    from cached_transformers.integrations import hosts as descriptions
    from cached_transformers.interfaces.memory import Query

    monkeypatch.setattr(descriptions, "_ADAPTERS", dict(descriptions._ADAPTERS))

    @register_adapter(strangers.NAME)
    def elsewhere(site: Any) -> Any:
        return descriptions.Host(16, 2, nn.Linear(16, 16), lambda x: Query(x), facts={"length": 4})

    strangers.refuse(strangers.PlainModel(), "its adapter names a Linear that is no part of the model")


def test_weights_are_used_without_a_call_where_nothing_stands_between() -> None:
    linear = nn.Linear(3, 4)
    weight, bias = linear.weight, linear.bias
    assert plain_weights(linear) == (weight, bias) and matrix_of(linear) == (weight, bias)
    linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    found, offset = matrix_of(linear)
    assert plain_weights(linear) is None
    torch.testing.assert_close(found, 2 * weight)
    torch.testing.assert_close(offset, bias)


@pytest.mark.parametrize("bias", [True, False])
def test_the_matrix_of_what_stands_in_for_a_linear_map(bias: bool) -> None:
    linear = nn.Linear(3, 4, bias)
    parametrised = nn.utils.parametrizations.weight_norm(copy.deepcopy(linear))
    patched = copy.deepcopy(linear)
    patched.forward = lambda x: F.linear(x, patched.weight, patched.bias)  # type: ignore[method-assign]
    for stands_in in (parametrised, patched, PackedLinear(linear)):
        weight, offset = matrix_of(stands_in)
        torch.testing.assert_close(weight, linear.weight)
        assert (offset is None) == (not bias)
    matrix_of(parametrised)[0].sum().backward()
    assert parametrised.parametrizations.weight.original1.grad.any()  # type: ignore[union-attr, index]
