"""A person's place, asked long after it was told: the tasks of RMT-1M (arXiv:2304.11062), in ids instead of words.

A fact is "person, went, place", of four persons and six places. The noise holds meaningless words and sentences of the
same form about four other persons, so only the person tells a fact from noise. The end asks for one person's place.

Legend: B rows, L tokens of a segment, C cells of a segment, K facts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import IGNORED, NOISE, distinct
from .planted import PlantedTask, PlantingPlan, noise_of

PERSONS, PLACES = 4, 6
WENT, ASK = 2 * PERSONS + PLACES, 2 * PERSONS + PLACES + 1
WIDTH = 3
RMT_1M: dict[str, Any] = {
    "paper": "arXiv:2304.11062",
    "title": "RMT-1M",
    "chance": "1 / 6",
    "sizes": "segments of 16; the paper: 499 tokens, 1 to 4096 segments",
}


class _SixPlaces(PlantedTask):
    """Base of the three tasks.

    Ids: persons, others, places, "went", "where is", noise.

    Args:
        segment: L. decoys: share of the noise that is sentences about others.

    Raises:
        ValueError: a segment shorter than a sentence; decoys outside 0..1.
    """

    facts = 1
    vocabulary, chance = ASK + 1 + NOISE, 1 / PLACES

    def __init__(self, segment: int = 16, decoys: float = 0.5) -> None:
        self._cells(segment, WIDTH, 2)
        if not 0 <= decoys <= 1:
            raise ValueError(f"decoys={decoys} must be 0 (none of the noise is sentences) to 1 (all of it)")
        self.decoys, self.shortest = decoys, -(-self.facts // self.per_segment)

    def _places(self, rows: int, distance: int, generator: Generator) -> Tensor:
        """Choose the cells of the facts, (B, K)."""
        return distinct(rows, self.facts, distance * self.per_segment, generator)

    def _plan(self, rows: int, distance: int, generator: Generator) -> PlantingPlan:
        who_BK = distinct(rows, self.facts, PERSONS, generator)
        where_BK = 2 * PERSONS + distinct(rows, self.facts, PLACES, generator)
        cells_BK = self._places(rows, distance, generator)
        statements_BKW = torch.stack([who_BK, torch.full_like(who_BK, WENT), where_BK], 2)
        ending_BQ = torch.stack([torch.full((rows,), ASK), who_BK[:, 0]], 1)
        answers_BQ = torch.stack([torch.full((rows,), IGNORED), where_BK[:, 0]], 1)
        words = noise_of(rows, self.segment, ASK + 1, NOISE, generator)
        size, end = (rows, self.per_segment), self.per_segment * WIDTH

        def background() -> Tensor:
            inputs_BL = words()
            who_BC = PERSONS + torch.randint(0, PERSONS, size, generator=generator)
            where_BC = 2 * PERSONS + torch.randint(0, PLACES, size, generator=generator)
            sentences_BCW = torch.stack([who_BC, torch.full(size, WENT), where_BC], 2)
            said_BC1 = torch.rand(*size, 1, generator=generator) < self.decoys
            cells_BCW = inputs_BL[:, :end].unflatten(1, (self.per_segment, WIDTH))
            inputs_BL[:, :end] = torch.where(said_BC1, sentences_BCW, cells_BCW).flatten(1)
            return inputs_BL

        return PlantingPlan(cells_BK, statements_BKW, ending_BQ, answers_BQ, background)


@PROBES.register(
    "memorise", asks="holding", **RMT_1M, solved_by="a state that learns what to write; a store that reaches back"
)
class Memorise(_SixPlaces):
    """A fact in the first segment, and sentences about others in all of them; the end asks for the fact."""

    def _places(self, rows: int, distance: int, generator: Generator) -> Tensor:
        return torch.randint(0, self.per_segment, (rows, 1), generator=generator)


@PROBES.register(
    "detect", asks="holding", **RMT_1M, solved_by="as memorise, if the written fact outlives any number of segments"
)
class Detect(_SixPlaces):
    """The task memorise with the fact in any segment except the last, uniformly."""

    def without_first(self, distance: int) -> float:
        return (distance - 1 + self.chance) / distance


@PROBES.register(
    "reason",
    asks="binding",
    **RMT_1M,
    solved_by="binding a person to a place; a memory of two places without their persons is right in a half",
)
class Reason(_SixPlaces):
    """Two facts about different persons and places before the last segment; the end asks for one of them."""

    facts = 2

    def without_first(self, distance: int) -> float:
        # The asked fact is in the first segment; the other fact, if it is elsewhere, leaves five places.
        cells = distance * self.per_segment
        both = (self.per_segment - 1) / (cells - 1)
        guess = both / PLACES + (1 - both) / (PLACES - 1)
        return (distance - 1 + guess) / distance
