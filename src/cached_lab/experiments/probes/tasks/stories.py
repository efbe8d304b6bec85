"""Stories with a question, as bAbI (arXiv:1502.05698) tells them, and books to hide them in, read from your files."""

from __future__ import annotations

import collections
import copy
import lzma
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

UNKNOWN = "<unk>"
NAMES = (
    ("bill", "daniel", "fred", "jeff", "john", "mary", "sandra"),
    ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
    ("apple", "football", "milk"),
)
"""Persons, places and things of bAbI's stories, each of which could be any other of its kind."""
FOLDERS = ("en-10k", "en")
"""Of bAbI's archive: stories in English, with ten thousand questions of each task and with a thousand."""
_WORD = re.compile(r"[a-z]+|[?.]")


class Story(NamedTuple):
    """Sentences in order, the question, and the answer, all as words; and which sentences the answer follows from."""

    sentences: list[list[str]]
    question: list[str]
    answer: str
    support: list[int]


class Library:
    """The stories of one of bAbI's tasks, a text from books, and ids for the words of both.

    Args:
        babi: bAbI's archive (tar.xz, tar.gz) or its unpacked folder. books: folder with .txt or .txt.xz files.
        task: bAbI's number. facts: longest story. words: most frequent words of the books that get an id of their own.
        split: which stories, and which of the books; see `part`.

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
        self._which = f"bAbI's task {task} has no story of at most facts={facts} sentences"
        self._take(split)

    def part(self, split: str) -> Library:
        """The same files with other stories. "train": the first nine tenths of bAbI's training stories; "valid": the
        others; both in the first nine tenths of the books. "test": bAbI's, in the rest of the books."""
        library = copy.copy(self)
        library._take(split)
        return library

    def _take(self, split: str) -> None:
        if split not in self._stories:
            raise ValueError(f"split={split!r} must be one of {', '.join(self._stories)}")
        self.stories = self._stories[split]
        if not self.stories:
            raise ValueError(f"{self._which} in split={split!r}; take more")
        cut = len(self._novel_N) * 9 // 10
        self.novel_N = self._novel_N[cut:] if split == "test" else self._novel_N[:cut]

    def encode(self, words: Iterable[str]) -> Tensor:
        """The ids of words."""
        return torch.tensor([self._ids.get(word, 0) for word in words])

    def guess(self) -> float:
        """Share of right guesses among the answers that the same question has in other stories."""
        return sum(1 / len(self._fitting[tuple(story.question)]) for story in self.stories) / len(self.stories)


def read_stories(babi: Path, task: int, split: str, facts: int) -> list[Story]:
    """Stories up to a question that at most `facts` sentences precede; questions in between are left out."""
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
    """A file of the ten thousand questions, of which BABILong is made, where they are there; else of the thousand."""
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
