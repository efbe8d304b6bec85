"""Attentions on maps and in strides against their definitions: axial, Image Transformer, Sparse Transformer."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs
from attentions.dense import Rule, assert_is_pattern, mask_of, padding_last, paddings, softmax_over, without_padding
from common import refuses
from torch import Tensor

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.axial import AxialAttention
from cached_transformers.attentions.image_transformer import ImageTransformerAttention
from cached_transformers.attentions.sparse_transformer import SparseTransformerAttention
from cached_transformers.interfaces.memory import Context

LENGTHS = (1, 3, 4, 8, 13, 24)


def after_prefix(causal: bool, prefix: int, inside: Rule) -> Rule:
    """A prefix sees all and is seen by all; a place of the map sees those `inside`; causal, no place a later one."""

    def sees(h: int, i: int, j: int) -> bool:
        if causal and j > i:
            return False
        return i < prefix or j < prefix or inside(h, i - prefix, j - prefix)

    return sees


def definition(axis: str, causal: bool, columns: int, prefix: int = 0) -> Rule:
    def inside(h: int, i: int, j: int) -> bool:
        return i // columns == j // columns if axis == "row" else i % columns == j % columns

    return after_prefix(causal, prefix, inside)


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


def test_tokens_beyond_the_map_are_refused() -> None:
    refuses(r"13.*12", AxialAttention(size=(3, 4), prefix=1), *inputs(14))
    core = ImageTransformerAttention(block=(2, 2), memory=(1, 1), size=(3, 4))
    refuses("13 tokens do not fit the map", core, *inputs(13))


UNBLOCKED = (1, 3, 8, 13, 24)


def blocks_along(causal: bool, block: int, memory: int, prefix: int = 0) -> Rule:
    def inside(h: int, i: int, j: int) -> bool:
        first = i // block * block
        return first - memory <= j < first + block + (0 if causal else memory)

    return after_prefix(causal, prefix, inside)


def cells(size: tuple[int, int], block: tuple[int, int], order: str) -> list[tuple[int, int]]:
    """(row, column) of each token of the sequence, by going through the map."""
    raster = [(row, column) for row in range(size[0]) for column in range(size[1])]
    if order == "raster":
        return raster
    return sorted(raster, key=lambda cell: (cell[0] // block[0], cell[1] // block[1], *cell))


def on_map(
    causal: bool, size: tuple[int, int], block: tuple[int, int], memory: tuple[int, int], order: str, prefix: int = 0
) -> Rule:
    cell = cells(size, block, order)

    def inside(h: int, i: int, j: int) -> bool:
        (row, column), (other_row, other_column) = cell[i], cell[j]
        top, left = row // block[0] * block[0], column // block[1] * block[1]
        below = 0 if causal else memory[0]
        return (
            top - memory[0] <= other_row < top + block[0] + below
            and left - memory[1] <= other_column < left + block[1] + memory[1]
        )

    return after_prefix(causal, prefix, inside)


@pytest.mark.parametrize(("block", "memory", "prefix"), [(4, 4, 0), (4, 0, 0), (3, 5, 2), (1, 2, 1), (5, 1, 0)])
def test_blocks_along_the_sequence_are_the_definition(block: int, memory: int, prefix: int) -> None:
    core = ImageTransformerAttention(block=block, memory=memory, prefix=prefix)
    assert_is_pattern(core, lambda causal: blocks_along(causal, block, memory, prefix), UNBLOCKED)


@pytest.mark.parametrize("order", ["raster", "blocks"])
@pytest.mark.parametrize(
    ("size", "block", "memory", "prefix", "lengths"),
    [
        ((12, 2), (2, 2), (1, 0), 0, UNBLOCKED),
        ((5, 5), (2, 3), (1, 2), 1, UNBLOCKED),
        ((2, 13), (1, 2), (1, 1), 0, UNBLOCKED),
        ((6, 4), (9, 2), (0, 9), 0, UNBLOCKED),
        ((9, 8), (2, 4), (1, 1), 0, (72, 61)),
        ((9, 8), (3, 2), (1, 1), 0, (72, 61)),
    ],
)
def test_blocks_on_the_map_are_the_definition(
    order: str, size: Any, block: Any, memory: Any, prefix: int, lengths: Any
) -> None:
    core = ImageTransformerAttention(block=block, memory=memory, size=size, order=order, prefix=prefix)
    assert_is_pattern(core, lambda causal: on_map(causal, size, block, memory, order, prefix), lengths)


def near(kind: str, stride: int, i: int, j: int) -> bool:
    return abs(i - j) < stride if kind == "strided" else i // stride == j // stride


def far(kind: str, stride: int, summary: int, i: int, j: int, part: int = 0) -> bool:
    if kind == "strided":
        return (i - j) % stride == 0
    return stride - (part + 1) * summary <= j % stride < stride - part * summary


def strided(
    causal: bool,
    kind: str,
    stride: int,
    summary: int,
    combine: str,
    *,
    index: int = 0,
    prefix: int = 0,
    slices: int = 1,
) -> Rule:
    def inside(h: int, i: int, j: int) -> bool:
        if combine == "union":
            return near(kind, stride, i, j) or far(kind, stride, summary, i, j, h % slices)
        if (index if combine == "layers" else h) % 2 == 0:
            return near(kind, stride, i, j)
        return far(kind, stride, summary, i, j, (h if combine == "layers" else h // 2) % slices)

    return after_prefix(causal, prefix, inside)


@pytest.mark.parametrize("kind", ["strided", "fixed"])
@pytest.mark.parametrize(("combine", "index"), [("union", 0), ("layers", 0), ("layers", 1), ("heads", 0)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_strides_are_the_definition(kind: str, combine: str, index: int, prefix: int) -> None:
    shape: Any = {"combine": combine, "index": index, "prefix": prefix}
    for stride, summary in ((4, 2), (3, 1)):
        core = SparseTransformerAttention(stride=stride, pattern=kind, summary=summary, **shape)
        assert_is_pattern(core, lambda causal, s=stride, c=summary: strided(causal, kind, s, c, **shape), LENGTHS)


@pytest.mark.parametrize("combine", ["union", "heads"])
@pytest.mark.parametrize(("stride", "summary", "slices"), [(6, 2, 3), (5, 2, 2), (8, 1, 3)])
@pytest.mark.parametrize("heads", [2, 5])
def test_heads_take_summary_tokens_of_their_own(
    combine: str, stride: int, summary: int, slices: int, heads: int
) -> None:
    core = SparseTransformerAttention(
        stride=stride, pattern="fixed", summary=summary, slices=slices, combine=combine, heads=heads
    )
    rule = partial(strided, kind="fixed", stride=stride, summary=summary, combine=combine, slices=slices)
    assert_is_pattern(core, rule, (1, 3, 8, 13, 16), heads=heads)


@pytest.mark.parametrize("kind", ["strided", "fixed"])
@pytest.mark.parametrize("causal", [False, True])
def test_everything_is_reached_in_two_steps(kind: str, causal: bool) -> None:
    """Where the values of one layer are the weights of the one before."""
    core = SparseTransformerAttention(stride=5, pattern=kind, summary=1)
    q, k, _ = inputs(25)
    first = core(q, k, torch.eye(25, dtype=torch.double).expand(2, 2, 25, 25), causal=causal).out_BHNV
    second = core(q, k, first, causal=causal).out_BHNV
    # A fixed pattern passes everything to the summary tokens, which are the last ones of their blocks.
    all_pairs = torch.ones(25, 25, dtype=torch.bool)
    assert torch.equal(second[0, 0] > 0, all_pairs.tril() if causal else all_pairs)
    assert ((first[0, 0] > 0).sum(-1) <= 9 + 5).all()
