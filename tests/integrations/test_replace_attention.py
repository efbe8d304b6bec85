"""replace_attention on models of timm, torch.nn and transformers: against the same models with an explicit mask, beside
a memory, saved, copied, undone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from integrations import hosts as H
from integrations import transformers_hosts as T
from integrations.cores import Told, near
from integrations.hosts import Host, close_gates, hosts, memories, padding, stored, train
from integrations.transformers_hosts import Architecture, architectures, awaken, call_of, words
from torch import Tensor, nn

from cached_transformers import ATTENTIONS, add_memory, remove_memory, replace_attention, restore_attention

pytestmark = pytest.mark.usefixtures("cores")

REPLACED = [host for host in H.HOSTS if host is not H.BERT_EAGER]
WINDOWED = [H.VIT, H.HF_VIT, H.BERT_SDPA, H.ENCODER, H.ENCODER_PADDED, H.ENCODER_PRENORM, H.MHA_VALUES]
TEMPERED = [H.VIT, H.SWIN, H.PVT, H.PVT_LINEAR, H.HF_VIT, H.ENCODER, H.MHA_VALUES]
PADDED = {H.BERT_SDPA, H.ENCODER_PADDED, H.ENCODER_PRENORM}


def windowed(host: Host, radius: int = 1) -> Any:
    return replace_attention(host.build(), "test_window", radius=radius)


def masked(host: Host, model: Any, given: dict[str, Any], seed: int = 0) -> Tensor:
    """The plain host with an explicit mask of the window."""
    if host is H.VIT:
        return host.run(model, {**given, "attn_mask": near(17)}, seed)
    if host is H.BERT_SDPA:
        keep = given["attention_mask"].bool()[:, None, None] & near(H.TOKENS)
        return host.run(model, {**given, "attention_mask": keep}, seed)
    if host is H.HF_VIT:
        hooks = [
            layer.register_forward_pre_hook(lambda m, a, k: ((a[0], near(17)), {}), with_kwargs=True)
            for layer in model.modules()
            if type(layer).__name__ == "ViTAttention"
        ]
        out = host.run(model, given, seed)
        for hook in hooks:
            hook.remove()
        return out
    return host.run(model, {**given, "attn_mask" if host is H.MHA_VALUES else "mask": ~near(H.TOKENS)}, seed)


def valid(host: Host, y: Tensor) -> Tensor:
    """Without what stands in padding, where a query may see nothing at all."""
    return y[~padding()] if host in PADDED else y


def assert_same_gradients(model: nn.Module, plain: nn.Module, atol: float = 1e-6) -> None:
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        if ".core." in f".{name}":
            continue
        assert (p.grad is None) == (wanted[name] is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@hosts(REPLACED)
@pytest.mark.parametrize("training", [True, False])
def test_softmax_changes_nothing(host: Host, training: bool) -> None:
    plain, model = host.build().train(training), replace_attention(host.build(), "softmax").train(training)
    for seed in range(2):
        given = host.given(seed)
        for m in (plain, model):
            m.zero_grad()
            host.run(m, given, seed).square().mean().backward()
        torch.testing.assert_close(host.run(model, given, seed), host.run(plain, given, seed), rtol=0, atol=1e-6)
        assert_same_gradients(model, plain)
    given = host.given()
    with torch.no_grad():
        got, expected = host.run(model, given, 1), host.run(plain, given, 1)
    if "src_key_padding_mask" in given and not training:  # the plain encoder's fused path zeroes what stands in padding
        got, expected = valid(host, got), valid(host, expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@hosts(WINDOWED)
@pytest.mark.parametrize("training", [True, False])
def test_a_window_is_the_host_with_a_mask_of_the_window(host: Host, training: bool) -> None:
    plain, model = host.build().train(training), windowed(host).train(training)
    given = host.given()
    expected, got = valid(host, masked(host, plain, given)), valid(host, host.run(model, given))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (got - valid(host, host.run(plain, given))).abs().max() > 1e-3
    torch.manual_seed(3)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    assert_same_gradients(model, plain, 1e-4)
    with torch.no_grad():
        torch.testing.assert_close(valid(host, host.run(model, given)), expected, rtol=0, atol=1e-5)


def test_swin_hears_its_bias_and_its_shift_mask() -> None:
    plain, model = H.SWIN.build(), replace_attention(H.SWIN.build(), "test_biased_window", radius=3)
    layers = [m for m in plain.modules() if type(m).__name__ == "WindowAttention"]
    assert layers and not layers[0].fused_attn
    hidden = torch.zeros(1, 49, 49).masked_fill(~near(49, 3), -torch.inf)

    def also(layer: Any, args: Any, kwargs: Any) -> Any:
        mask = args[1] if len(args) > 1 else kwargs.get("mask")
        return (args[0],), {"mask": hidden if mask is None else hidden + mask}

    for layer in layers:
        layer.register_forward_pre_hook(also, with_kwargs=True)
    given = H.SWIN.given()
    a, b = H.SWIN.run(model, given), H.SWIN.run(plain, given)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    a.square().sum().backward()
    b.square().sum().backward()
    assert_same_gradients(model, plain, 1e-5)


@hosts(TEMPERED)
def test_a_parameter_of_the_core_trains_and_cross_shapes_work(host: Host) -> None:
    """A host whose queries are twice as long has logits twice as high."""
    plain, model = host.build(), replace_attention(host.build(), "test_tempered", start=2.0)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            width = p.shape[0] // 3
            if "qkv" in name or "in_proj" in name:
                p[:width] *= 2
            elif "q_proj" in name or ".attn.q." in name:
                p *= 2
    given = host.given()
    if host is H.SWIN:  # the bias is not scaled
        assert (host.run(model, given) - host.run(host.build(), given)).abs().max() > 1e-6
    torch.testing.assert_close(host.run(model, given), host.run(plain, given), rtol=0, atol=1e-5)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".core." in f".{name}"}
    assert before
    losses = train(host, model)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


def test_the_cores_are_told_what_the_host_knows() -> None:
    def facts(model: nn.Module) -> list[dict[str, Any]]:
        return [m.facts for m in model.modules() if isinstance(m, Told)]

    given = {"causal": False, "prefix": 1, "length": 17, "heads": 2, "width": 32, "depth": 2}
    assert facts(replace_attention(H.VIT.build(), "test_told")) == [
        {**given, "size": (4, 4), "index": i} for i in (0, 1)
    ]
    [first, second] = facts(replace_attention(H.HF_VIT.build(), "test_told"))
    assert first == {**given, "width": 16, "size": (4, 4), "index": 0} and second["index"] == 1
    [first, _] = facts(replace_attention(H.BERT_SDPA.build(), "test_told"))
    assert (first["length"], first["prefix"], first["size"]) == (16, 0, None)
    [first] = facts(replace_attention(H.MHA.build(), "test_told", length=7))
    assert first["length"] == 7
    assert facts(replace_attention(H.MHA.build(), "test_told"))[0]["length"] is None


@hosts([H.VIT, H.HF_VIT, H.BERT_SDPA, H.MHA_VALUES])
def test_the_core_gets_the_layer_s_input(host: Host) -> None:
    model = replace_attention(host.build(), "test_told")
    seen: list[Tensor] = []
    layer = next(m for m in model.modules() if "exchange" in vars(m))
    hook = lambda m, a, k: seen.append(a[0] if a else k.get("query", k.get("hidden_states")))  # noqa: E731
    layer.register_forward_pre_hook(hook, with_kwargs=True)
    given = {k: v for k, v in host.given().items() if k != "attention_mask"}
    host.run(model, given)
    assert torch.equal(layer.core.x_BND, seen[0])  # type: ignore[union-attr]


@hosts(REPLACED)
def test_restoring_gives_back_outputs_keys_and_code(host: Host) -> None:
    plain, model = host.build(), replace_attention(host.build(), "softmax")
    train(host, model, 1)
    weights = model.state_dict()
    assert list(weights) == list(plain.state_dict())
    assert restore_attention(model) is model
    plain.load_state_dict(weights)
    for training in (True, False):
        given = host.given(2)
        assert torch.equal(host.run(model.train(training), given), host.run(plain.train(training), given))
    for a, b in zip(model.modules(), plain.modules(), strict=True):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys()
        assert len(a._forward_pre_hooks) == len(b._forward_pre_hooks)
        assert {k: v for k, v in vars(a).items() if isinstance(v, bool)} == {
            k: v for k, v in vars(b).items() if isinstance(v, bool)
        }
    with pytest.raises(ValueError, match="attention that it was made with; there is nothing to restore"):
        restore_attention(model)
    replace_attention(model, "softmax")


@hosts(TEMPERED)
def test_parameters_of_the_core_are_saved_under_the_layer(host: Host) -> None:
    plain, model = host.build(7), replace_attention(host.build(), "test_tempered")
    layers = [name for name, m in model.named_modules() if "exchange" in vars(m)]
    added = [key for key in model.state_dict() if key not in plain.state_dict()]
    assert added == [f"{name}.core.factor_H11".lstrip(".") for name in layers]
    result = model.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys and result.missing_keys == added
    train(host, model, 1)
    other = replace_attention(host.build(3), "test_tempered")
    other.load_state_dict(model.state_dict())
    given = host.given()
    assert torch.equal(host.run(other.eval(), given), host.run(model.eval(), given))


@hosts([H.VIT, H.SWIN, H.PVT, H.ENCODER, H.MHA_VALUES, H.HF_VIT])
def test_a_copy_is_equal_and_goes_its_own_way(host: Host) -> None:
    model = replace_attention(host.build(), "test_tempered")
    twin, other = pickle.loads(pickle.dumps(model)), copy.deepcopy(model)
    given = host.given(1)
    expected = host.run(model, given)
    assert torch.equal(host.run(twin, given), expected) and torch.equal(host.run(other, given), expected)
    train(host, twin, 2)
    assert (host.run(twin, given) - expected).abs().max() > 1e-4
    assert torch.equal(host.run(model, given), expected)
    with torch.no_grad():
        restore_attention(model)
        host.run(twin, given)


@hosts([*WINDOWED, H.SWIN])
def test_memory_and_attention_compose_in_either_order(host: Host) -> None:
    name = "test_biased_window" if host is H.SWIN else "test_window"
    first = replace_attention(host.with_memory(), name)
    second = replace_attention(host.build(), name)
    torch.manual_seed(1)
    add_memory(second, "grc", **host.options)
    alone = replace_attention(host.build(), name)
    assert sorted(first.state_dict()) == sorted(second.state_dict())
    for step in range(2):
        given = host.given(step)
        for m in (first, second):
            m.zero_grad()
            host.run(m, given).square().mean().backward()
        assert_same_gradients(second, first)
        assert memories(first) and all(
            torch.equal(a, b) for a, b in zip(stored(first), stored(second), strict=True) if a.any()
        )
    given = host.given(3)
    assert (host.run(first, given) - host.run(alone, given)).abs().max() > 1e-4
    for m in (first, second):
        close_gates(m)
        torch.testing.assert_close(host.run(m, given), host.run(alone, given), rtol=0, atol=1e-6)
    plain = host.build()
    for m, undo in ((first, (remove_memory, restore_attention)), (second, (remove_memory, restore_attention)[::-1])):
        for step in undo:
            step(m)
        assert torch.equal(host.run(m, given), host.run(plain, given))
        for a, b in zip(m.modules(), plain.modules(), strict=True):
            assert type(a) is type(b) and vars(a).keys() == vars(b).keys()


@hosts(REPLACED)
def test_softmax_beside_a_memory_is_the_memory_alone(host: Host) -> None:
    alone, model = host.with_memory(), replace_attention(host.with_memory(), "softmax")
    for step in range(2):
        given = host.given(step)
        for m in (alone, model):
            m.zero_grad()
            host.run(m, given, step).square().mean().backward()
        torch.testing.assert_close(stored(model), stored(alone), rtol=0, atol=1e-6)
        assert_same_gradients(model, alone)
    restore_attention(model)
    given = host.given(4)
    a, b = host.run(model.eval(), given), host.run(alone.eval(), given)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


MECHANISMS = ATTENTIONS.names()


@pytest.mark.parametrize("name", MECHANISMS)
@hosts([H.VIT, H.ENCODER_PADDED, H.BERT_SDPA])
def test_every_attention_serves_or_is_refused_when_replacing(host: Host, name: str) -> None:
    options: dict[str, Any] = {"commitment": 0.0} if "commitment" in ATTENTIONS.entry(name).options else {}
    if host is H.ENCODER_PADDED and "length" in ATTENTIONS.entry(name).options:
        options["length"] = H.TOKENS
    try:
        model = replace_attention(host.build(), name, **options)
    except ValueError as error:
        assert "needs bidirectional (" in str(error)
        return
    given = host.given()
    if "bidirectional" not in ATTENTIONS.entry(name).factory.can:
        return
    host.run(model, given).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        expected = host.run(model.eval(), given)
        add_memory(model, "grc", **host.options)
        assert (host.run(model, given) - expected).abs().max() > 1e-5
        close_gates(model)
        torch.testing.assert_close(host.run(model, given), expected, rtol=0, atol=1e-5)
        restore_attention(remove_memory(model))


@hosts([H.VIT, H.BERT_SDPA, H.ENCODER, H.MHA_VALUES, H.HF_VIT])
def test_autocast(host: Host) -> None:
    plain, model = host.build(), windowed(host)
    given = host.given()
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = host.run(model, given), masked(host, plain, given)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(valid(host, got), valid(host, expected), rtol=0.05, atol=0.05)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@hosts([H.VIT, H.BERT_SDPA, H.BERT_DROPOUT, H.HF_VIT])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_the_host(host: Host, reentrant: bool) -> None:
    plain, model = windowed(host), windowed(host)
    if host is H.VIT:
        if reentrant:
            pytest.skip("timm checkpoints in the newer way")
        host.recompute(model)  # type: ignore[misc]
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for m in (plain, model):
        host.run(m.train(), host.given(), 5).square().mean().backward()
    assert_same_gradients(model, plain)


@architectures([T.BART, T.T5, *T.DECODERS])
@pytest.mark.parametrize("memory", [False, True])
def test_exact_attention_changes_no_text_model(host: Architecture, memory: bool) -> None:
    """Neither T5's bias and missing scale, nor Llama's shared keys and rotary positions, nor what a memory adds."""
    plain, model = (awaken(host.with_memory()) if memory else host.build() for _ in range(2))
    replace_attention(model, "softmax")
    call = call_of(host)
    torch.testing.assert_close(model(**call).logits, plain(**call).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(restore_attention(model)(**call).logits, plain(**call).logits)


@architectures([T.BART, T.GPT2, T.LLAMA])
def test_a_window_is_heard(host: Architecture) -> None:
    """In an encoder-decoder the encoder alone has it; a decoder stays causal."""
    plain, model = host.build(), replace_attention(host.build(), {"name": "test_window", "radius": 1})
    ids = words(2, 8)
    what = "logits" if host in T.DECODERS else "encoder_last_hidden_state"
    assert (model(input_ids=ids)[what] - plain(input_ids=ids)[what]).abs().max() > 1e-5
    assert len([m for m in model.modules() if "core" in m._modules]) == 2
    if host in T.DECODERS:
        changed = ids.clone()
        changed[:, 5:] = 4
        torch.testing.assert_close(model(changed).logits[:, :5], model(ids).logits[:, :5])
