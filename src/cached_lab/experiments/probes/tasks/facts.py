"""Facts in the noise of a novel: stories of bAbI (arXiv:1502.05698) between pieces of a book, the question at the end.

The sentences of a story stand whole, each in one segment, the first of them in the first segment: that is what the
distance is measured from. `babilong` puts them where that benchmark does. The files are yours to give.

Legend: B rows, N tokens of an episode, L tokens of a segment.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import IGNORED, Episode, ProbeTask
from .stories import Library


@PROBES.register(
    "facts",
    asks="holding",
    paper="arXiv:2406.10149",
    title="BABILong",
    chance="1 / 6",
    sizes="at most 2 facts, segments of 16 words",
    solved_by="whatever carries a place with the person; of a story with an object, both of its facts",
)
class Facts(ProbeTask):
    """Where somebody of a bAbI story is, asked at the end of a text that is mostly a novel.

    Args:
        babi: bAbI's archive (tar.xz, tar.gz) or its unpacked folder.
        books: folder with .txt or .txt.xz files.
        story: bAbI's task: 1 (one supporting fact) or 2 (two).
        segment: L. facts: longest story. words: most frequent words of the books that are kept, others are unknown.
        split: stories to begin with, see `Library.part`.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: a segment too short for a sentence; no story of that length.
    """

    bounded_by = "the number of books"

    def __init__(
        self,
        babi: str | Path,
        books: str | Path,
        story: int = 1,
        segment: int = 16,
        facts: int = 2,
        words: int = 200,
        split: str = "train",
    ) -> None:
        if story not in (1, 2):
            raise ValueError(f"story={story} must be 1 or 2: bAbI's tasks whose answers are places")
        if segment < 12:
            raise ValueError(f"segment={segment} must hold a sentence and some noise; take at least 12 tokens")
        self.segment, self.facts = segment, facts
        self.library = Library(babi, books, story, facts, words, split)
        self.vocabulary, self.chance = len(self.library.words), 1 / len(self.library.answers)
        self._parts: dict[str, Facts] = {}
        self.longest = (len(self.library.novel_N) - 1) // segment - 1

    def part(self, split: str) -> Facts:
        if split not in self._parts:
            part = self._parts[split] = copy.copy(self)
            part.library = self.library.part(split)
            part.longest = (len(part.library.novel_N) - 1) // self.segment - 1
        return self._parts[split]

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        count = self.segments(distance)
        inputs_BN = torch.stack([self._row(count, generator) for _ in range(rows)])
        targets_BN = torch.full((rows, count * self.segment), IGNORED)
        targets_BN[:, -1] = inputs_BN[:, -1]
        return Episode(inputs_BN[:, :-1], targets_BN)

    def _row(self, count: int, generator: Generator) -> Tensor:
        """Tokens of an episode, and the answer behind them."""

        def below(limit: int) -> int:
            return int(torch.randint(0, limit, (1,), generator=generator))

        story = self.library.stories[below(len(self.library.stories))]
        n, length, novel_N = count * self.segment, self.segment, self.library.novel_N
        begin = below(len(novel_N) - n)
        tokens = novel_N[begin : begin + n].clone()
        places = [0, *sorted(below(count - 1) for _ in story.sentences[1:])]
        used = [0] * count
        for sentence, place in zip(story.sentences, places, strict=True):
            while used[place] + len(sentence) > length and place < count - 2:
                place += 1
            at = place * length + used[place]
            tokens[at : at + len(sentence)] = self.library.encode(sentence)
            used[place] += len(sentence)
        question = self.library.encode(story.question)
        tokens[n - len(question) :] = question
        return torch.cat([tokens, self.library.encode([story.answer])])
