"""Synthetic tasks that only a memory can solve: what is asked stands in an earlier segment than the question.

A task draws episodes of any number of segments. The first segment (or the first few) holds the cue, the last one the
question, noise lies between; `distance` counts the segments from the first to the last. Segments are so short that
attention inside one never sees both. The answer is the target at a few places, -100 stands everywhere else.

The tasks are those of RMT (arXiv:2207.06881: copy, reverse, associative retrieval), of RMT-1M (arXiv:2304.11062:
memorise) and of landmark attention (arXiv:2305.16300: passkey), in sizes that train in seconds.

Legend: B rows, N tokens of an episode, L tokens of a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from cached_transformers.registry import PROBES

IGNORED = -100
NOISE = 4
"""Number of noise tokens."""


class Episode(NamedTuple):
    """Token ids and targets, (B, N); -100 where nothing is asked."""

    inputs_BN: Tensor
    targets_BN: Tensor


class ProbeTask:
    """Base of the tasks.

    Attributes:
        segment: L. vocabulary: number of token ids. chance: accuracy of a guess. shortest: least distance.
    """

    segment: int
    vocabulary: int
    chance: float
    shortest: int = 1

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        """Episodes of `distance + 1` segments."""
        raise NotImplementedError("abstract: a task writes draw()")

    def stream(self, rows: int, distance: int, generator: Generator):
        """TEMP"""
        if distance > 2000:
            first = self.draw(rows, 2, generator)
            L = self.segment
            yield Episode(first.inputs_BN[:, :L], first.targets_BN[:, :L])
            for _ in range(distance - 1):
                n = self.draw(rows, 2, generator)
                yield Episode(n.inputs_BN[:, L : 2 * L], n.targets_BN[:, L : 2 * L])
            yield Episode(first.inputs_BN[:, -L:], first.targets_BN[:, -L:])
            return
        e = self.draw(rows, distance, generator)
        yield from map(Episode, e.inputs_BN.split(self.segment, 1), e.targets_BN.split(self.segment, 1))

    def segments(self, distance: int) -> int:
        """Segments of an episode."""
        if distance < self.shortest:
            raise ValueError(f"distance={distance} must be at least {self.shortest} segments for {type(self).__name__}")
        return distance + 1

    def without_first(self, distance: int) -> float:
        """Accuracy of a memory that knows everything but the first segment."""
        return self.chance

    def _noise(self, rows: int, tokens: int, first: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Noise ids `first`... and targets that ask nothing."""
        inputs_BN = first + torch.randint(0, NOISE, (rows, tokens), generator=generator)
        return inputs_BN, torch.full((rows, tokens), IGNORED)


@PROBES.register("latch", paper="arXiv:2304.11062")
class Latch(ProbeTask):
    """One of `classes` symbols hides in the first segment; the last token of the last one asks which.

    At distance 0 both stand in one segment, which attention alone solves: the begin of a curriculum.
    Ids: classes, decoys (as many, in the segments between), noise, question.
    """

    shortest = 0

    def __init__(self, segment: int = 4, classes: int = 4, decoys: bool = False) -> None:
        self.segment, self.classes, self.decoys = segment, classes, decoys
        self.vocabulary, self.chance = 2 * classes + NOISE + 1, 1 / classes

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        n = self.segments(distance) * self.segment
        inputs_BN, targets_BN = self._noise(rows, n, 2 * self.classes, generator)
        symbol_B = torch.randint(0, self.classes, (rows,), generator=generator)
        everywhere = torch.arange(rows)
        places = self.segment if distance else self.segment - 1  # the last token is the question
        inputs_BN[everywhere, torch.randint(0, places, (rows,), generator=generator)] = symbol_B
        if self.decoys:
            for begin in range(self.segment, n - self.segment, self.segment):
                decoy_B = torch.randint(self.classes, 2 * self.classes, (rows,), generator=generator)
                inputs_BN[everywhere, begin + torch.randint(0, self.segment, (rows,), generator=generator)] = decoy_B
        inputs_BN[:, -1] = self.vocabulary - 1
        targets_BN[:, -1] = symbol_B
        return Episode(inputs_BN, targets_BN)


