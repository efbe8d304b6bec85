"""Stories with a question, as in bAbI's tasks 1 to 5 (arXiv:1502.05698): told by a little world, or read from files.

Told stories have facts of four words, a question of at most four and an answer of one; every answer that fits the
question is equally likely, since names are interchangeable. Bystanders do the same things with other objects.
"""

from __future__ import annotations

import collections
import copy
import lzma
import re
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

PERSONS, BYSTANDERS = ("bill", "fred", "jeff", "mary"), ("anna", "carl", "dora", "emil")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
OTHER_PLACES = ("attic", "cellar", "garage", "porch")
OBJECTS, OTHER_OBJECTS = ("apple", "football", "milk"), ("book", "coat", "lamp")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
VERBS = ("went", "took", "dropped", "gave", "of")
ASKING = ("where", "before", "what", "who")
END = "."
WORDS = (*PERSONS, *BYSTANDERS, *PLACES, *OTHER_PLACES, *OBJECTS, *OTHER_OBJECTS, *OPPOSITE, *VERBS, *ASKING, END)
WIDTH = 4
"""Words of a told fact."""
NAMES = (("bill", "daniel", "fred", "jeff", "john", "mary", "sandra"), PLACES, OBJECTS)
"""Persons, places and objects of bAbI's files, interchangeable within their kind."""
UNKNOWN = "<unk>"
FOLDERS = ("en-10k", "en")
"""Folders of bAbI's archive: English stories, with ten thousand questions of each task and with a thousand."""
_WORD = re.compile(r"[a-z]+|[?.]")


class Story(NamedTuple):
    """Sentences in order, the question and the answer as words, and the sentences that the answer follows from."""

    sentences: list[list[str]]
    question: list[str]
    answer: str
    support: list[int]


class Visit(NamedTuple):
    """A place where an object or person was, and the fact that tells it."""

    place: str
    fact: int


@dataclass
class StoryWorld:
    """Persons, their places, and the history of each object."""

    random: Random
    facts: list[list[str]] = field(default_factory=list)
    at: dict[str, Visit] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    handled: dict[str, list[int]] = field(default_factory=dict)
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    gifts: list[tuple[int, tuple[str, str, str]]] = field(default_factory=list)

    def move(self) -> None:
        """Let a person go to another place with everything he or she holds."""
        person = self.random.choice(PERSONS)
        now = self.at[person].place if person in self.at else None
        place = self.random.choice([place for place in PLACES if place != now])
        self.at[person] = Visit(place, len(self.facts))
        for thing, holder in self.holder.items():
            if holder == person:
                self.visits[thing].append(self.at[person])
        self.facts.append([person, "went", place, END])

    def take(self) -> None:
        """Let a person take a free object: one never seen before, or dropped at the same place."""
        free = [
            (person, thing)
            for person in self.at
            for thing in OBJECTS
            if thing not in self.holder
            and (thing not in self.visits or self.visits[thing][-1].place == self.at[person].place)
        ]
        if free:
            person, thing = self.random.choice(free)
            self.holder[thing], self.handled[thing] = person, [len(self.facts)]
            self.visits.setdefault(thing, [self.at[person]])
            self.facts.append([person, "took", thing, END])

    def drop(self) -> None:
        """Let a holder drop an object."""
        if self.holder:
            thing = self.random.choice(sorted(self.holder))
            self.handled[thing].append(len(self.facts))
            self.facts.append([self.holder.pop(thing), "dropped", thing, END])

    def give(self) -> None:
        """Let a holder give an object to another person, wherever both are."""
        if self.holder:
            thing = self.random.choice(sorted(self.holder))
            giver = self.holder[thing]
            other = self.random.choice([person for person in PERSONS if person != giver])
            self.holder[thing] = other
            self.gifts.append((len(self.facts), (giver, thing, other)))
            self.facts.append([giver, "gave", thing, other])

    def hand_out(self) -> None:
        """Let a person take a free object, wherever both are: for stories in which places do not matter."""
        if free := [thing for thing in OBJECTS if thing not in self.holder]:
            person, thing = self.random.choice(PERSONS), self.random.choice(free)
            self.holder[thing], self.visits[thing] = person, []
            self.facts.append([person, "took", thing, END])


def _played(random: Random, count: int, acts: list[Callable[[StoryWorld], None]]) -> StoryWorld:
    """Return a world after `count` facts; an impossible act adds none."""
    world = StoryWorld(random)
    while len(world.facts) < count:
        random.choice(acts)(world)
    return world


