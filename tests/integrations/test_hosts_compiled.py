"""Models of others with a memory, another attention, or both, compiled and exported: one graph, the values and
gradients of eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from common import refuses
from integrations import hosts as H
from integrations.hosts import Host, hosts, library, memories, stored, train
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cached_transformers import add_memory, create_model, fold, replace_attention, reset_caches

COMPILED = [
    H.VIT,
    H.SWIN,
    H.PVT,
    H.ENCODER_PADDED,
    H.ENCODER_PRENORM,
    H.MHA,
    H.MHA_TIME_FIRST,
    H.HF_VIT,
    H.BERT_EAGER,
    H.BERT_SDPA,
]
LIKE_OTHERS = [H.ENCODER_PRENORM, H.MHA_TIME_FIRST, H.BERT_EAGER]
assert set(COMPILED) < set(H.HOSTS)


def compiled(model: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False)


def assert_near(a: Tensor, b: Tensor, name: str = "output") -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")


@hosts(COMPILED, slow=[*LIKE_OTHERS, H.ENCODER_PADDED, H.PVT, H.HF_VIT])
def test_evaluation_is_one_graph(host: Host) -> None:
    """Without the second half of compilation, which exporting goes through."""
    model = host.with_memory()
    train(host, model, 1)
    run = compiled(model.eval(), "eager")
    with torch.no_grad():
        for seed in range(2):
            given = host.given(seed)
            assert_near(host.run(run, given), host.run(model, given))
        assert counters["stats"]["unique_graphs"] == 1
        before = host.run(run, given)
        reset_caches(model)
        assert (host.run(run, given) - before).abs().max() > 1e-5  # the graph reads the buffer
    assert counters["stats"]["unique_graphs"] == 1


def same_steps(host: Host, model: Any, run: Any, plain: Any) -> None:
    """Three steps give the gradients and caches of a model that is not compiled; none after the first compiles."""
    graphs = 0
    for step in range(3):
        given = host.given(step)
        for m, call in ((model, run), (plain, plain)):
            m.zero_grad()
            host.run(call, given).square().mean().backward()
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            if b.grad is not None:
                assert_near(a.grad, b.grad, name)
        for a, b in zip(stored(model), stored(plain), strict=True):
            assert_near(a, b, "cache")
        with torch.no_grad():
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                for p, grad in ((a, b.grad), (b, b.grad)):
                    p -= 0.1 * grad if grad is not None else 0
        graphs = counters["stats"]["unique_graphs"] if step == 0 else graphs
        assert counters["stats"]["unique_graphs"] == graphs


@hosts(COMPILED, slow=[*LIKE_OTHERS, H.ENCODER_PADDED, H.PVT, H.HF_VIT, H.VIT])  # VIT trains compiled below
def test_training_compiles_without_break_and_no_step_compiles_again(host: Host) -> None:
    model = host.with_memory()
    same_steps(host, model, compiled(model), host.with_memory())
    # The hook that commits before the model runs may be a frame of its own.
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@hosts([H.VIT, H.BERT_SDPA], slow=[H.BERT_SDPA])
def test_compiled_with_activation_checkpointing(host: Host) -> None:
    """With graph breaks: the hosts, and the hooks on their layers, keep the compiler from one graph here."""
    model = host.with_memory()
    host.recompute(model)  # type: ignore[misc]
    same_steps(host, model, torch.compile(model, backend="aot_eager"), host.with_memory())


@hosts([H.VIT, H.BERT_DROPOUT], slow=[H.BERT_DROPOUT])
def test_released_variant_and_dropout_compile_too(host: Host) -> None:
    model = host.with_memory(variant="released") if host is H.VIT else host.with_memory()
    losses = train(host, model, 4, run=compiled(model))
    assert losses[-1] < losses[0] and counters["stats"]["unique_graphs"] <= 3
    assert all(c.any() for c in stored(model))


@hosts(COMPILED, slow=LIKE_OTHERS)
def test_exported_is_eager(host: Host) -> None:
    model = host.with_memory()
    train(host, model, 1)
    model.eval()
    given = host.given(1)
    with torch.no_grad():
        expected = host.run(model, given)
        open_ = torch.export.export(model, (), given, strict=False).module()
        assert_near(host.run(open_, given), expected)
        folded = torch.export.export(fold(model), (), given, strict=False).module()
        reset_caches(folded)
        assert_near(host.run(folded, given), expected)


QUICK = [(H.VIT, "grc", {}), (H.BERT_SDPA, None, {}), (H.MHA_VALUES, "grc", {})]
MORE = [
    (host, memory, {})
    for host in (*(case[0] for case in QUICK), H.ENCODER_PADDED, H.HF_VIT, H.SWIN, H.PVT)
    for memory in (None, "grc")
]
MORE += [(H.VIT, "attention_cache", {}), (H.VIT, "grc", {"variant": "released"}), (H.VIT, "convolution", {})]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    "host, memory, options", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)], ids=str
)
def test_another_attention_is_one_graph_and_is_exported(
    host: Host, memory: str | None, options: dict[str, Any]
) -> None:
    name = {H.SWIN: "test_biased_window", H.PVT: "test_tempered"}.get(host, "test_window")
    model = replace_attention(host.build(), name)
    if memory is not None:
        add_memory(model, memory, **{**host.options, **options})
    grads = []
    for call in (compiled(model), model):  # the cache of a memory is still empty at both calls
        model.zero_grad()
        host.run(call, host.given()).square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        reset_caches(model)
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        assert_near(grads[0][name], grad, name)
    given = host.given(1)
    with torch.no_grad():
        expected = host.run(model.eval(), given)
        for strict in (False, True) if (host, memory, options) in MORE else (False,):
            assert_near(host.run(torch.export.export(model, (), given, strict=strict).module(), given), expected)


def test_timm_models_by_name() -> None:
    library("timm")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    torch.manual_seed(0)
    model: Any = create_model(
        "timm", architecture="vit_small_patch16_224", classes=5, memory={"name": "grc", "ratio": 0.25}, **options
    )
    assert [tuple(c.shape) for c in stored(model)] == [(17, 8)] * 2
    x = torch.randn(2, 3, 32, 32)
    out = model(x)
    assert out.outputs.shape == (2, 5) and out.state == () and out.auxiliary_loss == 0
    out.outputs.square().mean().backward()
    model.zero_grad()
    model.set_activation_checkpointing(True)
    model(x).outputs.square().mean().backward()
    assert all(memory.cache.from_cache.weight.grad.abs().max() > 0 for memory in memories(model))


def test_a_timm_model_by_name_without_memory_is_timm_s() -> None:
    timm = library("timm")
    torch.manual_seed(0)
    plain = timm.create_model("vit_small_patch16_224", num_classes=5, img_size=32, depth=1)
    torch.manual_seed(0)
    model: Any = create_model("timm", architecture="vit_small_patch16_224", classes=5, img_size=32, depth=1)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x).outputs, plain(x))


def test_an_unknown_timm_model_is_refused() -> None:
    library("timm")
    refuses("architecture='vit_smal_patch16_224'", create_model, "timm", architecture="vit_smal_patch16_224")
    refuses("ratio=inf", create_model, "timm", architecture="pvt_v2_b0", memory={"name": "grc", "ratio": math.inf})
