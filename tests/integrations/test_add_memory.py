"""add_memory on models of timm, torch.nn and transformers: what it changes, what it leaves, how it is undone."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations import hosts as H
from integrations import transformers_hosts as T
from integrations.hosts import Host, close_gates, hosts, library, memories, stored, train
from integrations.transformers_hosts import Architecture, architectures, awaken, call_of, words
from torch import Tensor, nn

from cached_transformers import add_memory, load_pretrained, remove_memory, reset_caches
from cached_transformers.memories.grc.shared_cache import commit_caches


def mapped(change: Callable[[Tensor], Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, changed; one object stays one object (query, key and value of a self-attention)."""
    done = {id(value): change(value) for value in given.values()}
    return {name: done[id(value)] for name, value in given.items()}


IMAGES = [host for host in H.HOSTS if host.package == "timm" or host is H.HF_VIT]
RELEASED_HOSTS = [host for host in IMAGES if host not in (H.SWIN, H.PVT_LINEAR)]


CHECKPOINTED = [(host, False) for host in H.HOSTS if host.recompute is not None] + [
    (H.HF_VIT, True),
    (H.BERT_SDPA, True),
]


@hosts()
@pytest.mark.parametrize("training", [True, False])
def test_a_closed_gate_changes_nothing(host: Host, training: bool) -> None:
    plain, model = host.build().train(training), host.with_memory().train(training)
    for seed in range(2):  # the second time the caches hold something
        given = host.given(seed)
        expected = host.run(plain, given, seed)
        host.run(model, given, seed)
        close_gates(model)
        torch.testing.assert_close(host.run(model, given, seed), expected, rtol=0, atol=1e-6)


@hosts()
def test_an_open_gate_changes_the_output_and_no_weight_of_the_host(host: Host) -> None:
    plain, model = host.build(), host.with_memory()
    given = host.given()
    assert not torch.allclose(host.run(model, given), host.run(plain, given), atol=1e-4)
    before, after = plain.state_dict(), model.state_dict()
    assert [key for key in after if ".memory." not in f".{key}"] == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable >= {name for name, p in plain.named_parameters() if p.requires_grad}


@hosts()
def test_training_lowers_the_loss_and_moves_every_parameter_of_the_memory(host: Host) -> None:
    model = host.with_memory()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(host, model)
    assert losses[-1] < losses[0]
    still = [name for name, p in model.named_parameters() if "memory." in name and torch.equal(p, before[name])]
    assert not still
    assert all(cache.abs().max() > 0.01 for cache in stored(model))


@hosts()
def test_evaluation_is_deterministic_and_hears_the_cache(host: Host) -> None:
    model = host.with_memory()
    train(host, model)
    model.eval()
    caches, given = stored(model), host.given(1)
    with torch.no_grad():
        first = host.run(model, given)
        assert torch.equal(host.run(model, given, seed=5), first)
        assert all(torch.equal(a, b) for a, b in zip(stored(model), caches, strict=True))
        reset_caches(model)
        assert (host.run(model, given) - first).abs().max() > 1e-5


@hosts()
def test_every_row_of_an_evaluation_is_the_row_alone(host: Host) -> None:
    model = host.with_memory()
    train(host, model, 1)
    model.eval()
    given = host.given(1)
    rows = 1 if host is H.MHA_TIME_FIRST else 0
    with torch.no_grad():
        whole = host.run(model, given)
        parts = [host.run(model, mapped(lambda v, i=i: v.narrow(rows, i, 1), given)) for i in range(whole.shape[rows])]
    torch.testing.assert_close(torch.cat(parts, rows), whole, rtol=0, atol=1e-5)


