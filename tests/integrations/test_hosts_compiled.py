"""Models of others with a memory, compiled and exported; and the sizes that people really use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from integrations.hosts import (
    BERT_DROPOUT,
    BERT_EAGER,
    BERT_SDPA,
    ENCODER_PADDED,
    ENCODER_PRENORM,
    HF_VIT,
    HOSTS,
    MHA,
    MHA_TIME_FIRST,
    PVT,
    SWIN,
    VIT,
    Host,
    close_gates,
    hosts,
    library,
    memories,
    stored,
    train,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cached_transformers import add_memory, create_model, fold, reset_caches
from cached_transformers.memories.grc.shared_cache import commit_caches

COMPILED = [VIT, SWIN, PVT, ENCODER_PADDED, ENCODER_PRENORM, MHA, MHA_TIME_FIRST, HF_VIT, BERT_EAGER, BERT_SDPA]
LIKE_OTHERS = [ENCODER_PRENORM, MHA_TIME_FIRST, BERT_EAGER]
assert set(COMPILED) < set(HOSTS)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False)


def assert_near(a: Tensor, b: Tensor, name: str = "output") -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")


@hosts(COMPILED, slow=[*LIKE_OTHERS, ENCODER_PADDED, PVT, HF_VIT])
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


@hosts(COMPILED, slow=[*LIKE_OTHERS, ENCODER_PADDED, PVT, HF_VIT])
def test_training_compiles_without_break_and_no_step_compiles_again(host: Host) -> None:
    model = host.with_memory()
    same_steps(host, model, compiled(model), host.with_memory())
    # The hook that commits before the model runs may be a frame of its own.
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@hosts([VIT, BERT_SDPA], slow=[BERT_SDPA])
def test_compiled_with_activation_checkpointing(host: Host) -> None:
    """With graph breaks: the hosts, and the hooks on their layers, keep the compiler from one graph here."""
    model = host.with_memory()
    host.recompute(model)  # type: ignore[misc]
    same_steps(host, model, torch.compile(model, backend="aot_eager"), host.with_memory())


@hosts([VIT, BERT_DROPOUT], slow=[BERT_DROPOUT])
def test_released_variant_and_dropout_compile_too(host: Host) -> None:
    model = host.with_memory(variant="released") if host is VIT else host.with_memory()
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
        open_ = torch.export.export(model, (), given).module()
        assert_near(host.run(open_, given), expected)
        folded = torch.export.export(fold(model), (), given).module()
        reset_caches(folded)
        assert_near(host.run(folded, given), expected)


# ---- real sizes


def real(name: str, side: int = 224) -> tuple[nn.Module, nn.Module, Tensor]:
    """timm's model as it is, with and without a memory, and one image."""
    timm = library("timm")
    torch.manual_seed(0)
    plain = timm.create_model(name)
    torch.manual_seed(0)
    model = add_memory(timm.create_model(name))
    return plain, model, torch.randn(1, 3, side, side)


REAL = {
    "vit_small_patch16_224": [(197, 192)] * 12,
    "deit_tiny_patch16_224": [(197, 96)] * 12,
    "swin_tiny_patch4_window7_224": [(49, 48)] * 2 + [(49, 96)] * 2 + [(49, 192)] * 6 + [(49, 384)] * 2,
    "pvt_v2_b0": [(3136, 16)] * 2 + [(784, 32)] * 2 + [(196, 80)] * 2 + [(49, 128)] * 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_trains_a_step_and_a_closed_gate_is_the_plain_model(name: str) -> None:
    plain, model, x = real(name)
    assert [tuple(c.shape) for c in stored(model)] == REAL[name]
    model(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if "memory." in n)
    commit_caches(model)
    assert all(c.abs().max() > 0.01 for c in stored(model))
    with torch.no_grad():
        expected = plain.eval()(x)
        assert (model.eval()(x) - expected).abs().max() > 1e-4
        close_gates(model)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)


# ---- the model by name


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
    with pytest.raises(ValueError, match="architecture='vit_smal_patch16_224'"):
        create_model("timm", architecture="vit_smal_patch16_224")
    with pytest.raises(ValueError, match=r"ratio=inf.*0,"):
        create_model("timm", architecture="pvt_v2_b0", memory={"name": "grc", "ratio": math.inf})
