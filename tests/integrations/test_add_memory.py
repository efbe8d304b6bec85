"""add_memory on models of timm, torch.nn and transformers: what it changes, what it leaves, how it is undone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from integrations.hosts import (
    BERT_SDPA,
    HF_VIT,
    HOSTS,
    MHA_TIME_FIRST,
    PVT,
    PVT_LINEAR,
    SWIN,
    VIT,
    Host,
    close_gates,
    hosts,
    memories,
    stored,
    train,
)
from torch import Tensor

from cached_transformers import add_memory, remove_memory, reset_caches
from cached_transformers.memories.grc.shared_cache import commit_caches


def mapped(change: Callable[[Tensor], Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs, changed; one object stays one object (query, key and value of a self-attention)."""
    done = {id(value): change(value) for value in given.values()}
    return {name: done[id(value)] for name, value in given.items()}


IMAGES = [host for host in HOSTS if host.package == "timm" or host is HF_VIT]
RELEASED_HOSTS = [host for host in IMAGES if host not in (SWIN, PVT_LINEAR)]


CHECKPOINTED = [(host, False) for host in HOSTS if host.recompute is not None] + [(HF_VIT, True), (BERT_SDPA, True)]


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
    rows = 1 if host is MHA_TIME_FIRST else 0
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
    with pytest.raises(ValueError, match="no memory that could be removed"):
        remove_memory(model)
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
    assert still == (last if host not in (PVT, PVT_LINEAR) else [])
    remove_memory(model)
    fresh = host.build()
    add_memory(fresh, memory, **{**kept, **options})
    close_gates(fresh)
    given = host.given()
    torch.testing.assert_close(host.run(fresh, given), host.run(plain, given), rtol=0, atol=1e-6)


@hosts([VIT, PVT])
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
