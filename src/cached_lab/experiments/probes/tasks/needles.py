"""Retrieval and variable tracking of RULER (arXiv:2404.06654): statements hidden in a haystack, a question at the end.

A segment is divided into cells as wide as a statement; the rest after the last cell holds noise only. So a statement
never crosses a segment boundary, and every cell except those of the last segment may hold one.

Legend: B rows, L tokens of a segment, K statements, W tokens of a statement, Q tokens of the ending, V values of a key,
A digits of a value, S questions, C cells or chains, H lines of a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import IGNORED, NOISE, Episode, StreamedTask, asked_at_end, distinct, guess_of, nothing_asked

Haystack = Literal["line", "words", "needles"]
RULER: dict[str, Any] = {"paper": "arXiv:2404.06654", "title": "RULER"}


class PlantingPlan(NamedTuple):
    """Everything sampled before the first segment of an episode.

    Attributes:
        cells_BK: cells of the statements, counted from the first segment. statements_BKW: their tokens.
        ending_BQ: the last tokens of the episode. answers_BQ: their targets.
        background: returns the next segment without its statements, (B, L).
    """

    cells_BK: Tensor
    statements_BKW: Tensor
    ending_BQ: Tensor
    answers_BQ: Tensor
    background: Callable[[], Tensor]


class PlantedTask(StreamedTask):
    """Base of the two tasks.

    Args:
        segment: L. width: W. ending: Q.

    Raises:
        ValueError: the segment is shorter than a statement or the ending.
    """

    def __init__(self, segment: int, width: int, ending: int) -> None:
        least = max(width, ending)
        if segment < least:
            raise ValueError(
                f"segment={segment} must hold a statement of {width} tokens, and a question with its answers of "
                f"{ending}; take at least {least}"
            )
        self.segment, self.width, self.per_segment = segment, width, segment // width

    def _plan(self, rows: int, distance: int, generator: Generator) -> PlantingPlan:
        raise NotImplementedError("abstract: a task writes _plan()")

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        plan = self._plan(rows, distance, generator)
        within_W = torch.arange(self.width)
        for index in range(distance + 1):
            inputs_BL = plan.background()
            here_BK = plan.cells_BK - index * self.per_segment
            rows_I, items_I = ((here_BK >= 0) & (here_BK < self.per_segment)).nonzero(as_tuple=True)
            places_IW = here_BK[rows_I, items_I, None] * self.width + within_W
            inputs_BL[rows_I[:, None], places_IW] = plan.statements_BKW[rows_I, items_I]
            if index < distance:
                yield nothing_asked(inputs_BL)
        inputs_BL[:, -plan.ending_BQ.shape[1] :] = plan.ending_BQ
        yield asked_at_end(inputs_BL, plan.answers_BQ)


def _ending(prompts_BSP: Tensor, answers_BSA: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (B, S (P + A - 1)), of questions of P tokens, each followed by its answer.

    Each token of an answer is predicted from the tokens before it; the last one is a target only.
    """
    told_BSN = torch.cat([prompts_BSP, answers_BSA[..., :-1]], 2)
    asked_BSN = torch.full_like(told_BSN, IGNORED)
    asked_BSN[..., prompts_BSP.shape[2] - 1 :] = answers_BSA
    return told_BSN.flatten(1), asked_BSN.flatten(1)


