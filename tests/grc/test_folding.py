"""Folding: keys and values of a frozen cache as constants, and everything that must make them new again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import refuses
from grc.small_vit import cached_layer
from torch import Tensor, nn

from cached_transformers import fold, reset_caches, unfold

WIDTH, LENGTH = 16, 8


class Layer(nn.Module):
    """One attention with a shared cache, with inputs and outputs as plain tensors."""

    def __init__(self, **grc: Any) -> None:
        super().__init__()
        self.attention = cached_layer(WIDTH, 2, LENGTH, **grc)
        self.size = grc.get("size")
        with torch.no_grad():
            self(torch.randn(3, LENGTH, WIDTH))  # something in the cache
        self.computed = 0
        branch = self.attention.memory.branch
        compute = branch.keys_values

        def count(*args: Any) -> Any:
            self.computed += 1
            return compute(*args)

        branch.keys_values = count

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.attention(x_BND, size=self.size).y_BND

    @property
    def branch(self) -> Any:
        return self.attention.memory.branch


REDUCED = {"reduction": 2, "size": (2, 4)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"combine": "project"},
    {"ratio": 1.0},
    {"mix": "outputs", "source": "output"},
    {"name": "attention_cache"},
    {"name": "attention_cache", "update": "store"},
    REDUCED,
]


def use(layer: Layer, x_BND: Tensor) -> tuple[Tensor, int]:
    """Output without gradient, and how often keys and values were computed for it."""
    before = layer.computed
    with torch.no_grad():
        return layer(x_BND), layer.computed - before


@pytest.mark.parametrize("options", OPTIONS)
def test_folded_is_unfolded(options: dict[str, Any]) -> None:
    layer = Layer(**options).eval()
    x_BND = torch.randn(2, LENGTH, WIDTH)
    folded, computed = use(layer, x_BND)
    assert computed == 0  # eval() has folded already
    unfold(layer)
    unfolded, computed = use(layer, x_BND)
    assert computed == 1
    torch.testing.assert_close(folded, unfolded, rtol=0, atol=1e-6)
    fold(layer)
    again, computed = use(layer, x_BND)
    assert computed == 0 and torch.equal(again, folded)


def change_weight(layer: Layer) -> None:
    with torch.no_grad():
        layer.branch.key_value.weight.mul_(3)


def change_cache(layer: Layer) -> None:
    reset_caches(layer)


def load(layer: Layer) -> None:
    layer.load_state_dict(Layer().state_dict())


def new_parameter(layer: Layer) -> None:
    layer.branch.key_value.weight = nn.Parameter(torch.randn_like(layer.branch.key_value.weight))


@pytest.mark.parametrize("change", [change_weight, change_cache, load, new_parameter])
def test_a_change_in_evaluation_is_seen(change: Callable[[Layer], None]) -> None:
    layer = Layer().eval()
    x_BND = torch.randn(2, LENGTH, WIDTH)
    before, _ = use(layer, x_BND)
    change(layer)
    after, computed = use(layer, x_BND)
    assert computed == 1 and not torch.equal(after, before)
    expected, computed = use(layer.eval(), x_BND)
    assert computed == 0
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("explicit", [False, True])
def test_another_precision_folds_anew(dtype: torch.dtype, explicit: bool) -> None:
    layer = Layer().eval()
    if explicit:
        fold(layer)
    layer.to(dtype)
    x_BND = torch.randn(2, LENGTH, WIDTH, dtype=dtype)
    folded, computed = use(layer, x_BND)
    assert computed == 0 and folded.dtype == dtype
    unfolded, _ = use(unfold(layer), x_BND)
    assert torch.equal(folded, unfolded)


def test_frozen_weights_fold_and_the_input_still_gets_its_gradient() -> None:
    layer = Layer().eval().requires_grad_(False)
    x_BND = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    before = layer.computed
    (folded,) = torch.autograd.grad(layer(x_BND).square().sum(), x_BND)
    assert layer.computed == before
    (unfolded,) = torch.autograd.grad(unfold(layer)(x_BND).square().sum(), x_BND)
    torch.testing.assert_close(folded, unfolded, rtol=0, atol=1e-5)


def test_eval_inside_inference_mode_leaves_nothing_that_a_graph_cannot_hold() -> None:
    layer = Layer()
    x_BND = torch.randn(2, LENGTH, WIDTH)
    with torch.inference_mode():
        expected = layer.eval()(x_BND).clone()
    layer.requires_grad_(False)
    x_BND.requires_grad_()
    y_BND = layer(x_BND)
    y_BND.sum().backward()
    assert torch.equal(y_BND, expected) and x_BND.grad.abs().max() > 0
    layer.requires_grad_(True).train()(x_BND).sum().backward()
    assert layer.branch.key_value.weight.grad.abs().max() > 0


def used_inputs(exported: torch.export.ExportedProgram) -> set[str]:
    """Names of the parameters and buffers that the exported graph computes with."""
    signature = exported.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    used = {node.name for node in exported.graph.nodes if node.op == "placeholder" and node.users}
    return {name for node, name in names.items() if node in used}


SOURCES = {f"attention.memory.{name}" for name in ("cache.cache_MC", "branch.key_value.weight")}


def plain_layer() -> Layer:
    layer = Layer()
    del layer.branch.keys_values  # the counter would be traced too
    return layer.eval()


def test_exported_code_holds_constants_only_after_fold() -> None:
    layer = plain_layer()
    x_BND = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        expected = layer(x_BND)
        open_ = torch.export.export(layer, (x_BND,), strict=False)
        closed = torch.export.export(fold(layer), (x_BND,), strict=False)
    assert used_inputs(open_) >= SOURCES and not used_inputs(closed) & SOURCES
    for exported in (open_, closed):
        torch.testing.assert_close(exported.module()(x_BND), expected, rtol=0, atol=1e-6)


def test_compiled_code_sees_changes_until_fold() -> None:
    layer = plain_layer()
    x_BND = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        run = torch.compile(layer, backend="aot_eager", fullgraph=True)
        first = run(x_BND)
        torch.testing.assert_close(first, layer(x_BND), rtol=0, atol=1e-6)
        layer.branch.key_value.weight.mul_(3)
        changed = run(x_BND)
        torch.testing.assert_close(changed, layer(x_BND), rtol=0, atol=1e-6)
        assert (changed - first).abs().max() > 1e-5
        fold(layer)
        torch.testing.assert_close(run(x_BND), changed, rtol=0, atol=1e-6)
        layer.branch.key_value.weight.mul_(3)
        torch.testing.assert_close(run(x_BND), changed, rtol=0, atol=1e-6)  # constants, as asked
        unfold(layer)
        assert (run(x_BND) - changed).abs().max() > 1e-5


def test_a_training_layer_is_not_folded() -> None:
    refuses(r"cannot be folded: training=True; call eval\(\) first", fold, Layer())


@pytest.mark.parametrize(
    "options",
    [
        {"attend": "sample"},
        {"variant": "released", "positional_convolution": False},
        {"name": "attention_cache", "attend": "sample"},
    ],
)
def test_gates_that_run_in_evaluation_are_not_folded(options: dict[str, Any]) -> None:
    layer = Layer(**options).eval()
    refuses("attend='sample'", fold, layer)
    assert use(layer, torch.randn(2, LENGTH, WIDTH))[1] == 1
