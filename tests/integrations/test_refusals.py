"""What add_memory refuses, in which words, and that the model stays as it was; adapters of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from common import refuses
from integrations.families import patches, timm_family
from integrations.hosts import BERT_EAGER, HF_VIT, MHA, SWIN, VIT, bert, close_gates, library, memories, stored
from integrations.transformers_hosts import BART, BERT, GPT2, LLAMA, STREAMS, SWITCH, T5
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import add_memory, create_model, register_adapter, remove_memory
from cached_transformers.integrations import hosts as descriptions
from cached_transformers.integrations.hosts import Host as Description
from cached_transformers.integrations.masks import padding_of
from cached_transformers.interfaces.memory import Query


class PlainAttention(nn.Module):
    """Self-attention as people write it."""

    dim, heads = 16, 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

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


STORES = ("streaming_llm", "tova", "h2o", "transformer_xl")
"""Memories of stored states, which have a position of a table in them."""
UNTOLD = [(host, STREAMS[name]) for host in (GPT2, LLAMA) for name in ("grc_stream", "memorizing", "rmt", "outside")]
NAME = f"{PlainAttention.__module__}.{PlainAttention.__qualname__}"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of register_adapter's docstring."""
    monkeypatch.setattr(descriptions, "_ADAPTERS", dict(descriptions._ADAPTERS))

    @register_adapter(NAME)
    def my_attention(site: descriptions.Site) -> Description:
        layer: Any = site.layer
        return Description(layer.dim, layer.heads, layer.out, lambda x: Query(x), facts={"length": site.length()})


def fingerprint(model: nn.Module) -> Any:
    """All that add_memory and replace_attention could change."""
    return [
        (name, type(m), sorted(vars(m)), len(m._forward_pre_hooks), len(m._forward_hooks), vars(m).get("fused_attn"))
        for name, m in model.named_modules()
    ] + [*model.state_dict(), getattr(getattr(model, "config", None), "cached_transformers", None)]


def refuse(model: nn.Module, message: str, *args: Any, by: Callable[..., Any] = add_memory, **options: Any) -> None:
    """The model stays as it was."""
    before = fingerprint(model)
    refuses(message, by, model, *args, **options)
    assert fingerprint(model) == before


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


class MyMultihead(nn.MultiheadAttention):
    """With code of its own, for all that is known."""


def bert_of(cls: str = "BertModel", stem: str = "Bert", **more: Any) -> Any:
    transformers = library("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{stem}Config")(**sizes, intermediate_size=32, max_position_embeddings=32, **more)
    return getattr(transformers, cls)(config)


def torch_decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(16, 2, 32)


