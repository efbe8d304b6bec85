"""Our encoder-decoder with the weights of transformers' BART, Marian, T5 and Switch computes what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.hosts import library
from torch import Tensor, nn

from cached_lab.tasks.translation.translate import translate
from cached_transformers.integrations.transformers.seq2seq_weights import from_bart, from_t5
from cached_transformers.models.encoder_decoder import EncoderDecoder

V, D, ROWS, N, T = 23, 16, 4, 9, 7
BEGIN, END, PAD = 2, 1, 0
LENGTHS = torch.tensor([9, 5, 1, 7])


def close(got: Tensor, want: Tensor) -> None:
    """Equal to 1e-5 of the largest: logits of T5 1.1 are far from 1."""
    torch.testing.assert_close(got, want, atol=1e-5 * max(1.0, float(want.detach().abs().max())), rtol=0)


def bart_like(kind: str, **options: Any) -> nn.Module:
    transformers = library("transformers")
    config, model = {
        "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
        "marian": (transformers.MarianConfig, transformers.MarianMTModel),
    }[kind]
    sizes = {"vocab_size": V, "d_model": D, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 40}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24)
    tokens = {"pad_token_id": PAD, "bos_token_id": 3, "eos_token_id": END, "decoder_start_token_id": BEGIN}
    return model(config(**sizes, **tokens, forced_eos_token_id=None, **options))


def t5_like(kind: str, **options: Any) -> nn.Module:
    transformers = library("transformers")
    config, model = {
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
        "switch": (transformers.SwitchTransformersConfig, transformers.SwitchTransformersForConditionalGeneration),
    }[kind]
    sizes = {"vocab_size": V, "d_model": D, "d_kv": 5, "d_ff": 24, "num_layers": 4, "num_decoder_layers": 2}
    sizes |= {"num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    tokens = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": BEGIN}
    return model(config(**sizes, **tokens, **options))


CASES = {
    "bart": (lambda: bart_like("bart"), from_bart),
    "bart, scaled embeddings, relu": (
        lambda: bart_like("bart", scale_embedding=True, activation_function="relu"),
        from_bart,
    ),
    "marian": (lambda: bart_like("marian", activation_function="swish", scale_embedding=True), from_bart),
    "marian, two vocabularies": (
        lambda: bart_like(
            "marian", decoder_vocab_size=V - 4, share_encoder_decoder_embeddings=False, tie_word_embeddings=False
        ),
        from_bart,
    ),
    "t5": (lambda: t5_like("t5"), from_t5),
    "t5 1.1": (lambda: t5_like("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False), from_t5),
    "switch": (
        lambda: t5_like("switch", num_experts=3, num_sparse_encoder_layers=2, num_sparse_decoder_layers=1),
        from_t5,
    ),
}


@torch.no_grad()
def stirred(model: nn.Module) -> nn.Module:
    """In evaluation mode, with noise on all weights; a table of sinusoids stays what it is."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.is_floating_point() and "embed_positions" not in name:
            t.add_(0.3 * torch.randn_like(t))
    return model.eval()


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, EncoderDecoder]:
    """A model of transformers with random weights everywhere, and ours with its weights."""
    torch.manual_seed(0)
    make, convert = CASES[request.param]
    theirs = stirred(make())
    return theirs, convert(theirs)


def batch(ours: EncoderDecoder) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(3, ours.vocabulary, (ROWS, N), generator=generator)
    targets = torch.randint(3, ours.target_vocabulary, (ROWS, T), generator=generator)
    return inputs, torch.arange(N) >= LENGTHS[:, None], targets


@torch.no_grad()
def test_outputs_are_equal_with_and_without_padding(pair: tuple[Any, EncoderDecoder]) -> None:
    theirs, ours = pair
    inputs, padding, decoder_inputs = batch(ours)
    assert not ours.training
    for mask in (None, padding):
        given = {"attention_mask": None if mask is None else (~mask).long(), "use_cache": False}
        want = theirs(input_ids=inputs, decoder_input_ids=decoder_inputs, **given).logits
        close(ours(inputs, decoder_inputs, mask).outputs, want)


@torch.no_grad()
def test_masked_targets_change_nothing_before_them(pair: tuple[Any, EncoderDecoder]) -> None:
    """transformers masks the target's padding, ours does not: no token sees padding after the end."""
    theirs, ours = pair
    inputs, padding, decoder_inputs = batch(ours)
    valid = torch.arange(T) < torch.tensor([7, 3, 1, 5])[:, None]
    masks = {"attention_mask": (~padding).long(), "decoder_attention_mask": valid.long()}
    want = theirs(input_ids=inputs, decoder_input_ids=decoder_inputs, use_cache=False, **masks).logits
    got = ours(inputs, decoder_inputs, padding).outputs
    close(got[valid], want[valid])


@pytest.mark.parametrize("beams", [1, 4])
@torch.no_grad()
def test_texts_are_those_of_generate(pair: tuple[Any, EncoderDecoder], beams: int) -> None:
    theirs, ours = pair
    inputs, padding, _ = batch(ours)
    searched: dict[str, Any] = {"early_stopping": True, "length_penalty": 0.7} if beams > 1 else {}
    searched |= {"num_beams": beams, "do_sample": False, "max_new_tokens": 12, "bad_words_ids": None}
    told = {"return_dict_in_generate": True, "output_scores": True}
    want = theirs.generate(inputs, attention_mask=(~padding).long(), **searched, **told)
    options: dict[str, Any] = {"begin": BEGIN, "end": END, "tokens": 12, "beams": beams, "length_penalty": 0.7}
    got = translate(ours, inputs, padding=padding, **options)
    for row, length in enumerate(got.length_B.tolist()):
        sequence = want.sequences[row, 1:]
        assert got.tokens_BT[row, :length].tolist() == sequence[:length].tolist()
        assert set(sequence[length:].tolist()) <= {PAD, END}
    if beams > 1:
        close(got.score_B / got.length_B**0.7, want.sequences_scores)


def test_memory_is_added_to_the_weights_of_others_with_their_dtype_and_mode() -> None:
    """With the gate closed the model is the original; open, it is another, and learns."""
    theirs = stirred(bart_like("bart"))
    ours = from_bart(theirs, memory={"name": "grc", "length": 6}, dropout=0.0)
    inputs, padding, decoder_inputs = batch(ours)
    want = theirs(input_ids=inputs, attention_mask=(~padding).long(), decoder_input_ids=decoder_inputs).logits
    assert not torch.allclose(ours(inputs, decoder_inputs, padding).outputs, want, atol=1e-3)
    for memory in ours.stack.layer_memories():
        memory.close_gate()
    close(ours(inputs, decoder_inputs, padding).outputs, want)
    ours = from_t5(t5_like("t5").bfloat16().train())
    assert ours.training and {p.dtype for p in ours.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_t5(bart_like("bart")), "model=BartForConditionalGeneration"),
        (lambda: from_bart(bart_like("bart", activation_function="tanh")), "activation 'tanh' has no counterpart"),
        (lambda: from_bart(bart_like("bart"), norm="pre"), "options leave .* without a counterpart"),
        (
            lambda: from_t5(t5_like("switch", num_sparse_encoder_layers=1, num_sparse_decoder_layers=1)),
            "experts in layers .*every second one",
        ),
        (lambda: from_t5(t5_like("switch", router_bias=True)), "router_bias=True has no counterpart"),
    ],
)
def test_what_has_no_counterpart_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
