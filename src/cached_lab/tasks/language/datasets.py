"""Text data sets by name: WikiText, Penn Treebank, byte files, local files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cached_lab.data import text_files
from cached_lab.data.splits import check_fraction
from cached_lab.data.text import Corpus, fingerprint
from cached_lab.data.text_files import TextFile
from cached_lab.registries import DATASETS

_TITLE = re.compile(r"(?m)^ ?= [^=\n].* = ?$")


@dataclass(kw_only=True, eq=False, repr=False)
class SplitFiles(Corpus):
    """Text with one file per split, e.g. `wiki.train.tokens`, `ptb.valid.txt`, `test.txt.xz`.

    Args:
        path: folder or archive (.zip, .tar, .tar.xz, ...). Files may be compressed (.xz, .gz, .bz2).
        others: see `Corpus`.
    """

    path: str | Path

    def _key(self, split: str) -> object:
        return [self.name, fingerprint([text_files.split_text(self.path, split)])]

    def _documents(self, split: str) -> Iterator[str]:
        text = text_files.split_text(self.path, split)
        yield from self._parts(text_files.decoded(text.content(), text, self.exact))

    def _parts(self, text: str) -> Iterator[str]:
        """The documents in the text of a split."""
        yield text


@DATASETS.register("wikitext2", paper="arXiv:1609.07843")
class WikiText2(SplitFiles):
    """WikiText-2: two million words of Wikipedia articles, a document each; options as for `SplitFiles`."""

    name = "wikitext2"

    def _parts(self, text: str) -> Iterator[str]:
        # A title is between blank lines; one in the middle of a paragraph is text.
        titles = [m.start() for m in _TITLE.finditer(text) if _blank_around(text, m.start(), m.end())]
        first = len(text) - len(text.lstrip())  # blank lines before the first title belong to its article
        for start, end in pairwise([0, *(title for title in titles if title > first), len(text)]):
            yield text[start:end]


@DATASETS.register("wikitext103", paper="arXiv:1609.07843")
class WikiText103(WikiText2):
    """WikiText-103: 103 million words of Wikipedia articles, a document each; options as for `SplitFiles`."""

    name = "wikitext103"


@DATASETS.register("ptb")
class PennTreebank(SplitFiles):
    """Penn Treebank as prepared by Mikolov, one sentence per line; options as for `SplitFiles`."""

    name, line = "ptb", "sentence"


@dataclass(kw_only=True, eq=False, repr=False)
class HeldOutText(Corpus):
    """Texts without splits, or with files or folders named after splits.

    Args:
        path: file, folder or archive.
        validation_fraction, test_fraction: shares of the end of each text held out, without files or folders named
            after splits.
        others: see `Corpus`.

    Raises:
        ValueError: shares that leave nothing to train on; others as `Corpus`.
    """

    path: str | Path
    validation_fraction: float = 0.05
    test_fraction: float = 0.05

    def __post_init__(self) -> None:
        self.fractions = {"validation": self.validation_fraction, "test": self.test_fraction}
        for split, fraction in self.fractions.items():
            check_fraction(f"data.{split}_fraction", fraction)
        if not 0 < (held := sum(self.fractions.values())) < 1:
            raise ValueError(f"data.validation_fraction + data.test_fraction={held} must add up to less than 1")
        super().__post_init__()

    def _key(self, split: str) -> object:
        texts, tail = self._chosen(split)
        return [self.name, split, fingerprint(texts), self.fractions if tail else None, self.line]

    def _documents(self, split: str) -> Iterator[str]:
        texts, tail = self._chosen(split)
        for text in texts:
            content = text_files.decoded(text.content(), text, self.exact)
            if tail:
                raw = content.encode("utf-8", "surrogateescape")
                content = raw[slice(*self._bounds(raw, split))].decode("utf-8", "surrogateescape")
            if not content:
                raise ValueError(f"{text} is too short to hold out a {split} part; raise data.{split}_fraction")
            yield content

    def _chosen(self, split: str) -> tuple[list[TextFile], bool]:
        """The texts of a split, and True if only a part of each belongs to it."""
        texts = text_files.find_texts(self.path)
        one_file = Path(self.path).expanduser().is_file() and len(texts) == 1
        if not one_file and any(text_files.split_of(text) == "train" for text in texts):
            return text_files.split_texts(self.path, split), False
        return texts, True

    def _bounds(self, content: bytes, split: str) -> tuple[int, int]:
        """Start and end of a split in a text: exact for bytes, at a line end for other tokens."""
        first = round(len(content) * (1 - sum(self.fractions.values())))
        second = round(len(content) * (1 - self.fractions["test"]))
        if not self.exact:
            first, second = (_line_end(content, place) for place in (first, second))
        return {"train": (0, first), "validation": (first, second), "test": (second, len(content))}[split]


@DATASETS.register("enwik8")
@dataclass(kw_only=True, eq=False, repr=False)
class Enwik8(HeldOutText):
    """One file as bytes (enwik8, text8, ...): 90 % for training, then 5 % for validation and 5 % for test.

    Args:
        path: the file, plain, compressed or in an archive.
        tokenizer: "byte"; "bpe" and "word" work too, for text.
        reset, shuffle: without effect, since the file is one document.
        others: see `HeldOutText`.

    Raises:
        ValueError: the path holds several texts; others as `Corpus`.
    """

    name = "enwik8"
    path: str | Path
    tokenizer: str = "byte"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        texts = text_files.find_texts(self.path)
        if len(texts) > 1:
            names = ", ".join(text.name for text in texts[:5])
            raise ValueError(f"{self.path} holds {len(texts)} texts ({names}); give one file, or take data.name=text")
        super().__post_init__()


@DATASETS.register("text")
class LocalText(HeldOutText):
    """Any local text: a file, or a folder or archive of files, each a document; options of `HeldOutText`.

    Files or folders named after splits (train.txt, valid/, ...) are used as such; otherwise a part is held out. The
    word tokenizer separates punctuation.
    """

    name, punctuation = "text", True


def _blank_around(text: str, start: int, end: int) -> bool:
    before = text[max(0, start - 80) : start].split("\n")
    after = text[end : end + 80].split("\n")
    return (len(before) < 3 or not before[-2].strip()) and (len(after) < 2 or not after[1].strip())


def _line_end(content: bytes, place: int) -> int:
    """The first position from `place` on after a line end, or after a blank where lines are long."""
    found = content.find(b"\n", place, place + 4096)
    if found < 0:
        found = content.find(b" ", place)
    return len(content) if found < 0 else found + 1
