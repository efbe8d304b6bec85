"""Segment reordering: its classes, its documents, and that a model with a memory learns it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cached_lab.tasks.documents.reordered import orders, reorder
from cached_transformers.models.language_model import LanguageModel
from cached_transformers.models.sequence_classifier import LastTokenHead


def test_the_classes_are_all_permutations_of_up_to_m_pieces() -> None:
    assert orders(1) == [(0,)]
    assert orders(3) == [(0,), (0, 1), (1, 0), (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    for pieces in (2, 4, 5):
        assert len(set(orders(pieces))) == len(orders(pieces)) == sum(math.factorial(i) for i in range(1, pieces + 1))
    assert len(orders()) == 33


def test_a_document_comes_back_in_the_order_that_its_class_names() -> None:
    documents = torch.arange(9).repeat(2000, 1)
    mixed, classes = reorder(documents, 4, torch.Generator().manual_seed(0))
    for row, index in zip(mixed.tolist(), classes.tolist(), strict=True):
        order = orders(4)[index]
        starts = [0, *(i for i in range(1, 9) if row[i] != row[i - 1] + 1)]
        pieces = [row[a:b] for a, b in zip(starts, [*starts[1:], 9], strict=True)]
        assert sorted(row) == list(range(9)) and len(pieces) <= len(order)
        if len(pieces) == len(order):  # neighbours that stayed neighbours look like one piece
            places = sorted(range(len(pieces)), key=lambda i: pieces[i][0])
            assert [order[i] for i in places] == list(range(len(order)))
    counts = [sum(len(orders(4)[i]) == count for i in classes.tolist()) for count in range(1, 5)]
    assert all(400 < count < 600 for count in counts), "the number of pieces is uniform"
    assert classes.unique().numel() == 33
    again, _ = reorder(documents, 4, torch.Generator().manual_seed(0))
    assert torch.equal(again, mixed)


def test_the_head_reads_the_last_token_that_is_not_padding() -> None:
    head, x = LastTokenHead(8, len(orders(4))), torch.randn(3, 5, 8)
    assert head(x).shape == (3, 33)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False, True, True, False, True]])
    want = head(torch.stack([x[0, 4], x[1, 2], x[2, 3]])[:, None])
    torch.testing.assert_close(head(x, padding), want)
    torch.testing.assert_close(head(x), head.classify(head.pool(x[:, -1]).tanh()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: orders(0), "pieces=0 must be at least 1"),
        (lambda: reorder(torch.zeros(2, 3), 4), "documents of 3 tokens cannot be cut into pieces=4; take fewer pieces"),
        (lambda: orders(-1), "pieces=-1 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_the_order_is_learnt_where_the_second_segment_can_hear_of_the_first() -> None:
    """Two segments of consecutive numbers from a random one on, perhaps cut in two and swapped.

    A quarter is swapped. Of these, 4 in 7 have the seam in the first segment or at its end, which the second alone does
    not tell: 6 in 7 are then right at best.
    """

    def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        documents = torch.arange(8) + torch.randint(0, 9, (rows, 1), generator=generator)
        documents, classes = reorder(documents, 2, generator)
        return documents, (classes == 2).long()  # an uncut document and one cut but not swapped are the same text

    def accuracy(remember: bool) -> float:
        torch.manual_seed(0)
        model = LanguageModel(16, 32, 2, 4, 64, memory={"name": "ernie_doc", "length": 4})
        head, generator = LastTokenHead(32, len(orders(2))), torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 3e-3)

        def logits(documents: Tensor) -> Tensor:
            state = model.init_state(len(documents))
            for segment in documents.split(4, 1):
                out = model.stack(model.embedding(segment), state)
                state = out.state if remember else state
            return head(out.outputs)

        for _ in range(250):
            documents, swapped = batch(64, generator)
            optimizer.zero_grad()
            F.cross_entropy(logits(documents), swapped).backward()
            optimizer.step()
        documents, swapped = batch(1024, generator)
        with torch.no_grad():
            return (logits(documents).argmax(-1) == swapped).double().mean().item()

    assert accuracy(True) > 0.97
    assert accuracy(False) < 0.9
