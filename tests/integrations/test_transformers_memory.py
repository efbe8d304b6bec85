"""Six architectures of transformers take a memory, train, generate, are saved and loaded, and give it back."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import close_gates, library
from integrations.transformers_hosts import (
    BART,
    BERT,
    DECODERS,
    ENCODERS,
    GPT2,
    LLAMA,
    SEGMENT,
    SEQ2SEQ,
    STREAMS,
    SWITCH,
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


@architectures(ALL)
def test_saved_and_loaded_it_computes_the_same(host: Architecture, tmp_path: Path) -> None:
    model = awaken(host.with_memory()).train()
    model(**call_of(host)).loss.backward()
    model.eval()
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(str(tmp_path))
    assert type(loaded) is type(model) and not loaded.training
    assert loaded.config.cached_transformers == model.config.cached_transformers
    call = call_of(host, seed=4)
    assert torch.equal(loaded(**call).logits, model(**call).logits)
    after = loaded.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    half = load_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert half(**call).logits.dtype == torch.bfloat16


@architectures([BART, GPT2])
def test_a_plain_load_of_it_fails_and_one_of_the_earlier_form_warns_of_what_it_drops(
    host: Architecture, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers = library("transformers")
    model = host.with_memory()
    model.save_pretrained(tmp_path / "new")
    with pytest.raises(RuntimeError, match="mismatched"):
        type(model).from_pretrained(tmp_path / "new")
    type(model).save_pretrained(model, tmp_path)
    said = logging.getLogger("transformers")
    said.addHandler(caplog.handler)
    try:
        plain = type(model).from_pretrained(tmp_path)
        report = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert any("UNEXPECTED" in line and "memory.branch.gate_H" in line for line in report)
        caplog.clear()
        load_pretrained(str(tmp_path))
        assert not [r for r in caplog.records if "UNEXPECTED" in r.getMessage()]
    finally:
        said.removeHandler(caplog.handler)
    assert transformers.logging.get_verbosity() == logging.WARNING
    # Saved again without its memory, the folder is no longer what its config says.
    plain.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match=r"holds no .*memory.* \(\d+ tensors are missing\).*add_memory"):
        load_pretrained(str(tmp_path / "again"))
    add_memory(plain, host.memory, **host.options)


def test_loading_says_what_is_not_there_and_what_is_new(tmp_path: Path) -> None:
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
    with pytest.warns(UserWarning, match=r"score.weight: not stored, and newly initialised"):
        classifier = load_pretrained(str(tmp_path / "with"), transformers.GPT2ForSequenceClassification)
    assert classifier(ids).memory_state is not None


@architectures([*ENCODERS, LLAMA])
def test_copies_and_pickles_are_models_of_their_own(host: Architecture) -> None:
    model = awaken(host.with_memory())
    call = call_of(host)
    expected = model(**call).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**call).logits, expected)
        awaken(twin, seed=8)
        assert torch.equal(model(**call).logits, expected) and not torch.equal(twin(**call).logits, expected)
        assert torch.equal(remove_memory(twin)(**call).logits, host.build()(**call).logits)


@pytest.mark.parametrize(
    ("host", "memory"), [*((host, None) for host in ALL), *((host, "rmt") for host in DECODERS)], ids=str
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


CAUSAL = "docs/support.md"
REFUSALS: list[tuple[Architecture, Any, dict[str, Any], str]] = [
    (BART, "grc", {}, r"BartAttention does not tell how many tokens .*length=64"),
    (T5, "grc", {}, r"T5Attention does not tell how many tokens"),
    (SWITCH, "grc_stream", {}, r"'grc_stream' needs state \(.*\), which SwitchTransformersFor\w+ does not give"),
    (T5, "rmt", {}, r"'rmt' spans the layers; T5For\w+ .*docs/support.md"),
    (BERT, "rmt", {}, "segment_length is missing: memory 'rmt' .* segment_length=32, or fewer"),
    (BERT, "grc_stream", {"segment_length": 33}, "segment_length=33: 33 .*BertFor.* 32"),
    (BERT, "grc_stream", {"segment_length": 1}, "segment_length=1 must be at least 2"),
    (BERT, "grc_stream", {"input_size": (4, 4)}, r"input_size=\(4, 4\)"),
    (BERT, "rmt", {"cache": 4, "segment_length": 8}, "'rmt' needs context"),
    (
        BERT,
        "memory_transformer",
        {"place": "back", "segment_length": 8},
        "MemoryTransformer puts tokens after a text, .*take place='front'",
    ),
    (BERT, "convolution", {}, r"needs token_map \(.*\), which BertForMaskedLM does not give"),
    (BART, "grc", {"length": 4, "segment_length": 8}, "segment_length=8 is for memories that carry a state"),
    (GPT2, "grc", {"length": 4}, rf"needs bidirectional .*, which GPT2LMHeadModel does not give; {CAUSAL}"),
    (
        LLAMA,
        "attention_cache",
        {"length": 4},
        rf"needs bidirectional .*, which LlamaForCausalLM does not give; {CAUSAL}",
    ),
    (GPT2, "transformer_xl", {}, rf"needs context \(keys and values .*\), which GPT2LMHead.*{CAUSAL}"),
    (GPT2, "memformer", {}, r"needs slots \(a cross-attention over slots in every block\), which"),
    (GPT2, "memory_transformer", {"control": True}, "needs own_weights .*, which GPT2LMHeadModel does not give"),
    (
        GPT2,
        "memorizing",
        {"joint": True},
        "needs lse .*, which GPT2LMHeadModel does",
    ),
    (GPT2, "memorizing", {"layer": 3}, "layer=3 must be a layer, counted from 1 to 2"),
    (GPT2, "rmt", {"cache": 4}, "'rmt' needs context"),
    (
        GPT2,
        "rmt",
        {"length": 10, "segment_length": 50},
        "segment_length=50 and 20 memory tokens: 70 .*64",
    ),
    (GPT2, "grc_stream", {"segment_length": 0}, "segment_length=0 must be at least 1"),
    (LLAMA, "grc_stream", {"ratio": 2}, r"ratio=2 must lie in \(0, 1\]"),
    (LLAMA, "grc_stream", {"input_size": (4, 4)}, r"input_size=\(4, 4\)"),
]


@pytest.mark.parametrize(
    "host, memory, options, message", REFUSALS, ids=[f"{r[0]}-{i}" for i, r in enumerate(REFUSALS)]
)
def test_refusals_say_why_and_leave_the_model_as_it_was(
    host: Architecture, memory: str, options: dict[str, Any], message: str
) -> None:
    model = host.build()
    before = [(name, sorted(vars(module)), len(module._forward_pre_hooks)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        add_memory(model, memory, **options)
    assert [(n, sorted(vars(m)), len(m._forward_pre_hooks)) for n, m in model.named_modules()] == before
    assert not hasattr(model.config, "cached_transformers")


@architectures(DECODERS)
def test_a_second_memory_is_refused(host: Architecture) -> None:
    for memory in ("grc_stream", "rmt"):
        model = host.with_memory(memory, segment_length=SEGMENT)
        for other in ("grc_stream", "rmt"):
            with pytest.raises(ValueError, match="remove_memory"):
                add_memory(model, other)


def test_decoders_of_other_kinds_are_refused() -> None:
    library("transformers")
    with pytest.raises(ValueError, match=r"add_cross_attention=True"):
        add_memory(GPT2.build(add_cross_attention=True), "grc_stream")
    with pytest.raises(ValueError, match=r"no model of transformers .*the model of transformers inside"):
        add_memory(torch.nn.Sequential(GPT2.build()), "grc_stream")
    with pytest.raises(ValueError, match="BartForCausalLM"):
        add_memory(BART.build("BartForCausalLM", is_decoder=True, is_encoder_decoder=False), length=4)
