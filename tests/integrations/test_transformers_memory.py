"""Six architectures of transformers take a memory, train, generate, are saved and loaded, and give it back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from integrations.hosts import close_gates, library
from integrations.transformers_hosts import (
    BERT,
    DECODERS,
    ENCODERS,
    GPT2,
    SEGMENT,
    SEQ2SEQ,
    STREAMS,
    T5,
    Architecture,
    architectures,
    awaken,
    call_of,
    words,
)
from torch import Tensor

from cached_transformers import add_memory, load_pretrained, remove_memory

ALL = [*ENCODERS, *DECODERS]


def short(host: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """A batch of one segment, where the host has segments: beyond them it attends less far than alone."""
    return call_of(host, tokens=SEGMENT if host in DECODERS else 8, seed=seed)


@architectures(SEQ2SEQ)
def test_the_memory_of_an_encoder_decoder_is_in_the_encoder_alone(host: Architecture) -> None:
    model = host.with_memory()
    where = [name for name, module in model.named_modules() if name.endswith(".memory")]
    assert len(where) == 2 and all("encoder" in name and "decoder" not in name for name in where)
    plain = host.build()
    ids, decoder_ids = words(2, 6), words(2, 5, 1)
    hidden = torch.randn(2, 6, 16)
    encoded = library("transformers").modeling_outputs.MoEModelOutput(last_hidden_state=hidden)
    given = {"encoder_outputs": encoded, "decoder_input_ids": decoder_ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model(**given).logits, plain(**given).logits)


def test_weights_that_are_not_there_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    GPT2.build().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"from_pretrained.*add_memory"):
        load_pretrained(str(tmp_path / "plain"))
    transformers = library("transformers")
    model = awaken(GPT2.with_memory())
    model.save_pretrained(tmp_path / "with", max_shard_size="10KB")
    assert len(list((tmp_path / "with").glob("*.safetensors"))) > 1
    body = load_pretrained(str(tmp_path / "with"), transformers.GPT2Model)  # the decoder alone, from its model's files
    ids = words(2, 7)
    torch.testing.assert_close(body(ids).last_hidden_state, model.transformer(ids).last_hidden_state)
    said = logging.getLogger("transformers")
    said.addHandler(caplog.handler)
    try:
        classifier = load_pretrained(str(tmp_path / "with"), transformers.GPT2ForSequenceClassification)
    finally:
        said.removeHandler(caplog.handler)
    assert classifier(ids).memory_state is not None and "score.weight" in caplog.text and "memory" not in caplog.text
    GPT2.build().save_pretrained(tmp_path / "with")
    model.config.save_pretrained(tmp_path / "with")
    for load in (load_pretrained, transformers.GPT2LMHeadModel.from_pretrained):
        with pytest.raises(ValueError, match=r"holds no .*memory.* \(\d+ tensors are missing\).*add_memory"):
            load(str(tmp_path / "with"))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "with")
    del config.cached_transformers
    host = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "with", config=config)
    add_memory(host, GPT2.memory, **GPT2.options)


@pytest.mark.parametrize(
    ("host", "memory"), [*((host, None) for host in ALL), *((host, "rmt") for host in (*DECODERS, BERT))], ids=str
)
def test_removing_restores_outputs_keys_code_and_config(host: Architecture, memory: str | None) -> None:
    plain = host.build()
    model = host.with_memory() if memory is None else host.with_memory(STREAMS[memory], segment_length=SEGMENT)
    call = call_of(host)
    model.train()(**call).loss.backward()
    model.eval()
    assert remove_memory(model) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(model(**call).logits, plain(**call).logits)
    assert model.config.to_dict() == plain.config.to_dict()
    for a, b in zip(model.modules(), plain.modules(), strict=True):
        assert vars(a).keys() == vars(b).keys()
        assert len(a._forward_pre_hooks) == len(b._forward_pre_hooks) and len(a._forward_hooks) == len(b._forward_hooks)
    with pytest.raises(ValueError, match=r"no memory that could be removed"):
        remove_memory(model)
    add_memory(model, host.memory, **host.options)


def test_a_t5_whose_heads_are_wider_than_its_model() -> None:
    wide = Architecture("wide", T5.cls, T5.config, {**T5.sizes, "d_kv": 20})
    model = wide.with_memory("grc", length=4, ratio=0.25)
    close_gates(model)
    call = call_of(wide)
    assert torch.equal(model(**call).logits, wide.build()(**call).logits)
    with pytest.raises(ValueError, match=r"16.*40.*ratio=0.4"):
        wide.with_memory("grc", length=4)
    with pytest.raises(ValueError, match="mix='outputs'"):
        wide.with_memory("grc", length=4, ratio=0.25, mix="outputs")
