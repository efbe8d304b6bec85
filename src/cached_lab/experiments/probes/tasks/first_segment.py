"""Tasks with the cue in the first segment: one symbol (latch), several (copy), a number in a filler (passkey).

The first is the fact of RMT-1M (arXiv:2304.11062) without its sentence, copy is RMT's (arXiv:2207.06881), and passkey
is landmark attention's (arXiv:2305.16300), in sizes that train in seconds.

Legend: B rows, L tokens of a segment, S asked symbols.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator

from cached_lab.registries import PROBES

from .base import NOISE, Episode, ProbeTask, asked_at_end, noise, nothing_asked


@PROBES.register(
    "latch",
    asks="holding",
    paper="arXiv:2304.11062",
    title="RMT-1M",
    chance="1 / classes",
    sizes="4 classes",
    solved_by="any carried state; with decoys, one that also decides what to write",
)
class Latch(ProbeTask):
    """One of a few symbols hides in the first segment; the last token asks for it.

    At distance 0 both are in one segment, which attention solves: the beginning of a curriculum.
    Ids: classes, decoys (as many), noise, question.

    Args:
        segment: L. classes: symbols.
        decoys: put a symbol of another kind, not to be remembered, into each segment between.
    """

    shortest = 0

    def __init__(self, segment: int = 4, classes: int = 4, decoys: bool = False) -> None:
        self.segment, self.classes, self.decoys = segment, classes, decoys
        self.vocabulary, self.chance = 2 * classes + NOISE + 1, 1 / classes

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        pieces = noise(rows, distance + 1, self.segment, 2 * self.classes, generator)
        symbol_B = torch.randint(0, self.classes, (rows,), generator=generator)
        everywhere = torch.arange(rows)
        places = self.segment if distance else self.segment - 1  # the last token is the question
        place_B = torch.randint(0, places, (rows,), generator=generator)
        for index, inputs_BL in enumerate(pieces):
            if index == 0:
                inputs_BL[everywhere, place_B] = symbol_B
            elif self.decoys and index < distance:
                decoy_B = torch.randint(self.classes, 2 * self.classes, (rows,), generator=generator)
                inputs_BL[everywhere, torch.randint(0, self.segment, (rows,), generator=generator)] = decoy_B
            if index < distance:
                yield nothing_asked(inputs_BL)
        inputs_BL[:, -1] = self.vocabulary - 1
        yield asked_at_end(inputs_BL, symbol_B[:, None])


@PROBES.register(
    "copy",
    asks="order",
    paper="arXiv:2207.06881",
    title="RMT",
    chance="1 / symbols",
    sizes="4 of 6 symbols; the paper: 24, 120 and 360 of 8",
    solved_by="a store of tokens that reaches back; a state with room for the string",
)
class Copy(ProbeTask):
    """The first segment begins with random symbols; the last one ends with them, each predicted from those before it.

    At distance 0, if a segment has room, it holds the string twice. Ids: symbols, noise, start.

    Args:
        segment: L. symbols: number of symbols.
        length: of the string; None for the whole segment.

    Raises:
        ValueError: the string is longer than a segment.
    """

    def __init__(self, segment: int = 4, symbols: int = 6, length: int | None = None) -> None:
        self.segment, self.symbols, self.length = segment, symbols, segment if length is None else length
        if not 1 <= self.length <= segment:
            raise ValueError(f"length={length} must be 1 to segment={segment}; a string of more needs longer segments")
        self.vocabulary, self.chance = symbols + NOISE + 1, 1 / symbols
        self.shortest = 0 if 2 * self.length <= segment else 1

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        pieces = noise(rows, distance + 1, self.segment, self.symbols, generator)
        source_BS = torch.randint(0, self.symbols, (rows, self.length), generator=generator)
        for index, inputs_BL in enumerate(pieces):
            if index == 0:
                inputs_BL[:, : self.length] = source_BS
            if index < distance:
                yield nothing_asked(inputs_BL)
        inputs_BL[:, self.segment - self.length] = self.vocabulary - 1
        inputs_BL[:, self.segment - self.length + 1 :] = source_BS[:, :-1]
        yield asked_at_end(inputs_BL, source_BS)


@PROBES.register(
    "passkey",
    asks="holding",
    paper="arXiv:2305.16300",
    title="landmark attention",
    chance="1 / 10",
    sizes="2 digits; Infini-attention: 5",
    solved_by="a state that repeated noise does not wear off: a delta rule, a chosen region",
)
class Passkey(ProbeTask):
    """A number between two marks in the first segment, in a repeated filler; the end asks for it.

    Ids: digits 0 to 9, filler words, mark, question.

    Args:
        segment: L. digits: of the number.

    Raises:
        ValueError: the segment cannot hold the number.
    """

    def __init__(self, segment: int = 8, digits: int = 2) -> None:
        if segment < digits + 2:
            raise ValueError(f"segment={segment} cannot hold {digits} digits between two marks; take {digits + 2}")
        self.segment, self.digits = segment, digits
        self.vocabulary, self.chance = 10 + NOISE + 2, 0.1

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        mark, begins = 10 + NOISE, range(0, (distance + 1) * self.segment, self.segment)
        digits_BS = torch.randint(0, 10, (rows, self.digits), generator=generator)
        begin_B1 = torch.randint(0, self.segment - self.digits - 1, (rows, 1), generator=generator)
        mark_B1 = torch.full((rows, 1), mark)
        for begin in begins:
            inputs_BL = (10 + torch.arange(begin, begin + self.segment) % NOISE).repeat(rows, 1)
            if begin == 0:
                marked = torch.cat([mark_B1, digits_BS, mark_B1], 1)
                inputs_BL.scatter_(1, begin_B1 + torch.arange(self.digits + 2), marked)
            if begin < begins[-1]:
                yield nothing_asked(inputs_BL)
        inputs_BL[:, self.segment - self.digits] = mark + 1
        inputs_BL[:, self.segment - self.digits + 1 :] = digits_BS[:, :-1]
        yield asked_at_end(inputs_BL, digits_BS)
