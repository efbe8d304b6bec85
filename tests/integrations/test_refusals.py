"""What add_memory refuses, in which words, and that the model stays as it was; adapters of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from integrations.hosts import (
    BERT_EAGER,
    HF_VIT,
    MHA,
    SWIN,
    VIT,
    bert,
    close_gates,
    hosts,
    library,
    memories,
    stored,
)
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import add_memory, register_adapter, remove_memory
from cached_transformers.integrations import hosts as descriptions
from cached_transformers.integrations.hosts import Host as Description
from cached_transformers.integrations.masks import padding_of
from cached_transformers.interfaces.memory import Query


class PlainAttention(nn.Module):
    """Self-attention as people write it."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OtherAttention(PlainAttention):
    """A subclass: what is known of the class is known of it."""


class PlainModel(nn.Module):
    def __init__(self, kind: type[PlainAttention] = PlainAttention) -> None:
        super().__init__()
        self.first, self.second = kind(), kind()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


NAME = f"{PlainAttention.__module__}.{PlainAttention.__qualname__}"


@pytest.fixture
def registered() -> Iterator[None]:
    """The example of register_adapter's docstring."""
    before = dict(descriptions._ADAPTERS)

    @register_adapter(NAME)
    def my_attention(site: descriptions.Site) -> Description:
        layer: Any = site.layer
        return Description(layer.dim, layer.heads, layer.out, lambda x: Query(x), facts={"length": site.length()})

    yield
    descriptions._ADAPTERS.clear()
    descriptions._ADAPTERS.update(before)


def fingerprint(model: nn.Module) -> Any:
    """All that add_memory could change."""
    return [
        (name, type(module), sorted(vars(module)), len(module._forward_pre_hooks), len(module._forward_hooks))
        for name, module in model.named_modules()
    ] + list(model.state_dict())


def refuse(model: nn.Module, message: str, *args: Any, **options: Any) -> None:
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        add_memory(model, *args, **options)
    assert fingerprint(model) == before


# ---- adapters


def test_an_unknown_attention_is_refused_by_name_with_the_way_out() -> None:
    refuse(
        PlainModel(),
        rf"PlainModel: no adapter for attention class {NAME}; describe .* cached_transformers.register_adapter",
        length=4,
    )


@pytest.mark.parametrize("kind", [PlainAttention, OtherAttention])
@pytest.mark.usefixtures("registered")
def test_an_adapter_of_one_s_own(kind: type[PlainAttention]) -> None:
    plain = PlainModel(kind)
    model = add_memory(copy.deepcopy(plain), "grc", length=4)
    assert len(memories(model)) == 2
    x = torch.randn(3, 5, 16)
    for _ in range(2):
        model(x).square().mean().backward()
    assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if "memory." in n)
    assert (model(x) - plain(x)).abs().max() > 1e-4
    close_gates(model)
    torch.testing.assert_close(model(x), plain(x), rtol=0, atol=1e-6)
    assert torch.equal(remove_memory(model)(x), plain(x))


@pytest.mark.parametrize("kind", [nn.TransformerDecoder, nn.TransformerDecoderLayer])
def test_a_decoder_of_torch_alone_is_refused_with_the_way_out(kind: Any) -> None:
    layer = nn.TransformerDecoderLayer(16, 2, 32)
    model = layer if kind is nn.TransformerDecoderLayer else nn.TransformerDecoder(layer, 2)
    with pytest.raises(ValueError, match=rf"{kind.__name__} has no attention layer .*give the enc"):
        add_memory(model, "grc", length=4)


@pytest.mark.usefixtures("registered")
def test_an_adapter_that_needs_a_length_says_so() -> None:
    refuse(PlainModel(), r"PlainAttention does not tell how many tokens .* add_memory\(model, 'grc', length=64\)")


@pytest.mark.usefixtures("registered")
def test_one_unknown_attention_refuses_the_whole_model() -> None:
    class StrangeAttention(nn.Module):
        pass

    model = nn.Sequential(PlainModel(), StrangeAttention())
    refuse(model, "no adapter for attention class .*StrangeAttention", length=4)


def test_a_layer_may_be_left_out_by_its_adapter(registered: None) -> None:
    @register_adapter(NAME)
    def every_second(site: descriptions.Site) -> Description | None:
        layer: Any = site.layer
        if site.name == "second":
            return None
        return Description(layer.dim, layer.heads, layer.out, lambda x: Query(x), facts={"length": 4})

    model = add_memory(PlainModel())
    assert [name for name, m in model.named_modules() if m in memories(model)] == ["first.memory"]
    assert model(torch.randn(2, 5, 16)).shape == (2, 5, 16)


# ---- memories and options


@hosts([VIT, MHA, HF_VIT, BERT_EAGER])
def test_adding_twice_is_refused(host: Any) -> None:
    model = host.with_memory()
    refuse(model, r"has a memory already; call remove_memory\(model\) first", "grc", **host.options)
    before = [memory for memory in memories(model)]
    host.run(model, host.given())
    assert memories(model) == before


def test_a_memory_of_streams_is_refused() -> None:
    refuse(
        SWIN.build(),
        r"memory 'grc_stream' needs state \(.*\), which SwinTransformer does not .*docs/support.md",
        "grc_stream",
    )