def _one_fact(random: Random, count: int) -> Story | None:
    world = _played(random, count, [StoryWorld.move])
    person = random.choice(sorted(world.at))
    return Story(world.facts, ["where", person], world.at[person].place, [world.at[person].fact])


def _two_facts(random: Random, count: int) -> Story | None:
    world = _played(random, count, [StoryWorld.move, StoryWorld.move, StoryWorld.take, StoryWorld.drop])
    if not world.visits:
        return None
    thing = random.choice(sorted(world.visits))
    last = world.visits[thing][-1]
    return Story(world.facts, ["where", thing], last.place, sorted({*world.handled[thing], last.fact}))


def _three_facts(random: Random, count: int) -> Story | None:
    world = _played(random, count, [StoryWorld.move, StoryWorld.move, StoryWorld.take, StoryWorld.drop])
    asked = []
    for thing, visits in sorted(world.visits.items()):
        last = {visit.place: index for index, visit in enumerate(visits)}  # the last visit of each place
        asked += [(thing, index) for index in last.values() if index]
    if not asked:
        return None
    thing, index = random.choice(asked)
    before, then = world.visits[thing][index - 1 : index + 1]
    support = sorted({*world.handled[thing], before.fact, then.fact})
    return Story(world.facts, ["where", thing, "before", then.place], before.place, support)


def _two_arguments(random: Random, count: int) -> Story | None:
    line, way = random.sample(PLACES, 3), random.choice(sorted(OPPOSITE))
    pairs = [(line[0], line[1]), (line[1], line[2])]  # the first is that way of the second
    facts = [random.choice([[a, way, "of", b], [b, OPPOSITE[way], "of", a]]) for a, b in pairs]
    asked = random.randrange(2)
    a, b = pairs[asked]
    question, answer = random.choice(
        [
            (["what", way, "of", b], a),
            ([a, way, "of", "what"], b),
            (["what", OPPOSITE[way], "of", a], b),
            ([b, OPPOSITE[way], "of", "what"], a),
        ]
    )
    if random.random() < 0.5:
        return Story(facts, question, answer, [asked])
    return Story(facts[::-1], question, answer, [1 - asked])


def _three_arguments(random: Random, count: int) -> Story | None:
    world = _played(random, count, [StoryWorld.hand_out, StoryWorld.give, StoryWorld.give, StoryWorld.move])
    if not world.gifts:
        return None
    _, gift = random.choice(world.gifts)
    unknown = random.randrange(3)
    # The last gift that agrees in everything except the unknown.
    fact, told = [g for g in world.gifts if all(i == unknown or g[1][i] == gift[i] for i in range(3))][-1]
    giver, thing, other = (("who", "what", "who")[i] if i == unknown else word for i, word in enumerate(gift))
    return Story(world.facts, [giver, "gave", thing, other], told[unknown], [fact])


class StoryKind(NamedTuple):
    """One kind of told story.

    Attributes:
        tell: makes a story of a number of facts, or None if it allows no question.
        least: facts. most: default of the greatest number of facts.
        choices: equally likely answers that fit a question. step: between numbers of facts.
    """

    tell: Callable[[Random, int], Story | None]
    least: int
    most: int
    choices: int
    step: int = 1


KINDS = {
    "qa1": StoryKind(_one_fact, 2, 4, len(PLACES), 2),
    "qa2": StoryKind(_two_facts, 2, 6, len(PLACES)),
    "qa3": StoryKind(_three_facts, 4, 8, len(PLACES) - 1),
    "qa4": StoryKind(_two_arguments, 2, 2, len(PLACES) - 1),
    "qa5": StoryKind(_three_arguments, 2, 6, len(PERSONS) - 1),
}
"""Kinds by the names of bAbI's tasks; the giver, object and receiver of qa5 have three fitting answers each."""


def tell(question: str, most: int, random: Random) -> Story:
    """Tell a story of at most `most` facts."""
    kind = KINDS[question]
    count = random.randrange(kind.least, most + 1, kind.step)
    story = None
    while story is None:
        story = kind.tell(random, count)
    return story


def gossip(question: str) -> list[list[str]]:
    """Return all sentences of the same kind about bystanders and other objects."""
    if question == "qa4":
        return [[one, way, "of", other] for one, other in permutations(OTHER_PLACES, 2) for way in OPPOSITE]
    said = [[who, "went", place, END] for who in BYSTANDERS for place in PLACES]
    if question in ("qa2", "qa3"):
        said += [[who, did, thing, END] for who in BYSTANDERS for did in ("took", "dropped") for thing in OTHER_OBJECTS]
    if question == "qa5":
        said += [[who, "gave", thing, other] for who, other in permutations(BYSTANDERS, 2) for thing in OTHER_OBJECTS]
    return said


