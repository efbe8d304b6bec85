"""Documents with reordered pieces, generated or from a text, of any length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses

from cached_lab.tasks import create_dataset
from cached_lab.tasks.documents.reordered import COUNTS, ReorderedDocuments, orders, reorder


def reordered(split: str = "train", **options: Any) -> ReorderedDocuments:
    sizes = {"train_size": 60, "validation_size": 12, "test_size": 12, "segment_length": 8, "segments": 4}
    made = create_dataset("reordered_documents", split, **{**sizes, **options})
    assert isinstance(made, ReorderedDocuments)
    return made


def test_made_documents_are_answered_by_where_their_ids_stand() -> None:
    data = reordered(segment_length=64)
    rising = np.arange(256) / 256
    right = 0
    for tokens_N, label in data:
        words, order = tokens_N.numpy() / COUNTS, orders(3)[label]
        # The right order is that in which the pieces, put back, fit a straight line best, wherever they were cut.
        jumps = np.abs(np.diff(np.convolve(words, np.ones(5) / 5, "valid"), prepend=words[0])) > 0.04
        right += (len(order) > 1) == bool(jumps.any()) or len(order) > 1  # a permutation may leave the order as it is
        assert sorted(tokens_N.tolist())[0] < 4 and np.abs(np.sort(words) - rising).max() < 0.1
    assert right > 50
    shares = np.bincount([len(orders(3)[label]) for label in reordered(train_size=600).labels])[1:] / 600
    assert (np.abs(shares - 1 / 3) < 0.07).all(), "1, 2 and 3 pieces, as often"


def test_a_text_is_cut_into_documents_whose_pieces_come_back(tmp_path: Path) -> None:
    for name, size in {"train": 330, "valid": 70, "test": 70}.items():
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i % 26) for i in range(size)), encoding="utf-8")
    data = reordered(path=tmp_path, tokenizer="byte")
    assert len(data) == 330 // 32 and data.tokenizer is not None and data.vocabulary == 256
    text = data._text
    assert text is not None
    for index, (tokens_N, _) in enumerate(data):
        want = np.sort(text.tokens[32 * index : 32 * index + 32])
        assert sorted(tokens_N.tolist()) == want.tolist()
        short_N, _ = data.document(index, 2)
        assert sorted(short_N.tolist()) == np.sort(text.tokens[32 * index : 32 * index + 16]).tolist()
    assert len(data.document(0, 99)[0]) == 32, "a text has no more than the data ask for"
    refuses(r"70.*data.segments=9", reordered, "validation", path=tmp_path, tokenizer="byte", segments=9)


def test_a_document_depends_on_its_arguments_alone_and_training_goes_on_to_others() -> None:
    data, again = reordered(), reordered()
    assert torch.equal(data[3][0], again[3][0]) and data.labels.tolist() == [data[i][1] for i in range(60)]
    others = (data.document(3, epoch=1), data[4], reordered(seed=1)[3])
    assert not any(torch.equal(data[3][0], other) for other, _ in others)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pieces": 0}, "pieces=0 must be at least 1"),
        ({"pieces": 9, "segment_length": 8}, "data.segment_length=8 must be at least data.pieces=9"),
        ({"segment_length": 0}, "data.segment_length=0 must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, reordered, **options)


def test_the_classes_are_all_permutations_of_up_to_m_pieces() -> None:
    assert orders(1) == [(0,)]
    assert orders(3) == [(0,), (0, 1), (1, 0), (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    for pieces in (2, 4, 5):
        assert len(set(orders(pieces))) == len(orders(pieces)) == sum(math.factorial(i) for i in range(1, pieces + 1))
    assert len(orders()) == 33


def test_a_document_comes_back_in_the_order_that_its_class_names() -> None:
    generator = torch.Generator().manual_seed(0)
    found = [reorder(torch.arange(9), 4, generator) for _ in range(2000)]
    for tokens_N, index in found:
        row = tokens_N.tolist()
        order = orders(4)[index]
        starts = [0, *(i for i in range(1, 9) if row[i] != row[i - 1] + 1)]
        pieces = [row[a:b] for a, b in zip(starts, [*starts[1:], 9], strict=True)]
        assert sorted(row) == list(range(9)) and len(pieces) <= len(order)
        if len(pieces) == len(order):  # neighbours that stayed neighbours look like one piece
            places = sorted(range(len(pieces)), key=lambda i: pieces[i][0])
            assert [order[i] for i in places] == list(range(len(order)))
    counts = [sum(len(orders(4)[i]) == count for _, i in found) for count in range(1, 5)]
    assert all(400 < count < 600 for count in counts), "the number of pieces is uniform"
    assert len({index for _, index in found}) == 33
    again, _ = reorder(torch.arange(9), 4, torch.Generator().manual_seed(0))
    assert torch.equal(again, found[0][0])
