"""Probe tasks: an episode determines its answers, and the tokens near the question do not."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from probes.solvers import SOLVERS

from cached_lab.experiments.probes.distances import Course, train_by_distance
from cached_lab.experiments.probes.protocol import ProbeSizes, build_model, probe
from cached_lab.experiments.probes.tasks import IGNORED, Episode, ProbeTask, base
from cached_lab.experiments.probes.tasks.base import distinct
from cached_lab.experiments.probes.tasks.mqar import power_law_slots
from cached_lab.registries import PROBES

CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    **{name: ({}, (3, 5)) for name in SOLVERS},
    **{f"{name}/longer": ({"segment": 24}, (2, 1)) for name in SOLVERS},
    "latch/decoys": ({"decoys": True, "segment": 16}, (1, 4)),
    "copy/short": ({"segment": 16, "length": 4}, (2, 1)),
    "copy/together": ({"segment": 8, "length": 4}, (0,)),
    "recall/long": ({"segment": 16}, (3,)),
    "recall/together": ({"segment": 10}, (0,)),
    "remember/together": ({"segment": 16}, (0,)),
    "rewrite/together": ({"segment": 24, "symbols": 3}, (0,)),
    "mqar/together": ({}, (0,)),
    "remember/strings": ({"key_size": 2, "value_size": 3, "segment": 16, "symbols": 5}, (1, 20)),
    "rewrite/strings": ({"value_size": 2, "segment": 16, "symbols": 3}, (1, 9)),
    "mqar/lists": ({"segment": 8, "pairs": 7}, (3, 6)),
    "mqar/paper": ({"spread": 0.01, "vocabulary": 128}, (3,)),
    "mqar/uniform": ({"spread": 1.0, "segment": 4}, (4, 7)),
    "mqar/one": ({"spread": 0.01, "segment": 64}, (0,)),
    "niah/uuid": ({"segment": 40, "digits": 32, "base": 16, "haystack": "needles"}, (2,)),
    "niah/multikey": ({"keys": 4, "haystack": "needles"}, (1, 3)),
    "niah/multiquery": ({"keys": 4, "queries": 4, "digits": 7, "segment": 32, "haystack": "words"}, (2,)),
    "niah/multivalue": ({"values": 4, "haystack": "words"}, (3, 5)),
}
"""Options and distances, by the name of a task and of the case."""


def made(case: str) -> ProbeTask:
    task: ProbeTask = PROBES.create(case.partition("/")[0], **CASES[case][0])
    return task


def draw(task: ProbeTask, distance: int, rows: int = 200, seed: int = 0) -> Episode:
    return task.draw(rows, distance, torch.Generator().manual_seed(seed))


def asked(episode: Episode) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """The tokens of each row, and the places that are asked with their answers."""
    for inputs, targets in zip(episode.inputs_BN.tolist(), episode.targets_BN.tolist(), strict=True):
        yield inputs, [(place, target) for place, target in enumerate(targets) if target != IGNORED]


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_answers_are_those_that_the_episode_tells(case: str) -> None:
    task, solver = made(case), SOLVERS[case.partition("/")[0]]
    for distance in CASES[case][1]:
        episode = draw(task, distance, rows=40)
        assert episode.inputs_BN.shape == episode.targets_BN.shape == (40, (distance + 1) * task.segment)
        assert episode.inputs_BN.min() >= 0 and episode.inputs_BN.max() < task.vocabulary
        for tokens, questions in asked(episode):
            told: list[int] = []
            assert questions
            for place, answer in questions:
                assert solver(task, tokens, place, told) == {answer}
                told.append(answer)
        if getattr(task, "spread", None) is None:
            assert (episode.targets_BN[:, : distance * task.segment] == IGNORED).all(), "only the last segment asks"


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_stream_gives_the_episode_piece_by_piece_and_the_seed_decides(case: str) -> None:
    task, distance = made(case), CASES[case][1][-1]
    episode = draw(task, distance, rows=3)
    pieces = list(task.stream(3, distance, torch.Generator().manual_seed(0)))
    assert [piece.inputs_BN.shape for piece in pieces] == [(3, task.segment)] * (distance + 1)
    assert torch.equal(torch.cat([piece.inputs_BN for piece in pieces], 1), episode.inputs_BN)
    assert torch.equal(torch.cat([piece.targets_BN for piece in pieces], 1), episode.targets_BN)
    again = torch.Generator().manual_seed(0)
    assert torch.equal(task.draw(3, distance, again).inputs_BN, episode.inputs_BN)
    assert not torch.equal(task.draw(3, distance, again).inputs_BN, episode.inputs_BN), "the generator goes on"
    assert not torch.equal(draw(task, distance, rows=3, seed=1).inputs_BN, episode.inputs_BN)


@pytest.mark.parametrize("case", sorted(set(CASES) - {"mqar/one"}))
def test_the_last_segment_tells_nothing_about_the_first_answer(case: str) -> None:
    """Answers have the same frequencies whatever the token before the first question is."""
    task, distance = made(case), CASES[case][1][-1]
    rows = 2000
    inputs_BN, targets_BN = draw(task, distance, rows)
    first = (targets_BN != IGNORED).float().argmax(1)
    answers = targets_BN[torch.arange(rows), first]
    before = inputs_BN[torch.arange(rows), first]
    for chosen in (answers, *(answers[before == token] for token in before.unique())):
        if len(chosen) > 300:
            bound = task.chance + 5 * (task.chance / len(chosen)) ** 0.5
            assert chosen.bincount().max() / len(chosen) < bound
    if task.segment > 4 and distance > 1:
        text_BN = inputs_BN[:, : distance * task.segment]
        assert (text_BN == answers[:, None]).float().mean(0).max() < 0.7, "it stands at another place each time"


ONE_OF = {"recall", "remember", "niah"}
"""Tasks whose question is about one of several places, the first segment as likely as others."""


@pytest.mark.parametrize("name", sorted({"latch", "copy", "passkey", "mqar"} | ONE_OF))
def test_answers_in_the_first_segment_are_guesses_without_it(name: str) -> None:
    task, solver, distance = PROBES.create(name), SOLVERS[name], 3
    right = []
    for tokens, questions in asked(draw(task, distance, rows=1000)):
        told: list[int] = []
        hidden = [None] * task.segment + tokens[task.segment :]
        for place, answer in questions:
            possible = solver(task, hidden, place, told)
            assert answer in possible
            right.append(1 / len(possible))
            told.append(answer)
    known = (distance - 1) / distance if name in ONE_OF else 0
    assert sum(right) / len(right) == pytest.approx(known + (1 - known) * task.chance, abs=0.04)


@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"recall"}))
def test_a_stream_of_a_million_tokens_is_made_as_it_is_read(name: str) -> None:
    """No tensor of a whole text is made, nor are its segments there before they are asked for."""
    task = PROBES.create(name, **({"key_size": 4, "segment": 16} if name == "remember" else {}))
    pieces = task.stream(2, 2**20 // task.segment - 1, torch.Generator().manual_seed(0))
    for _ in range(20):
        assert next(pieces).inputs_BN.untyped_storage().nbytes() <= 2**18 * 8


@pytest.mark.parametrize("name", ["latch", "copy"])
def test_noise_is_the_same_drawn_at_once_and_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = PROBES.create(name)
    whole = draw(task, 20, rows=3)
    monkeypatch.setattr(base, "AT_ONCE", 0)
    for piece in (1, 8, 10, 1000):
        monkeypatch.setattr(base, "PIECE", piece)
        assert torch.equal(draw(task, 20, rows=3).inputs_BN, whole.inputs_BN)


def test_places_keys_and_decoys_are_drawn_evenly() -> None:
    drawn_BK = distinct(20_000, 3, 5, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 3 for row in drawn_BK.tolist())
    counts = Counter(map(tuple, drawn_BK.tolist()))
    assert len(counts) == 60 and max(counts.values()) < 20_000 / 60 * 1.25 and min(counts.values()) > 20_000 / 60 * 0.75
    task = PROBES.create("latch", decoys=True)
    middle = draw(task, 4).inputs_BN[:, task.segment : -task.segment]
    assert ((middle >= 4) & (middle < 8)).sum(1).eq(3).all()
    assert {*SOLVERS, "babilong"} == set(PROBES.names())


def test_mqar_has_the_papers_form_and_power_law() -> None:
    """The first follows the law, the second the law without the first."""
    a, slots = 0.3, 6
    drawn_BQ = power_law_slots(40_000, 2, slots, a, torch.Generator().manual_seed(0))
    law = torch.arange(1, slots + 1, dtype=torch.float64) ** (a - 1)
    law /= law.sum()
    left = sum(law[g] * law.index_fill(0, torch.tensor([g]), 0) / (1 - law[g]) for g in range(slots))
    for column, expected in ((0, law), (1, left)):
        found = drawn_BQ[:, column].bincount(minlength=slots) / 40_000
        assert torch.allclose(found.double(), torch.as_tensor(expected), atol=0.01)
    # Pairs first, then each key once at the first token of a slot, its value the target there, blanks elsewhere.
    task = PROBES.create("mqar", vocabulary=8192, pairs=8, segment=128, spread=0.01)
    inputs_BN, targets_BN = draw(task, 0, rows=300)
    assert (inputs_BN[:, 0:16:2] < 4096).all() and (inputs_BN[:, 1:16:2] >= 4096).all()
    asked_BN = targets_BN != IGNORED
    assert asked_BN.sum(1).eq(8).all() and not asked_BN[:, 1::2].any() and not asked_BN[:, :16].any()
    assert (inputs_BN[:, 16:][~asked_BN[:, 16:]] == 0).all()
    early = asked_BN[:, 16:72].sum() / asked_BN.sum()
    assert early > 0.6, "questions come early"


RECORDED = {
    "latch": (4796611, -49101904),
    "copy": (2849198, -38885340),
    "recall": (5204806, -48877584),
    "passkey": (23150570, -195897889),
}
"""Sums of ids and targets of episodes, weighted by their places, as in the runs of `docs/results/remembers.md`."""


def test_draws_are_those_of_the_recorded_results() -> None:
    sums = {}
    for name in RECORDED:
        inputs_BN, targets_BN = draw(PROBES.create(name), 3, rows=64, seed=7)
        weights = torch.arange(1, inputs_BN.numel() + 1).view_as(inputs_BN)
        sums[name] = (int((inputs_BN * weights).sum()), int((targets_BN * weights).sum()))
    assert sums == RECORDED


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("passkey", {"segment": 3}, "segment=3 cannot hold 2 digits"),
        ("copy", {"length": 5}, "length=5 must be 1 to segment=4"),
        ("mqar", {"segment": 15}, "segment=15 must be even"),
        ("mqar", {"vocabulary": 8}, "vocabulary=8 must be even and hold .*; take at least 10"),
        ("mqar", {"pairs": 0}, r"pairs=0 keys \(at least 1\)"),
        ("mqar", {"spread": 0.0}, "spread=0.0 must be above 0"),
        ("remember", {"segment": 3}, "segment=3 must hold a pair with its marks; take at least 4"),
        ("remember", {"key_size": 6}, "symbols=16 make 16,777,216 keys of key_size=6 .* take shorter ones"),
        ("rewrite", {"value_size": 0}, "value_size=0.*at least one symbol"),
        ("niah", {"segment": 3}, "segment=3 must hold .*; take at least 4"),
        ("niah", {"values": 4, "segment": 8}, "segment=8 must hold .*; take at least 9"),
        ("niah", {"keys": 4, "words": 4, "haystack": "needles"}, "words=4 must be at least 5"),
        ("niah", {"queries": 2}, "queries=2, keys=1"),
        ("niah", {"haystack": "hay"}, "haystack='hay' must be one of .*words.*needles"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    refuses(message, PROBES.create, name, **options)


@pytest.mark.parametrize(
    ("name", "distance", "message"),
    [
        ("copy", 0, "distance=0 must be at least 1"),
        ("recall", 7, "distance=7 must be at most 6 segments for AssociativeRecall; raise keys"),
        ("remember", 17, "distance=17 must be at most 16 segments for Remember; raise key_size"),
    ],
)
def test_distances_without_an_episode_are_refused(name: str, distance: int, message: str) -> None:
    task, generator = PROBES.create(name), torch.Generator()
    for way in (task.draw, task.stream):
        refuses(message, way, 1, distance, generator)


@pytest.fixture
def library(tmp_path: Path) -> dict[str, Path]:
    """A tiny bAbI and a tiny book."""
    babi, books = tmp_path / "babi" / "en", tmp_path / "books"
    babi.mkdir(parents=True)
    books.mkdir()
    story = (
        "1 Mary moved to the bathroom.\n2 John went to the hallway.\n3 Where is Mary? \tbathroom\t1\n"
        "4 Mary went to the garden.\n5 Where is John? \thallway\t2\n"
        "1 John moved to the garden.\n2 Where is John? \tgarden\t1\n"
    )
    for split, times in (("train", 10), ("test", 1)):
        (babi / f"qa1_single-supporting-fact_{split}.txt").write_text(story * times)
    (books / "novel.txt").write_text("it was a dark and stormy night upon the open sea . alas . " * 200)
    return {"babi": tmp_path / "babi", "books": books}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"question": "qa2"}, FileNotFoundError, "en/qa2_"),
        ({"books": Path("nowhere")}, FileNotFoundError, r"txt\.xz"),
        ({"babi": Path(__file__)}, ValueError, "babi=.*test_tasks"),
        ({"question": "qa6"}, ValueError, "question='qa6' must be one of .*qa1.*qa2"),
        ({"segment": 3}, ValueError, "segment=3"),
        ({"facts": 1}, ValueError, "facts=1"),
    ],
)
def test_stories_need_their_files_and_a_question_its_room(
    options: dict[str, Any], error: type[Exception], message: str, library: dict[str, Path]
) -> None:
    if "facts" in options:
        (library["babi"] / "en/qa1_single-supporting-fact_test.txt").write_text("")
    refuses(message, PROBES.create, "babilong", **library | options, raises=error)


def test_a_training_is_asked_of_stories_that_it_did_not_draw(library: dict[str, Path]) -> None:
    train = library["babi"] / "en/qa1_single-supporting-fact_train.txt"
    ten = [f"1 Mary moved to the {place}.\n2 Where is Mary? \t{place}\t1\n" for place in "abcdefghij"]
    train.write_text("".join(ten))
    task = PROBES.create("babilong", **library)

    def answers(part: Any) -> set[str]:
        return {task.words[int(i)] for i in draw(part, 3, rows=200).targets_BN[:, -1]}

    assert answers(task) == set("abcdefghi") and answers(task.part("valid")) == {"j"}
    assert answers(task.part("test")) == {"bathroom", "garden", "hallway"}
    assert task.part("test") is task.part("test") and task.part("test").vocabulary == task.vocabulary
    asked = list[tuple[str, int]]()
    task.part = lambda split: asked.append((split, 0)) or type(task).part(task, split)
    sizes = ProbeSizes(width=8, depth=1, heads=1, feed_forward=8, batch_size=2, steps=2, check_every=1, rows=2)
    model = build_model(task, None, sizes)
    train_by_distance(model, task, Course(2, 2), sizes)
    assert {split for split, _ in asked} == {"valid"}
    asked.clear()
    assert probe(task, None, 2, sizes=sizes) and {split for split, _ in asked} == {"valid", "test"}


def test_renamed_stories_are_told_of_others_and_still_true(library: dict[str, Path]) -> None:
    task = PROBES.create("babilong", **library, facts=4, segment=40, renamed=True)
    inputs_BN, targets_BN = draw(task, 0, rows=300)
    told = set()
    for inputs, answer in zip(inputs_BN.tolist(), targets_BN[:, -1].tolist(), strict=True):
        words = [task.words[i] for i in inputs]
        who, place = words[-2], task.words[answer]
        text = " ".join(words)
        assert text.rfind(f"{who} moved to the {place}") + text.rfind(f"{who} went to the {place}") > -2
        told.add((who, place))
    assert told == {(who, place) for who in ("mary", "john") for place in ("bathroom", "garden", "hallway")}
    plain = PROBES.create("babilong", **library, facts=4, segment=40)
    for split in ("valid", "test"):
        for renamed, same in zip(draw(task.part(split), 2, rows=9), draw(plain.part(split), 2, rows=9), strict=True):
            assert torch.equal(renamed, same)


def test_the_ten_thousand_questions_are_taken_where_they_are_there(library: dict[str, Path]) -> None:
    more = library["babi"] / "en-10k"
    more.mkdir()
    for file in (library["babi"] / "en").iterdir():
        (more / file.name).write_text(file.read_text() * 2)
    assert len(PROBES.create("babilong", **library).stories) == 54
    archive = library["books"].parent / "babi.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(library["babi"], "babi")
    assert len(PROBES.create("babilong", **(library | {"babi": archive})).stories) == 54


@pytest.mark.parametrize(("distance", "segment"), [(2, 16), (0, 40)])
def test_babilong_puts_a_story_into_a_book(distance: int, segment: int, library: dict[str, Path]) -> None:
    """Without facts and question there are the book's sentences of ten words, unbroken, truncated only at the end.

    At distance 0 story and question share the segment; in shorter ones there is no such distance.
    """
    task = PROBES.create("babilong", **library, facts=4, segment=segment)
    assert task.has(0) == (distance == 0)
    assert [s.answer for s in task.stories] == ["bathroom", "hallway", "garden"] * 9
    assert task.chance == pytest.approx((1 + 1 / 2 + 1 / 2) / 3), "where Mary is has one answer, where John is two"
    inputs_BN, targets_BN = draw(task, distance, rows=100)
    assert (targets_BN[:, :-1] == IGNORED).all()
    sentence, seen = "it was a dark and stormy night upon the open sea . ", set()
    for inputs, answer in zip(inputs_BN.tolist(), targets_BN[:, -1].tolist(), strict=True):
        text = " ".join(task.words[i] for i in inputs)
        story = next(
            s
            for s in task.stories
            if text.endswith(" ".join(s.question)) and all(" ".join(fact) in text for fact in s.sentences)
        )
        assert story.answer == task.words[answer]
        places = [text.index(" ".join(fact)) for fact in story.sentences]
        assert places == sorted(places) and text[: places[-1]].count(" ") < max(distance, 1) * segment
        seen.add(places[0])
        rest = text.removesuffix(" ".join(story.question))
        for fact in story.sentences:
            rest = rest.replace(" ".join(fact) + " ", "", 1)
        assert (sentence * 9).startswith(rest)
    assert len(seen) > 1


def test_babilong_of_the_real_files(shared: Path) -> None:
    files = {"babi": shared / "data/babi/babi-en-and-en-10k.tar.xz", "books": shared / "data/books"}
    task = PROBES.create("babilong", question="qa5", **files)
    assert {task.words[answer] for answer in draw(task.part("test"), 8, rows=400).targets_BN[:, -1].tolist()} == {
        *("bill", "fred", "jeff", "mary"),
        *("apple", "football", "milk"),
    }
