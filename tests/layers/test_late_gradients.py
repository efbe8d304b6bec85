"""Weight gradients as one delayed product, against gradients of every call."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cached_transformers import create_model
from cached_transformers.loops import segments
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.parts.late_gradients import late_gradients, mapped


class Half(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        return t / 2


def prepared(change: str) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(4, 6, bias=change != "no bias").double()
    if change == "frozen":
        linear.weight.requires_grad_(False)
    elif change == "hook":
        linear.register_forward_hook(lambda module, given, out: 2 * out)
    elif change == "parametrised":
        parametrize.register_parametrization(linear, "weight", Half())
    return linear


def grads(linear: nn.Linear, x_NK: Tensor, late: bool) -> list[Tensor]:
    """Loss of a recurrence that uses the whole map, some of its outputs, and its weight itself."""
    with late_gradients(late):
        h, total = x_NK[:1], torch.zeros((), dtype=x_NK.dtype)
        for row in x_NK.split(1):
            y = mapped(linear, (h + row)[None])[0].sin()
            h = mapped(linear, y[:, :4], 1, 5)
            total = total + y.square().sum()
        total = total + linear.weight.square().sum()
    leaves = [x_NK, *(p for p in linear.parameters() if p.requires_grad)]
    first = torch.autograd.grad(total, x_NK, retain_graph=True)
    torch.autograd.grad(total, leaves, retain_graph=True)
    again = torch.autograd.grad(total, leaves)  # nothing that the backwards before have left is in it
    torch.testing.assert_close(first[0], again[0])
    return list(again)


@pytest.mark.parametrize("change", ["none", "no bias", "frozen", "hook", "parametrised"])
def test_gradients_are_those_of_every_call(change: str) -> None:
    linear = prepared(change)
    x_NK = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(grads(linear, x_NK, True), grads(linear, x_NK, False), rtol=0, atol=1e-12)


def test_the_weight_gets_one_gradient_and_its_hooks_see_the_whole() -> None:
    linear, seen = prepared("none"), []
    linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x_NK = torch.randn(5, 4, dtype=torch.float64)
    nodes: list[Any] = []
    with late_gradients():
        ys = [mapped(linear, row) for row in x_NK.split(1)]
        nodes = [y.grad_fn for y in ys]
    torch.cat(ys).sin().sum().backward()
    want = torch.autograd.grad(linear(x_NK).sin().sum(), linear.weight)[0]
    assert len(seen) == 1 and {type(node).__name__ for node in nodes} == {"_CallBackward"}
    torch.testing.assert_close(seen[0], want)


def test_outside_without_gradient_and_under_autocast_maps_are_called_as_they_are() -> None:
    linear, x = nn.Linear(4, 6), torch.randn(2, 4)

    def node() -> str:
        return type(mapped(linear, x).grad_fn).__name__

    with late_gradients():
        assert node() == "_CallBackward"
        with late_gradients(False):
            assert node() == "AddmmBackward0"
        with torch.no_grad():
            assert node() == "NoneType"
    with torch.autocast("cpu", torch.bfloat16), late_gradients():
        assert mapped(linear, x).dtype == torch.bfloat16 and node() != "_CallBackward"
    assert node() == "AddmmBackward0"


def test_a_loop_defers_the_gradients_of_maps_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    memory = {"name": "crtn", "segment": 4, "regions": 2, "topk": 1}
    sizes = {"vocabulary": 7, "width": 8, "depth": 1, "heads": 2, "feed_forward": 8}
    model: Any = create_model("language_model", memory=memory, **sizes).double()
    loop, ids = SegmentLoop(model, 4, bptt=2), torch.randint(0, 7, (2, 17))
    weight = model.stack.model_memory.summary.maps[0].weight

    def gradients() -> tuple[list[Tensor], int]:
        model.zero_grad()
        loss = loop(ids[:, :-1], ids[:, 1:])[0]
        uses, nodes, seen = 0, [loss.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                uses += sum(getattr(after, "variable", None) is weight for after, _ in node.next_functions)
                nodes += [after for after, _ in node.next_functions]
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None], uses

    late, once = gradients()
    monkeypatch.setattr(segments, "late_gradients", lambda **_: contextlib.nullcontext())
    usual, often = gradients()
    assert once == 1 < often
    torch.testing.assert_close(late, usual, rtol=0, atol=1e-12)


def test_a_gradient_of_the_gradient_is_refused() -> None:
    linear, x = nn.Linear(4, 6), torch.randn(2, 4, requires_grad=True)
    with late_gradients():
        grad = torch.autograd.grad(mapped(linear, x).sin().sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()