TABLE = r"its positions are a table .*rotary positions .*; docs/support.md"
NO_ENCODER = "Sequential is no model of transformers around one encoder"
FOUR, SEGMENTED = {"length": 4}, {"segment_length": 5}
FRAMES = {family.name: family for family in (patches("ViT", ""), patches("Beit", ""))}
TIMM = timm_family(
    "timm_vit", "", "vit_small_patch16_224", 16, img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=4
)
REFUSED: list[tuple[Callable[[], nn.Module], Any, dict[str, Any], str]] = [
    # attention layers
    (PlainModel, "grc", FOUR, rf"PlainModel: .*attention class {NAME}; .*register_adapter"),
    (lambda: nn.TransformerDecoder(torch_decoder(), 2), "grc", FOUR, "TransformerDecoder has no attention .*the enc"),
    (lambda: nn.MultiheadAttention(16, 2, kdim=8), "grc", FOUR, "kdim, vdim, add_bias_kv .* takes no memory"),
    (lambda: nn.MultiheadAttention(16, 2, add_bias_kv=True), "grc", FOUR, "takes no memory"),
    (lambda: MyMultihead(16, 2), "grc", FOUR, "MyMultihead is a subclass of nn.MultiheadAttention"),
    (lambda: bert_of(is_decoder=True), "grc", FOUR, "is_decoder=True is causal"),
    (lambda: GPT2.build(add_cross_attention=True), "grc_stream", {}, "add_cross_attention=True"),
    # names and options
    (VIT.build, "grk", {}, "unknown memory 'grk'; did you mean 'grc'"),
    (VIT.build, "grc", {"ratios": 0.5}, "option of memory 'grc' 'ratios'; did you mean 'ratio'"),
    (VIT.build, {"ratio": 0.5}, {}, "must be a name or have the key 'name'"),
    (VIT.build, None, {}, "memory=None"),
    (VIT.build, "grc", {"ratio": 0.01}, "ratio=0.01 .* 0 channels, which heads=2"),
    (VIT.build, "grc", {"variant": "released", "ratio": 0.375}, "width=32 into 12 groups"),
    (
        lambda: nn.Sequential(MHA.build(), nn.MultiheadAttention(12, 6)),
        "grc",
        {**FOUR, "ratio": 0.75},
        "ratio=0.75.*=6",
    ),
    (LLAMA.build, "grc_stream", {"ratio": 2}, r"ratio=2 must lie in \(0, 1\]"),
    (LLAMA.build, "grc_stream", {"input_size": (4, 4)}, r"input_size=\(4, 4\)"),
    (GPT2.build, "memorizing", {"layer": 3}, "layer=3 must be a layer, counted from 1 to 2"),
    # lengths of segments
    *((host.build, spec, {}, r"segment_length is missing.*segment_length=\d+.*=None") for host, spec in UNTOLD),
    (BERT.build, "rmt", {}, "segment_length is missing: .*'rmt' .* segment_length=32"),
    (BERT.build, "grc_stream", {"segment_length": 33}, "segment_length=33: 33 .*BertFor.* 32"),
    (BERT.build, "grc_stream", {"segment_length": 1}, "segment_length=1 must be at least 2"),
    (GPT2.build, "grc_stream", {"segment_length": 0}, "segment_length=0 must be at least 1"),
    (GPT2.build, "rmt", {"length": 10, "segment_length": 50}, "segment_length=50 and 20 .*: 70 .*64"),
    (GPT2.build, "rmt", {"length": 3}, r"segment_length=58\b"),  # 64 positions, 6 of them for memory tokens
    (LLAMA.build, "grc_stream", {}, r"segment_length=256\b"),
    (BART.build, "grc", {**FOUR, "segment_length": 8}, "segment_length=8 is for memories"),
    (FRAMES["vit"].build, "grc_stream", {"segment_length": 4}, "segment_length=4 is for texts; ViT"),
    (TIMM.build, "grc_stream", {"segment_length": 4}, "segment_length=4"),
    # needs that a host does not give
    (BART.build, "grc", {}, r"BartAttention does not tell how many tokens .*length=64"),
    (SWITCH.build, "grc_stream", {}, "'grc_stream' needs state .*SwitchTransformersFor"),
    (SWIN.build, "grc_stream", {}, "'grc_stream' needs state .*SwinTransformer"),
    (T5.build, "rmt", {}, r"'rmt' spans the layers; T5For\w+ .*docs/support.md"),
    (TIMM.build, "rmt", {}, "'rmt' spans the layers; VisionTransformer"),
    (FRAMES["beit"].build, "memory_transformer", {}, "'memory_transformer' spans the layers; Beit"),
    (BERT.build, "rmt", {"cache": 4, **SEGMENTED}, "'rmt' needs context"),
    (BERT.build, "convolution", {}, r"needs token_map \(.*\), which BertForMaskedLM does not give"),
    (BERT.build, "memory_transformer", {"place": "back", **SEGMENTED}, "take place='front'"),
    (BERT.build, "grc_stream", {"input_size": (4, 4)}, r"input_size=\(4, 4\)"),
    (FRAMES["vit"].build, "grc_stream", {"input_size": (16, 16)}, r"input_size=\(16, 16\): ViT\w+"),
    (GPT2.build, "grc", FOUR, "needs bidirectional .*GPT2LMHeadModel .*docs/support.md"),
    (GPT2.build, "memorizing", {"joint": True}, "needs lse .*, which GPT2LMHeadModel does"),
    (GPT2.build, "rmt", {"cache": 4}, "'rmt' needs context"),
    (GPT2.build, "titans", {"chunk": 4, "place": "context", "persistent": 2, **SEGMENTED}, "'titans'"),
    *(
        (GPT2.build, name, SEGMENTED, rf"memory '{name}' needs \w+ .*GPT2LMHeadModel does not give; {TABLE}")
        for name in STORES
    ),
    (GPT2.build, "expire_span", {"price": 0, **SEGMENTED}, rf"'expire_span' needs \w+ .*{TABLE}"),
    (GPT2.build, "streaming_llm", {"keep": "kv", **SEGMENTED}, rf"'streaming_llm' needs \w+ .*{TABLE}"),
    (LLAMA.build, "transformer_xl", {"relative": True, **SEGMENTED}, "position scheme .*relative=False"),
    (LLAMA.build, "compressive", SEGMENTED, "needs own_loss .*function='mean'.*loss='task'"),
    (LLAMA.build, "infinity_former", SEGMENTED, "needs own_loss .*; take kl_weight=0"),
    (LLAMA.build, "segatron", SEGMENTED, r"needs token_ids \(the token ids .*docs/support.md"),
    (LLAMA.build, "feedback", SEGMENTED, "needs context_alone"),
    (LLAMA.build, "memformer", SEGMENTED, "needs slots .*docs/support.md"),
    (LLAMA.build, "crtn", {"scope": "segment", **SEGMENTED}, "needs bidirectional .*; take scope='previous'"),
    (LLAMA.build, "memory_transformer", {"control": True, **SEGMENTED}, "needs own_weights .*; take control=False"),
    # models of other kinds
    (lambda: nn.Sequential(GPT2.build()), "grc_stream", {}, "the model of transformers inside"),
    (lambda: BART.build("BartForCausalLM", is_decoder=True, is_encoder_decoder=False), "grc", FOUR, "BartForCausalLM"),
    (lambda: bert_of("RobertaForCausalLM", "Roberta"), "rmt", SEGMENTED, "RobertaForCausalLM"),
    (lambda: nn.Sequential(BERT.build()), "rmt", SEGMENTED, NO_ENCODER),
    (lambda: nn.Sequential(BERT.build(), BERT.build()), "rmt", SEGMENTED, NO_ENCODER),
    (lambda: nn.Sequential(BERT.build(), GPT2.build()), "grc_stream", SEGMENTED, "Sequential holds models"),
    (lambda: nn.Sequential(GPT2.build(), BERT.build()), "grc_stream", SEGMENTED, "Sequential holds models"),
    (lambda: nn.Sequential(TIMM.build()), "grc_stream", {}, "Sequential would not pass memory_state on"),
    (lambda: nn.Sequential(FRAMES["vit"].build()), "grc_stream", {}, NO_ENCODER),
]


