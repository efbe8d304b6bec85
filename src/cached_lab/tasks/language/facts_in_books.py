"""Texts of books with facts in them that the end asks for: data that train a memory on a pretrained decoder.

A text is one of three kinds: pages of a book; pages with two to four sentences of invented facts, repeated at the end
in another order; or pages with a story of bAbI and its question, as in BABILong (arXiv:2406.10149). Facts lie before
the last segment, so that only a memory, or attention over the whole text, knows the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cached_lab.data.babi import Story, read_stories
from cached_lab.data.splits import SPLITS
from cached_lab.data.tokenizers import Tokenizer
from cached_lab.registries import DATASETS
from cached_transformers.checks import at_least_one, shares

from .datasets import HeldOutText

ADJECTIVES = (
    *("red", "green", "old", "small", "heavy", "silver", "broken", "wooden", "quiet", "narrow", "golden", "empty"),
    *("dusty", "painted", "round", "tall", "cold", "bright", "hidden", "plain"),
)
NOUNS = (
    *("lamp", "chair", "ladder", "bottle", "wagon", "clock", "mirror", "basket", "hammer", "candle", "carpet", "drum"),
    *("kettle", "blanket", "bucket", "trumpet", "saddle", "barrel", "fence", "bridge", "tower", "garden", "window"),
    *("table", "needle", "violin", "helmet", "anchor", "cradle", "lantern", "shovel", "pillow"),
)
"""Words of facts; every fourth noun is in validation and test only."""
DIGITS, MOST_FACTS, STORY_FACTS = 3, 4, 4


def fact(adjective: str, noun: str) -> str:
    """Return a fact without its number."""
    return f" The code of the {adjective} {noun} is"


def told_story(story: Story) -> tuple[list[str], str, str]:
    """Return the sentences of a story, its question, and its answer as English text."""
    sentences = [f" {' '.join(words[:-1]).capitalize()}." for words in story.sentences]
    return sentences, f" Question: {' '.join(story.question[:-1]).capitalize()}? Answer:", f" {story.answer}"


@DATASETS.register("facts_in_books")
@dataclass(kw_only=True, eq=False, repr=False)
class FactsInBooks(HeldOutText):
    """Pages of books, each a text of its own, with facts or a story in a share of them.

    Args:
        path: file, folder or archive of books.
        tokenizer: the folder of a pretrained model, or a name of `cached fetch`; others work, too.
        segment_length: tokens in a segment. segments: of a text.
        facts: share of texts with invented facts. stories: share of texts with a story of bAbI.
        babi: bAbI's archive or its unpacked folder, for stories. seed: of the data, independent of training seeds.
        others: see `HeldOutText`.

    Raises:
        ValueError: segments too short for the questions, shares above 1, stories without bAbI, or too little text.
    """

    name = "facts_in_books"
    segment_length: int = 128
    segments: int = 8
    facts: float = 0.5
    stories: float = 0.0
    babi: str | Path | None = None
    seed: int = 0
    reset: str = "document"
    shuffle: bool = True

    def __post_init__(self) -> None:
        at_least_one("", **{"data.segment_length": self.segment_length})
        at_least_one(": facts lie before the last segment", least=2, **{"data.segments": self.segments})
        shares(facts=self.facts, stories=self.stories, both=self.facts + self.stories)
        if self.reset != "document":
            raise ValueError(f"data.reset={self.reset!r}: each text begins with an empty memory; take document")
        if self.stories and self.babi is None:
            raise ValueError(f"data.stories={self.stories} needs data.babi, bAbI's archive or folder")
        super().__post_init__()
        self._plant()

    def _plant(self) -> None:
        """Cut the split into texts of equal length, and put facts into them."""
        draw = np.random.default_rng([self.seed, SPLITS.index(self.split)])
        asked = "test" if self.split == "test" else "train"
        stories = read_stories(Path(self.babi), "qa1", asked, STORY_FACTS) if self.babi is not None else []
        length, ends = self.segment_length * self.segments, np.isin(self.tokens, self._words.sentence_ends)
        texts, place = [], 0
        while True:
            kind = draw.random()
            told, questions = (
                self._facts(draw)
                if kind < self.facts
                else self._story(stories[draw.integers(len(stories))])
                if kind < self.facts + self.stories
                else ([], [])
            )
            room = length - sum(map(len, (*told, *questions)))
            first = length - self.segment_length - sum(map(len, told))
            if sum(map(len, questions)) > self.segment_length or first < 1:
                raise ValueError(f"data.segment_length={self.segment_length} has no room for questions; take more")
            if place + room > len(self.tokens):
                break
            page, gaps = self.tokens[place : place + room], np.flatnonzero(ends[place : place + first]) + 1
            cuts = np.sort(draw.choice(gaps if len(gaps) else np.arange(1, first + 1), len(told)))
            parts = np.split(page, cuts)
            inserted = [part for pair in zip(parts, [*told, page[:0]], strict=True) for part in pair]
            texts.append(np.concatenate([*inserted, *questions]))
            place += room
        if not texts:
            raise ValueError(f"split {self.split!r} of {self.path} has {len(self.tokens)} tokens, a text {length}")
        self.tokens, self.starts = np.concatenate(texts), np.arange(len(texts)) * length
        text = self._words.decode(self.tokens.tolist())
        self.counts = {"tokens": len(self.tokens), "words": len(text.split()), "bytes": len(text.encode())}

    @property
    def _words(self) -> Tokenizer:
        return self.tokenizer  # type: ignore[return-value]  # it replaced the option of its name

    def _facts(self, draw: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Sentences of facts, and the same in another order."""
        nouns = [noun for index, noun in enumerate(NOUNS) if (index % 4 == 3) == (self.split != "train")]
        count = int(draw.integers(2, MOST_FACTS + 1))
        chosen = zip(draw.choice(ADJECTIVES, count), draw.choice(nouns, count, replace=False), strict=True)
        told = [self._encode(f"{fact(*words)} {draw.integers(10 ** (DIGITS - 1), 10**DIGITS)}.") for words in chosen]
        return told, [told[index] for index in draw.permutation(count)]

    def _story(self, story: Story) -> tuple[list[np.ndarray], list[np.ndarray]]:
        sentences, question, answer = told_story(story)
        return [self._encode(sentence) for sentence in sentences], [self._encode(f"{question}{answer}.")]

    def _encode(self, text: str) -> np.ndarray:
        return self._words.encode(text).astype(self.tokens.dtype)
