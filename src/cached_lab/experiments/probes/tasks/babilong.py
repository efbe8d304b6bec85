"""Stories of bAbI (arXiv:1502.05698) in the text of books: BABILong (arXiv:2406.10149, github.com/booydar/babilong).

Each fact is put into one of the gaps between the sentences of the text, chosen with replacement and sorted, so that
their order stays; all facts precede the last segment, which asks.

Legend: B rows, L tokens of a segment, K facts, W tokens of a fact, N tokens of the books, V vocabulary.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from cached_lab.data.archives import refuse_utf16, unpacked
from cached_lab.data.babi import WORD, read_stories
from cached_lab.registries import PROBES

from .base import Episode, ProbeTask, asked_at_end, nothing_asked

FACTS = {"qa1": 4, "qa2": 6, "qa3": 8, "qa4": 2, "qa5": 6}
"""Sentences of the longest story of each of bAbI's tasks, unless an option says another number."""
NAMES = (
    ("bill", "daniel", "fred", "jeff", "john", "mary", "sandra"),
    ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
    ("apple", "football", "milk"),
)
"""Persons, places and objects of bAbI, interchangeable within their kind."""
SHORTEST_SENTENCE = 10
"""Words of a book's sentence; shorter ones are left out, as in BABILong."""
UNKNOWN, END = "<unk>", "."


