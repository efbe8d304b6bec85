"""Cores as attention functions of transformers: encoders and decoders, padding, generation, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.cores import near
from integrations.hosts import library

from cached_transformers.integrations.transformers.attention_functions import (
    register_attention_function,
    register_attention_functions,
)

pytestmark = pytest.mark.usefixtures("cores", "interfaces")

ROWS, TOKENS = 3, 7
SIZES: dict[str, Any] = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def interfaces() -> Iterator[None]:
    """What is registered with transformers is taken back."""
    transformers = library("transformers")
    kept = [
        (kind._global_mapping, dict(kind._global_mapping))
        for kind in (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    ]
    yield
    for mapping, before in kept:
        mapping.clear()
        mapping.update(before)


def bert(implementation: str, **options: Any) -> Any:
    return build("BertModel", "BertConfig", implementation, intermediate_size=32, **options)


def llama(implementation: str, **options: Any) -> Any:
    """Two heads of queries share one of keys."""
    options = {"num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 32, **options}
    return build("LlamaForCausalLM", "LlamaConfig", implementation, **options)


def gpt2(implementation: str, **options: Any) -> Any:
    return build("GPT2LMHeadModel", "GPT2Config", implementation, bos_token_id=0, eos_token_id=0, **options)


def modernbert(implementation: str, **options: Any) -> Any:
    """Windows of two tokens in one of its layers."""
    more = {"intermediate_size": 32, "local_attention": 4, "pad_token_id": 0, **options}
    return build("ModernBertModel", "ModernBertConfig", implementation, **more)


def mistral(implementation: str, **options: Any) -> Any:
    more = {"num_key_value_heads": 2, "intermediate_size": 32, "sliding_window": 4, **options}
    return build("MistralForCausalLM", "MistralConfig", implementation, **more)


def build(model: str, config: str, implementation: str, **options: Any) -> Any:
    transformers = library("transformers")
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SIZES, **options}, attn_implementation=implementation)
    return getattr(transformers, model)(made).eval()


def given(padded: bool) -> dict[str, Any]:
    """The second row ends, the third begins with two tokens of padding."""
    torch.manual_seed(5)
    words = torch.randint(1, 20, (ROWS, TOKENS))
    keep = torch.ones(ROWS, TOKENS, dtype=torch.long)
    if padded:
        keep[1, 5:] = 0
        keep[2, :2] = 0
    return {"input_ids": words, "attention_mask": keep}


def valid(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    out: torch.Tensor = model(**inputs)[0]
    return out[inputs["attention_mask"].bool()]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [bert, llama, gpt2])
def test_softmax_is_sdpa(make: Any, padded: bool) -> None:
    assert register_attention_function("softmax") == "cached_softmax"
    torch.testing.assert_close(
        valid(make("cached_softmax"), given(padded)), valid(make("sdpa"), given(padded)), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", [bert, llama])
def test_a_window_is_a_mask_of_the_window_with_the_same_gradients(make: Any, padded: bool) -> None:
    name = register_attention_function("test_window", key="test_narrow", radius=2)
    model, plain, inputs = make(name), make("sdpa"), given(padded)
    rows = near(TOKENS, 2, causal=make is llama)
    keep = inputs["attention_mask"].bool()
    mask = {"attention_mask": keep[:, None, None] & rows}
    if padded and make is llama:  # the dense twin must count positions as the model does
        mask["position_ids"] = torch.arange(TOKENS).expand(ROWS, -1)
    got = valid(model, inputs)
    expected = plain(**{**inputs, **mask})[0][keep]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (got - valid(plain, inputs)).abs().max() > 1e-4
    got.square().sum().backward()
    expected.square().sum().backward()
    for (n, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=n: f"{n}: {m}")


def test_dropout_of_the_host_is_the_core_s() -> None:
    register_attention_function("softmax")
    outs = []
    for kind in ("sdpa", "cached_softmax"):
        model = bert(kind, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0).train()
        torch.manual_seed(3)
        outs.append(model(**given(False))[0])
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)
    register_attention_function("test_told", index=0, depth=1)
    model = bert("cached_test_told", attention_probs_dropout_prob=0.5).train()
    with pytest.raises(ValueError, match=r"BertSelfAttention.*0.5.*'test_told'"):
        model(input_ids=given(False)["input_ids"])


def test_generation_without_a_cache() -> None:
    name = register_attention_function("softmax")
    words, settings = given(False)["input_ids"], {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ours, theirs = llama(name), llama("sdpa")
    assert torch.equal(ours.generate(words, use_cache=False, **settings), theirs.generate(words, **settings))
    with pytest.raises(ValueError, match=r"1.*use_cache=False"):
        ours.generate(words, **settings)


def test_a_decoder_that_is_told_to_look_ahead() -> None:
    name = register_attention_function("softmax")
    inputs = {**given(True), "is_causal": False}
    got, expected = valid(llama(name), inputs), valid(llama("eager"), inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_a_core_without_a_causal_form_serves_no_decoder() -> None:
    name = register_attention_function("test_constant")
    with pytest.raises(ValueError, match=r"needs causal \(.*\), which attention Constant does not give"):
        llama(name)(**given(False))


COMPILERS = [
    (bert, "compile"),
    (llama, "export"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((bert, "strict"), (llama, "compile"), (llama, "strict"))
    ),
]


@pytest.mark.parametrize(("make", "way"), COMPILERS)
def test_compiled_and_exported(make: Any, way: str) -> None:
    """Made while it is traced, the core must not stay."""
    torch._dynamo.reset()
    name = register_attention_function("test_window")
    model, inputs = make(name), {**given(True), **({} if make is bert else {"use_cache": False})}
    with torch.no_grad():
        if way == "compile":
            run: Any = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
        else:
            run = torch.export.export(model, (), inputs, strict=way == "strict").module()
        got = valid(run, inputs)
        torch.testing.assert_close(got, valid(model, inputs), rtol=0, atol=1e-5)
    torch._dynamo.reset()


def test_layers_share_nothing_that_is_trained_and_copies_work() -> None:
    name = register_attention_function("test_window")
    model = bert(name)
    assert list(model.state_dict()) == list(bert("sdpa").state_dict())
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(valid(model, given(True)), valid(bert("sdpa"), given(True)), rtol=0, atol=0)


# ---- refusals


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"name": "test_tempered", "heads": 2}, "'test_tempered' has factor_H11 to save.*use replace_attention"),
        ("test_needs_input", "'test_needs_input' needs more than transformers' attention interface gives: .*x_BND"),
        ("sofmax", "unknown attention 'sofmax'"),
    ],
)
def test_what_has_no_place_there_is_refused(attention: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        register_attention_function(attention)


def test_all_that_fit_are_registered() -> None:
    names = register_attention_functions()
    assert {"cached_softmax", "cached_test_window"} <= set(names)
    assert not {"cached_test_tempered", "cached_test_needs_input"} & set(names)
    assert all(name in library("transformers").AttentionInterface().valid_keys() for name in names)


@pytest.mark.parametrize("make", [modernbert, mistral])
def test_windows_of_the_host_are_refused(make: Any) -> None:
    name = register_attention_function("softmax")
    with pytest.raises(ValueError, match=r"more than causality and padding|with sliding_window"):
        make(name)(**given(False))


def test_masks_that_say_more_are_refused() -> None:
    name = register_attention_function("test_window")
    words = given(False)["input_ids"]
    with pytest.raises(ValueError, match="differs between queries"):
        bert(name)(input_ids=words, attention_mask=near(TOKENS, 6, True).expand(ROWS, 1, -1, -1))
    packed = torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(ROWS, -1)
    with pytest.raises(ValueError, match="packed sequences"):
        llama(name)(input_ids=words, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="with output_attentions"):
        layer = bert(name).encoder.layer[0].attention.self
        layer(torch.randn(ROWS, TOKENS, 16), output_attentions=True)
    with pytest.raises(ValueError, match="with softcap"):
        layer(torch.randn(ROWS, TOKENS, 16), softcap=3.0)


def test_a_core_that_padding_would_change_says_so() -> None:
    name = register_attention_function("test_told", index=0, depth=1)
    model = bert(name)
    model(**given(False))
    with pytest.raises(ValueError, match="exact_padding"):
        model(**given(True))
