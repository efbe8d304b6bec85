"""Retrieval and variable tracking of RULER (arXiv:2404.06654): statements hidden in a haystack.

A needle is "mark, key, digits of the value". Questions at the end are "ask, key" followed by their values, each digit
predicted from the digits before it; several values of one key are asked in the order of the text. A line of variable
tracking is "variable, =, number or variable": the first line of a chain assigns a number, each further one the variable
of the line before. Lines keep their order; those of several chains are mixed.

Legend: B rows, L tokens of a segment, K needles or lines, V values of a key, A digits of a value, S questions, C cells
or chains, H lines of a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import NOISE, distinct, guess_of
from .planted import PlantedTask, PlantingPlan, endings, noise_of

Haystack = Literal["line", "words", "needles"]
RULER: dict[str, Any] = {"paper": "arXiv:2404.06654", "title": "RULER"}
DIGITS: dict[str, Any] = {**RULER, "chance": "1 / base"}


class Needles(PlantedTask):
    """Keys with values, hidden in noise; the four retrieval tasks are settings of it.

    Ids: digits, words that serve as keys, mark, ask, noise.

    Args:
        segment: L. keys: different keys in the text. values: of each key. queries: keys that are asked.
        digits: of a value. base: different digits; 32 digits of base 16 are a UUID, 7 of base 10 the paper's numbers.
        words: number of possible keys.
        haystack: one repeated "line", random "words", or "needles" with other keys and numbers.

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
                f"queries={queries}, keys={keys}, values={values}, digits={digits}, base={base}: take at least one of "
                "each, two of base, and at most as many queries as keys"
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

    def _plan(self, rows: int, distance: int, generator: Generator) -> PlantingPlan:
        words_BK = self.base + torch.rand(rows, self.words, generator=generator).argsort(1)
        keys_BK = words_BK[:, : self.keys]
        size = (rows, self.keys, self.values, self.digits)
        values_BKVA = torch.randint(0, self.base, size, generator=generator)
        cells = distinct(rows, self.keys * self.values, distance * self.per_segment, generator)
        cells_BKV = cells.unflatten(1, (self.keys, self.values)).sort(2).values
        key_BKV = keys_BK[:, :, None].expand(size[:3])
        needles_BKVW = torch.cat([torch.full((*size[:3], 1), self.mark), key_BKV[..., None], values_BKVA], 3)
        asked_BS = keys_BK[:, : self.queries]  # in a random order already, independent of their places
        prompts_BSP = torch.stack([torch.full_like(asked_BS, self.ask), asked_BS], 2)
        ending_BQ, answers_BQ = endings(prompts_BSP, values_BKVA[:, : self.queries].flatten(2))
        background = self._background(rows, words_BK[:, self.keys :], generator)
        return PlantingPlan(cells_BKV.flatten(1), needles_BKVW.flatten(1, 2), ending_BQ, answers_BQ, background)

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
    **DIGITS,
    sizes="2 digits; the paper: 7 digits or a UUID",
    solved_by="in a repeated line a delta rule, not mere decay; among random words a memory that also forgets",
)
def niah_single(
    segment: int = 16, digits: int = 2, base: int = 10, words: int = 16, haystack: Haystack = "line"
) -> Needles:
    """One needle anywhere except in the last segment, which asks for its value.

    Args: as `Needles`.
    """
    return Needles(segment, 1, 1, 1, digits, base, words, haystack)


@PROBES.register(
    "niah_multikey",
    asks="binding",
    **DIGITS,
    sizes="4 keys, 2 digits; the paper: 4 keys or a haystack of needles, 7 digits or a UUID",
    solved_by="binding a value to its key; among needles only a state with room for all of them, or a search",
)
def niah_multikey(
    segment: int = 16, keys: int = 4, digits: int = 2, base: int = 10, words: int = 16, haystack: Haystack = "words"
) -> Needles:
    """Several needles with different keys; the end asks for one of them.

    Args: as `Needles`.
    """
    return Needles(segment, keys, 1, 1, digits, base, words, haystack)


@PROBES.register(
    "niah_multivalue",
    asks="order",
    **DIGITS,
    sizes="4 values, 2 digits; the paper: 4 values of 7 digits",
    solved_by="several values under one key, in order: a store; a delta rule overwrites all but the last",
)
def niah_multivalue(
    segment: int = 16, values: int = 4, digits: int = 2, base: int = 10, words: int = 16, haystack: Haystack = "words"
) -> Needles:
    """Several needles with the same key; the end asks for all their values, in the order of the text.

    Args: as `Needles`.
    """
    return Needles(segment, 1, values, 1, digits, base, words, haystack)


