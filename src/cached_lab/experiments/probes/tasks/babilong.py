"""Stories in a long text: BABILong (arXiv:2406.10149, github.com/booydar/babilong) and a simpler task of two facts.

BABILong puts each fact into one of the gaps between the sentences of the text, chosen with replacement and sorted, so
that their order stays; all facts precede the last segment, which asks. The text is a book's, if files are given, and
otherwise sentences of the same kind about bystanders, which are harder to tell from facts than a book's are.

Legend: B rows, L tokens of a segment, K facts, W tokens of a fact, C cells of a segment, N tokens of the books.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.utils.rnn import pad_sequence

from cached_lab.registries import PROBES

from . import stories
from .base import IGNORED, Episode, StreamedTask
from .planted import PlantedTask, PlantingPlan
from .stories import KINDS, NAMES, Library, Story

LONGEST_QUESTION = 4
SHORTEST_SENTENCE = 10
"""Words of a book's sentence; shorter ones are left out, as in BABILong."""
COUNTED = 1000
"""Stories used to estimate how often the first segment is needed."""
BABILONG: dict[str, Any] = {"paper": "arXiv:2406.10149", "title": "BABILong"}


@PROBES.register(
    "babilong",
    asks="joining",
    **BABILONG,
    chance="qa1, qa2: 1 / 6; qa3, qa4: 1 / 5; qa5: 1 / 3; of files 1 / answers of the same question",
    sizes="qa1 to qa5 with 2 to 8 facts; the paper: bAbI's 20 tasks and all of their facts",
    solved_by="keeping facts one by one and in order, without bystanders; qa2 and qa3 join two and three facts",
)
def babilong(
    question: Literal["qa1", "qa2", "qa3", "qa4", "qa5"] = "qa1",
    babi: str | Path | None = None,
    books: str | Path | None = None,
    segment: int = 16,
    facts: int | None = None,
    words: int = 200,
    split: str = "train",
    renamed: bool = False,
) -> ToldStories | BookStories:
    """A story's facts scattered over an unrelated text; the end asks for a conclusion from them.

    Without files: stories of four persons, six places and three objects. With bAbI's files and a folder of books: its
    stories, in the books' sentences of at least ten words. At distance 0, if stories of files fit with their question
    into a segment, attention answers: a curriculum may begin there.

    Args:
        question: bAbI's task. qa1: a person's place. qa2: an object's place. qa3: its place before. qa4: the place
            north of another. qa5: giver, object or receiver of a gift.
        babi, books: files as of `BabiFacts`; None for told stories.
        segment: L. facts: longest story; None for 4, 6, 8, 2 and 6 sentences of qa1 to qa5 (bAbI has few so short ones
            of qa2, qa3 and qa5).
        words: see `BabiFacts`; of files only. split: stories at the beginning, see `Library.part`; of files only.
        renamed: exchange persons, places and objects among themselves in each training episode, so that a few thousand
            stories cannot be memorised; of files only.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: only one of babi and books; no story of that length; a segment shorter than a question.
    """
    if question not in KINDS:
        raise ValueError(f"question={question!r} must be one of {', '.join(KINDS)}")
    kind = KINDS[question]
    most = kind.most if facts is None else facts
    if most < kind.least:
        raise ValueError(f"facts={facts} must be at least {kind.least} for {question}: fewer answer no question")
    if (babi is None) != (books is None):
        raise ValueError("babi and books go together: give both, or neither for told stories")
    if babi is None or books is None:
        if renamed:
            raise ValueError("renamed=True is about stories of files; give babi and books, or leave it out")
        return ToldStories(question, most, segment)
    return BookStories(Library(babi, books, int(question[2:]), most, words, split), segment, renamed)


def _known_without_first(stories: list[Story], first_BK: Tensor, chance: float) -> float:
    """Return the accuracy where stories with a needed fact in the first segment are guesses."""
    needed = [any(first_K[fact] for fact in s.support) for s, first_K in zip(stories, first_BK.tolist(), strict=True)]
    share = sum(needed) / len(needed)
    return 1 - share + share * chance