@PROBES.register(
    "babilong",
    asks="joining",
    paper="arXiv:2406.10149",
    title="BABILong",
    chance="1 / answers of the same question",
    sizes="qa1 to qa5 with 2 to 8 facts; the paper: bAbI's 20 tasks and all of their facts",
    solved_by="keeping facts one by one and in order; qa2 and qa3 join two and three facts",
)
class BookStories(ProbeTask):
    """A story's facts scattered over the sentences of books; the end asks for a conclusion from them.

    Books start over at their end. At distance 0, if stories fit with their question into a segment, attention answers:
    the beginning of a curriculum.

    Args:
        babi: bAbI's archive (tar.xz, tar.gz) or its unpacked folder. books: folder with .txt or .txt.xz files.
        question: bAbI's task. qa1: a person's place. qa2: an object's place. qa3: its place before. qa4: the place
            north of another. qa5: giver, object or receiver of a gift.
        segment: L. facts: longest story; None for 4, 6, 8, 2 and 6 sentences of qa1 to qa5 (bAbI has few so short ones
            of qa2, qa3 and qa5).
        words: number of frequent words of the books; others are unknown.
        renamed: exchange persons, places and objects among themselves in each training episode, so that a few thousand
            stories cannot be memorised.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: no story of that length; a segment shorter than a question; books without a long sentence.
    """

    def __init__(
        self,
        babi: str | Path,
        books: str | Path,
        question: Literal["qa1", "qa2", "qa3", "qa4", "qa5"] = "qa1",
        segment: int = 16,
        facts: int | None = None,
        words: int = 200,
        renamed: bool = False,
    ) -> None:
        if question not in FACTS:
            raise ValueError(f"question={question!r} must be one of {', '.join(FACTS)}")
        most = FACTS[question] if facts is None else facts
        told, asked = (read_stories(Path(babi), question, split, most) for split in ("train", "test"))
        every, kept = told + asked, -(-len(told) * 9 // 10)
        self._stories = {"train": told[:kept], "valid": told[kept:], "test": asked}
        if not all(self._stories.values()):
            counts = ", ".join(f"{len(stories)} of {split}" for split, stories in self._stories.items())
            raise ValueError(f"facts={most}: {question} has too few stories so short ({counts}); take more")
        self.segment = segment
        if segment < (longest := max(len(story.question) for story in every)):
            raise ValueError(f"segment={segment} must hold a question; take at least {longest} tokens")
        novel = _read_words(Path(books))
        used = sorted({word for story in every for said in (*story.sentences, story.question) for word in said})
        frequent = [word for word, _ in collections.Counter(novel).most_common(words)]
        answers = sorted({story.answer for story in every})
        self.words = tuple(dict.fromkeys([UNKNOWN, *answers, *used, *frequent]))
        self.vocabulary, self._ids = len(self.words), {word: index for index, word in enumerate(self.words)}
        fitting: dict[tuple[str, ...], set[str]] = collections.defaultdict(set)
        for story in every:
            fitting[tuple(story.question)].add(story.answer)
        train = self._stories["train"]
        self.chance = sum(1 / len(fitting[tuple(story.question)]) for story in train) / len(train)
        lengths = [sum(map(len, story.sentences)) for story in every]
        asked_too = max(facts + len(story.question) for facts, story in zip(lengths, every, strict=True))
        self.shortest = 0 if asked_too <= segment else -(-max(lengths) // segment)
        self._novel_N, kinds = self.encode(novel), [sorted({*used} & {*kind}) for kind in NAMES]
        self._parts: dict[str, BookStories] = {}
        self._kinds: list[Tensor] = []
        for split in ("valid", "test", "train"):
            self._parts[split] = self if split == "train" else copy.copy(self)
            self._parts[split]._take(split)
        self._kinds = [self.encode(kind) for kind in kinds if kind] if renamed else []

    def part(self, split: str) -> BookStories:
        """Return the same task with other stories.

        "train" has the first nine tenths of bAbI's training stories and "valid" the rest, both in the first nine tenths
        of the books; "test" has bAbI's test stories, in the rest of the books.
        """
        return self._parts[split]

    def _take(self, split: str) -> None:
        self.stories, cut = self._stories[split], len(self._novel_N) * 9 // 10
        novel_N = self._novel_N[cut:] if split == "test" else self._novel_N[:cut]
        ends = ((novel_N == self._ids[END]).nonzero()[:, 0] + 1).tolist()
        sentences = [novel_N[a:b] for a, b in zip([0, *ends], ends, strict=False) if b - a >= SHORTEST_SENTENCE]
        if not sentences:
            raise ValueError(f"the books have no sentence of {SHORTEST_SENTENCE} words or more; give a novel")
        self._text_N = torch.cat(sentences)
        self._starts = torch.tensor([0, *map(len, sentences)]).cumsum(0)[:-1]

    def encode(self, words: Iterable[str]) -> Tensor:
        """Return the ids of words."""
        return torch.tensor([self._ids.get(word, 0) for word in words])

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        which = torch.randint(0, len(self.stories), (rows,), generator=generator).tolist()
        chosen = [self.stories[index] for index in which]
        texts = [[self.encode(words) for words in (*s.sentences, s.question)] for s in chosen]
        lengths = [torch.tensor([len(words) for words in text]) for text in texts]
        starts, begins = [], torch.randint(0, len(self._starts), (rows,), generator=generator)
        for row, length_K in enumerate(lengths):
            facts_K, asked = length_K[:-1], int(length_K[-1])
            before = distance * self.segment or self.segment - asked  # distance 0: the question's own segment
            gaps = self._gaps(int(begins[row]), before - int(facts_K.sum()))
            drawn_K = torch.randint(0, gaps, (len(facts_K),), generator=generator).sort().values
            before_K = self._offset(begins[row] + drawn_K) - self._offset(begins[row])
            question_at = torch.tensor([(distance + 1) * self.segment - asked])
            starts.append(torch.cat([before_K + facts_K.cumsum(0) - facts_K, question_at]))
        width = max(len(words) for text in texts for words in text)
        tokens_BKW = torch.zeros(rows, max(map(len, texts)), width, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens_BKW[row, : len(text)] = pad_sequence([*text, torch.zeros(width, dtype=torch.long)], True)[:-1]
        answers_B1 = self.encode(story.answer for story in chosen)[:, None]
        if self._kinds:
            names_BV = self._renaming(rows, generator)
            tokens_BKW = names_BV.gather(1, tokens_BKW.flatten(1)).view_as(tokens_BKW)
            answers_B1 = names_BV.gather(1, answers_B1)
        starts_BK1 = pad_sequence(starts, True, (distance + 1) * self.segment)[..., None]
        begins_B1, lengths_BK1 = self._offset(begins)[:, None], pad_sequence(lengths, True)[..., None]
        for begin in range(0, (distance + 1) * self.segment, self.segment):
            place_L = torch.arange(begin, begin + self.segment)
            into_BKL = place_L - starts_BK1
            said_BKL = (into_BKL >= 0) & (into_BKL < lengths_BK1)
            inserted_BL = into_BKL.clamp(min=0).minimum(lengths_BK1).sum(1)
            inputs_BL = self._text_N[(begins_B1 + place_L - inserted_BL) % len(self._text_N)]
            rows_I, facts_I, places_I = said_BKL.nonzero(as_tuple=True)
            inputs_BL[rows_I, places_I] = tokens_BKW[rows_I, facts_I, into_BKL[rows_I, facts_I, places_I]]
            if begin < distance * self.segment:
                yield nothing_asked(inputs_BL)
        yield asked_at_end(inputs_BL, answers_B1)

    def _renaming(self, rows: int, generator: Generator) -> Tensor:
        """Return a permutation of the words per row, (B, V)."""
        names_BV = torch.arange(self.vocabulary).repeat(rows, 1)
        for ids_K in self._kinds:
            order_BK = torch.rand(rows, len(ids_K), generator=generator).argsort(1)
            names_BV[:, ids_K] = ids_K[order_BK]
        return names_BV

    def _offset(self, sentences: Tensor) -> Tensor:
        """Return the places of sentences in the endlessly repeated books."""
        count = len(self._starts)
        return self._starts[sentences % count] + sentences // count * len(self._text_N)

    def _gaps(self, sentence: int, room: int) -> int:
        """Count the gaps between sentences in the `room` tokens from the beginning of a sentence, its own included."""
        again, rest = divmod(int(self._starts[sentence]) + room, len(self._text_N))
        last = again * len(self._starts) + int(torch.searchsorted(self._starts, rest, right=True)) - 1
        return last - sentence + 1


def _read_words(books: Path) -> list[str]:
    files = sorted([*books.glob("*.txt"), *books.glob("*.txt.xz")])
    if not files:
        raise FileNotFoundError(f"{books} holds no .txt or .txt.xz file; give a folder of books as --books")
    words: list[str] = []
    for path in files:
        raw = unpacked(path.read_bytes(), path, path.suffix)
        refuse_utf16(raw, path)
        words += WORD.findall(raw.decode("utf-8", "replace").lower())
    return words