@hosts()
def test_removing_restores_outputs_keys_and_code(host: Host) -> None:
    plain, model = host.build(), host.with_memory()
    train(host, model, 1)
    weights = {k: v for k, v in model.state_dict().items() if ".memory." not in f".{k}"}
    assert remove_memory(model) is model
    plain.load_state_dict(weights)
    assert list(model.state_dict()) == list(plain.state_dict())
    for training in (True, False):
        given = host.given(2)
        assert torch.equal(host.run(model.train(training), given), host.run(plain.train(training), given))
    for a, b in zip(model.modules(), plain.modules(), strict=True):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys()
        assert len(a._forward_pre_hooks) == len(b._forward_pre_hooks) and len(a._forward_hooks) == len(b._forward_hooks)
    refuses("no memory that could be removed", remove_memory, model)
    add_memory(model, "grc", **host.options)  # and it can have another


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@hosts()
def test_the_checkpoint_of_the_plain_model_loads(host: Host) -> None:
    plain, model = host.build(seed=7), host.with_memory()
    result = model.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys and all(".memory." in f".{key}" for key in result.missing_keys)
    close_gates(model)
    given = host.given()
    with torch.no_grad():
        got, expected = host.run(model.eval(), given), host.run(plain.eval(), given)
    if "src_key_padding_mask" in given:  # the plain encoder's fused path zeroes what stands in padding
        got, expected = (y[~given["src_key_padding_mask"]] for y in (got, expected))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@hosts()
def test_its_own_checkpoint_restores_everything(host: Host) -> None:
    model, other = host.with_memory(), host.with_memory()
    train(host, model, 2)
    other.load_state_dict(model.state_dict())
    given = host.given(1)
    for training in (True, False):
        assert torch.equal(host.run(model.train(training), given), host.run(other.train(training), given))


@hosts()
def test_a_copy_is_equal_and_goes_its_own_way(host: Host) -> None:
    model = host.with_memory()
    train(host, model, 1)
    twin, other = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    given = host.given(1)
    expected = host.run(model, given)
    assert torch.equal(host.run(twin, given), expected) and torch.equal(host.run(other, given), expected)
    assert not {id(m) for m in memories(model)} & {id(m) for m in memories(other)}
    kept = {k: v.clone() for k, v in twin.state_dict().items()}
    train(host, model, 2)
    assert all(torch.equal(v, kept[k]) for k, v in twin.state_dict().items())
    losses = train(host, twin, 3)
    assert losses[-1] < losses[0]
    assert not {id(m) for m in memories(model)} & {id(m) for m in memories(twin)}
    given = host.given(2)
    with torch.no_grad():  # the copy's layers hear the copy's memories
        host.run(twin.eval(), given)
        before = host.run(model.eval(), given)
        reset_caches(twin)
        assert torch.equal(host.run(model, given), before)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("host, reentrant", CHECKPOINTED, ids=str)
