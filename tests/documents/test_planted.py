"""Documents with facts in them: an oracle answers all of them, labels are even, and nothing gives an answer away."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses

from cached_lab.data.dataset import LabelledDataset
from cached_lab.tasks import create_dataset
from cached_lab.tasks.documents.planted import KINDS, PlantedDocuments
from cached_lab.tasks.documents.reordered import COUNTS, ReorderedDocuments, orders, reorder

LENGTH = 12


def planted(kind: str = "memorise", split: str = "train", **options: Any) -> PlantedDocuments:
    sizes = {"train_size": 600, "validation_size": 60, "test_size": 60, "noise": 7}
    made = create_dataset("planted_documents", split, kind=kind, segment_length=LENGTH, **{**sizes, **options})
    assert isinstance(made, PlantedDocuments)
    return made


def facts(words: list[int]) -> list[tuple[int, int, int]]:
    """(place in the document, person, where to) of each; 0 is "went", 2 to 5 are persons, 6 to 11 places."""
    return [(i - 1, words[i - 1], words[i + 1]) for i, word in enumerate(words) if word == 0]


def answer(words: list[int]) -> int:
    """By reading."""
    where, person = words[-2:]
    assert where == 1 and 2 <= person < 6
    (place,) = [place for _, one, place in facts(words) if one == person]
    return place - 6


@pytest.mark.parametrize("segments", [1, 2, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_answered_by_reading_it(kind: str, segments: int) -> None:
    data = planted(kind)
    for index in range(0, 600, 3):
        tokens_N, label = data.document(index, segments)
        words = tokens_N.tolist()
        assert tokens_N.shape == (segments * LENGTH,) and answer(words) == label
        found = facts(words)
        assert len(found) == len({person for _, person, _ in found}) == len({to for *_, to in found}) == KINDS[kind]
        assert all(begin // LENGTH == (begin + 2) // LENGTH for begin, *_ in found), "a fact lies within one segment"
        rest = Counter(word >= 12 for word in words)
        assert rest[False] == 3 * len(found) + 2, "everything else is noise"


def test_facts_stand_where_their_kind_says() -> None:
    data = {kind: planted(kind) for kind in KINDS}
    read = {kind: [data[kind].document(i, 4)[0].tolist() for i in range(600)] for kind in KINDS}
    begins = {kind: [facts(words)[0][0] for words in read[kind]] for kind in KINDS}
    assert set(begins["memorise"]) == {0}
    counts = Counter(begin // LENGTH for begin in begins["detect"])
    assert all(100 < counts[segment] < 200 for segment in range(4)), "uniform, and a question leaves room for 15 of 16"
    firsts, asked = [facts(words) for words in read["reason"]], [words[-1] for words in read["reason"]]
    share = sum(found[0][1] == person for found, person in zip(firsts, asked, strict=True)) / 600
    assert 0.43 < share < 0.57, "either of the two is asked for"


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_labels_are_even_and_guessing_gives_a_sixth(split: str) -> None:
    data = planted(split=split)
    assert set(Counter(data.labels.tolist()).values()) == {len(data) // 6}
    assert data.baselines(planted()) == {"majority class": pytest.approx(1 / 6)}


def test_documents_depend_on_their_arguments_alone() -> None:
    data, again = planted(), planted()
    same = torch.equal
    assert same(data[5][0], again[5][0]) and same(data[5][0], data.document(5, data.segments)[0])
    others = [data[6], data.document(5, epoch=1), planted(seed=1)[5], planted(split="test")[5]]
    assert not any(same(data[5][0], other) for other, _ in others)
    assert data.document(5, epoch=1)[1] == data[5][1]
    data, again = reordered(), reordered()
    assert torch.equal(data[3][0], again[3][0]) and data.labels.tolist() == [data[i][1] for i in range(60)]
    others = (data.document(3, epoch=1), data[4], reordered(seed=1)[3])
    assert not any(torch.equal(data[3][0], other) for other, _ in others)


def test_it_is_a_data_set() -> None:
    data = planted()
    assert isinstance(data, LabelledDataset) and len(list(planted(split="test"))) == 60  # type: ignore[call-overload]
    facts_of = {"vocabulary": 19, "max_length": LENGTH, "segments": 7, "classes": 6, "size": 600}
    assert facts_of.items() <= data.describe().items()
    keys = ("vocabulary", "max_length", "classes")
    told = PlantedDocuments.foretell(segment_length=LENGTH, noise=7)
    assert {key: told[key] for key in keys} == {key: data.describe()[key] for key in keys}
    batch = data.collate([data.document(0, 2), data.document(1, 2)])
    assert batch.inputs.shape == (2, 2 * LENGTH) and batch.padding is None
    uneven = data.collate([data.document(0, 2), (torch.tensor([3, 4]), 1)])
    assert uneven.padding is not None and uneven.padding.sum(1).tolist() == [0, 2 * LENGTH - 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "recall"}, "unknown data.kind 'recall'"),
        ({"segment_length": 7}, "data.segment_length=7 must be at least 8"),
        ({"segments": 0}, "data.segments=0 must be at least 1"),
        ({"train_size": 0}, "data.train_size=0 must be at least 1"),
        ({"noise": 0}, "data.noise=0 must be at least 1"),
        ({"seed": -1}, "data.seed=-1 must not be negative"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, create_dataset, "planted_documents", "train", **options)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pieces": 0}, "pieces=0 must be at least 1"),
        ({"pieces": 9, "segment_length": 8}, "data.segment_length=8 must be at least data.pieces=9"),
        ({"segment_length": 0}, "data.segment_length=0 must be at least 1"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
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
