"""BABILong (arXiv:2406.10149, github.com/booydar/babilong): a story's facts anywhere in a long text, and a question.

Each fact is put into one of the gaps between the sentences of the text, drawn with replacement and sorted, so that
their order stays; all stand before the last segment, which asks. The text is a book's, if you give files, and else
sentences of the same kind about bystanders (`worlds`), which are harder to tell from facts than a book's are.

Legend: B rows, L tokens of a segment, K facts, W tokens of a fact, C cells of a segment, N tokens of the books.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from cached_lab.registries import PROBES

from . import worlds
from .base import IGNORED, Episode, StreamedTask
from .planted import Plan, PlantedTask
from .stories import NAMES, Library, Story

LONGEST_QUESTION = 4
SHORTEST_SENTENCE = 10
"""Words of a book's sentence; shorter ones are left out, as BABILong does."""
COUNTED = 1000
"""Stories on which is counted how often the first segment is needed."""


@PROBES.register(
    "babilong",
    asks="joining",
    paper="arXiv:2406.10149",
    title="BABILong",
    chance="qa1, qa2: 1 / 6; qa3, qa4: 1 / 5; qa5: 1 / 3; of files 1 / answers of the same question",
    sizes="qa1 to qa5 with 2 to 8 facts; the paper: bAbI's 20 tasks and all of their facts",
    solved_by="what keeps facts one by one and in order, and lets bystanders go; qa2 and qa3 join two and three facts",
)
class Babilong(StreamedTask):
    """A story's facts scattered over a text that has nothing to do with them; the end asks what follows from them.

    At distance 0, of files whose stories fit with their question into a segment, both stand there together: attention
    alone answers, which is where a curriculum may begin.

    Without files: stories of four persons, six places and three things, told by a little world model. With bAbI's files
    and a folder of books: its stories, in the books' sentences of at least ten words.

    Args:
        question: bAbI's task. qa1: where somebody is. qa2: where a thing is. qa3: where it was before. qa4: what lies
            north of what. qa5: who gave what to whom.
        babi, books: files as of `Facts`; None for stories of our own.
        segment: L. facts: longest story; None for 4, 6, 8, 2 and 6 sentences of qa1 to qa5 (bAbI has few so short ones
            of qa2, qa3 and qa5).
        words: see `Facts`; of files alone. split: stories to begin with, see `Library.part`; of files alone.
        renamed: persons, places and things of what a training draws are exchanged among themselves each time, so that a
            few thousand stories cannot be learned by heart; of files alone.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: one of babi and books alone; no story of that length; a segment shorter than a question.
    """

    def __init__(
        self,
        question: Literal["qa1", "qa2", "qa3", "qa4", "qa5"] = "qa1",
        babi: str | Path | None = None,
        books: str | Path | None = None,
        segment: int = 16,
        facts: int | None = None,
        words: int = 200,
        split: str = "train",
        renamed: bool = False,
    ) -> None:
        if question not in worlds.KINDS:
            raise ValueError(f"question={question!r} must be one of {', '.join(worlds.KINDS)}")
        kind = worlds.KINDS[question]
        most = kind.most if facts is None else facts
        if most < kind.least:
            raise ValueError(f"facts={facts} must be at least {kind.least} for {question}: fewer answer no question")
        if (babi is None) != (books is None):
            raise ValueError("babi and books go together: give both, or neither for stories of our own")
        if renamed and babi is None:
            raise ValueError("renamed=True is about stories of files, which babi and books name; ours are told anew")
        if babi is None or books is None:
            self.source: _Told | _Read = _Told(question, most, segment)
        else:
            self.source = _Read(Library(babi, books, int(question[2:]), most, words, split), segment, renamed)
        self.segment, self.shortest = segment, self.source.shortest
        self._parts: dict[str, Babilong] = {}
        self.words, self.vocabulary, self.chance = self.source.words, len(self.source.words), self.source.chance

    def part(self, split: str) -> Babilong:
        if isinstance(self.source, _Read) and split not in self._parts:
            part = self._parts[split] = copy.copy(self)
            part.source = _Read(self.source.library.part(split), self.segment)
        return self._parts.get(split, self)

    def without_first(self, distance: int) -> float:
        """Counted on stories: those of which the first segment holds a fact that is needed are a guess."""
        needed = self.source.needs_first(COUNTED, distance, torch.Generator().manual_seed(0))
        return 1 - needed + needed * self.chance

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        return self.source.stream(rows, distance, generator)