@PROBES.register("copy", paper="arXiv:2207.06881")
class Copy(ProbeTask):
    """The first segment is random symbols; the last one gives them again, each predicted from those before it.

    Ids: symbols, noise, start.
    """

    reverse = False

    def __init__(self, segment: int = 4, symbols: int = 6) -> None:
        self.segment, self.symbols = segment, symbols
        self.vocabulary, self.chance = symbols + NOISE + 1, 1 / symbols

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        n, length = self.segments(distance) * self.segment, self.segment
        inputs_BN, targets_BN = self._noise(rows, n, self.symbols, generator)
        source = torch.randint(0, self.symbols, (rows, length), generator=generator)
        target = source.flip(1) if self.reverse else source
        inputs_BN[:, :length] = source
        inputs_BN[:, n - length] = self.vocabulary - 1
        inputs_BN[:, n - length + 1 :] = target[:, :-1]
        targets_BN[:, n - length :] = target
        return Episode(inputs_BN, targets_BN)


@PROBES.register("reverse", paper="arXiv:2207.06881")
class Reverse(Copy):
    """As copy, backwards."""

    reverse = True


@PROBES.register("recall", paper="arXiv:2207.06881")
class Recall(ProbeTask):
    """Each segment before the last holds a key and its value; the last asks for the value of one of the keys.

    Values are drawn apart from keys, so that a key tells nothing. A memory that falls short of the first segment alone
    still knows the other pairs. Ids: keys, values, noise, question.
    """

    def __init__(self, segment: int = 4, keys: int = 6, values: int = 6) -> None:
        self.segment, self.keys, self.values = segment, keys, values
        self.vocabulary, self.chance = keys + values + NOISE + 1, 1 / values

    def without_first(self, distance: int) -> float:
        return (distance - 1 + self.chance) / distance

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        n = self.segments(distance) * self.segment
        if distance > self.keys:
            raise ValueError(f"distance={distance} needs as many different keys, there are {self.keys}; raise keys")
        inputs_BN, targets_BN = self._noise(rows, n, self.keys + self.values, generator)
        keys = torch.rand(rows, self.keys, generator=generator).argsort(1)[:, :distance]
        values = torch.randint(0, self.values, (rows, distance), generator=generator)
        for pair in range(distance):
            inputs_BN[:, pair * self.segment] = keys[:, pair]
            inputs_BN[:, pair * self.segment + 1] = self.keys + values[:, pair]
        asked = torch.randint(0, distance, (rows, 1), generator=generator)
        inputs_BN[:, -2] = self.vocabulary - 1
        inputs_BN[:, -1] = keys.gather(1, asked)[:, 0]
        targets_BN[:, -1] = self.keys + values.gather(1, asked)[:, 0]
        return Episode(inputs_BN, targets_BN)


@PROBES.register("passkey", paper="arXiv:2305.16300")
class Passkey(ProbeTask):
    """A key of `digits` digits between two marks stands in the first segment, in a filler that repeats; the end asks.

    Ids: digits 0 to 9, filler words, mark, question.
    """

    def __init__(self, segment: int = 8, digits: int = 2) -> None:
        if segment < digits + 2:
            raise ValueError(f"segment={segment} cannot hold {digits} digits between two marks; take {digits + 2}")
        self.segment, self.digits = segment, digits
        self.vocabulary, self.chance = 10 + NOISE + 2, 0.1

    def draw(self, rows: int, distance: int, generator: Generator) -> Episode:
        n, mark = self.segments(distance) * self.segment, 10 + NOISE
        inputs_BN = (10 + torch.arange(n) % NOISE).repeat(rows, 1)
        targets_BN = torch.full((rows, n), IGNORED)
        digits = torch.randint(0, 10, (rows, self.digits), generator=generator)
        begin_B1 = torch.randint(0, self.segment - self.digits - 1, (rows, 1), generator=generator)
        marked = torch.cat([torch.full((rows, 1), mark), digits, torch.full((rows, 1), mark)], 1)
        inputs_BN.scatter_(1, begin_B1 + torch.arange(self.digits + 2), marked)
        inputs_BN[:, n - self.digits] = mark + 1
        inputs_BN[:, n - self.digits + 1 :] = digits[:, :-1]
        targets_BN[:, n - self.digits :] = digits
        return Episode(inputs_BN, targets_BN)