@pytest.mark.parametrize(
    "build, memory, options, message",
    REFUSED,
    ids=[f"{n}-{r[1] if isinstance(r[1], str) else ''}" for n, r in enumerate(REFUSED)],
)
def test_what_does_not_fit_is_refused_with_the_way_out(
    build: Callable[[], nn.Module], memory: Any, options: dict[str, Any], message: str
) -> None:
    refuse(build(), message, memory, **options)


def test_a_segment_may_take_all_positions_and_a_model_without_a_state_any() -> None:
    add_memory(GPT2.build(), "rmt", length=3, segment_length=58)
    add_memory(GPT2.build(), "memory_transformer", length=3)  # carries nothing, so that no length is missing


TWICE = [*((host, "grc", "grc") for host in (VIT, MHA, HF_VIT, BERT_EAGER))]
TWICE += [(host, *pair) for host in (GPT2, LLAMA) for pair in product(("grc_stream", "rmt"), repeat=2)]


@pytest.mark.parametrize("host, first, second", TWICE, ids=str)
def test_adding_twice_is_refused(host: Any, first: str, second: str) -> None:
    options = host.options if first == "grc" else {"segment_length": 5}
    refuse(host.with_memory(first, **options), r"memory already; call remove_memory\(model\)", second, **options)


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
    refuses(message, call, model, x)
    assert all(torch.equal(a, b) for a, b in zip(stored(model), before, strict=True))
    model(x, x, x)  # and goes on


@pytest.mark.parametrize("training", [True, False])
def test_a_causal_encoder_is_refused_at_the_call(training: bool) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    model = add_memory(encoder, length=4).train(training)
    refuses("leak the future", model, torch.randn(2, 5, 16), mask=causal(5), is_causal=True)


def test_timm_s_attention_mask_is_refused() -> None:
    library("timm")
    model = VIT.with_memory()
    refuses("attention was called with a mask", model.blocks[0].attn, torch.randn(2, 17, 32), attn_mask=causal(17))


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
    refuses(r"cannot read padding from .* of shape \(2, 3, 6, 6\) over 6 tokens", padding_of, torch.ones(2, 3, 6, 6), 6)


def test_the_forms_of_a_padding_mask_say_the_same() -> None:
    keep = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    bools = keep.bool()[:, None, None]
    added = torch.zeros(2, 1, 1, 4).masked_fill(~bools, -torch.inf)
    for form in (keep, keep.bool(), keep.float(), bools, bools.expand(2, 1, 4, 4), added, added.expand(2, 1, 4, 4)):
        padding = padding_of(form, 4)
        assert padding is not None and padding.tolist() == [[False, False, False, True], [False] * 4]


def test_pretrained_weights_that_cannot_be_loaded_are_named(tmp_path: Any) -> None:
    for name, kind in (("..", ValueError), ("nosuch/nosuch", OSError)):
        given = {"pretrained": name, "cache_dir": tmp_path, "local_files_only": True}
        refuses(f"pretrained={name} ", create_model, "transformers", raises=kind, **given)
