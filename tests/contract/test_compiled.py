"""Compilation and export: one graph serves every segment, and one with the state as input and output can be shipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contract_cases import COMPILED, CONTRACTS, ROWS, Case, cases, stream
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from cached_transformers import state as states
from cached_transformers.memories.grc.shared_cache import commit_caches


def compiled(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend=backend, dynamic=False)


def assert_near(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def segments(case: Case, count: int) -> list[Tensor]:
    """Short ones where a memory reads token by token, since each token is compiled."""
    return [segment[:, :3] if case.name == "feedback" else segment for segment in case.segments(count)]


def variant(case: Case) -> bool:
    """Another form of a memory, or a memory of the examples, which is exported all the same, and so captured."""
    return "/" in case.memory or case.name not in CONTRACTS


DIFFERS = ("none", "grc", "attention_cache", "transformer_xl", "memorizing", "titans", "feedback")
"""Memories whose evaluation differs from training, or the first of their model."""


@cases([case for case in COMPILED if case.name in DIFFERS], slow=variant)
def test_evaluation_is_one_graph_for_all_segments(case: Case) -> None:
    """No segment compiles again; that each memory can be captured is what exporting shows."""
    model, reference = case.build_shallow(), case.build_shallow()
    for m in (model, reference):
        m(case.segments(1, seed=7)[0])  # something in the shared caches
        m.eval()
    inputs = segments(case, 6)
    with torch.no_grad():
        found = stream(compiled(model, "eager"), inputs, model.init_state(ROWS))
        assert_near([out.outputs for out in found], [out.outputs for out in stream(reference, inputs)])
    assert counters["stats"]["unique_graphs"] == 1


class Differentiated:
    """A backend that runs graphs as they were captured, except the one with this number: it is differentiated first, as
    compilers do."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.seen += 1
        return torch._dynamo.lookup_backend("aot_eager" if self.seen == self.number else "eager")(graph, inputs)


TRAINED = ("none", "grc", "grc_stream", "rmt", "transformer_xl", "memorizing", "infini", "titans", "streaming_llm")
"""One memory of each kind; `make test-slow` compiles the training of all, and each is captured by its export below."""


@cases(COMPILED, slow=lambda case: variant(case) or case.name not in TRAINED)
def test_training_is_compiled_without_a_break(case: Case) -> None:
    """The compiler differentiates one form of each memory and only captures its other forms.

    If the state passes a gradient on, it differentiates the second graph, the first one with that gradient."""
    if "/" in case.memory:
        check_training(case, "eager")
        return
    hands_on = case.language and not case.contract.detached and not case.exempt("remembers")
    backend = Differentiated(2 if hands_on else 1)
    check_training(case, backend)
    assert backend.seen >= backend.number


@pytest.mark.slow
@cases(COMPILED)
def test_every_graph_of_training_is_compiled(case: Case) -> None:
    check_training(case, "aot_eager")


def check_training(case: Case, backend: Any) -> None:
    model, reference = case.build_shallow(), case.build_shallow()
    run = compiled(model, backend)
    state, other = model.init_state(ROWS), reference.init_state(ROWS)
    for index, segment in enumerate(segments(case, 6)):
        with torch._dynamo.config.patch(error_on_recompile=index >= 4):  # for a fresh, attached and detached state
            out, expected = run(segment, state), reference(segment, other)
        assert_near(out.outputs, expected.outputs)
        state, other = out.state, expected.state
        if index % 2 or not case.language:
            for o in (out, expected):
                (o.outputs.square().mean() + o.auxiliary_loss).backward()
            state, other = states.detach(state), states.detach(other)
    assert counters["stats"]["unique_graphs"] <= 3 and not counters["graph_break"]
    found, wanted = ({name: p.grad for name, p in m.named_parameters()} for m in (model, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    commit_caches(model), commit_caches(reference)
    assert_near(dict(model.named_buffers()), dict(reference.named_buffers()))


class Flat(nn.Module):
    """A model whose state is passed and returned as plain tensors, as a runtime without Python wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.spec = pytree.tree_structure(model.init_state(ROWS))  # type: ignore[operator]

    def forward(self, inputs: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        out = self.model(inputs, pytree.tree_unflatten(list(leaves), self.spec))
        return (out.outputs, *pytree.tree_leaves(out.state))


def _double(inputs: Tensor) -> Tensor:
    return inputs.double() if inputs.is_floating_point() else inputs


@cases(COMPILED)
def test_exported_with_the_state_as_input_and_output(case: Case) -> None:
    """In float64: rotary positions are other products in eager code, and memories multiply what was rounded."""
    model: Any = case.build_shallow().double()
    model(_double(case.segments(1, seed=7)[0]))
    flat = Flat(model.eval())
    inputs = [_double(segment) for segment in segments(case, 6)]
    leaves = pytree.tree_leaves(model.init_state(ROWS))
    with torch.no_grad():
        exported = torch.export.export(flat, (inputs[0], *leaves), strict=False).module()
        for segment, expected in zip(inputs, stream(model, inputs), strict=True):
            outputs, *leaves = exported(segment, *leaves)
            torch.testing.assert_close(outputs, expected.outputs, rtol=0, atol=1e-6)
    torch.testing.assert_close(leaves, pytree.tree_leaves(expected.state), rtol=0, atol=1e-6)
