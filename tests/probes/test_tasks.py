"""Probe tasks: what is asked can be answered from the episode, and from nothing that stands near the question."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cached_transformers.experiments.probes.facts import Facts
from cached_transformers.experiments.probes.tasks import IGNORED, Episode, ProbeTask
from cached_transformers.registry import PROBES

SYNTHETIC = sorted(set(PROBES.names()) - {"facts"})


def draw(task: ProbeTask, distance: int, rows: int = 200, seed: int = 0) -> Episode:
    return task.draw(rows, distance, torch.Generator().manual_seed(seed))


def solve(name: str, task: ProbeTask, inputs: list[int], distance: int) -> list[int]:
    """The answers, by reading the episode as its docstring says."""
    length = task.segment
    if name == "latch":
        return [next(i for i in inputs[:length] if i < task.classes)]  # type: ignore[attr-defined]
    if name in ("copy", "reverse"):
        return inputs[:length] if name == "copy" else inputs[:length][::-1]
    if name == "recall":
        values = {inputs[i * length]: inputs[i * length + 1] for i in range(distance)}
        return [values[inputs[-1]]]
    mark = inputs.index(task.vocabulary - 2)
    return inputs[mark + 1 : mark + 1 + task.digits]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("distance", [1, 3, 5])
def test_the_answers_are_those_that_the_episode_tells(name: str, distance: int) -> None:
    task = PROBES.create(name)
    inputs_BN, targets_BN = draw(task, distance)
    assert inputs_BN.shape == targets_BN.shape == (200, (distance + 1) * task.segment)
    assert inputs_BN.min() >= 0 and inputs_BN.max() < task.vocabulary
    for inputs, targets in zip(inputs_BN.tolist(), targets_BN.tolist(), strict=True):
        assert [t for t in targets if t != IGNORED] == solve(name, task, inputs, distance)
    asked = targets_BN != IGNORED
    assert not asked[:, : distance * task.segment].any(), "only the last segment asks"


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_last_segment_tells_nothing_about_the_first_answer(name: str) -> None:
    """Answers have the same frequencies whatever the tokens before the first question in the last segment are."""
    task = PROBES.create(name)
    inputs_BN, targets_BN = draw(task, 3, rows=6000)
    asked = targets_BN != IGNORED
    first = asked.float().argmax(1)
    answers = targets_BN[torch.arange(6000), first]
    frequency = answers.bincount() / 6000
    assert frequency.max() < 1.15 * task.chance
    before = inputs_BN[torch.arange(6000), first]
    for token in before.unique():
        chosen = answers[before == token]
        if len(chosen) > 500:
            assert chosen.bincount().max() / len(chosen) < task.chance + 4 * (task.chance / len(chosen)) ** 0.5


def test_who_misses_the_first_segment_still_recalls_the_other_pairs() -> None:
    task = PROBES.create("recall")
    inputs_BN, _ = draw(task, 3, rows=6000)
    asked = inputs_BN[:, -1] == inputs_BN[:, 0]  # the pair of the first segment, which is then a guess
    share = (1 - asked.float().mean()) + asked.float().mean() * task.chance
    assert task.without_first(3) == pytest.approx(share.item(), abs=0.02)
    assert all(PROBES.create(name).without_first(3) == PROBES.create(name).chance for name in ("latch", "copy"))


def test_episodes_are_those_of_the_seed() -> None:
    task = PROBES.create("latch", decoys=True)
    assert torch.equal(draw(task, 4).inputs_BN, draw(task, 4).inputs_BN)
    assert not torch.equal(draw(task, 4).inputs_BN, draw(task, 4, seed=1).inputs_BN)
    middle = draw(task, 4).inputs_BN[:, task.segment : -task.segment]
    assert ((middle >= 4) & (middle < 8)).sum(1).eq(3).all(), "one decoy in each segment between"


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="distance=0 must be at least 1"):
        draw(PROBES.create("copy"), 0)
    with pytest.raises(ValueError, match="distance=7 needs as many different keys, there are 6"):
        draw(PROBES.create("recall"), 7)
    with pytest.raises(ValueError, match="segment=3 cannot hold 2 digits"):
        PROBES.create("passkey", segment=3)


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
    for split in ("train", "test"):
        (babi / f"qa1_single-supporting-fact_{split}.txt").write_text(story)
    (books / "novel.txt").write_text("it was a dark and stormy night . " * 200)
    return {"babi": tmp_path / "babi", "books": books}


def test_facts_stand_in_order_before_the_question(library: dict[str, Path]) -> None:
    task = Facts(**library)
    assert {story.answer for story in task.stories} == {"bathroom", "garden"}, "longer stories are left out"
    inputs_BN, targets_BN = draw(task, 4, rows=50)
    assert (targets_BN[:, :-1] == IGNORED).all()
    for inputs, answer in zip(inputs_BN.tolist(), targets_BN[:, -1].tolist(), strict=True):
        words = [task.words[i] for i in inputs]
        assert words[-4:] in (["where", "is", "mary", "?"], ["where", "is", "john", "?"])
        text, story = " ".join(words), task.words[answer]
        who = words[-2]
        assert f"{who} moved to the {story} ." in " ".join(words[: task.segment])
        if who == "mary":
            assert text.index("mary moved") < text.index("john went")
        assert words.count("stormy") > 0 or task.segment * 5 < 40


def test_facts_need_their_files(library: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no file en/qa2_"):
        Facts(**library, story=2)
    with pytest.raises(FileNotFoundError, match=r"no \.txt or \.txt\.xz file"):
        Facts(library["babi"], tmp_path)
    with pytest.raises(ValueError, match="segment=4 must hold a sentence"):
        Facts(**library, segment=4)


def test_facts_of_the_real_files(shared: Path) -> None:
    task = Facts(shared / "data/babi/babi-en-and-en-10k.tar.xz", shared / "data/books", split="test")
    assert len(task.answers) == 6 and len(task.stories) > 100
    assert draw(task, 7, rows=4).inputs_BN.shape == (4, 8 * task.segment)
