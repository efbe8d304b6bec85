"""Text of the Hugging Face hub read as a stream ("huggingface_stream"), without a copy on disk.

The training split is an endless stream of documents. Validation and test are a limited number of documents, held in
memory: of their own splits, or chosen by a hash from the training split, which then never trains on them. Copies of a
document are always in the same split.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from cached_lab.data.huggingface import HubShards, load_from_hub
from cached_lab.data.samples import Sample
from cached_lab.data.shard_order import Dealer
from cached_lab.data.splits import check_choice, check_fraction, check_split
from cached_lab.data.text import RESETS, TextDataset, encoded
from cached_lab.data.tokenizers import Tokenizer, check_kind, train_tokenizer
from cached_lab.registries import DATASETS
from cached_transformers.checks import at_least_one
from cached_transformers.layers.token_loss import perplexity


@DATASETS.register("huggingface_stream")
@dataclass(eq=False, repr=False)
class HuggingFaceStream(TextDataset):
    """Text of any data set of the Hugging Face hub, read as a stream and never kept; a row is a document.

    A stopped run resumes bitwise in the middle of a file. Validation and test are held in memory. The training split
    has `documents` in shards instead of `tokens` and `starts`.

    Args:
        split: "train", "validation" or "test".
        dataset: its name, e.g. "HuggingFaceFW/fineweb", or a folder of files (.jsonl, .parquet, .txt, compressed).
        config: its configuration, if it has any.
        column: of the text.
        tokenizer: "byte", "word" or "bpe"; its vocabulary is built on the first training documents.
        vocabulary_size: largest number of token ids; None for all words, or 16,000 byte pairs.
        vocabulary_documents: number of training documents that the vocabulary is built on.
        punctuation: separate punctuation from words in the word tokenizer.
        reset: "document" starts each document at the start of a segment, with an empty memory; "packed" directly after
            the previous one, also with an empty memory; "never" keeps the memory.
        shuffle: permute the files in each epoch, and documents within windows.
        window: documents that are permuted together, and held in memory.
        parts: shares of the files, each for equally many rows of a batch. A process reads the parts of its rows: with
            one part every process reads all data.
        held_out: most documents of validation, and of test.
        held_fraction: share of the training documents taken for each of them, if the data have no such split.

    Raises:
        ImportError: the `datasets` library, or for tokenizer="bpe" the `tokenizers` library, is not installed.
        ValueError: unknown data set, split or column, an option out of range, or more parts than files; while reading,
            a file that cannot be read.
    """

    name = "huggingface_stream"
    split: str
    _: KW_ONLY
    dataset: str
    config: str | None = None
    column: str = "text"
    tokenizer: str = "byte"  # type: ignore[assignment]  # the option, later replaced by the tokenizer it names
    vocabulary_size: int | None = None
    vocabulary_documents: int = 10_000
    punctuation: bool = True
    reset: str = "never"
    shuffle: bool = True
    window: int = 1000
    parts: int = 1
    held_out: int = 1000
    held_fraction: float = 0.005

    def __post_init__(self) -> None:
        self.kind = self.tokenizer
        check_kind(self.kind, self.vocabulary_size)
        check_split(self.split)
        check_fraction("data.held_fraction", self.held_fraction)
        check_choice("data.reset", self.reset, RESETS)
        counts = ("vocabulary_documents", "window", "parts", "held_out")
        at_least_one("", **{f"data.{name}": getattr(self, name) for name in counts})
        if not 0 < self.held_fraction < 0.5:
            raise ValueError(f"data.held_fraction={self.held_fraction} must lie between 0 and 0.5; it is taken twice")
        self.streamed = self.split == "train"
        splits = _splits(self.dataset, self.config)
        self.documents = _documents(splits, "train", self.dataset, self.column, self.held_fraction)
        Dealer(self.documents, 0, self.parts, self.window)  # checks the options before training
        names = (self.dataset, self.config, self.column, self.held_fraction)
        options = (self.kind, self.vocabulary_size, self.punctuation, self.vocabulary_documents)
        found = _tokenizer(*names, *options)
        self.tokenizer = found  # type: ignore[assignment]
        if not self.streamed:
            documents = _documents(splits, self.split, self.dataset, self.column, self.held_fraction)
            texts = list(islice(_once(documents), self.held_out))
            if not texts:
                raise ValueError(f"{self.dataset} has no document for {self.split}; raise data.held_fraction")
            self._hold(encoded(texts, found, self.line))

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.documents.names)

    def __len__(self) -> int:
        if self.streamed:
            raise ValueError(f"split {self.split!r} of {self.name!r} is a stream, which has no length; take validation")
        return super().__len__()

    def _sizes(self) -> dict[str, object]:
        return {"shards": self.shards} if self.streamed else super()._sizes()

    def samples(self) -> Iterator[Sample]:
        """For a stream, the first document of the first and the last shard."""
        if not self.streamed:
            yield from super().samples()
            return
        for shard in dict.fromkeys((0, self.shards - 1)):
            yield next(self.documents.read(shard), "").encode("utf-8", "surrogatepass")

    def scores(self, nats: float, tokens: float) -> dict[str, float]:
        """Scores as for any text. A stream has no counts of words and bytes: no word_perplexity, and bits_per_byte only
        for bytes."""
        if not self.streamed:
            return super().scores(nats, tokens)
        loss = nats / tokens
        values = {"loss": loss, "perplexity": perplexity(loss)}
        return values | ({"bits_per_byte": loss / math.log(2)} if self.kind == "byte" else {})

    def baselines(self, train: TextDataset) -> dict[str, dict[str, float]]:
        """Empty: the tokens of a stream are not counted."""
        return {}


@lru_cache(maxsize=4)
def _splits(dataset: str, config: str | None) -> dict[str, Any]:
    return load_from_hub(dataset, config, ", or give local files to data.name=text", streaming=True)


def _documents(splits: dict[str, Any], split: str, dataset: str, column: str, fraction: float) -> HubShards:
    """The documents of a split: its own, or a share of the training documents, chosen by their hash."""
    held = [name for name in ("validation", "test") if name not in splits]
    if split in splits and not (split == "train" and held):
        return HubShards(splits[split], column, f"{dataset}, split {split}")
    bounds = {name: (place * fraction, (place + 1) * fraction) for place, name in enumerate(held)}
    low, high = bounds.get(split, (len(held) * fraction, 1.0))

    def belongs(text: str) -> bool:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        return low <= int.from_bytes(digest[:6], "big") / 2**48 < high

    return HubShards(splits["train"], column, f"{dataset}, split train", belongs)


def _once(documents: HubShards) -> Iterator[str]:
    """All documents, in order."""
    for shard in range(len(documents.names)):
        yield from documents.read(shard)


@lru_cache(maxsize=2)
def _tokenizer(
    dataset: str,
    config: str | None,
    column: str,
    fraction: float,
    kind: str,
    size: int | None,
    punctuation: bool,
    count: int,
) -> Tokenizer:
    """A tokenizer of the first training documents, shared by all splits of a process."""
    texts = islice(_once(_documents(_splits(dataset, config), "train", dataset, column, fraction)), count)
    return train_tokenizer(kind, texts, size, punctuation)
