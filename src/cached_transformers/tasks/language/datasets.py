"""Text data sets by name: WikiText, Penn Treebank, byte files, books, local files, the Hugging Face hub."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from cached_transformers.data.huggingface import load_from_hub
from cached_transformers.data.splits import SPLIT_WORDS, check_fraction
from cached_transformers.data.text import TextDataset, fingerprint
from cached_transformers.data.text_files import TextFile, decoded, find_texts, split_of, split_text, split_texts
from cached_transformers.registry import DATASETS

_GUTENBERG = re.compile(r"(?m)^\*\*\* ?(START|END) OF .*$")
_TITLE = re.compile(r"(?m)^ ?= [^=\n].* = ?$")


class SplitFiles(TextDataset):
    """Text with one file a split, e.g. `wiki.train.tokens`, `ptb.valid.txt`, `test.txt.xz`.

    Args:
        split: "train", "validation" or "test".
        path: folder, archive (.zip, .tar, .tar.xz, ...), or a mapping from split to one of these or to a file. Files
            may be compressed (.xz, .gz, .bz2).
        tokenizer: "word", "byte" or "bpe"; its vocabulary is built on the training split.
        vocabulary_size: largest number of token ids; all words, or 16,000 byte pairs, when None.
        reset: "never" lets streams run on over the ends of documents; "document" begins each with an empty memory.
        shuffle: a new order of documents for each epoch.

    Raises:
        FileNotFoundError: there is no such path, or no file for the split (or for "train", which the vocabulary needs).
        ValueError: a file is empty, damaged, or not UTF-8; or a wrong option.
        ImportError: tokenizer="bpe" needs the `tokenizers` library.
    """

    title = "text"

    def __init__(
        self,
        split: str,
        *,
        path: str | Path | Mapping[str, str | Path],
        tokenizer: str = "word",
        vocabulary_size: int | None = None,
        reset: str = "never",
        shuffle: bool = False,
    ) -> None:
        self.path = path
        options = {"tokenizer": tokenizer, "vocabulary_size": vocabulary_size, "reset": reset, "shuffle": shuffle}
        super().__init__(self.title, split, **options)  # type: ignore[arg-type]

    def _key(self, split: str) -> object:
        return [self.title, fingerprint([split_text(self.path, split)])]

    def _documents(self, split: str) -> Iterator[str]:
        text = split_text(self.path, split)
        yield from self._cut(decoded(text.content(), text, self.exact))

    def _cut(self, text: str) -> Iterator[str]:
        """The documents in the text of a split."""
        yield text


class WikiText(SplitFiles):
    """WikiText; a document is an article."""

    def _cut(self, text: str) -> Iterator[str]:
        # A title stands between blank lines; one in the middle of a paragraph is text.
        blank = [m.start() for m in _TITLE.finditer(text) if _blank_around(text, m.start(), m.end())]
        first = len(text) - len(text.lstrip())  # blank lines before the first title belong to its article
        bounds = [0, *(start for start in blank if start > first), len(text)]
        for start, end in pairwise(bounds):
            yield text[start:end]


@DATASETS.register("wikitext2", paper="arXiv:1609.07843")
class WikiText2(WikiText):
    """WikiText-2: two million words of Wikipedia articles; options as for `SplitFiles`."""

    title = "wikitext2"


@DATASETS.register("wikitext103", paper="arXiv:1609.07843")
class WikiText103(WikiText):
    """WikiText-103: 103 million words of Wikipedia articles; options as for `SplitFiles`."""

    title = "wikitext103"


@DATASETS.register("ptb")
class PennTreebank(SplitFiles):
    """Penn Treebank as Mikolov prepared it, a sentence a line; options as for `SplitFiles`."""

    title, line = "ptb", "sentence"


class HeldOutText(TextDataset):
    """Texts that are not split yet, or that files or folders named after splits divide.

    Args:
        holdout: "file" keeps whole texts for validation and test, the last in order of their names; "tail" the end of
            each. Not asked where files or folders are named after splits.
    """

    def __init__(
        self,
        name: str,
        split: str,
        *,
        path: str | Path | Mapping[str, str | Path],
        tokenizer: str,
        vocabulary_size: int | None,
        reset: str,
        shuffle: bool,
        holdout: str,
        validation_fraction: float,
        test_fraction: float,
    ) -> None:
        if holdout not in ("file", "tail"):
            raise ValueError(f"data.holdout={holdout!r} must be 'file' (whole texts) or 'tail' (the end of each)")
        check_fraction("data.validation_fraction", validation_fraction)
        if not 0 < validation_fraction + check_fraction("data.test_fraction", test_fraction) < 1:
            raise ValueError(
                f"data.validation_fraction={validation_fraction} and data.test_fraction={test_fraction} must add up "
                "to less than 1, or nothing is left to train on"
            )
        self.path, self.holdout = path, holdout
        self.fractions = {"validation": validation_fraction, "test": test_fraction}
        options = {"tokenizer": tokenizer, "vocabulary_size": vocabulary_size, "reset": reset, "shuffle": shuffle}
        super().__init__(name, split, **options)  # type: ignore[arg-type]

    def _key(self, split: str) -> object:
        texts, tail = self._chosen(split)
        return [self.name, split, fingerprint(texts), self.fractions if tail else None, self.line]

    def _documents(self, split: str) -> Iterator[str]:
        texts, tail = self._chosen(split)
        for text in texts:
            cleaned = self._clean(decoded(text.content(), text, self.exact))
            if not cleaned.strip():
                raise ValueError(f"{text} is an empty document; remove it")
            if tail:
                content = cleaned.encode("utf-8", "surrogateescape")
                cleaned = content[slice(*self._bounds(content, split))].decode("utf-8", "surrogateescape")
            if not cleaned:
                raise ValueError(f"{text} is too short to hold out a {split} part; raise data.{split}_fraction")
            yield cleaned

    def _clean(self, text: str) -> str:
        """The text proper of a document."""
        return text

    def _chosen(self, split: str) -> tuple[list[TextFile], bool]:
        """The texts of a split, and whether each gives only a part."""
        if isinstance(self.path, Mapping):
            return split_texts(self.path, split), False
        texts = find_texts(self.path)
        one_file = Path(self.path).expanduser().is_file() and len(texts) == 1
        if not one_file and any(split_of(text) == "train" for text in texts):
            return split_texts(self.path, split), False
        if self.holdout == "tail" or len(texts) == 1:
            return texts, True
        if len(texts) < 3:
            raise ValueError(
                f"{self.path} holds {len(texts)} texts, which cannot be dealt to three splits; "
                "take data.holdout=tail, which holds out the end of each"
            )
        held = {name: max(1, math.ceil(share * len(texts))) for name, share in self.fractions.items()}
        first, last = len(texts) - sum(held.values()), len(texts) - held["test"]
        if first < 1:
            raise ValueError(f"the held-out shares {self.fractions} leave none of {len(texts)} texts to train on")
        bounds = {"train": (0, first), "validation": (first, last), "test": (last, len(texts))}
        return texts[slice(*bounds[split])], False

    def _bounds(self, content: bytes, split: str) -> tuple[int, int]:
        """Where a split begins and ends in a text; bytes are cut exactly, other tokens where a line ends."""
        first = round(len(content) * (1 - sum(self.fractions.values())))
        second = round(len(content) * (1 - self.fractions["test"]))
        if not self.exact:
            first, second = (_line_end(content, place) for place in (first, second))
        return {"train": (0, first), "validation": (first, second), "test": (second, len(content))}[split]


@DATASETS.register("enwik8")
class Enwik8(HeldOutText):
    """One file as bytes (enwik8, text8, ...): 90 % to train on, then 5 % for validation and 5 % for test.

    Args:
        split: "train", "validation" or "test".
        path: the file, plain, compressed or in an archive.
        tokenizer: "byte"; "bpe" and "word" work too, for text.
        vocabulary_size: for tokenizers other than bytes.
        reset: "never" or "document"; the file is one document.
        shuffle: has nothing to shuffle in one document.
        validation_fraction, test_fraction: shares held out, at the end of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the path holds several texts, or a text that is empty or damaged.
    """

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        tokenizer: str = "byte",
        vocabulary_size: int | None = None,
        reset: str = "never",
        shuffle: bool = False,
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
    ) -> None:
        texts = find_texts(path)
        if len(texts) > 1:
            names = ", ".join(text.name for text in texts[:5])
            raise ValueError(f"{path} holds {len(texts)} texts ({names}); give one file, or take data.name=text")
        super().__init__(
            "enwik8",
            split,
            path=path,
            tokenizer=tokenizer,
            vocabulary_size=vocabulary_size,
            reset=reset,
            shuffle=shuffle,
            holdout="tail",
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
        )


@DATASETS.register("text")
class Text(HeldOutText):
    """Any local text: a file, or a folder or archive of files, each of which is a document.

    Files or folders named after splits (train.txt, valid/, ...) are taken as these; otherwise a part is held out.

    Args:
        split: "train", "validation" or "test".
        path: file, folder, archive, or a mapping from split to one of these.
        tokenizer: "word", "byte" or "bpe". vocabulary_size: largest number of token ids.
        punctuation: whether the word tokenizer separates punctuation from words.
        line: what a line is: "paragraph", "sentence", or "wrapped" where lines end anywhere.
        reset: "never" or "document". shuffle: a new order of documents for each epoch.
        holdout: "tail" holds out the end of each text, "file" whole texts.
        validation_fraction, test_fraction: shares held out.

    Raises:
        FileNotFoundError: there is no such path, or no text.
        ValueError: a text is empty, damaged or not UTF-8; or a wrong option.
    """

    def __init__(
        self,
        split: str,
        *,
        path: str | Path | Mapping[str, str | Path],
        tokenizer: str = "word",
        vocabulary_size: int | None = None,
        punctuation: bool = True,
        line: str = "paragraph",
        reset: str = "never",
        shuffle: bool = False,
        holdout: str = "tail",
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
    ) -> None:
        if line not in ("paragraph", "sentence", "wrapped"):
            raise ValueError(f"data.line={line!r} must be 'paragraph', 'sentence' or 'wrapped'")
        self.line, self.punctuation = line, punctuation
        super().__init__(
            "text",
            split,
            path=path,
            tokenizer=tokenizer,
            vocabulary_size=vocabulary_size,
            reset=reset,
            shuffle=shuffle,
            holdout=holdout,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
        )


@DATASETS.register("books", paper="arXiv:1911.05507")
class Books(HeldOutText):
    """Long documents, one a file (PG-19 and its like); folders train, validation and test are taken as such.

    Licence and header of Project Gutenberg are removed where they are marked.

    Args:
        split: "train", "validation" or "test".
        path: folder or archive of texts.
        tokenizer: "word", "byte" or "bpe". vocabulary_size: largest number of token ids.
        unwrap: join the lines of a paragraph, so that a line end is the end of a paragraph.
        reset: "document" begins each book with an empty memory, "never" runs on.
        shuffle: a new order of books for each epoch.
        holdout: "file" holds out whole books, "tail" the end of each.
        validation_fraction, test_fraction: shares held out.

    Raises:
        FileNotFoundError: there is no such path, or no text.
        ValueError: a book is empty, damaged or not UTF-8; too few books; or a wrong option.
    """

    punctuation = True

    def __init__(
        self,
        split: str,
        *,
        path: str | Path | Mapping[str, str | Path],
        tokenizer: str = "word",
        vocabulary_size: int | None = None,
        unwrap: bool = True,
        reset: str = "document",
        shuffle: bool = True,
        holdout: str = "file",
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
    ) -> None:
        self.unwrap, self.line = unwrap, "paragraph" if unwrap else "wrapped"
        super().__init__(
            "books",
            split,
            path=path,
            tokenizer=tokenizer,
            vocabulary_size=vocabulary_size,
            reset=reset,
            shuffle=shuffle,
            holdout=holdout,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
        )

    def _clean(self, text: str) -> str:
        marks = {found[1]: found for found in _GUTENBERG.finditer(text)}
        end = marks["END"].start() if "END" in marks else len(text)
        text = text[marks["START"].end() if "START" in marks else 0 : end].strip("\r\n") + "\n"
        return unwrapped(text) if self.unwrap else text


@DATASETS.register("huggingface")
class HuggingFace(TextDataset):
    """Text of any data set of the Hugging Face hub, through the `datasets` library; a row is a document.

    Args:
        split: "train", "validation" or "test"; a split that the data set lacks is refused.
        dataset: its name, e.g. "deepmind/pg19", or the path of one on disk. config: its configuration, if it has any.
        column: where the text stands.
        tokenizer: "word", "byte" or "bpe". vocabulary_size: largest number of token ids.
        punctuation: whether the word tokenizer separates punctuation from words.
        reset: "never" or "document". shuffle: a new order of documents for each epoch.

    Raises:
        ImportError: the `datasets` library is not installed.
        ValueError: unknown data set, split or column, or it is not on disk and cannot be fetched.
    """

    def __init__(
        self,
        split: str,
        *,
        dataset: str,
        config: str | None = None,
        column: str = "text",
        tokenizer: str = "word",
        vocabulary_size: int | None = None,
        punctuation: bool = True,
        reset: str = "never",
        shuffle: bool = False,
    ) -> None:
        self.dataset, self.config, self.column, self.punctuation = dataset, config, column, punctuation
        self._rows: dict[str, Any] = {}
        options = {"tokenizer": tokenizer, "vocabulary_size": vocabulary_size, "reset": reset, "shuffle": shuffle}
        super().__init__("huggingface", split, **options)  # type: ignore[arg-type]

    def _load(self, split: str) -> Any:
        if split in self._rows:
            return self._rows[split]
        loaded = load_from_hub(self.dataset, self.config, ", or give local files to data.name=text")
        names = [name for name in loaded if name in SPLIT_WORDS[split]]
        if not names:
            raise ValueError(f"{self.dataset} has no split {split!r}; it has {', '.join(loaded)}")
        rows = loaded[names[0]]
        if self.column not in rows.column_names:
            raise ValueError(f"data.column={self.column!r}: {self.dataset} has {', '.join(rows.column_names)}")
        self._rows[split] = rows
        return rows

    def _key(self, split: str) -> object:
        rows = self._load(split)
        return ["huggingface", self.dataset, self.config, self.column, split, len(rows), rows._fingerprint]

    def _documents(self, split: str) -> Iterator[str]:
        texts = (str(row[self.column]) for row in self._load(split))
        found = False
        for text in texts:
            if text.strip():
                found = True
                yield text
        if not found:
            raise ValueError(f"{self.dataset}, split {split!r}: column {self.column!r} holds no text")


def unwrapped(text: str) -> str:
    """Paragraphs, which blank lines part, on one line each; the blank lines go."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n[ \t]*\n", text))
    return "".join(f"{paragraph}\n" for paragraph in paragraphs if paragraph)


def _blank_around(text: str, start: int, end: int) -> bool:
    before = text[max(0, start - 80) : start].split("\n")
    after = text[end : end + 80].split("\n")
    return (len(before) < 3 or not before[-2].strip()) and (len(after) < 2 or not after[1].strip())


def _line_end(content: bytes, place: int) -> int:
    """The first place from `place` on that follows a line end; where lines are long, one that follows a blank."""
    found = content.find(b"\n", place, place + 4096)
    if found < 0:
        found = content.find(b" ", place)
    return len(content) if found < 0 else found + 1
