"""Text for language modelling. A split is one long sequence of token ids, divided into documents.

Every token of a split is predicted exactly once; the tokenizer's `start` precedes the first one. The sum of all losses
is therefore a property of the text, whatever the tokenizer, and gives bits per byte and perplexity per word.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from cached_transformers.layers.token_loss import perplexity

from .samples import Sample
from .splits import check_choice, check_split
from .store import Arrays, load_or_build
from .text_files import TextFile
from .tokenizers import (
    PretrainedTokenizer,
    Tokenizer,
    check_kind,
    load_tokenizer,
    pretrained_folder,
    train_tokenizer,
)

VERSION = 1  # to be raised when the same text gives other ids
RESETS = ("never", "document", "packed")


class TextDataset:
    """A split of a corpus as token ids, with the tokenizer of the training split.

    Attributes:
        task: name of the training task.
        tokenizer: from text to ids and back. kind: its name.
        tokens: ids (size,). starts: start of each document (documents,).
        counts: "tokens", "words" and "bytes" of the split; of a stream, at most their ratio.
        line: unit of a line, "paragraph" or "sentence".
        punctuation: the word tokenizer separates it from words.
    """

    task = "language"
    name: str
    split: str
    kind: str
    tokenizer: Tokenizer
    tokens: np.ndarray
    starts: np.ndarray
    counts: dict[str, int]
    reset: str
    shuffle: bool
    line = "paragraph"
    punctuation = False

    def __len__(self) -> int:
        return len(self.tokens)

    def samples(self) -> Iterator[Sample]:
        """Content that identifies the text (`data/samples.py`)."""
        yield self.tokens
        yield self.starts

    def describe(self) -> dict[str, object]:
        """Facts for reports and for building a model; ends are token ids, empty where the tokenizer has none."""
        lines = self.tokenizer.line_ends
        return {
            "name": self.name,
            "split": self.split,
            **self._sizes(),
            "tokenizer": self.kind,
            "vocabulary": self.tokenizer.vocabulary,
            "sentence_ends": lines if self.line == "sentence" else self.tokenizer.sentence_ends,
            "paragraph_ends": lines if self.line == "paragraph" else (),
        }

    def _sizes(self) -> dict[str, object]:
        return {"size": len(self), "documents": len(self.starts), **self.counts}

    def scores(self, nats: float, tokens: float) -> dict[str, float]:
        """Scores from a loss summed over `tokens` tokens.

        loss (nats) and perplexity are per token; bits_per_byte and word_perplexity, for lossless tokenizers, are per
        byte and per word of the text (as for WikiText: blank-separated, a line end counts as one word).
        """
        loss = nats / tokens
        values = {"loss": loss, "perplexity": perplexity(loss)}
        if self.tokenizer.lossless:
            per_token = {unit: count / self.counts["tokens"] for unit, count in self.counts.items()}
            if "bytes" in per_token:
                values["bits_per_byte"] = loss / math.log(2) / per_token["bytes"]
            if "words" in per_token:
                values["word_perplexity"] = perplexity(loss / per_token["words"])
        return values

    def baselines(self, train: TextDataset) -> dict[str, dict[str, float]]:
        """Scores of the unigram model of `train` with add-one smoothing."""
        size = self.tokenizer.vocabulary
        counts = np.bincount(train.tokens, minlength=size) + 1
        seen = np.bincount(self.tokens, minlength=size)
        nats = float(-(seen * np.log(counts / counts.sum())).sum())
        return {"unigram": self.scores(nats, len(self))}

    def _hold(self, arrays: Arrays) -> None:
        """Take the arrays of `encoded`."""
        self.tokens, self.starts = arrays["tokens"], arrays["starts"]
        self.counts = dict(zip(("tokens", "words", "bytes"), arrays["counts"].tolist(), strict=True))


@dataclass(eq=False, repr=False)
class Corpus(TextDataset):
    """A text data set read from files; the fields of a subclass are its options.

    Subclasses read the documents of a split (`_documents`) and name everything that decides them (`_key`).

    Args:
        split: "train", "validation" or "test".
        tokenizer: "word", "byte" or "bpe", with a vocabulary of the training split; or that of a pretrained model, by
            its folder or a name of `cached fetch`.
        vocabulary_size: largest number of token ids; None for all words, or 16,000 byte pairs.
        reset: "never" lets a stream run on from document to document, as Transformer-XL does; "document" starts each
            document at the start of a segment, with an empty memory, after padding; "packed" starts each document with
            an empty memory directly after the previous one, anywhere in a segment.
        shuffle: permute the documents in each epoch of training.

    Raises:
        FileNotFoundError: no such path, no text in it, or none for the split (or for "train", which the vocabulary
            needs).
        ValueError: a text is empty, damaged or not UTF-8; or a wrong option.
        ImportError: tokenizer="bpe" needs the `tokenizers` library.
    """

    split: str
    _: KW_ONLY
    tokenizer: str = "word"  # type: ignore[assignment]  # the option, later replaced by the tokenizer it names
    vocabulary_size: int | None = None
    reset: str = "never"
    shuffle: bool = False

    def __post_init__(self) -> None:
        self.kind, size = self.tokenizer, self.vocabulary_size
        check_kind(self.kind, size)
        check_choice("data.reset", self.reset, RESETS)
        check_split(self.split)
        key: dict[str, object] = {"kind": self.kind, "size": size, "punctuation": self.punctuation, "version": VERSION}
        found: Tokenizer
        if (folder := pretrained_folder(self.kind)) is not None:
            found = PretrainedTokenizer.of_model(folder)
            key["kind"] = hashlib.sha256(found.dump()).hexdigest()
        else:
            if self.kind != "byte":
                key["train"] = self._key("train")
            found = trained_tokenizer(self.kind, key, lambda: self._documents("train"), size, self.punctuation)
        self.tokenizer = found  # type: ignore[assignment]
        text = {**key, "text": self._key(self.split), "line": self.line}
        self._hold(load_or_build("text", text, lambda: encoded(self._documents(self.split), found)))

    def _key(self, split: str) -> object:
        """Everything that decides the documents of a split, as JSON."""
        raise NotImplementedError("abstract: a text data set names the source of its documents")

    def _documents(self, split: str) -> Iterator[str]:
        """The documents of a split, in order; none is empty."""
        raise NotImplementedError("abstract: a text data set reads its documents")

    @property
    def exact(self) -> bool:
        """True if every byte of the files counts."""
        return self.kind == "byte"


def trained_tokenizer(
    kind: str, key: Mapping[str, object], texts: Callable[[], Iterable[str]], size: int | None, punctuation: bool
) -> Tokenizer:
    """Train a tokenizer, or load it from the cache under `key`."""

    def train() -> Arrays:
        return {"tokenizer": np.frombuffer(train_tokenizer(kind, texts(), size, punctuation).dump(), dtype=np.uint8)}

    stored = train() if kind == "byte" else load_or_build("vocabulary", key, train)
    return load_tokenizer(stored["tokenizer"].tobytes())


def encoded(documents: Iterable[str], tokenizer: Tokenizer) -> Arrays:
    """ "tokens", "starts" and "counts" (tokens, words, bytes) of documents."""
    parts, words, size = [], 0, 0
    for text in documents:
        parts.append(tokenizer.encode(text))
        words += len(text.split()) + text.count("\n")
        size += len(text.encode("utf-8", "surrogateescape"))
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
    kind = next(k for k in (np.uint8, np.uint16, np.int32) if tokenizer.vocabulary - 1 <= np.iinfo(k).max)
    tokens = np.concatenate(parts).astype(kind)
    return {"tokens": tokens, "starts": starts, "counts": np.array([len(tokens), words, size], dtype=np.int64)}


def fingerprint(texts: list[TextFile]) -> list[list[str | None]]:
    """Name and content digest of texts, for the key of a cache."""
    return [[text.name, text.member, _digest(text.path, text.path.stat().st_mtime_ns)] for text in texts]


@lru_cache(maxsize=256)
def _digest(path: Path, modified: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
