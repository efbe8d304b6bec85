"""Needles in a haystack: keys with a value each, hidden in noise; the retrieval tasks of RULER (arXiv:2404.06654).

A needle is "mark, key, digits of the value"; the haystack repeats one line for ever, or is random words, or is needles
with other keys. At the end stand questions, "ask, key", with their values behind them, each digit predicted from those
before it. Values of one key are asked in the order in which they stand.

Legend: B rows, L tokens of a segment, K needles, V values of a key, A digits of a value, S questions, C cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import NOISE, distinct
from .planted import Plan, PlantedTask, endings, noise_of

Haystack = Literal["line", "words", "needles"]
FACTS: dict[str, Any] = {"paper": "arXiv:2404.06654", "title": "RULER", "chance": "1 / base"}


class _Needles(PlantedTask):
    """Base of the four.

    Ids: digits, words that keys are, mark, ask, noise.

    Args:
        segment: L. keys: different ones that stand in the text. values: of each key. queries: keys that are asked.
        digits: of a value. base: different digits; 32 digits of base 16 are a UUID, 7 of base 10 the paper's numbers.
        words: that keys are taken from.
        haystack: one "line" for ever, random "words", or "needles" with other keys and numbers.

    Raises:
        ValueError: a segment too short for a needle or the questions; too few words for the keys.
    """

    def __init__(
        self,
        segment: int,
        keys: int,
        values: int,
        queries: int,
        digits: int,
        base: int,
        words: int,
        haystack: Haystack,
    ) -> None:
        if not 1 <= queries <= keys or min(values, digits) < 1 or base < 2:
            raise ValueError(
                f"queries={queries}, keys={keys}, values={values}, digits={digits}, base={base}: at least one of each "
                "is needed, two of base, and no more queries than keys"
            )
        if haystack not in get_args(Haystack):
            raise ValueError(f"haystack={haystack!r} must be one of {', '.join(get_args(Haystack))}")
        least = keys + (haystack == "needles")
        if words < least:
            raise ValueError(f"words={words} must be at least {least}: {keys} different keys, and those of the noise")
        self._cells(segment, digits + 2, queries * (1 + values * digits))
        self.keys, self.values, self.queries, self.digits = keys, values, queries, digits
        self.base, self.words, self.haystack = base, words, haystack
        self.mark, self.ask = base + words, base + words + 1
        self.vocabulary, self.chance = base + words + 2 + NOISE, 1 / base
        self.shortest = -(-keys * values // self.per_segment)

    def without_first(self, distance: int) -> float:
        return (distance - 1 + self.chance) / distance

    def _plan(self, rows: int, distance: int, generator: Generator) -> Plan:
        words_BK = self.base + torch.rand(rows, self.words, generator=generator).argsort(1)
        keys_BK = words_BK[:, : self.keys]
        size = (rows, self.keys, self.values, self.digits)
        values_BKVA = torch.randint(0, self.base, size, generator=generator)
        cells = distinct(rows, self.keys * self.values, distance * self.per_segment, generator)
        cells_BKV = cells.unflatten(1, (self.keys, self.values)).sort(2).values
        key_BKV = keys_BK[:, :, None].expand(size[:3])
        needles_BKVW = torch.cat([torch.full((*size[:3], 1), self.mark), key_BKV[..., None], values_BKVA], 3)
        asked_BS = keys_BK[:, : self.queries]  # their order is random already, and apart from their places
        prompts_BSP = torch.stack([torch.full_like(asked_BS, self.ask), asked_BS], 2)
        ending_BQ, answers_BQ = endings(prompts_BSP, values_BKVA[:, : self.queries].flatten(2))
        background = self._background(rows, words_BK[:, self.keys :], generator)
        return Plan(cells_BKV.flatten(1), needles_BKVW.flatten(1, 2), ending_BQ, answers_BQ, background)

    def _background(self, rows: int, others_BK: Tensor, generator: Generator) -> Callable[[], Tensor]:
        first, cells = self.ask + 1, self.per_segment
        if self.haystack == "words":
            return noise_of(rows, self.segment, first, NOISE, generator)
        line_BL = (first + torch.arange(self.segment) % NOISE).repeat(rows, 1)
        if self.haystack == "line":
            return line_BL.clone

        def needles() -> Tensor:
            key_BC = others_BK.gather(1, torch.randint(0, others_BK.shape[1], (rows, cells), generator=generator))
            values_BCA = torch.randint(0, self.base, (rows, cells, self.digits), generator=generator)
            needles_BCW = torch.cat([torch.full((rows, cells, 1), self.mark), key_BC[..., None], values_BCA], 2)
            return torch.cat([needles_BCW.flatten(1), line_BL[:, cells * self.width :]], 1)

        return needles


@PROBES.register(
    "niah_single",
    asks="holding",
    **FACTS,
    sizes="2 digits; the paper: 7 digits or a UUID",
    solved_by="in a repeated line a delta rule, not mere decay; among random words what also forgets",
)
class NiahSingle(_Needles):
    """One needle anywhere but in the last segment, which asks for its value."""

    def __init__(
        self, segment: int = 16, digits: int = 2, base: int = 10, words: int = 16, haystack: Haystack = "line"
    ) -> None:
        super().__init__(segment, 1, 1, 1, digits, base, words, haystack)


@PROBES.register(
    "niah_multikey",
    asks="binding",
    **FACTS,
    sizes="4 keys, 2 digits; the paper: 4 keys or a haystack of needles, 7 digits or a UUID",
    solved_by="what binds a value to its key; among needles alone a state with room for all of them, or a search",
)
class NiahMultikey(_Needles):
    """Several needles with different keys, of which the end asks for one."""

    def __init__(
        self,
        segment: int = 16,
        keys: int = 4,
        digits: int = 2,
        base: int = 10,
        words: int = 16,
        haystack: Haystack = "words",
    ) -> None:
        super().__init__(segment, keys, 1, 1, digits, base, words, haystack)


@PROBES.register(
    "niah_multivalue",
    asks="order",
    **FACTS,
    sizes="4 values, 2 digits; the paper: 4 values of 7 digits",
    solved_by="what keeps several values under one key, in order: a store; a delta rule writes over all but the last",
)
class NiahMultivalue(_Needles):
    """Several needles with the same key; the end asks for all their values, in the order of the text."""

    def __init__(
        self,
        segment: int = 16,
        values: int = 4,
        digits: int = 2,
        base: int = 10,
        words: int = 16,
        haystack: Haystack = "words",
    ) -> None:
        super().__init__(segment, 1, values, 1, digits, base, words, haystack)


@PROBES.register(
    "niah_multiquery",
    asks="binding",
    **FACTS,
    sizes="4 keys, 2 digits; the paper: 4 keys, numbers of 7 digits",
    solved_by="as niah_multikey, and the state must serve every question",
)
class NiahMultiquery(_Needles):
    """Several needles with different keys; the end asks for the value of each, one after the other."""

    def __init__(
        self,
        segment: int = 16,
        keys: int = 4,
        digits: int = 2,
        base: int = 10,
        words: int = 16,
        haystack: Haystack = "words",
    ) -> None:
        super().__init__(segment, keys, 1, keys, digits, base, words, haystack)
