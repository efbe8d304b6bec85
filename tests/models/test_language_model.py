"""The language model: refusals, embeddings, shared layers; segments of a text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from common import refuses
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers import state as states
from cached_transformers.models.segments import cut, read_earlier_passes, read_segments

V, D = 11, 16
XL = {"name": "transformer_xl", "length": 4}


def build(**options: Any) -> Any:
    sizes = {"vocabulary": V, "width": D, "depth": 2, "heads": 2, "feed_forward": 16, "memory": XL}
    return create_model("language_model", **{**sizes, **options})


def tokens(rows: int = 2, n: int = 5) -> torch.Tensor:
    return torch.randint(V, (rows, n))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build()(tokens(), reset=torch.zeros(3, dtype=torch.bool)), r"reset of shape \(3,\).*one per row"),
        (lambda: build()(tokens(), reset=torch.zeros(2)), "dtype torch.float32 must be bool"),
        (lambda: build().init_state(0), "batch_size=0"),
        (lambda: build(initial_std=-1), "initial_std=-1"),
        (lambda: build(output_dropout=-1), "output_dropout=-1"),
        (lambda: build(memory=None, shared_biases=True), "shared_biases=True"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    refuses(message, call)


OTHERWISE = [("rmt", "length", 1, 10), ("compressive", "rate", 2, 4), ("infini", "update", "linear", "delta")]


@pytest.mark.parametrize(("name", "option", "value", "other"), OTHERWISE)
def test_a_state_of_other_options_is_refused(name: str, option: str, value: Any, other: Any) -> None:
    state = build(memory={"name": name, option: value})(tokens()).state
    refuses(f" {name} ", build(memory={"name": name, option: other}), tokens(), state)
    same = build(memory={"name": name, option: value}, dropout=0.1)
    assert states.signature(same(tokens(), state).state) == states.signature(state)


def test_a_state_fits_other_models_but_not_of_another_dtype() -> None:
    model = build(memory={**XL, "eval_length": 7})
    state = model(tokens()).state
    fresh = build(memory={**XL, "eval_length": 7}).eval()
    fresh.load_state_dict(model.state_dict())
    out = fresh(tokens(), state)
    assert states.signature(out.state) == states.signature(state)
    model = build()
    state = model(tokens()).state
    model.double()
    refuses(r"state\.map_state", model, tokens(), state)
    model(tokens(), states.map_state(lambda t: t.double() if t.is_floating_point() else t, state))


@pytest.mark.parametrize("options", [{}, {"cutoffs": [4], "div_value": 2}], ids=str)
def test_embeddings_are_scaled_by_the_root_of_the_width(options: Any) -> None:
    model, scaled = build(**options), build(**options, scale_embedding=True)
    scaled.load_state_dict(model.state_dict())
    seen: list[torch.Tensor] = []
    for m in (model, scaled):
        m.stack.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        m(torch.arange(V)[None])
    torch.testing.assert_close(seen[1], seen[0] * 4.0)


def test_what_the_head_reads_may_be_the_last_and_dropped_out() -> None:
    for options in ({}, {"cutoffs": [4]}):
        model = build(**options)
        x = tokens()
        torch.testing.assert_close(model(x, last_only=True).outputs, model(x).outputs[:, -1:])
    model = build(output_dropout=0.5)
    seen: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(tokens(4, 20))
    assert 0.4 < (seen[0] == 0).float().mean() < 0.6
    model.eval()(tokens(4, 20))
    assert not (seen[1] == 0).any()


@pytest.mark.parametrize("options", [{}, {"memory": None, "positions": "relative"}], ids=str)
def test_layers_share_their_relative_biases_when_asked(options: Any) -> None:
    apart, shared = build(**options), build(**options, shared_biases=True)
    assert sum(p.numel() for p in apart.parameters()) - sum(p.numel() for p in shared.parameters()) == 2 * D
    first, second = (block.attention.positions for block in shared.stack.blocks)
    assert first.content_bias is second.content_bias and first.position_bias is second.position_bias
    assert first.project.weight is not second.project.weight
    shared(tokens()).outputs.square().sum().backward()
    # Both layers speak through the one pair: its gradient is the sum of theirs.
    apart.load_state_dict(shared.state_dict())
    torch.manual_seed(0)
    x = tokens()
    for model in (apart, shared):
        model.zero_grad()
        model(x).outputs.square().sum().backward()
    total = sum(block.attention.positions.content_bias.grad for block in apart.stack.blocks)
    torch.testing.assert_close(first.content_bias.grad, total, rtol=1e-4, atol=1e-5)


def test_initial_weights_of_the_original() -> None:
    model = build(width=128, vocabulary=2000, initial_std=0.05)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            assert abs(parameter.mean().item() - 1) < 0.03 and 0.03 < parameter.std().item() < 0.07, name
        elif parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.15), name
        else:
            assert not parameter.any(), name


def test_bad_tokens_are_found_without_breaking_the_graph() -> None:
    """The check is part of the graph: tracing reads no values."""
    model = build().eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x, state = tokens(), model.init_state(2)
    torch.testing.assert_close(compiled(x, state).outputs, model(x, state).outputs)
    refuses("a token id is not in a vocabulary", compiled, x + V, state, raises=RuntimeError)


def test_every_parameter_of_an_adaptive_model_survives_a_save(tmp_path: Any) -> None:
    model: nn.Module = build(cutoffs=[4], div_value=2, tied_projections=[False, True], shared_biases=True)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = build(cutoffs=[4], div_value=2, tied_projections=[False, True], shared_biases=True)
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    x = tokens()
    torch.testing.assert_close(other(x).outputs, model(x).outputs, rtol=0, atol=0)


class Out(NamedTuple):
    value: Tensor
    state: Tensor


@pytest.mark.parametrize(("length", "filled"), [(None, 0), (1, 0), (4, 0), (4, 1), (4, 3), (20, 0), (20, 3)])
@pytest.mark.parametrize("tokens", [1, 4, 11, 12])
def test_all_tokens_are_in_segments_and_an_open_one_is_filled(tokens: int, length: int | None, filled: int) -> None:
    parts = [range(tokens)[part] for part in cut(tokens, length, filled)]
    assert [token for part in parts for token in part] == list(range(tokens))
    if length is None:
        assert len(parts) == 1
        return
    sizes = [len(part) for part in parts]
    assert sizes[0] == min(length - filled, tokens) and all(size == length for size in sizes[1:-1])
    assert 0 < sizes[-1] <= length


def test_nothing_is_read_before_it_is_asked_for() -> None:
    """An endless stream can be read, and the caller may stop."""
    drawn: list[int] = []

    def stream() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            drawn.append(number)
            yield number

    outs = read_segments(lambda n, state, reset: Out(n, (0 if state is None else state) + n), stream(), None)
    assert drawn == []
    assert [next(outs).state for _ in range(3)] == [1, 3, 6] and drawn == [1, 2, 3]


@pytest.mark.parametrize(("bptt", "reached"), [(None, 3), (1, 1), (2, 1), (3, 3)])
def test_the_gradient_crosses_so_many_segments(bptt: int | None, reached: int) -> None:
    weights = [torch.ones(1, requires_grad=True) for _ in range(3)]
    outs = list(read_segments(lambda w, state, reset: Out(w, state + w), weights, torch.zeros(1), bptt=bptt))
    outs[-1].state.backward()
    assert outs[-1].state == 3 and sum(w.grad is not None for w in weights) == reached


def test_rows_begin_anew_with_the_first_segments_alone() -> None:
    met: list[object] = []
    resets = [torch.tensor([True]), None]
    list(read_segments(lambda n, state, reset: Out(met.append(reset), n), range(4), None, resets))
    assert met == [resets[0], None, None, None]


@pytest.mark.parametrize(("bptt", "cut_off"), [(None, False), (3, False), (2, True)])
def test_a_pass_begins_with_what_is_made_of_the_last_one(bptt: int | None, cut_off: bool) -> None:
    weight, calls = torch.ones(1, requires_grad=True), []

    def next_pass(before: Tensor, after: list[Tensor]) -> Tensor:
        calls.append((before.item(), [state.item() for state in after]))
        return before + 10 * after[-1]

    start = torch.zeros(1)
    state = read_earlier_passes(
        lambda n, state, reset: Out(n, state + n * weight), [1, 2, 3], start, next_pass, 3, bptt=bptt
    )
    assert calls == [(0, [1, 3, 6]), (60, [61, 63, 66])] and state == 720
    assert state.requires_grad is not cut_off
    assert read_earlier_passes(lambda *piece: pytest.fail("nothing is read"), [1], start, next_pass, 1) is start
