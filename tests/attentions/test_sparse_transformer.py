"""Sparse Transformer against the definition pair by pair, what its parts reach together, its limits and its cost."""

from __future__ import annotations

import pytest
import torch
from attentions.agreement import inputs
from attentions.dense import Rule, assert_is_pattern

from cached_transformers.attentions.sparse_transformer import SparseTransformerAttention

LENGTHS = (1, 3, 4, 8, 13, 24)


def near(kind: str, stride: int, i: int, j: int) -> bool:
    return abs(i - j) < stride if kind == "strided" else i // stride == j // stride


def far(kind: str, stride: int, summary: int, i: int, j: int, part: int = 0) -> bool:
    if kind == "strided":
        return (i - j) % stride == 0
    return stride - (part + 1) * summary <= j % stride < stride - part * summary


def definition(
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
    def sees(h: int, i: int, j: int) -> bool:
        if causal and j > i:
            return False
        if i < prefix or j < prefix:
            return True
        i, j = i - prefix, j - prefix
        if combine == "union":
            return near(kind, stride, i, j) or far(kind, stride, summary, i, j, h % slices)
        if (index if combine == "layers" else h) % 2 == 0:
            return near(kind, stride, i, j)
        return far(kind, stride, summary, i, j, (h if combine == "layers" else h // 2) % slices)

    return sees


@pytest.mark.parametrize("kind", ["strided", "fixed"])
@pytest.mark.parametrize(("combine", "index"), [("union", 0), ("layers", 0), ("layers", 1), ("heads", 0)])
@pytest.mark.parametrize("prefix", [0, 2])
def test_it_is_the_definition(kind: str, combine: str, index: int, prefix: int) -> None:
    for stride, summary in ((4, 2), (3, 1)):
        core = SparseTransformerAttention(
            stride=stride, pattern=kind, summary=summary, combine=combine, index=index, prefix=prefix
        )
        assert_is_pattern(
            core,
            lambda causal, s=stride, c=summary: definition(causal, kind, s, c, combine, index=index, prefix=prefix),
            LENGTHS,
        )


@pytest.mark.parametrize("combine", ["union", "heads"])
@pytest.mark.parametrize(("stride", "summary", "slices"), [(6, 2, 3), (5, 2, 2), (8, 1, 3)])
@pytest.mark.parametrize("heads", [2, 5])
def test_heads_take_summary_tokens_of_their_own(
    combine: str, stride: int, summary: int, slices: int, heads: int
) -> None:
    core = SparseTransformerAttention(
        stride=stride, pattern="fixed", summary=summary, slices=slices, combine=combine, heads=heads
    )
    assert_is_pattern(
        core,
        lambda causal: definition(causal, "fixed", stride, summary, combine, slices=slices),
        (1, 3, 8, 13, 16),
        heads=heads,
    )


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
