"""Axial attention against the definition pair by pair, what its causal forms reach, its limits and its cost."""

from __future__ import annotations

import itertools

import pytest
import torch
from attentions.agreement import agree, inputs
from attentions.dense import Rule, assert_is_pattern, mask_of, padding_last, paddings, softmax_over, without_padding
from refusals import refuses
from torch import Tensor

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.axial import AxialAttention
from cached_transformers.interfaces.memory import Context

LENGTHS = (1, 3, 4, 8, 13, 24)


def definition(axis: str, causal: bool, columns: int, prefix: int = 0) -> Rule:
    def sees(h: int, i: int, j: int) -> bool:
        if causal and j > i:
            return False
        if i < prefix or j < prefix:
            return True
        i, j = i - prefix, j - prefix
        return i // columns == j // columns if axis == "row" else i % columns == j % columns

    return sees


def along(axis: str, sources: list[Tensor], causal: bool, columns: int, prefix: int, padding: Tensor | None) -> Tensor:
    tokens = sources[0].shape[2]
    return softmax_over(*sources, mask_of(definition(axis, causal, columns, prefix), 2, tokens), padding)


def two_steps(sources: list[Tensor], causal: bool, columns: int, prefix: int, padding: Tensor | None) -> Tensor:
    """Sequential, query by query; class tokens lie before the map, on no row of it."""
    q, k, v = sources
    own = along("row", sources, causal, columns, prefix, padding)
    tokens = q.shape[2]
    whole = own
    if causal:

        def rule(h: int, i: int, j: int) -> bool:
            return definition("row", i < prefix or j < prefix, columns, prefix)(h, i, j)

        whole = softmax_over(q, k, v, mask_of(rule, 2, tokens), padding)
    mask = without_padding(mask_of(definition("col", causal, columns, prefix), 2, tokens), padding)
    out = []
    for i in range(tokens):
        values = torch.cat([whole[:, :, :i], own[:, :, i : i + 1], whole[:, :, i + 1 :]], 2)
        out.append(softmax_over(q[:, :, i : i + 1], k, values, mask[..., i : i + 1, :]))
    return torch.cat(out, 2)


@pytest.mark.parametrize("mode", ["row", "col"])
@pytest.mark.parametrize(("columns", "prefix"), [(4, 0), (5, 2), (1, 0), (3, 1)])
def test_one_axis_is_the_definition(mode: str, columns: int, prefix: int) -> None:
    core = AxialAttention(mode=mode, columns=columns, prefix=prefix)
    assert_is_pattern(core, lambda causal: definition(mode, causal, columns, prefix), LENGTHS)


@pytest.mark.parametrize("mode", ["sum", "sequential"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("columns", "prefix"), [(4, 0), (5, 2), (1, 0), (3, 1)])
def test_two_axes_are_the_definition(mode: str, causal: bool, columns: int, prefix: int) -> None:
    core = AxialAttention(mode=mode, columns=columns, prefix=prefix)
    for tokens in LENGTHS:
        for padding in paddings(tokens):
            sources = inputs(tokens)
            if mode == "sum":
                want = sum(along(axis, sources, causal, columns, prefix, padding) for axis in ("row", "col"))
                assert isinstance(want, Tensor)
                there = torch.ones(2, tokens, dtype=torch.bool)
            else:
                want = padding_last(
                    lambda *given: two_steps(list(given[:3]), causal, columns, prefix, given[3]), sources, padding
                )
                there = torch.ones(2, tokens, dtype=torch.bool) if padding is None else ~padding
            got = core(*sources, causal=causal, key_padding_mask=padding).out_BHNV
            agree(got, want, sources, weight=there[:, None, :, None])


def test_layers_take_turns() -> None:
    for index, axis in enumerate(("row", "col", "row")):
        core = AxialAttention(columns=4, index=index)
        assert_is_pattern(core, lambda causal, a=axis: definition(a, causal, 4), (13,))


def test_a_row_of_padding_alone_gives_zeros() -> None:
    padding = torch.zeros(2, 13, dtype=torch.bool)
    padding[1] = True
    for mode, prefix, causal in itertools.product(("sum", "sequential"), (0, 1), (False, True)):
        sources, core = inputs(13), AxialAttention(mode=mode, columns=4, prefix=prefix)
        out = core(*sources, causal=causal, key_padding_mask=padding).out_BHNV
        assert (out[1] == 0).all()
        assert all(t.isfinite().all() for t in torch.autograd.grad(out.square().sum(), sources))


@pytest.mark.parametrize(("mode", "causal"), [("sum", False), ("sequential", True)])
def test_two_softmaxes_are_one_graph(mode: str, causal: bool) -> None:
    core, sources = AxialAttention(mode=mode, columns=4, prefix=1), [t.detach() for t in inputs(13)]
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager", dynamic=False)
    want = core(*sources, causal=causal).out_BHNV
    torch.testing.assert_close(compiled(*sources, causal=causal).out_BHNV, want)
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", ["sum", "sequential"])
@pytest.mark.parametrize("causal", [False, True])
def test_two_softmaxes_are_finite_in_half_precision(mode: str, causal: bool) -> None:
    q, k, v = (t.detach() for t in inputs(13))
    half = [t.to(torch.float16) for t in (q * 20, k, v)]
    out = AxialAttention(mode=mode, columns=4, prefix=1)(*half, causal=causal).out_BHNV
    assert out.dtype == torch.float16 and out.isfinite().all()


@pytest.mark.parametrize("mode", ["sum", "sequential"])
def test_two_softmaxes_take_no_context_and_have_no_log_sum_exp(mode: str) -> None:
    core, (q, k, v) = AxialAttention(mode=mode, columns=4), inputs(8, values=6)
    refuses("needs lse", core, q, k, v, want_lse=True)
    with pytest.raises(ValueError, match="needs context"):
        core(q, k, v, context=Context(k, v, torch.zeros(2, 8, 1), torch.ones(2, 8, dtype=torch.bool)))


def test_the_map_is_found_from_what_the_model_knows() -> None:
    for known, columns in (
        ({"size": (3, 7), "length": 22, "prefix": 1}, 7),
        ({"length": 24}, 5),
        ({"length": 25}, 5),
        ({"length": 26}, 6),
        ({"length": 26, "prefix": 1}, 5),
        ({"length": 1}, 1),
    ):
        core = create_attention("axial", **known, width=12, heads=2)
        assert isinstance(core, AxialAttention) and core.columns == columns


def test_a_sequence_longer_than_the_map_is_refused() -> None:
    refuses(r"13.*12", AxialAttention(size=(3, 4), prefix=1), *inputs(14))