class Library:
    """The stories of one of bAbI's tasks, a text from books, and ids for the words of both.

    Args:
        babi: bAbI's archive (tar.xz, tar.gz) or its unpacked folder. books: folder with .txt or .txt.xz files.
        task: bAbI's number. facts: longest story. words: number of frequent words of the books with an id of their own.
        split: stories and part of the books; see `part`.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: there is no story of that length.
    """

    def __init__(self, babi: str | Path, books: str | Path, task: int, facts: int, words: int, split: str) -> None:
        told, asked = (read_stories(Path(babi), task, part, facts) for part in ("train", "test"))
        kept = -(-len(told) * 9 // 10)
        self.every = told + asked
        """The stories of all parts."""
        self._stories = {"train": told[:kept], "valid": told[kept:], "test": asked}
        novel = _read_words(Path(books))
        texts = sorted({w for s in self.every for p in (*s.sentences, s.question) for w in p})
        self._fitting: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
        for story in self.every:
            self._fitting[tuple(story.question)].add(story.answer)
        self.answers = sorted(set().union(*self._fitting.values()))
        frequent = [word for word, _ in collections.Counter(novel).most_common(words)]
        self.words = list(dict.fromkeys([UNKNOWN, *self.answers, *texts, *frequent]))
        self._ids = {word: index for index, word in enumerate(self.words)}
        self._novel_N = self.encode(novel)
        self._missing = f"bAbI's task {task} has no story of at most facts={facts} sentences"
        self._take(split)

    def part(self, split: str) -> Library:
        """Return the same files with other stories.

        "train" has the first nine tenths of bAbI's training stories and "valid" the rest, both in the first nine tenths
        of the books; "test" has bAbI's test stories, in the rest of the books.
        """
        library = copy.copy(self)
        library._take(split)
        return library

    def _take(self, split: str) -> None:
        if split not in self._stories:
            raise ValueError(f"split={split!r} must be one of {', '.join(self._stories)}")
        self.stories = self._stories[split]
        if not self.stories:
            raise ValueError(f"{self._missing} in split={split!r}; take more")
        cut = len(self._novel_N) * 9 // 10
        self.novel_N = self._novel_N[cut:] if split == "test" else self._novel_N[:cut]

    def encode(self, words: Iterable[str]) -> Tensor:
        """Return the ids of words."""
        return torch.tensor([self._ids.get(word, 0) for word in words])

    def guess(self) -> float:
        """Return the accuracy of a guess among the answers that the same question has in any story."""
        return sum(1 / len(self._fitting[tuple(story.question)]) for story in self.stories) / len(self.stories)


def read_stories(babi: Path, task: int, split: str, facts: int) -> list[Story]:
    """Read a story for each question that at most `facts` sentences precede, without the questions between."""
    result: list[Story] = []
    sentences: list[list[str]] = []
    numbers: list[str] = []
    for line in _babi_text(babi, task, split).splitlines():
        number, _, text = line.partition(" ")
        if number == "1":
            sentences, numbers = [], []
        if "\t" not in text:
            sentences.append(_WORD.findall(text.lower()))
            numbers.append(number)
            continue
        question, answer, support = text.split("\t", 2)
        if len(sentences) <= facts:
            needed = [numbers.index(number) for number in support.split()]
            result.append(Story(list(sentences), _WORD.findall(question.lower()), answer.strip().lower(), needed))
    return result


def _babi_text(babi: Path, task: int, split: str) -> str:
    """Return the file with ten thousand questions, as in BABILong, or the file with a thousand if it is missing."""
    name = f"qa{task}_*_{split}.txt"
    if babi.is_file():
        with tarfile.open(babi) as archive:
            members = archive.getmembers()
            for folder in FOLDERS:
                for member in members:
                    if Path(member.name).match(f"{folder}/{name}") and (file := archive.extractfile(member)):
                        return file.read().decode("utf-8")
    else:
        paths = sorted(babi.rglob(name), key=lambda path: (path.parent.name != FOLDERS[0], path))
        if paths:
            return paths[0].read_text(encoding="utf-8")
    raise FileNotFoundError(f"{babi} holds no file en/{name}; give bAbI's archive or folder as --babi")


def _read_words(books: Path) -> list[str]:
    files = sorted([*books.glob("*.txt"), *books.glob("*.txt.xz")])
    if not files:
        raise FileNotFoundError(f"{books} holds no .txt or .txt.xz file; give a folder of books as --books")
    words: list[str] = []
    for path in files:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        words += _WORD.findall(raw.decode("utf-8", "replace").lower())
    return words
