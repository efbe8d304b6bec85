"""Documents of noise with facts in them, and a question at the end: three data sets of RMT at a million tokens.

Paper: Bulatov, Kuratov, Burtsev, arXiv:2304.11062. There facts and questions are sentences among pages of books; here
each word is an id, so that a small model without pre-training can read them.

    memorise  a fact at the beginning:        Mary went garden  . . . . .  . . . . .  where Mary?
    detect    the fact anywhere               . . . . .  . Mary went garden . .  . .  where Mary?
    reason    two facts anywhere, about two:  . John went hall  . . Mary went garden  where Mary?

The answer is one of six places, which occur equally often. A fact lies within one segment.

Legend: N tokens.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.splits import SPLITS
from cached_lab.registries import DATASETS
from cached_transformers.checks import at_least_one
from cached_transformers.registry import unknown_name

from .dataset import DocumentDataset

PERSONS, PLACES = 4, 6
WENT, WHERE = 0, 1
FIRST_PERSON = 2
FIRST_PLACE = FIRST_PERSON + PERSONS
FIRST_NOISE = FIRST_PLACE + PLACES
FACT, QUESTION = 3, 2
"""Tokens of a fact (person, went, place) and of a question (where, person)."""
KINDS = {"memorise": 1, "detect": 1, "reason": 2}
"""Facts in a document of each kind."""


@DATASETS.register("planted_documents", paper="arXiv:2304.11062")
@dataclass(eq=False, repr=False)
class PlantedDocuments(DocumentDataset):
    """Noise with facts in it and a question at the end, of any length; the answer is one of six places.

    Labels of a split are dealt evenly. Everything else of a training document is sampled again in each epoch.

    Args:
        split: "train", "validation" or "test".
        kind: "memorise", a fact at the beginning; "detect", anywhere; "reason", two of them, about two persons.
        segment_length: tokens in a segment. segments: of a document.
        noise: number of ids without meaning, which fill a document.
        train_size, validation_size, test_size: documents of each split.
        seed: of the data set; independent of training seeds.

    Raises:
        ValueError: an unknown kind, segments too short for two facts and a question, or a size below 1.
    """

    split: str
    _: KW_ONLY
    kind: str = "memorise"
    segment_length: int = 32
    segments: int = 7
    noise: int = 50
    train_size: int = 20_000
    validation_size: int = 600
    test_size: int = 1200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(unknown_name("data.kind", self.kind, list(KINDS)))
        size = self.generated_size((self.train_size, self.validation_size, self.test_size), self.seed)
        shortest = 2 * FACT + QUESTION
        if self.segment_length < shortest:
            raise ValueError(f"data.segment_length={self.segment_length} must be at least {shortest}: facts, question")
        at_least_one("", **{"data.noise": self.noise})
        draw = np.random.default_rng([self.seed, SPLITS.index(self.split)])
        labels = draw.permutation(np.arange(size) % PLACES)
        super().__init__("planted_documents", self.split, labels, PLACES, vocabulary=FIRST_NOISE + self.noise)

    @classmethod
    def foretell(cls, **options: Any) -> dict[str, object]:
        """The result of `describe` for these options, without the labels of the training split."""
        return cls("validation", **options).describe()

    def document(self, index: int, segments: int | None = None, epoch: int = 0) -> tuple[Tensor, int]:
        """One document of exactly `segments` segments; None for those of the data."""
        place, count = self.position(index), self.segments if segments is None else segments
        draw = np.random.default_rng([self.seed, SPLITS.index(self.split), place, epoch, count])
        answer, length = int(self.labels[place]), count * self.segment_length
        tokens_N = FIRST_NOISE + draw.integers(self.noise, size=length)
        persons = draw.permutation(PERSONS)[:2]
        others = draw.choice([p for p in range(PLACES) if p != answer], size=1)
        starts = [0]
        if self.kind != "memorise":
            in_segment = np.arange(0, self.segment_length - FACT + 1, FACT)
            free = (np.arange(0, length, self.segment_length)[:, None] + in_segment).ravel()
            starts = draw.choice(free[free + FACT <= length - QUESTION], size=KINDS[self.kind], replace=False).tolist()
        for start, person, where in zip(starts, persons, [answer, *others], strict=False):
            tokens_N[start : start + FACT] = FIRST_PERSON + person, WENT, FIRST_PLACE + where
        tokens_N[-QUESTION:] = WHERE, FIRST_PERSON + persons[0]
        return torch.from_numpy(tokens_N), answer
