"""Facts in the noise of a novel: stories of bAbI (arXiv:1502.05698) between pieces of a book, the question at the end.

The form is BABILong's (arXiv:2406.10149): the sentences of a story stand in their order at random places of a long text
that has nothing to do with them. The files are yours to give: bAbI's archive or folder, and a folder of books.

Legend: B rows, N tokens of an episode, L tokens of a segment.
"""

from __future__ import annotations

import collections
import lzma
import re
import tarfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from cached_transformers.registry import PROBES

from .tasks import IGNORED, Episode, ProbeTask

UNKNOWN = "<unk>"
_WORD = re.compile(r"[a-z]+|[?.]")


class Story(NamedTuple):
    """Sentences in order, the question, and the answer; all as words."""

    sentences: list[list[str]]
    question: list[str]
    answer: str


@PROBES.register("facts", paper="arXiv:2406.10149")
class Facts(ProbeTask):
    """Where somebody of a bAbI story is, asked at the end of a text that is mostly a novel.

    Args:
        babi: bAbI's archive (tar.xz, tar.gz) or its unpacked folder.
        books: folder with .txt or .txt.xz files.
        story: bAbI's task: 1 (one supporting fact) or 2 (two).
        segment: L. facts: longest story. words: most frequent words of the books that are kept, others are unknown.
        split: "train" or "test": of bAbI; the books' first nine tenths or the rest.

    Raises:
        FileNotFoundError: files are missing.
        ValueError: a segment too short for a sentence; no story of that length.
    """

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
        stories = {part: _stories(Path(babi), story, part, facts) for part in ("train", "test")}
        if not stories[split]:
            raise ValueError(f"bAbI's task {story} has no story of at most facts={facts} sentences; take more")
        self.stories = stories[split]
        novel = _words(Path(books))
        texts = sorted({w for s in stories["train"] + stories["test"] for p in (*s.sentences, s.question) for w in p})
        self.answers = sorted({s.answer for part in stories.values() for s in part})
        frequent = [word for word, _ in collections.Counter(novel).most_common(words)]
        self.words = list(dict.fromkeys([UNKNOWN, *self.answers, *texts, *frequent]))
        self.ids = {word: index for index, word in enumerate(self.words)}
        cut = len(novel) * 9 // 10
        text = novel[:cut] if split == "train" else novel[cut:]
        self.novel_N = torch.tensor([self.ids.get(word, 0) for word in text])
        self.vocabulary, self.chance = len(self.words), 1 / len(self.answers)

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

        story = self.stories[below(len(self.stories))]
        n, length = count * self.segment, self.segment
        begin = below(len(self.novel_N) - n)
        tokens = self.novel_N[begin : begin + n].clone()
        # The first sentence stands in the first segment: that is what the distance is measured from.
        places = [0, *sorted(below(count - 1) for _ in story.sentences[1:])]
        used = [0] * count
        for sentence, place in zip(story.sentences, places, strict=True):
            while used[place] + len(sentence) > length and place < count - 2:
                place += 1
            at = place * length + used[place]
            tokens[at : at + len(sentence)] = self._encode(sentence)
            used[place] += len(sentence)
        question = self._encode(story.question)
        tokens[n - len(question) :] = question
        return torch.cat([tokens, torch.tensor([self.ids[story.answer]])])

    def _encode(self, words: list[str]) -> Tensor:
        return torch.tensor([self.ids[word] for word in words])


def _stories(babi: Path, task: int, split: str, facts: int) -> list[Story]:
    """Stories up to a question that at most `facts` sentences precede."""
    result: list[Story] = []
    sentences: list[list[str]] = []
    for line in _babi_text(babi, task, split).splitlines():
        number, _, text = line.partition(" ")
        if number == "1":
            sentences = []
        if "\t" not in text:
            sentences.append(_WORD.findall(text.lower()))
            continue
        question, answer, _ = text.split("\t", 2)
        if len(sentences) <= facts:
            result.append(Story(list(sentences), _WORD.findall(question.lower()), answer.strip().lower()))
    return result


def _babi_text(babi: Path, task: int, split: str) -> str:
    name = f"qa{task}_"
    if babi.is_file():
        with tarfile.open(babi) as archive:
            for member in archive:
                path = Path(member.name)
                if path.parent.name == "en" and path.name.startswith(name) and path.name.endswith(f"_{split}.txt"):
                    file = archive.extractfile(member)
                    assert file is not None
                    return file.read().decode("utf-8")
    else:
        for path in sorted(babi.rglob(f"{name}*_{split}.txt")):
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(f"{babi} holds no file en/{name}..._{split}.txt; give bAbI's archive or folder as --babi")


def _words(books: Path) -> list[str]:
    files = sorted([*books.glob("*.txt"), *books.glob("*.txt.xz")])
    if not files:
        raise FileNotFoundError(f"{books} holds no .txt or .txt.xz file; give a folder of books as --books")
    words: list[str] = []
    for path in files:
        raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        words += _WORD.findall(raw.decode("utf-8", "replace").lower())
    return words
