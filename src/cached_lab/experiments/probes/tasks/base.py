"""Episodes of probe tasks, their streams, noise, and random places.

Legend: B rows, N tokens of an episode, L tokens of a segment, K chosen items.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

IGNORED = -100
NOISE = 4
"""Number of noise tokens."""
AT_ONCE, PIECE = 2**20, 2**14
"""Noise tokens sampled in one call: for all rows together, and for one row of a longer text."""


class Episode(NamedTuple):
    """Token ids and targets, (B, N) or of one segment (B, L); the target is -100 where nothing is asked."""

    inputs_BN: Tensor
    targets_BN: Tensor


class ProbeTask:
    """Base of the tasks.

    Attributes:
        segment: L. vocabulary: number of token ids. chance: accuracy of a guess.
        shortest, longest: least and greatest distance; None for no upper limit.
        bounded_by: the option that raises the greatest distance.
    """

    segment: int
    vocabulary: int
    chance: float
    shortest: int = 1
    longest: int | None = None
    bounded_by: str = ""

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        """Return episodes of `distance + 1` segments. A task writes this, or `_segments` for streams."""
        inputs, targets = zip(*self.stream(rows, distance, generator), strict=True)
        return Episode(torch.cat(inputs, 1), torch.cat(targets, 1))

    def stream(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        """Yield the episodes of `draw` segment by segment."""
        self.segments(distance)
        return self._segments(rows, distance, generator)

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        """Make one segment after the other, so that an episode may have a million tokens."""
        inputs_BN, targets_BN = self.draw(rows, distance, generator)
        return map(Episode, inputs_BN.split(self.segment, 1), targets_BN.split(self.segment, 1))

    def part(self, split: str) -> ProbeTask:
        """Return the task with the stories of one split: "train", "valid" (during training) or "test".

        A task that generates every episode returns itself.
        """
        return self

    def has(self, distance: int) -> bool:
        """Return True if the task has episodes of this distance."""
        return self.shortest <= distance and (self.longest is None or distance <= self.longest)

    def segments(self, distance: int) -> int:
        """Return the number of segments of an episode.

        Raises:
            ValueError: the task has no episode of this distance.
        """
        name = type(self).__name__
        if distance < self.shortest:
            raise ValueError(f"distance={distance} must be at least {self.shortest} segments for {name}")
        if not self.has(distance):
            raise ValueError(
                f"distance={distance} must be at most {self.longest} segments for {name}; raise {self.bounded_by}"
            )
        return distance + 1


def noise(rows: int, segments: int, length: int, first: int, generator: Generator) -> Iterator[Tensor]:
    """Yield segments of the ids `first` ... `first + NOISE - 1`, each (B, L), which the caller may overwrite.

    The generator moves past the whole noise at once, row by row. Each row of a long text keeps a copy of the generator
    at the beginning of its noise, so the ids do not depend on the size of the pieces.
    """
    tokens = segments * length
    if rows * tokens <= AT_ONCE:
        return iter((first + torch.randint(0, NOISE, (rows, tokens), generator=generator)).split(length, 1))
    generators = []
    for _ in range(rows):
        generators.append(Generator().set_state(generator.get_state()))
        for begin in range(0, tokens, PIECE):
            torch.randint(0, NOISE, (min(PIECE, tokens - begin),), generator=generator)
    return _noise_of_rows(generators, segments, length, first)


def _noise_of_rows(generators: list[Generator], segments: int, length: int, first: int) -> Iterator[Tensor]:
    most = max(1, PIECE // length)
    for begin in range(0, segments, most):
        tokens = min(most, segments - begin) * length
        piece_BN = torch.stack([torch.randint(0, NOISE, (tokens,), generator=row) for row in generators])
        yield from (first + piece_BN).split(length, 1)


def nothing_asked(inputs_BL: Tensor) -> Episode:
    """Return a segment without a question."""
    return Episode(inputs_BL, torch.full_like(inputs_BL, IGNORED))


def asked_at_end(inputs_BL: Tensor, answers_BS: Tensor) -> Episode:
    """Return a segment with an answer as the target of each of its last tokens."""
    episode = nothing_asked(inputs_BL)
    episode.targets_BN[:, -answers_BS.shape[1] :] = answers_BS
    return episode


def distinct(rows: int, count: int, below: int, generator: Generator) -> Tensor:
    """Choose `count` different numbers of 0 ... `below` - 1 per row, uniformly over choices and orders, (B, K).

    Floyd's sampling (Communications of the ACM 30, 1987) takes K random numbers and no list of the possible millions.
    It chooses a set; a random permutation then orders it.
    """
    chosen_BK = torch.full((rows, count), -1)
    for index, last in enumerate(range(below - count, below)):
        drawn_B = torch.randint(0, last + 1, (rows,), generator=generator)
        taken_B = (chosen_BK == drawn_B[:, None]).any(1)
        chosen_BK[:, index] = torch.where(taken_B, last, drawn_B)
    return chosen_BK.gather(1, torch.rand(rows, count, generator=generator).argsort(1))