@PROBES.register(
    "niah",
    asks="holding",
    **RULER,
    chance="1 / base",
    sizes="1 key, 2 digits; the paper: 1 or 4 keys, 1 or 4 values, 7 digits or a UUID",
    solved_by="one needle in a repeated line: a delta rule, not mere decay; several keys: binding a value to its key; "
    "several values of one key, in order: a store, since a delta rule overwrites all but the last",
)
class Needles(PlantedTask):
    """Needles, keys with values, anywhere except in the last segment, which asks for the values of some keys.

    A needle is "mark, key, digits of the value". A question is "ask, key" followed by the values, each digit predicted
    from the digits before it; several values of one key are asked in the order of the text. The paper's multi-key,
    multi-value and multi-query tasks are `keys=4`, `values=4` and `keys=4, queries=4`, with `haystack="words"`.
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
        segment: int = 16,
        keys: int = 1,
        values: int = 1,
        queries: int = 1,
        digits: int = 2,
        base: int = 10,
        words: int = 16,
        haystack: Haystack = "line",
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
        super().__init__(segment, digits + 2, queries * (1 + values * digits))
        self.keys, self.values, self.queries, self.digits = keys, values, queries, digits
        self.base, self.words, self.haystack = base, words, haystack
        self.mark, self.ask = base + words, base + words + 1
        self.vocabulary, self.chance = base + words + 2 + NOISE, 1 / base
        self.shortest = -(-keys * values // self.per_segment)

    def _plan(self, rows: int, distance: int, generator: Generator) -> PlantingPlan:
        words_BK = self.base + torch.rand(rows, self.words, generator=generator).argsort(1)
        keys_BK = words_BK[:, : self.keys]
        values_BKVA = torch.randint(0, self.base, (rows, self.keys, self.values, self.digits), generator=generator)
        cells = distinct(rows, self.keys * self.values, distance * self.per_segment, generator)
        cells_BKV = cells.unflatten(1, (self.keys, self.values)).sort(2).values
        needles_BKVW = self._needles(keys_BK[:, :, None].expand(-1, -1, self.values), values_BKVA)
        asked_BS = keys_BK[:, : self.queries]  # in a random order already, independent of their places
        prompts_BSP = torch.stack([torch.full_like(asked_BS, self.ask), asked_BS], 2)
        ending_BQ, answers_BQ = _ending(prompts_BSP, values_BKVA[:, : self.queries].flatten(2))
        background = self._background(rows, words_BK[:, self.keys :], generator)
        return PlantingPlan(cells_BKV.flatten(1), needles_BKVW.flatten(1, 2), ending_BQ, answers_BQ, background)

    def _needles(self, keys: Tensor, values_A: Tensor) -> Tensor:
        return torch.cat([torch.full_like(keys, self.mark)[..., None], keys[..., None], values_A], -1)

    def _background(self, rows: int, others_BK: Tensor, generator: Generator) -> Callable[[], Tensor]:
        first, cells = self.ask + 1, self.per_segment
        line_BL = (first + torch.arange(self.segment) % NOISE).repeat(rows, 1)

        def words() -> Tensor:
            return torch.randint(first, first + NOISE, (rows, self.segment), generator=generator)

        def needles() -> Tensor:
            key_BC = others_BK.gather(1, torch.randint(0, others_BK.shape[1], (rows, cells), generator=generator))
            values_BCA = torch.randint(0, self.base, (rows, cells, self.digits), generator=generator)
            return torch.cat([self._needles(key_BC, values_BCA).flatten(1), line_BL[:, cells * self.width :]], 1)

        return {"words": words, "line": line_BL.clone, "needles": needles}[self.haystack]


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

    A line is "variable, =, number or variable": the first line of a chain assigns a number, each further one the
    variable of the line before. Lines keep their order; those of several chains are mixed.
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
        super().__init__(segment, 3, 1 + self.lines)
        self.chains, self.names, self.numbers = chains, names, numbers
        self.vocabulary, self.chance = names + numbers + 2 + NOISE, guess_of(names, self.lines)
        self.shortest = -(-chains * self.lines // self.per_segment)

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
        ending_BQ, answers_BQ = _ending(prompt_BSP, names_BCH[:, :1])
        line_BL = (ask + 1 + torch.arange(self.segment) % NOISE).repeat(rows, 1)
        return PlantingPlan(cells_BCH.flatten(1), lines_BCHW.flatten(1, 2), ending_BQ, answers_BQ, line_BL.clone)