class _Told(PlantedTask):
    """Stories of `worlds`, in cells of the width of a fact."""

    words = worlds.WORDS

    def __init__(self, question: str, most: int, segment: int) -> None:
        self._cells(segment, worlds.WIDTH, LONGEST_QUESTION)
        self.question, self.most = question, most
        self.vocabulary, self.chance = len(self.words), 1 / worlds.KINDS[question].choices
        self.shortest = -(-most // self.per_segment)
        self._ids = {word: index for index, word in enumerate(self.words)}
        self._gossip_GW = torch.tensor([self._encoded(said) for said in worlds.gossip(question)])

    def needs_first(self, rows: int, distance: int, generator: Generator) -> float:
        """Share of the episodes that have a needed fact in the first segment."""
        stories, cells_BK = self._drawn(rows, distance, generator)
        return _share_needed(stories, cells_BK < self.per_segment)

    def _drawn(self, rows: int, distance: int, generator: Generator) -> tuple[list[Story], Tensor]:
        """Stories, and the cells of their facts, (B, K); -1 where a story has fewer."""
        random = Random(int(torch.randint(0, 2**62, (), generator=generator)))
        stories = [worlds.tell(self.question, self.most, random) for _ in range(rows)]
        count_B1 = torch.tensor([[len(story.sentences)] for story in stories])
        gaps_B1 = distance * self.per_segment - count_B1 + 1
        fact_K = torch.arange(self.most)
        gap_BK = (torch.rand(rows, self.most, generator=generator, dtype=torch.float64) * gaps_B1).long()
        gap_BK = gap_BK.masked_fill(fact_K >= count_B1, distance * self.per_segment).sort(1).values
        return stories, (gap_BK + fact_K).masked_fill(fact_K >= count_B1, -1)

    def _plan(self, rows: int, distance: int, generator: Generator) -> Plan:
        stories, cells_BK = self._drawn(rows, distance, generator)
        nothing = [[worlds.END] * worlds.WIDTH] * self.most
        facts = [[self._encoded(f) for f in (story.sentences + nothing)[: self.most]] for story in stories]
        pad = [worlds.END] * LONGEST_QUESTION
        questions = [self._encoded([*pad, *story.question][-LONGEST_QUESTION:]) for story in stories]
        answers_BQ = torch.full((rows, LONGEST_QUESTION), IGNORED)
        answers_BQ[:, -1] = torch.tensor([self._ids[story.answer] for story in stories])
        end = self.per_segment * self.width
        left_BL = torch.full((rows, self.segment - end), self._ids[worlds.END])

        def background() -> Tensor:
            which_BC = torch.randint(0, len(self._gossip_GW), (rows, self.per_segment), generator=generator)
            return torch.cat([self._gossip_GW[which_BC].flatten(1), left_BL], 1)

        return Plan(cells_BK, torch.tensor(facts), torch.tensor(questions), answers_BQ, background)

    def _encoded(self, words: list[str]) -> list[int]:
        return [self._ids[word] for word in words]


class _Insertions(NamedTuple):
    """What is put into the books' text: where in the episode each sentence begins, its length and its tokens.

    The last sentence is the question. `begins_B1` are the places of the books at which the episodes begin.
    """

    stories: list[Story]
    starts_BK: Tensor
    lengths_BK: Tensor
    tokens_BKW: Tensor
    begins_B1: Tensor
    answers_B1: Tensor


class _Read(StreamedTask):
    """Stories of files in the sentences of books, which begin again at their end."""

    def __init__(self, library: Library, segment: int, renamed: bool = False) -> None:
        longest = max(len(story.question) for story in library.every)
        if segment < longest:
            raise ValueError(f"segment={segment} must hold a question; take at least {longest} tokens")
        self.library, self.segment, self.words = library, segment, tuple(library.words)
        self.vocabulary, self.chance = len(library.words), library.guess()
        told = [sum(map(len, story.sentences)) for story in library.every]
        asked_too = max(facts + len(story.question) for facts, story in zip(told, library.every, strict=True))
        self.shortest = 0 if asked_too <= segment else -(-max(told) // segment)
        end = int(library.encode([worlds.END]))
        ends = ((library.novel_N == end).nonzero()[:, 0] + 1).tolist()
        sentences = [library.novel_N[a:b] for a, b in zip([0, *ends], ends, strict=False) if b - a >= SHORTEST_SENTENCE]
        if not sentences:
            raise ValueError(f"the books have no sentence of {SHORTEST_SENTENCE} words or more; give a novel")
        self._text_N = torch.cat(sentences)
        self._starts = torch.tensor([0, *map(len, sentences)]).cumsum(0)[:-1]
        used = {word for story in library.every for words in (*story.sentences, story.question) for word in words}
        kinds = [sorted(used & {*kind}) for kind in NAMES] if renamed else []
        self._kinds = [library.encode(kind) for kind in kinds if kind]

    def needs_first(self, rows: int, distance: int, generator: Generator) -> float:
        """Share of the episodes that have a needed fact, or the begin of one, in the first segment."""
        drawn = self._drawn(rows, distance, generator)
        return _share_needed(drawn.stories, drawn.starts_BK < self.segment)

    def _drawn(self, rows: int, distance: int, generator: Generator) -> _Insertions:
        which = torch.randint(0, len(self.library.stories), (rows,), generator=generator).tolist()
        stories = [self.library.stories[index] for index in which]
        texts = [[self.library.encode(words) for words in (*s.sentences, s.question)] for s in stories]
        lengths = [torch.tensor([len(words) for words in text]) for text in texts]
        starts, begins = [], torch.randint(0, len(self._starts), (rows,), generator=generator)
        for row, length_K in enumerate(lengths):
            facts_K = length_K[:-1]
            before = distance * self.segment or self.segment - int(
                length_K[-1]
            )  # at distance 0 the question's own segment
            room = before - int(facts_K.sum())
            gaps = self._gaps(int(begins[row]), room)
            drawn_K = torch.randint(0, gaps, (len(facts_K),), generator=generator).sort().values
            before_K = self._offset(begins[row] + drawn_K) - self._offset(begins[row])
            asked = torch.tensor([(distance + 1) * self.segment - int(length_K[-1])])
            starts.append(torch.cat([before_K + facts_K.cumsum(0) - facts_K, asked]))
        beyond = (distance + 1) * self.segment
        width = max(len(words) for text in texts for words in text)
        count = max(map(len, texts))
        tokens_BKW = torch.zeros(rows, count, width, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens_BKW[row, : len(text)] = pad_sequence([*text, torch.zeros(width, dtype=torch.long)], True)[:-1]
        answers_B1 = self.library.encode(story.answer for story in stories)[:, None]
        if self._kinds:
            names_BV = self._renaming(rows, generator)
            tokens_BKW = names_BV.gather(1, tokens_BKW.flatten(1)).view_as(tokens_BKW)
            answers_B1 = names_BV.gather(1, answers_B1)
        return _Insertions(
            stories,
            pad_sequence(starts, True, beyond),
            pad_sequence(lengths, True),
            tokens_BKW,
            self._offset(begins)[:, None],
            answers_B1,
        )

    def _renaming(self, rows: int, generator: Generator) -> Tensor:
        """(B, V): what each word is called in each row."""
        names_BV = torch.arange(self.vocabulary).repeat(rows, 1)
        for ids_K in self._kinds:
            order_BK = torch.rand(rows, len(ids_K), generator=generator).argsort(1)
            names_BV[:, ids_K] = ids_K[order_BK]
        return names_BV

    def _offset(self, sentences: Tensor) -> Tensor:
        """Where sentences begin; the books come again and again."""
        count = len(self._starts)
        return self._starts[sentences % count] + sentences // count * len(self._text_N)

    def _gaps(self, sentence: int, room: int) -> int:
        """Gaps between sentences in the next `room` tokens behind the begin of a sentence, its own included."""
        again, rest = divmod(int(self._starts[sentence]) + room, len(self._text_N))
        last = again * len(self._starts) + int(torch.searchsorted(self._starts, rest, right=True)) - 1
        return last - sentence + 1

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        drawn = self._drawn(rows, distance, generator)
        for begin in range(0, (distance + 1) * self.segment, self.segment):
            place_L = torch.arange(begin, begin + self.segment)
            into_BKL = place_L - drawn.starts_BK[..., None]
            said_BKL = (into_BKL >= 0) & (into_BKL < drawn.lengths_BK[..., None])
            inserted_BL = into_BKL.clamp(min=0).minimum(drawn.lengths_BK[..., None]).sum(1)
            inputs_BL = self._text_N[(drawn.begins_B1 + place_L - inserted_BL) % len(self._text_N)]
            rows_I, facts_I, places_I = said_BKL.nonzero(as_tuple=True)
            inputs_BL[rows_I, places_I] = drawn.tokens_BKW[rows_I, facts_I, into_BKL[rows_I, facts_I, places_I]]
            targets_BL = torch.full_like(inputs_BL, IGNORED)
            if begin == distance * self.segment:
                targets_BL[:, -1:] = drawn.answers_B1
            yield Episode(inputs_BL, targets_BL)


def _share_needed(stories: list[Story], first_BK: Tensor) -> float:
    """Share of the stories with a needed fact among those in the first segment."""
    needed = [any(first_K[fact] for fact in s.support) for s, first_K in zip(stories, first_BK.tolist(), strict=True)]
    return sum(needed) / len(needed)
