"""What all probe tasks share: episodes, the streams that they are drawn as, noise, and places drawn at random.

Legend: B rows, N tokens of an episode, L tokens of a segment, K things that are drawn.
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
"""Noise tokens that are drawn in one go, of all rows together; and of a row where there are more."""


class Episode(NamedTuple):
    """Token ids and targets, (B, N) or of one segment (B, L); -100 where nothing is asked."""

    inputs_BN: Tensor
    targets_BN: Tensor


class ProbeTask:
    """Base of the tasks.

    Attributes:
        segment: L. vocabulary: number of token ids. chance: share of asked tokens that a guess has right.
        shortest, longest: least and greatest distance; None where there is no greatest.
        bounded_by: the option that the greatest distance grows with.
    """

    segment: int
    vocabulary: int
    chance: float
    shortest: int = 1
    longest: int | None = None
    bounded_by: str = ""

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        """Episodes of `distance + 1` segments."""
        raise NotImplementedError("abstract: a task writes draw()")

    def stream(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        """The same episodes as `draw` gives, segment by segment.

        They are drawn whole and cut; a `StreamedTask` holds no more than a piece and its plan.
        """
        inputs_BN, targets_BN = self.draw(rows, distance, generator)
        return map(Episode, inputs_BN.split(self.segment, 1), targets_BN.split(self.segment, 1))

    def part(self, split: str) -> ProbeTask:
        """The task with other stories of its files: what is drawn in training ("train"), looked at on the way ("valid")
        and asked in the end ("test"). Itself, where every episode is made anew."""
        return self

    def has(self, distance: int) -> bool:
        """Whether the task has episodes of that distance."""
        return self.shortest <= distance and (self.longest is None or distance <= self.longest)

    def segments(self, distance: int) -> int:
        """Segments of an episode.

        Raises:
            ValueError: the task has no episode of that distance.
        """
        if distance < self.shortest:
            raise ValueError(f"distance={distance} must be at least {self.shortest} segments for {type(self).__name__}")
        if not self.has(distance):
            raise ValueError(
                f"distance={distance} must be at most {self.longest} segments for {type(self).__name__}; "
                f"raise {self.bounded_by}"
            )
        return distance + 1

    def without_first(self, distance: int) -> float:
        """Accuracy, at most, of a memory that knows everything but the first segment.

        What the first segment itself asks is answered by attention, without a memory.
        """
        return self.chance if distance else 1.0


class StreamedTask(ProbeTask):
    """Base of tasks whose segments are made one after the other, so that an episode may have a million tokens."""

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        inputs, targets = zip(*self.stream(rows, distance, generator), strict=True)
        return Episode(torch.cat(inputs, 1), torch.cat(targets, 1))

    def stream(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        """The segments of `rows` episodes, each (B, L); what does not fit is refused before the first one."""
        self.segments(distance)
        return self._segments(rows, distance, generator)

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        raise NotImplementedError("abstract: a task writes _segments()")


def noise(rows: int, segments: int, length: int, first: int, generator: Generator) -> Iterator[Tensor]:
    """Segments of the ids `first` ... `first + NOISE - 1`, each (B, L) and the caller's to write into.

    The generator gives the noise row by row, and whatever is drawn next comes behind it. So each row of a long text has
    a generator of its own, which stands where its noise begins: the ids are the same, drawn at once or not.
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
    """A segment without a question."""
    return Episode(inputs_BL, torch.full_like(inputs_BL, IGNORED))


def asked_at_end(inputs_BL: Tensor, answers_BS: Tensor) -> Episode:
    """A segment that asks for an answer at each of its last tokens."""
    episode = nothing_asked(inputs_BL)
    episode.targets_BN[:, -answers_BS.shape[1] :] = answers_BS
    return episode


def distinct(rows: int, count: int, below: int, generator: Generator) -> Tensor:
    """For each row `count` different numbers of 0 ... `below` - 1, every choice and order as likely, (B, K).

    Robert Floyd's way (Communications of the ACM 30, 1987): K draws and no list of all numbers, of which there may be
    millions. It chooses a set; the order is drawn behind it.
    """
    chosen_BK = torch.full((rows, count), -1)
    for index, last in enumerate(range(below - count, below)):
        drawn_B = torch.randint(0, last + 1, (rows,), generator=generator)
        taken_B = (chosen_BK == drawn_B[:, None]).any(1)
        chosen_BK[:, index] = torch.where(taken_B, last, drawn_B)
    return chosen_BK.gather(1, torch.rand(rows, count, generator=generator).argsort(1))


def guess_of(choices: int, answers: int) -> float:
    """Share of right guesses at `answers` different ones of `choices`, each asked after the one before it is told."""
    return sum(1 / (choices - told) for told in range(answers)) / answers
