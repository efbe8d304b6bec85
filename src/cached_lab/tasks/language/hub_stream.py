"""Text of the Hugging Face hub or of local files read as a stream ("huggingface_stream"), without a copy on disk.

The training split is an endless stream of documents. Validation and test are a limited number of documents, held in
memory: of their own splits, or chosen by a hash from the training split, which then never trains on them. Copies of a
document are always in the same split.

A stream has no index and no length, so that a batch is not a function of its step: rows are read step after step, and
their positions are saved with the run. Each row starts the next document as soon as it has finished one. Documents are
dealt in the order in which rows need them, row after row, which depends only on the lengths of documents.

Legend: B rows, N tokens of a step, S segments of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.samples import Sample
from cached_lab.data.splits import SPLIT_WORDS, check_choice, check_split
from cached_lab.data.text import RESETS, TextDataset, encoded
from cached_lab.data.tokenizers import Tokenizer, check_kind, train_tokenizer
from cached_lab.registries import DATASETS
from cached_transformers.checks import at_least_one
from cached_transformers.extras import require

from .shard_order import Dealer, HubShards, as_tensor, from_tensor
from .streams import IGNORED, StreamBatch

VOCABULARY_DOCUMENTS = 10_000
SAVED_SHARDS = 64
"""Most shards of a stream over a data set that was saved to disk."""


@DATASETS.register("huggingface_stream")
@dataclass(eq=False, repr=False)
class HuggingFaceStream(TextDataset):
    """Text of any data set of the Hugging Face hub, read as a stream and never kept; a row is a document.

    A stopped run resumes bitwise in the middle of a file. Validation and test are held in memory. The training split
    has `documents` in shards instead of `tokens` and `starts`. The word tokenizer separates punctuation.

    Args:
        split: "train", "validation" or "test".
        dataset: its name, e.g. "HuggingFaceFW/fineweb", or a folder of files (.jsonl, .parquet, .txt, compressed).
        config: its configuration, if it has any.
        column: of the text.
        tokenizer, vocabulary_size, reset: see `Corpus`; the vocabulary is built on the first 10,000 training documents.
        shuffle: permute the files in each epoch, and documents within windows.
        window: documents that are permuted together, and held in memory.
        held_out: most documents of validation, and of test.
        held_fraction: share of the training documents taken for each of them, if the data have no such split.

    Raises:
        ImportError: the `datasets` library, or for tokenizer="bpe" the `tokenizers` library, is not installed.
        ValueError: unknown data set, split or column, or an option out of range; while reading, a file that cannot be
            read.
    """

    name, punctuation = "huggingface_stream", True
    split: str
    _: KW_ONLY
    dataset: str
    config: str | None = None
    column: str = "text"
    tokenizer: str = "byte"  # type: ignore[assignment]  # the option, later replaced by the tokenizer it names
    vocabulary_size: int | None = None
    reset: str = "never"
    shuffle: bool = True
    window: int = 1000
    held_out: int = 1000
    held_fraction: float = 0.005

    def __post_init__(self) -> None:
        self.kind, self.streamed = self.tokenizer, check_split(self.split) == "train"
        check_kind(self.kind, self.vocabulary_size)
        check_choice("data.reset", self.reset, RESETS)
        at_least_one("", **{"data.window": self.window, "data.held_out": self.held_out})
        if not 0 < self.held_fraction < 0.5:
            raise ValueError(f"data.held_fraction={self.held_fraction} must lie between 0 and 0.5; it is taken twice")
        source = (self.dataset, self.config, self.column, self.held_fraction)
        self.documents = documents_of("train", *source)
        self.tokenizer = _tokenizer(*source, self.kind, self.vocabulary_size)  # type: ignore[assignment]
        self.counts = {"tokens": 1, "bytes": 1} if self.kind == "byte" else {}
        if not self.streamed:
            texts = list(islice(_once(documents_of(self.split, *source)), self.held_out))
            if not texts:
                raise ValueError(f"{self.dataset} has no document for {self.split}; raise data.held_fraction")
            self._hold(encoded(texts, self.tokenizer))  # type: ignore[arg-type]

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

    def baselines(self, train: TextDataset) -> dict[str, dict[str, float]]:
        """Empty: the tokens of a stream are not counted."""
        return {}


@lru_cache(maxsize=4)
def _splits(dataset: str, config: str | None) -> dict[str, Any]:
    """The splits of a data set, as streams; one without splits is "train"."""
    library = require("datasets", extra="language")
    folder = Path(dataset).expanduser()
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    try:
        loaded = library.load_from_disk(folder) if saved else library.load_dataset(dataset, config, streaming=True)
    except Exception as error:  # the library raises many kinds: no network, unknown name, unknown configuration
        raise ValueError(
            f"data.dataset={dataset!r} cannot be loaded: {error}; check the name, or fetch it once on a machine with a "
            "network and keep its cache (HF_HOME) or what save_to_disk writes, or give local files to data.name=text"
        ) from error
    splits = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    found = {split: splits[name] for split, words in SPLIT_WORDS.items() for name in splits if name in words}
    if "train" not in found:
        raise ValueError(f"{dataset} has no split 'train'; it has {', '.join(splits)}")
    if saved:
        return {name: rows.to_iterable_dataset(num_shards=min(len(rows), SAVED_SHARDS)) for name, rows in found.items()}
    return found


def documents_of(split: str, dataset: str, config: str | None, column: str, fraction: float) -> HubShards:
    """The documents of a split: its own, or a share of the training documents, chosen by their hash."""
    splits = _splits(dataset, config)
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
    dataset: str, config: str | None, column: str, fraction: float, kind: str, size: int | None
) -> Tokenizer:
    """A tokenizer of the first training documents, shared by all splits of a process."""
    texts = islice(_once(documents_of("train", dataset, config, column, fraction)), VOCABULARY_DOCUMENTS)
    return train_tokenizer(kind, texts, size, punctuation=True)


class _RowRest(NamedTuple):
    """The rest of a row's document.

    Attributes:
        tokens: ids (left,). before: the id before them. offset: their position in the document. document: its number,
            from 0; -1 before the first.
    """

    tokens: np.ndarray
    before: int
    offset: int
    document: int


class StreamedRows:
    """The rows of a batch; the counterpart of `Streams` for a stream. Every process reads all rows, and takes its own.

    Args:
        data: shards of documents. tokenizer: encodes them.
        rows: B. length: N. align: documents begin at multiples of `align` tokens of their row, with a reset; 0 disables
            this.
        packed: documents begin anywhere, each with its own memory.
        window, seed: see `Dealer`.
    """

    def __init__(
        self,
        data: HubShards,
        tokenizer: Tokenizer,
        rows: int,
        length: int,
        *,
        align: int = 0,
        packed: bool = False,
        window: int = 1,
        seed: int | None = None,
    ) -> None:
        self.dealer = Dealer(data, window=window, seed=seed)
        self.tokenizer, self.length, self.align, self.packed = tokenizer, length, align, packed
        self.rows = [_RowRest(np.zeros(0, dtype=np.int32), tokenizer.start, 0, -1) for _ in range(rows)]
        self._step: int | None = None

    def batch(self, step: int, rows: slice) -> StreamBatch:
        """The batch of some rows at a step; steps are consecutive.

        Raises:
            RuntimeError: neither the last step nor the next one.
        """
        if step != self._step:
            if self._step is not None and step != self._step + 1:
                raise RuntimeError(f"step={step} of a stream does not follow step {self._step}")
            self._step, self._batch = step, self._next()
        return StreamBatch(*(part[rows] if isinstance(part, Tensor) else part for part in self._batch))  # type: ignore[arg-type]

    def _next(self) -> StreamBatch:
        """The next tokens of all rows."""
        align, width = self.align, self.length
        shape = (len(self.rows), width)
        inputs_BN, targets_BN = np.full(shape, self.tokenizer.start, np.int64), np.full(shape, IGNORED, np.int64)
        offset_BN, document_BN = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        fresh_BS = np.zeros((len(self.rows), width // align if align else 1), bool)
        for number, row in enumerate(self.rows):
            fresh_BS[number, 0] |= row.document < 0
            place = 0
            while place < width:
                if not len(row.tokens):
                    row = self._begun(row)
                    if align:
                        fresh_BS[number, place // align] = True
                    fresh_BS[number, 0] |= self.packed and not place
                count = min(width - place, len(row.tokens))
                part, own = slice(place, place + count), row.tokens[:count]
                inputs_BN[number, part] = np.append(row.before, own)[:count]
                targets_BN[number, part] = own
                offset_BN[number, part] = np.arange(row.offset, row.offset + count)
                document_BN[number, part] = row.document
                row = row._replace(tokens=row.tokens[count:], before=int(own[-1]), offset=row.offset + count)
                place += count
                if align and not len(row.tokens):
                    place = -(-place // align) * align
            self.rows[number] = row._replace(tokens=row.tokens.copy())  # frees the part of the document already read
        targets = torch.from_numpy(targets_BN)
        return StreamBatch(
            inputs=torch.from_numpy(inputs_BN),
            targets=targets,
            reset=torch.from_numpy(fresh_BS),
            padding=targets == IGNORED if align else None,
            positions=torch.from_numpy(offset_BN),
            documents=torch.from_numpy(document_BN),
            tokens=int((targets_BN != IGNORED).sum()),
            packed=self.packed,
        )

    def _begun(self, row: _RowRest) -> _RowRest:
        """The row with the next document that has a token."""
        while not len(tokens := self.tokenizer.encode(next(self.dealer)).astype(np.int32)):
            pass
        before = self.tokenizer.start if self.align or self.packed else row.before
        return _RowRest(tokens, before, 0, self.dealer.given - 1)

    def state_dict(self) -> dict[str, Tensor]:
        """The position of the dealer and the rest of each row's document."""
        facts = [(len(row.tokens), row.before, row.offset, row.document) for row in self.rows]
        left = torch.from_numpy(np.concatenate([row.tokens for row in self.rows]))
        return {"dealer": as_tensor(self.dealer.state()), "rows": torch.tensor(facts), "left": left}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Resume from a `state_dict` (ValueError: other shards)."""
        self.dealer.go_on(from_tensor(state["dealer"]))
        lefts = state["left"].split(state["rows"][:, 0].tolist())
        facts = state["rows"][:, 1:].tolist()
        self.rows = [_RowRest(left.numpy().copy(), *fact) for left, fact in zip(lefts, facts, strict=True)]
        self._step = None
