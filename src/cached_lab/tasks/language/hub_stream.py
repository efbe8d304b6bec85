"""Text of the Hugging Face hub that is read as it comes ("huggingface_stream"): nothing of it is kept on disk.

The training split is a stream of documents without an end. Validation and test are so many documents, held in memory:
of splits of their own, or those of the training split whose hash says so, which are then never trained on. A document
is in the same split wherever it stands, and so are its copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from cached_lab.data.huggingface import HubShards, load_from_hub
from cached_lab.data.samples import Sample
from cached_lab.data.shard_order import Dealer, Sharded
from cached_lab.data.splits import SPLIT_WORDS, check_fraction, check_split
from cached_lab.data.text import TextDataset, encoded
from cached_lab.data.tokenizers import Tokenizer, check_kind, train_tokenizer
from cached_lab.registries import DATASETS
from cached_transformers.layers.token_loss import perplexity

_LN2 = 0.6931471805599453


class TextStream(TextDataset):
    """A training split without an end, which has neither `tokens` nor `starts`; other splits are as ever.

    Attributes:
        streamed: whether this split is one.
        documents: of the split, in shards. parts, window: see `Dealer`.
    """

    streamed = False
    documents: Sharded[str]
    parts: int
    window: int

    @property
    def shards(self) -> int:
        """Their number."""
        return len(self.documents.names)

    def __len__(self) -> int:
        if self.streamed:
            raise ValueError(f"split {self.split!r} of {self.name!r} is a stream, which has no length; take validation")
        return super().__len__()

    def _sizes(self) -> dict[str, object]:
        return {"shards": self.shards} if self.streamed else super()._sizes()

    def samples(self) -> Iterator[Sample]:
        """Of a stream, how its shards begin: the first document of the first and of the last."""
        if not self.streamed:
            yield from super().samples()
            return
        for shard in dict.fromkeys((0, self.shards - 1)):
            yield next(self.documents.read(shard), "").encode("utf-8", "surrogatepass")

    def scores(self, nats: float, tokens: float) -> dict[str, float]:
        """As of any text; of a stream, whose words nobody has counted, a word's perplexity is not among them, and bits
        per byte only where a token is a byte."""
        if not self.streamed:
            return super().scores(nats, tokens)
        loss = nats / tokens
        values = {"loss": loss, "perplexity": perplexity(loss)}
        return values | ({"bits_per_byte": loss / _LN2} if self.kind == "byte" else {})

    def baselines(self, train: TextDataset) -> dict[str, dict[str, float]]:
        """None, as nobody has counted the tokens of a stream."""
        return {}


@DATASETS.register("huggingface_stream")
@dataclass(eq=False, repr=False)
class HuggingFaceStream(TextStream):
    """Text of any data set of the Hugging Face hub, read as it comes and never kept; a row is a document.

    A run that is stopped goes on in the middle of a file, to the bit. What a model is evaluated on is held in memory.

    Args:
        split: "train", "validation" or "test".
        dataset: its name, e.g. "HuggingFaceFW/fineweb", or a folder of files (.jsonl, .parquet, .txt, compressed).
        config: its configuration, if it has any.
        column: where the text stands.
        tokenizer: "byte", "word" or "bpe"; its vocabulary is built on the first documents to train on.
        vocabulary_size: largest number of token ids; None for all words, or 16,000 byte pairs.
        vocabulary_documents: how many documents of the training split the vocabulary is built on.
        punctuation: whether the word tokenizer separates punctuation from words.
        reset: "document" begins each document at the start of a segment, with an empty memory; "packed" where the one
            before it ends, with an empty memory, too; "never" reads on.
        shuffle: draw a new order of files for each epoch, and of documents within windows.
        window: documents that are drawn from at a time, and held in memory.
        parts: shares of the files, each for as many rows of a batch. A process reads the parts of its rows: with one
            part every process reads all of the data.
        held_out: documents of validation, and of test, at most.
        held_fraction: share of the documents that each of them is taken from, where the data have no such split.

    Raises:
        ImportError: the `datasets` library, or for tokenizer="bpe" the `tokenizers` library, is not installed.
        ValueError: unknown data set, split or column, an option out of range, or more parts than files; while it is
            read, a file that cannot be.
    """

    name = "huggingface_stream"
    split: str
    _: KW_ONLY
    dataset: str
    config: str | None = None
    column: str = "text"
    tokenizer: str = "byte"  # type: ignore[assignment]  # an option first, and then what it names
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
        if self.reset not in ("never", "document", "packed"):
            raise ValueError(f"data.reset={self.reset!r} must be 'never', 'document' or 'packed'")
        for name in ("vocabulary_documents", "window", "parts", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name}={getattr(self, name)} must be at least 1")
        if not 0 < self.held_fraction < 0.5:
            raise ValueError(
                f"data.held_fraction={self.held_fraction} is taken twice from the training documents, for validation "
                "and test; it must lie between 0 and 0.5"
            )
        self.streamed = self.split == "train"
        splits = _splits(self.dataset, self.config)
        training = _documents(splits, "train", self.dataset, self.column, self.held_fraction)
        Dealer(training, 0, self.parts, self.window)  # refuses now what training would
        names = (self.dataset, self.config, self.column, self.held_fraction)
        options = (self.kind, self.vocabulary_size, self.punctuation, self.vocabulary_documents)
        self.tokenizer = _tokenizer(*names, *options)  # type: ignore[assignment]
        self.documents = training
        if not self.streamed:
            self._hold(_documents(splits, self.split, self.dataset, self.column, self.held_fraction))

    def _hold(self, documents: HubShards) -> None:
        """Take the first documents of a split into memory (ValueError: there is none)."""
        texts = list(islice(_once(documents), self.held_out))
        if not texts:
            raise ValueError(
                f"{self.dataset} has no document for {self.split}; raise data.held_fraction={self.held_fraction}"
            )
        arrays = encoded(texts, self.tokenizer, self.line)  # type: ignore[arg-type]
        self.tokens, self.starts = arrays["tokens"], arrays["starts"]
        self.counts = dict(zip(("tokens", "words", "bytes"), arrays["counts"].tolist(), strict=True))


@lru_cache(maxsize=4)
def _splits(dataset: str, config: str | None) -> dict[str, Any]:
    """The splits that there are, under our names (ValueError: none to train on)."""
    loaded = load_from_hub(dataset, config, ", or give local files to data.name=text", streaming=True)
    found = {ours: loaded[name] for ours, words in SPLIT_WORDS.items() for name in loaded if name in words}
    if "train" not in found:
        raise ValueError(f"{dataset} has no split 'train'; it has {', '.join(loaded)}")
    return found


def _documents(splits: dict[str, Any], split: str, dataset: str, column: str, fraction: float) -> HubShards:
    """The documents of a split: its own, or a share of those of training."""
    held = [name for name in ("validation", "test") if name not in splits]
    if split in splits and not (split == "train" and held):
        return HubShards(splits[split], column, f"{dataset}, split {split}")
    return HubShards(splits["train"], column, f"{dataset}, split train", _of_split(split, held, fraction))


def _of_split(split: str, held: list[str], fraction: float) -> Callable[[str], bool]:
    """Whether a document of the training split belongs to a split: by its hash."""
    bounds = {name: (place * fraction, (place + 1) * fraction) for place, name in enumerate(held)}
    low, high = bounds.get(split, (len(held) * fraction, 1.0))

    def belongs(text: str) -> bool:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        return low <= int.from_bytes(digest[:6], "big") / 2**48 < high

    return belongs


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
    """A tokenizer of the first documents to train on; made once for all splits of a process."""
    texts = islice(_once(_documents(_splits(dataset, config), "train", dataset, column, fraction)), count)
    return train_tokenizer(kind, texts, size, punctuation)
