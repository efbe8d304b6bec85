"""What replace_attention refuses, when replacing or at the call, in which words; causal hosts and masks of torch.nn."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from common import refuses
from integrations import hosts as H
from integrations.cores import near
from integrations.hosts import Host, library, tokens
from integrations.test_refusals import PlainAttention, bert_of, refuse, registered  # noqa: F401
from integrations.test_replace_attention import windowed
from integrations.transformers_hosts import GPT2, SWITCH, T5
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import replace_attention, restore_attention

pytestmark = pytest.mark.usefixtures("cores")


@pytest.mark.parametrize(
    ("host", "attention", "message"),
    [
        (H.SWIN, "test_window", r"attn needs bias \(.*\), which attention Window does not give; `cached list"),
        (
            H.PVT,
            "test_window",
            r"stages.0.blocks.0.attn needs cross \(other keys than queries\), which attention Window",
        ),
        (H.BERT_EAGER, "softmax", r"attn_implementation='eager' .*call model.set_attn_implementation\('sdpa'\) first"),
        (H.VIT, {"name": "rfa", "gate": True}, r"attn needs bidirectional .*RandomFeatureAttention \(its options take"),
        (H.BERT_DROPOUT, "test_tempered", r"drops 0.1 of the attention weights.* attention_probs_dropout_prob"),
        (T5, "performer", r"needs bias \(a bias on the logits.*\), which attention \w+ does not give"),
        (SWITCH, "softmax", r"attn_implementation='eager' there is no scaled_dot_product_attention"),  # its only one
        (GPT2, "test_tempered", r"needs causal \(a causal form.*\), which attention \w+ does not give"),
        (H.VIT, "sofmax", "unknown attention 'sofmax'; did you mean 'softmax'"),
        (H.VIT, {"radius": 2}, "must be a name, or have a 'name'"),
        (H.VIT, {"name": "test_window", "radios": 2}, "'radios'; did you mean 'radius'"),
    ],
)
def test_what_a_core_cannot_do_is_refused_and_the_model_untouched(host: Host, attention: Any, message: str) -> None:
    refuse(host.build(), message, attention, by=replace_attention)


def test_replacing_twice_is_refused() -> None:
    refuse(windowed(H.VIT), "replaced already; call restore_attention", "softmax", by=replace_attention)
    refuse(windowed(H.MHA), "MultiheadAttention was replaced already", "softmax", by=replace_attention)


def causal_bert(attention: str) -> Any:
    model = bert_of(is_decoder=True, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    return replace_attention(model, attention)


def test_a_causal_bert_needs_a_causal_core() -> None:
    library("transformers")
    refuses(r"needs causal \(a causal form.*\), which attention Tempered does not give", causal_bert, "test_tempered")
    model, exact, words = causal_bert("test_window"), causal_bert("softmax"), torch.randint(20, (2, 6))
    plain = restore_attention(causal_bert("softmax"))
    with torch.no_grad():
        for m, mask in ((model, near(6, 1, True)), (exact, near(6, 6, True))):
            wanted = plain(input_ids=words, attention_mask=mask.expand(2, 1, 6, 6)).last_hidden_state
            torch.testing.assert_close(m(input_ids=words).last_hidden_state, wanted, rtol=0, atol=1e-5)
        keep = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
        a, b = (m(input_ids=words, attention_mask=keep).last_hidden_state for m in (exact, plain))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    refuses("differs between queries", model, input_ids=words, attention_mask=keep)
    past = model(input_ids=words, use_cache=True).past_key_values
    refuses("use_cache=False", model, input_ids=words[:, :1], past_key_values=past)


def test_padding_needs_a_core_that_is_exact_over_it() -> None:
    model = replace_attention(H.BERT_SDPA.build(), "test_told")
    given = H.BERT_SDPA.given()
    refuses("exact_padding", model, **given)
    model(input_ids=given["input_ids"])
    model(input_ids=given["input_ids"], attention_mask=torch.ones_like(given["attention_mask"]))
    encoder_ = replace_attention(H.ENCODER_PADDED.build(), "test_told")
    for training in (True, False):
        with torch.no_grad(), pytest.raises(ValueError, match="needs exact_padding"):
            encoder_.train(training)(**H.ENCODER_PADDED.given())


def test_masks_of_torch_nn() -> None:
    model, plain = windowed(H.ENCODER), H.ENCODER.build()
    src = tokens()["src"]
    causal = nn.Transformer.generate_square_subsequent_mask(H.TOKENS)
    for training in (True, False):
        got = model.train(training)(src, mask=causal, is_causal=True)
        wanted = plain.train(training)(src, mask=~near(H.TOKENS, 1, True))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match=r"the mask of this call needs bias \(.*\), which attention Window does"):
            model(src, mask=~near(H.TOKENS, 3))
    exact = replace_attention(H.ENCODER.build(), "softmax")
    for mask in (causal, ~near(H.TOKENS, 2), torch.randn(3 * 2, H.TOKENS, H.TOKENS)):
        torch.testing.assert_close(exact(src, mask=mask), plain(src, mask=mask), rtol=0, atol=1e-6)
    tempered = replace_attention(nn.MultiheadAttention(16, 2, batch_first=True), "test_tempered")
    with pytest.raises(ValueError, match=r"needs causal \(.*\), which attention Tempered does not give"):
        tempered(src, src, src, need_weights=False, attn_mask=causal, is_causal=True)
    refuses(r"is_causal=True.*attn_mask", tempered, src, src, src, need_weights=False, is_causal=True)
    refuses("another attention serves self-attention", tempered, src, src[:, :3], src[:, :3], need_weights=False)


def test_weights_are_softmax_s_alone() -> None:
    x = torch.randn(3, H.TOKENS, 16)
    plain, exact = H.MHA.build(), replace_attention(H.MHA.build(), "softmax")
    causal = nn.Transformer.generate_square_subsequent_mask(H.TOKENS)
    for mask in (None, causal, ~near(H.TOKENS)):
        torch.testing.assert_close(exact(x, x, x, attn_mask=mask), plain(x, x, x, attn_mask=mask), rtol=0, atol=1e-6)
    refuses("need_weights=False", windowed(H.MHA), x, x, x)


def test_a_loss_of_the_core_s_own_is_refused_in_training() -> None:
    model = replace_attention(H.VIT.build(), "test_selfish")
    refuses("trained with an auxiliary loss", model, **H.VIT.given())
    model.eval()(**H.VIT.given())


@pytest.mark.parametrize("case", ["fused_attn", "implementation"])
def test_a_layer_that_no_longer_calls_fused_attention_is_refused(case: str) -> None:
    if case == "fused_attn":
        model, given = windowed(H.VIT), H.VIT.given()
        model.blocks[0].attn.fused_attn = False
    else:
        model, given = windowed(H.HF_VIT), H.HF_VIT.given()
        model.set_attn_implementation("eager")
    refuses("scaled_dot_product_attention", model, **given)


class TwiceAttention(PlainAttention):
    times = 1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = F.scaled_dot_product_attention(q, k, v, scale=0.7).transpose(1, 2).flatten(2)
        return self.out(x)


def test_an_adapter_of_one_s_own_serves_here_too(registered: None) -> None:  # noqa: F811
    x, layer = torch.randn(2, 5, 16), TwiceAttention()
    model = nn.Sequential(layer)
    plain = copy.deepcopy(model)
    torch.testing.assert_close(replace_attention(model, "softmax")(x), plain(x), rtol=0, atol=1e-6)
    layer.times = 2
    refuses("2 times instead of once", model, x)
    restore_attention(model)
    layer.forward = layer.forward  # type: ignore[method-assign]
    refuse(model, "the forward of 0 was patched already", "softmax", by=replace_attention)