class ToldStories(PlantedTask):
    """Told stories in cells of the width of a fact, among gossip about bystanders."""

    words = stories.WORDS

    def __init__(self, question: str, most: int, segment: int) -> None:
        self._cells(segment, stories.WIDTH, LONGEST_QUESTION)
        self.question, self.most = question, most
        self.vocabulary, self.chance = len(self.words), 1 / KINDS[question].choices
        self.shortest = -(-most // self.per_segment)
        self._ids = {word: index for index, word in enumerate(self.words)}
        self._gossip_GW = torch.tensor([self._encoded(said) for said in stories.gossip(question)])

    def without_first(self, distance: int) -> float:
        told, cells_BK = self._drawn(COUNTED, distance, Generator().manual_seed(0))
        return _known_without_first(told, cells_BK < self.per_segment, self.chance)

    def _drawn(self, rows: int, distance: int, generator: Generator) -> tuple[list[Story], Tensor]:
        """Tell stories and choose the cells of their facts, (B, K); -1 where a story has fewer."""
        random = Random(int(torch.randint(0, 2**62, (), generator=generator)))
        told = [stories.tell(self.question, self.most, random) for _ in range(rows)]
        count_B1 = torch.tensor([[len(story.sentences)] for story in told])
        gaps_B1 = distance * self.per_segment - count_B1 + 1
        fact_K = torch.arange(self.most)
        gap_BK = (torch.rand(rows, self.most, generator=generator, dtype=torch.float64) * gaps_B1).long()
        gap_BK = gap_BK.masked_fill(fact_K >= count_B1, distance * self.per_segment).sort(1).values
        return told, (gap_BK + fact_K).masked_fill(fact_K >= count_B1, -1)

    def _plan(self, rows: int, distance: int, generator: Generator) -> PlantingPlan:
        told, cells_BK = self._drawn(rows, distance, generator)
        nothing = [[stories.END] * stories.WIDTH] * self.most
        facts = [[self._encoded(f) for f in (story.sentences + nothing)[: self.most]] for story in told]
        pad = [stories.END] * LONGEST_QUESTION
        questions = [self._encoded([*pad, *story.question][-LONGEST_QUESTION:]) for story in told]
        answers_BQ = torch.full((rows, LONGEST_QUESTION), IGNORED)
        answers_BQ[:, -1] = torch.tensor([self._ids[story.answer] for story in told])
        end = self.per_segment * self.width
        left_BL = torch.full((rows, self.segment - end), self._ids[stories.END])

        def background() -> Tensor:
            which_BC = torch.randint(0, len(self._gossip_GW), (rows, self.per_segment), generator=generator)
            return torch.cat([self._gossip_GW[which_BC].flatten(1), left_BL], 1)

        return PlantingPlan(cells_BK, torch.tensor(facts), torch.tensor(questions), answers_BQ, background)

    def _encoded(self, words: list[str]) -> list[int]:
        return [self._ids[word] for word in words]


class _LibraryTask(StreamedTask):
    """Base of tasks with stories and books from files."""

    def __init__(self, library: Library, segment: int) -> None:
        self.segment, self.vocabulary = segment, len(library.words)
        self._parts: dict[str, _LibraryTask] = {}
        self._take(library)

    def _take(self, library: Library) -> None:
        self.library = library

    def part(self, split: str) -> _LibraryTask:
        if split not in self._parts:
            part = self._parts[split] = copy.copy(self)
            part._take(self.library.part(split))
        return self._parts[split]


class Insertions(NamedTuple):
    """Sentences inserted into the books' text: their places in the episode, lengths and tokens.

    The last sentence is the question. `begins_B1` are the places of the books at which the episodes begin.
    """

    stories: list[Story]
    starts_BK: Tensor
    lengths_BK: Tensor
    tokens_BKW: Tensor
    begins_B1: Tensor
    answers_B1: Tensor


class BookStories(_LibraryTask):
    """Stories of files among the sentences of books, which start over at their end."""

    def __init__(self, library: Library, segment: int, renamed: bool = False) -> None:
        longest = max(len(story.question) for story in library.every)
        if segment < longest:
            raise ValueError(f"segment={segment} must hold a question; take at least {longest} tokens")
        super().__init__(library, segment)
        self.words, self.chance = tuple(library.words), library.guess()
        told = [sum(map(len, story.sentences)) for story in library.every]
        asked_too = max(facts + len(story.question) for facts, story in zip(told, library.every, strict=True))
        self.shortest = 0 if asked_too <= segment else -(-max(told) // segment)
        used = {word for story in library.every for words in (*story.sentences, story.question) for word in words}
        kinds = [sorted(used & {*kind}) for kind in NAMES] if renamed else []
        self._kinds: list[Tensor] = [library.encode(kind) for kind in kinds if kind]

    def _take(self, library: Library) -> None:
        self.library = library
        self._kinds = []
        end = int(library.encode([stories.END]))
        ends = ((library.novel_N == end).nonzero()[:, 0] + 1).tolist()
        sentences = [library.novel_N[a:b] for a, b in zip([0, *ends], ends, strict=False) if b - a >= SHORTEST_SENTENCE]
        if not sentences:
            raise ValueError(f"the books have no sentence of {SHORTEST_SENTENCE} words or more; give a novel")
        self._text_N = torch.cat(sentences)
        self._starts = torch.tensor([0, *map(len, sentences)]).cumsum(0)[:-1]

    def without_first(self, distance: int) -> float:
        drawn = self._drawn(COUNTED, distance, Generator().manual_seed(0))
        return _known_without_first(drawn.stories, drawn.starts_BK < self.segment, self.chance)

    def _drawn(self, rows: int, distance: int, generator: Generator) -> Insertions:
        which = torch.randint(0, len(self.library.stories), (rows,), generator=generator).tolist()
        chosen = [self.library.stories[index] for index in which]
        texts = [[self.library.encode(words) for words in (*s.sentences, s.question)] for s in chosen]
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
        answers_B1 = self.library.encode(story.answer for story in chosen)[:, None]
        if self._kinds:
            names_BV = self._renaming(rows, generator)
            tokens_BKW = names_BV.gather(1, tokens_BKW.flatten(1)).view_as(tokens_BKW)
            answers_B1 = names_BV.gather(1, answers_B1)
        starts_BK = pad_sequence(starts, True, (distance + 1) * self.segment)
        begins_B1 = self._offset(begins)[:, None]
        return Insertions(chosen, starts_BK, pad_sequence(lengths, True), tokens_BKW, begins_B1, answers_B1)

    def _renaming(self, rows: int, generator: Generator) -> Tensor:
        """(B, V): a permutation of the words per row."""
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


@PROBES.register(
    "facts",
    asks="holding",
    **BABILONG,
    chance="1 / 6",
    sizes="at most 2 facts, segments of 16 words",
    solved_by="carrying a place with its person; both facts of a story with an object",
)
class BabiFacts(_LibraryTask):
    """The place of a person or object of a bAbI story, asked at the end of a text that is mostly a novel.

    Each sentence of a story is within one segment, the first one in the first segment; the distance counts from there.

    Args:
        babi: bAbI's archive (tar.xz, tar.gz) or its unpacked folder.
        books: folder with .txt or .txt.xz files.
        story: bAbI's task: 1 (one supporting fact) or 2 (two).
        segment: L. facts: longest story. words: number of frequent words of the books; others are unknown.
        split: stories at the beginning, see `Library.part`.

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
        super().__init__(Library(babi, books, story, facts, words, split), segment)
        self.facts, self.chance = facts, 1 / len(self.library.answers)

    def _take(self, library: Library) -> None:
        self.library, self.longest = library, (len(library.novel_N) - 1) // self.segment - 1

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        inputs_BN = torch.stack([self._row(distance + 1, generator) for _ in range(rows)])
        targets_BN = torch.full_like(inputs_BN[:, :-1], IGNORED)
        targets_BN[:, -1] = inputs_BN[:, -1]
        return map(Episode, inputs_BN[:, :-1].split(self.segment, 1), targets_BN.split(self.segment, 1))

    def _row(self, count: int, generator: Generator) -> Tensor:
        """Return the tokens of an episode, followed by the answer."""

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
