"""Raw text for encoder-decoders: blocks of a corpus, each with noise for the encoder, to be restored.

Legend: N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from cached_lab.data.pairs import Pair, PairBatch, pad_pairs
from cached_lab.data.samples import Sample
from cached_lab.data.splits import SPLITS
from cached_lab.data.text import TextDataset
from cached_lab.data.tokenizers import SpecialTokens
from cached_lab.registries import DATASETS
from cached_transformers.registry import unknown_name

from .objectives import ObjectiveSpec, create_objective

_SHORTEST = 2  # tokens, enough for every objective
_SENTINELS = 100  # of T5


@DATASETS.register("denoising", paper="arXiv:1910.13461")
class Denoising:
    """Blocks of raw text under an objective of BART or T5; items are pairs of a damaged text and its target.

    Training changes the noise of a row in each epoch; in validation and test it is fixed. A text longer than a block
    continues in the next; a remainder of a single token is left out.

    Args:
        split: "train", "validation" or "test".
        path: file, folder or archive of text.
        corpus: its reader, the name of a text data set: "text", "wikitext2", ...
        objective: a name (`OBJECTIVES`), or {"name": ..., option: value}.
        max_length: longest source or target, with begin and end; blocks are as long as that allows.
        sentinels: number of their ids; None: T5's 100 for an objective that needs some, else 0. A model can change its
            objective if both have equal numbers.
        tokenizer, vocabulary_size: see `Corpus`; special ids are not counted.
        reset: "never" lets blocks cross the ends of documents; "document" begins a block with each.

    Attributes:
        task: of the trainer. augment: True if noise comes from the global generator.
        tokenizer: with the ids of mask, sentinels, padding, begin and end.

    Raises:
        FileNotFoundError, ValueError, ImportError: as the corpus; or options out of range, or too little text.
    """

    name = "denoising"
    task = "translation"

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        corpus: str = "text",
        objective: ObjectiveSpec = "bart",
        max_length: int = 512,
        sentinels: int | None = None,
        tokenizer: str = "bpe",
        vocabulary_size: int | None = None,
        reset: str = "never",
    ) -> None:
        if max_length < 4:
            raise ValueError(f"data.max_length={max_length} must be at least 4: begin, two tokens and end")
        self.objective, self.max_length = create_objective(objective), max_length
        length, needed = self.objective.block(max_length)
        sentinels = (_SENTINELS if needed else 0) if sentinels is None else sentinels
        if needed > sentinels:
            raise ValueError(
                f"data.sentinels={sentinels} do not suffice for the {needed} spans of {length} tokens (data.objective="
                f"{objective}, data.max_length={max_length}); set data.sentinels={needed}, or take shorter blocks"
            )
        options = {"path": path, "tokenizer": tokenizer, "vocabulary_size": vocabulary_size, "reset": reset}
        if corpus not in DATASETS.names():
            raise ValueError(unknown_name("data.corpus", corpus, DATASETS.names()))
        DATASETS.check(corpus, options, "data.corpus")
        text = DATASETS.create(corpus, split=split, **options)
        if not isinstance(text, TextDataset):
            raise ValueError(f"data.corpus={corpus!r} must be a text in memory; take text, wikitext2, ...")
        self.text, self.split, self.augment = text, split, split == "train"
        self.tokenizer = SpecialTokens(text.tokenizer, sentinels)
        self.tokenizer.sentence_ends = text.describe()["sentence_ends"]  # type: ignore[assignment]
        begins = text.starts if reset == "document" else np.zeros(1, dtype=np.int64)
        self._bounds = blocks(begins, len(text), length)
        if not len(self._bounds):
            raise ValueError(f"the {split} split of {text.name!r} has {len(text)} tokens; give a text of 2 or more")
        self._multiple = 8 if max_length % 8 == 0 else 1

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: int) -> Pair:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} items of {self.name!r}")
        index %= len(self)
        seed = [SPLITS.index(self.split), index]
        if self.augment:  # the loader seeds it for this row and epoch
            seed = np.random.randint(0, 2**32, size=4, dtype=np.uint64).tolist()
        return self.pair(index, np.random.default_rng(seed))

    def pair(self, index: int, generator: np.random.Generator) -> Pair:
        """Return row `index` with noise of a generator."""
        start, end = self._bounds[index]
        tokens_N = self.text.tokens[start:end].astype(np.int64)
        source, target = self.objective(tokens_N, self.tokenizer, generator)
        decoder_inputs = np.concatenate([[self.tokenizer.begin], target[:-1]])
        return Pair(*(torch.from_numpy(ids) for ids in (source, decoder_inputs, target)))

    def collate(self, items: Sequence[Pair]) -> PairBatch:
        """Return padded pairs; lengths are multiples of 8 if `max_length` is one."""
        return pad_pairs(items, self.tokenizer.pad, self._multiple)

    def samples(self) -> Iterator[Sample]:
        """Return samples for the fingerprint of the data (`data/samples.py`)."""
        return self.text.samples()

    def describe(self) -> dict[str, object]:
        """Return facts for reports and for building a model; pad, begin and end are ids."""
        special = self.tokenizer
        return {
            "name": self.name,
            "split": self.split,
            "size": len(self),
            "corpus": self.text.name,
            "tokens": len(self.text),
            "tokenizer": self.text.kind,
            "vocabulary": special.vocabulary,
            "max_length": self.max_length,
            "pad": special.pad,
            "begin": special.begin,
            "end": special.end,
            "sentence_ends": special.sentence_ends,
        }


def blocks(begins: np.ndarray, size: int, length: int) -> np.ndarray:
    """(blocks, 2): bounds of blocks of `length` tokens; each document begins a block."""
    ends = [*begins[1:].tolist(), size]
    found = [
        (start, min(start + length, end))
        for begin, end in zip(begins.tolist(), ends, strict=True)
        for start in range(begin, end, length)
    ]
    return np.array([bounds for bounds in found if bounds[1] - bounds[0] >= _SHORTEST], dtype=np.int64).reshape(-1, 2)