@PROBES.register(
    "niah_multiquery",
    asks="binding",
    **DIGITS,
    sizes="4 keys, 2 digits; the paper: 4 keys, numbers of 7 digits",
    solved_by="as niah_multikey, and the state must serve every question",
)
def niah_multiquery(
    segment: int = 16, keys: int = 4, digits: int = 2, base: int = 10, words: int = 16, haystack: Haystack = "words"
) -> Needles:
    """Several needles with different keys; the end asks for the value of each, one after the other.

    Args: as `Needles`.
    """
    return Needles(segment, keys, 1, keys, digits, base, words, haystack)


@PROBES.register(
    "variable_tracking",
    asks="joining",
    **RULER,
    chance="1 / names, and more with each name revealed",
    sizes="1 chain of 4 hops, 16 names; the paper: as many hops, 26^5 names",
    solved_by="looking up one item after another: a store, or a state with room for all lines",
)
class VariableTracking(PlantedTask):
    """Variables assigned a number directly or through others; the end gives a number and asks for their names.

    Ids: names, numbers, "=", ask, noise.

    Args:
        segment: L. hops: lines of a chain after its first. chains: number of chains; one is asked for.
        names: of variables. numbers: that variables may have.

    Raises:
        ValueError: too few names or numbers; a segment too short for the names of a chain.
    """

    def __init__(self, segment: int = 16, hops: int = 4, chains: int = 1, names: int = 16, numbers: int = 16) -> None:
        if hops < 0 or chains < 1:
            raise ValueError(f"hops={hops} must be at least 0, and chains={chains} at least 1")
        self.lines = hops + 1
        if names < chains * self.lines or numbers < chains:
            raise ValueError(
                f"names={names} and numbers={numbers} must be at least {chains * self.lines} and {chains}: all "
                "variables and the numbers of all chains are different"
            )
        self._cells(segment, 3, 1 + self.lines)
        self.chains, self.names, self.numbers = chains, names, numbers
        self.vocabulary, self.chance = names + numbers + 2 + NOISE, guess_of(names, self.lines)
        self.shortest = -(-chains * self.lines // self.per_segment)

    def without_first(self, distance: int) -> float:
        """Sum over the number of lines in the first segment.

        A variable is named by its own line and the next one, so the last missing name is in the line after it.
        """
        count, first, cells = self.lines, self.per_segment, distance * self.per_segment
        right = 0.0
        for missing in range(min(count, first) + 1):
            ways = math.comb(first, missing) * math.comb(cells - first, count - missing)
            unknown = count if missing == count else max(missing - 1, 0)
            known = count - unknown
            guessed = unknown * guess_of(self.names - known, unknown) if unknown else 0
            right += ways / math.comb(cells, count) * (known + guessed)
        return right / count

    def _plan(self, rows: int, distance: int, generator: Generator) -> PlantingPlan:
        equals, ask = self.names + self.numbers, self.names + self.numbers + 1
        shape = (rows, self.chains, self.lines)
        names_BCH = distinct(rows, self.chains * self.lines, self.names, generator).view(shape)
        numbers_BC1 = self.names + distinct(rows, self.chains, self.numbers, generator)[:, :, None]
        said_BCH = torch.cat([numbers_BC1, names_BCH[..., :-1]], 2)
        lines_BCHW = torch.stack([names_BCH, torch.full(shape, equals), said_BCH], 3)
        cells = distinct(rows, self.chains * self.lines, distance * self.per_segment, generator)
        cells_BCH = cells.view(shape).sort(2).values
        # The first chain is asked for: chains are exchangeable, and their places independent of them.
        prompt_BSP = torch.stack([torch.full((rows, 1), ask), numbers_BC1[:, 0]], 2)
        ending_BQ, answers_BQ = endings(prompt_BSP, names_BCH[:, :1])
        line_BL = (ask + 1 + torch.arange(self.segment) % NOISE).repeat(rows, 1)
        return PlantingPlan(cells_BCH.flatten(1), lines_BCHW.flatten(1, 2), ending_BQ, answers_BQ, line_BL.clone)