@pytest.mark.parametrize(
    "args, options, message",
    [
        (("grk",), {}, r"unknown memory 'grk'; did you mean 'grc'"),
        (("grc",), {"ratios": 0.5}, r"unknown option of memory 'grc' 'ratios'; did you mean 'ratio'"),
        (({"ratio": 0.5},), {}, r"must be a name or have the key 'name'"),
        (("grc",), {"ratio": 0.01}, r"ratio=0.01 gives a cache of 0 channels, which heads=2 do not divide"),
        (("grc",), {"ratio": 2}, r"ratio=2 must lie in \(0, 1\]"),
        (("grc",), {"variant": "papers"}, r"unknown GRC variant .papers.; did you mean .paper."),
        (("grc",), {"variant": "released", "ratio": 0.375}, r"width=32 into 12 groups, which do not divide it"),
        ((None,), {}, r"memory=None"),
    ],
)
def test_bad_options_leave_the_model_untouched(args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    refuse(VIT.build(), message, *args, **options)


def test_a_ratio_that_one_later_layer_cannot_take_leaves_the_first_ones_untouched() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2), nn.MultiheadAttention(12, 6))
    refuse(model, "ratio=0.75 gives a cache of 9 channels, which heads=6 do not divide", "grc", length=4, ratio=0.75)


def test_a_causal_bert_is_refused() -> None:
    transformers = library("transformers")
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, is_decoder=True)
    refuse(transformers.BertModel(config), "is_decoder=True is causal", length=4)


def test_special_multihead_attentions_are_refused() -> None:
    refuse(nn.MultiheadAttention(16, 2, kdim=8), "kdim, vdim, add_bias_kv or add_zero_attn takes no memory", length=4)
    refuse(nn.MultiheadAttention(16, 2, add_bias_kv=True), "takes no memory", length=4)

    class MyMultihead(nn.MultiheadAttention):
        pass

    refuse(MyMultihead(16, 2), "MyMultihead is a subclass of nn.MultiheadAttention with its own code", length=4)


# ---- calls


def causal(n: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


CALLS: list[tuple[str, Callable[[Any, Tensor], Any], str]] = [
    ("mask", lambda m, x: m(x, x, x, attn_mask=causal(5)), r"a shared cache would bypass; a causal mask would so leak"),
    ("flag", lambda m, x: m(x, x, x, attn_mask=causal(5), is_causal=True), "models need the memory 'grc_stream'"),
    ("cross", lambda m, x: m(x, x[:, :3], x[:, :3]), "query, key and value must be the same tensor"),
]


@pytest.mark.parametrize("name, call, message", CALLS, ids=[c[0] for c in CALLS])
@pytest.mark.parametrize("training", [True, False])
def test_masks_and_cross_attention_are_refused_at_the_call(
    name: str, call: Callable[[Any, Tensor], Any], message: str, training: bool
) -> None:
    model, x = MHA.with_memory().train(training), torch.randn(2, 5, 16)
    model(x, x, x)
    before = stored(model)
    with pytest.raises(ValueError, match=message):
        call(model, x)
    assert all(torch.equal(a, b) for a, b in zip(stored(model), before, strict=True))
    model(x, x, x)  # and goes on


@pytest.mark.parametrize("training", [True, False])
def test_a_causal_encoder_is_refused_at_the_call(training: bool) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    model = add_memory(encoder, length=4).train(training)
    with pytest.raises(ValueError, match="leak the future"):
        model(torch.randn(2, 5, 16), mask=causal(5), is_causal=True)


def test_timm_s_attention_mask_is_refused() -> None:
    library("timm")
    model = VIT.with_memory()
    with pytest.raises(ValueError, match="attention was called with a mask"):
        model.blocks[0].attn(torch.randn(2, 17, 32), attn_mask=causal(17))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_a_mask_that_differs_between_queries_is_refused(implementation: str, run: str) -> None:
    """transformers lets a mask of four dimensions through; its first query's row alone does not tell the padding."""
    torch.manual_seed(0)
    model = add_memory(bert(implementation)(), length=4)
    words = torch.randint(20, (2, 6))
    allowed = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    allowed[1, ..., 4:] = False
    causal_ = allowed.tril()
    if implementation == "eager":  # added to the logits
        lowest = torch.finfo(torch.float32).min
        allowed, causal_ = (torch.zeros(2, 1, 6, 6).masked_fill(~m, lowest) for m in (allowed, causal_))
    call: Any = model if run == "eager" else torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():  # half the time of compilation is that of the gradient
        call(input_ids=words, attention_mask=allowed)
        with pytest.raises(ValueError if run == "eager" else RuntimeError, match="differs between queries"):
            call(input_ids=words, attention_mask=causal_)


def test_a_mask_of_a_shape_that_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot read padding from .* of shape \(2, 3, 6, 6\) over 6 tokens"):
        padding_of(torch.ones(2, 3, 6, 6), 6)


def test_the_forms_of_a_padding_mask_say_the_same() -> None:
    keep = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    bools = keep.bool()[:, None, None]
    added = torch.zeros(2, 1, 1, 4).masked_fill(~bools, -torch.inf)
    for form in (keep, keep.bool(), keep.float(), bools, bools.expand(2, 1, 4, 4), added, added.expand(2, 1, 4, 4)):
        padding = padding_of(form, 4)
        assert padding is not None and padding.tolist() == [[False, False, False, True], [False] * 4]