def test_activation_checkpointing_of_the_host(host: Host, reentrant: bool) -> None:
    plain, model = host.with_memory(), host.with_memory()
    if reentrant:  # the older kind
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    else:
        host.recompute(model)  # type: ignore[misc]
    for step in range(3):
        given = host.given(step)
        for m in (plain, model):
            m.train().zero_grad()
            host.run(m, given, step).square().mean().backward()
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            wanted = b.grad if b.grad is not None else torch.zeros_like(b)
            got = a.grad if a.grad is not None else torch.zeros_like(a)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        for x, y in zip(stored(model), stored(plain), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
        with torch.no_grad():
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                if b.grad is not None:
                    a -= 0.1 * b.grad
                    b -= 0.1 * b.grad


@hosts()
def test_a_plain_loop_commits_each_proposal_once(host: Host) -> None:
    model = host.with_memory().train()
    for step in range(3):
        proposed = stored(model)
        host.run(model, host.given(step)).sum().backward()
        now = [memory.cache.cache_MC for memory in memories(model)]
        assert all(torch.equal(a, b) for a, b in zip(now, proposed, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(stored(model), proposed, strict=True))


@hosts(RELEASED_HOSTS)
@pytest.mark.parametrize("memory", ["grc", "convolution"])
def test_the_released_code_and_its_control(host: Host, memory: str) -> None:
    options = {"variant": "released"} if memory == "grc" else {}
    kept = {k: v for k, v in host.options.items() if memory == "grc"}
    model, plain = host.build(), host.build()
    add_memory(model, memory, **{**kept, **options})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(host, model)
    assert losses[-1] < losses[0]
    still = [n for n, p in model.named_parameters() if "memory." in n and torch.equal(p, before[n])]
    # The class token alone goes on from the last layer of a ViT, and the convolution skips it.
    last = [n for n, _ in model.named_parameters() if ".1." in n and "convolution" in n]
    assert still == (last if host not in (H.PVT, H.PVT_LINEAR) else [])
    remove_memory(model)
    fresh = host.build()
    add_memory(fresh, memory, **{**kept, **options})
    close_gates(fresh)
    given = host.given()
    torch.testing.assert_close(host.run(fresh, given), host.run(plain, given), rtol=0, atol=1e-6)


@hosts([H.VIT, H.PVT])
def test_the_control_has_as_many_channels_a_group_as_the_released_convolution(host: Host) -> None:
    released = add_memory(host.build(), "grc", variant="released", **host.options)
    control = add_memory(host.build(), "convolution")
    shapes = [
        [tuple(p.shape) for n, p in m.named_parameters() if "memory.convolution" in n] for m in (released, control)
    ]
    assert shapes[0] == shapes[1] and shapes[0]
    assert not list(stored(control))


@hosts()
def test_half_precision_hosts_get_half_precision_memories_with_float32_caches(host: Host) -> None:
    model = host.build().to(torch.bfloat16)
    add_memory(model, "grc", **host.options)
    given = mapped(lambda v: v.to(torch.bfloat16) if v.is_floating_point() else v, host.given())
    out = host.run(model, given)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    commit_caches(model)
    assert all(c.dtype == torch.float32 and c.any() for c in stored(model))


@hosts(H.PADDED)
@pytest.mark.parametrize("training", [True, False])
def test_a_padded_row_is_the_trimmed_row(host: Host, training: bool) -> None:
    padded, trimmed = host.with_memory(), host.with_memory()
    for row in range(3):
        given = {k: v[row : row + 1] for k, v in host.given(row).items()}
        valid = H.TOKENS - [0, 2, 3][row]
        short = {k: v[:, :valid] for k, v in given.items()}
        a, b = (host.run(m.train(training), g) for m, g in ((padded, given), (trimmed, short)))
        torch.testing.assert_close(a[:, :valid], b, rtol=0, atol=1e-5)
        for x, y in zip(stored(padded), stored(trimmed), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_fused_path_of_the_encoder_does_not_skip_the_memory(padded: bool, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = add_memory(nn.TransformerEncoder(layer, 2), length=4)  # nested tensors are on by default
    x_BND, padding_BN = torch.randn(2, 5, 16), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    mask = {"src_key_padding_mask": padding_BN} if padded else {}
    model(x_BND, **mask)
    model.eval()
    with torch.set_grad_enabled(grad):
        before = model(x_BND, **mask)
        reset_caches(model)
        after = model(x_BND, **mask)
    assert before.shape == (2, 5, 16) and ((before - after).abs().amax(-1) > 1e-5).all()


def test_removing_gives_the_encoder_its_nested_tensors_back() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    assert model.use_nested_tensor
    assert not add_memory(model, length=4).use_nested_tensor
    assert remove_memory(model).use_nested_tensor


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("need_weights, average", [(False, True), (True, True), (True, False)])
def test_a_bare_attention_answers_in_the_shape_of_its_call(
    batch_first: bool, batched: bool, need_weights: bool, average: bool
) -> None:
    plain = (H.MHA if batch_first else H.MHA_TIME_FIRST).build()
    model = add_memory((H.MHA if batch_first else H.MHA_TIME_FIRST).build(), length=4)
    x = torch.randn(5, 16) if not batched else torch.randn(3, 5, 16) if batch_first else torch.randn(5, 3, 16)
    keep = torch.zeros(5, dtype=torch.bool) if not batched else torch.zeros(3, 5, dtype=torch.bool)
    keep[..., -1] = True
    call: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average, "key_padding_mask": keep}
    y, weights = model(x, x, x, **call)
    expected, expected_weights = plain(x, x, x, **call)
    assert y.shape == x.shape and (y - expected).abs().max() > 1e-4
    assert (weights is None) == (not need_weights)
    if need_weights:  # those of the self branch
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)
    close_gates(model)
    torch.testing.assert_close(model(x, x, x, **call)[0], expected, rtol=0, atol=1e-6)


def test_time_first_and_batch_first_are_the_same_memory() -> None:
    a, b = H.MHA.with_memory(), H.MHA_TIME_FIRST.with_memory()
    for seed in range(2):
        x = H.MHA.given(seed)["query"]
        x_t = x.transpose(0, 1)
        torch.testing.assert_close(a(x, x, x)[0], b(x_t, x_t, x_t)[0].transpose(0, 1), rtol=0, atol=1e-6)
    assert all(torch.allclose(p, q) for p, q in zip(stored(a), stored(b), strict=True))


def test_a_decoder_keeps_its_attentions_and_the_encoder_gets_memories() -> None:
    model = nn.Transformer(16, 2, 1, 2, 32, dropout=0.0, batch_first=True)
    add_memory(model, length=4)
    assert [name for name, m in model.named_modules() if m in memories(model)] == ["encoder.layers.0.self_attn.memory"]
    source, target = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    out = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    changed = target.clone()
    changed[:, 4:] += 1
    reset_caches(model)
    torch.testing.assert_close(model(source, changed, tgt_mask=mask, tgt_is_causal=True)[:, :4], out[:, :4])


ALL = [*T.ENCODERS, *T.DECODERS]


@architectures(T.SEQ2SEQ)
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
    T.GPT2.build().save_pretrained(tmp_path / "plain")
    refuses(r"from_pretrained.*add_memory", load_pretrained, str(tmp_path / "plain"))
    transformers = library("transformers")
    model = awaken(T.GPT2.with_memory())
    model.save_pretrained(tmp_path / "with", max_shard_size="10KB")
    assert len(list((tmp_path / "with").glob("*.safetensors"))) > 1
    body = load_pretrained(str(tmp_path / "with"), transformers.GPT2Model)  # the decoder alone, from its model's files
    ids = words(2, 7)
    torch.testing.assert_close(body(ids).last_hidden_state, model.transformer(ids).last_hidden_state)
    caplog.set_level("WARNING", logger="transformers")
    said = logging.getLogger("transformers")
    said.addHandler(caplog.handler)
    try:
        classifier = load_pretrained(str(tmp_path / "with"), transformers.GPT2ForSequenceClassification)
    finally:
        said.removeHandler(caplog.handler)
    assert classifier(ids).memory_state is not None and "score.weight" in caplog.text and "memory" not in caplog.text
    T.GPT2.build().save_pretrained(tmp_path / "with")
    model.config.save_pretrained(tmp_path / "with")
    for load in (load_pretrained, transformers.GPT2LMHeadModel.from_pretrained):
        refuses(r"holds no .*memory.* \(\d+ tensors are missing\).*add_memory", load, str(tmp_path / "with"))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "with")
    del config.cached_transformers
    host = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "with", config=config)
    add_memory(host, T.GPT2.memory, **T.GPT2.options)


@pytest.mark.parametrize(
    ("host", "memory"), [*((host, None) for host in ALL), *((host, "rmt") for host in (*T.DECODERS, T.BERT))], ids=str
)
def test_removing_restores_outputs_keys_code_and_config(host: Architecture, memory: str | None) -> None:
    plain = host.build()
    model = host.with_memory() if memory is None else host.with_memory(T.STREAMS[memory], segment_length=T.SEGMENT)
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
    refuses(r"no memory that could be removed", remove_memory, model)
    add_memory(model, host.memory, **host.options)


def test_a_t5_whose_heads_are_wider_than_its_model() -> None:
    wide = Architecture("wide", T.T5.cls, T.T5.config, {**T.T5.sizes, "d_kv": 20})
    model = wide.with_memory("grc", length=4, ratio=0.25)
    close_gates(model)
    call = call_of(wide)
    assert torch.equal(model(**call).logits, wide.build()(**call).logits)
    refuses(r"16.*40.*ratio=0.4", wide.with_memory, "grc", length=4)
    refuses("mix='outputs'", wide.with_memory, "grc", length=4, ratio=0.25, mix="outputs")
