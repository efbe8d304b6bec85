"""Chains of variables: variable tracking of RULER (arXiv:2404.06654).

A line is "variable, =, what it is": the first of a chain says a number, each further one the variable of the line
before it. Lines stand in their order at random places of one repeated line of noise; those of several chains are
mixed. The end gives a number, and wants the names of all variables that have it, in the order of the chain.

Legend: B rows, L tokens of a segment, K lines, C chains, H lines of a chain.
"""

from __future__ import annotations

import math

import torch
from torch import Generator

from cached_lab.registries import PROBES

from .base import NOISE, distinct, guess_of
from .planted import Plan, PlantedTask, endings

WIDTH = 3


@PROBES.register(
    "variable_tracking",
    asks="joining",
    paper="arXiv:2404.06654",
    title="RULER",
    chance="1 / names, and more with each that is told",
    sizes="1 chain of 4 hops, 16 names; the paper: as many hops, 26^5 names",
    solved_by="what looks up one thing after another in what it keeps: a store, or a state with room for all lines",
)
class VariableTracking(PlantedTask):
    """Variables that were given a number directly or through others; the end gives a number and wants their names.

    Ids: names, numbers, "=", ask, noise.

    Args:
        segment: L. hops: lines of a chain behind its first. chains: how many, of which one is asked for.
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
        self._cells(segment, WIDTH, 1 + self.lines)
        self.chains, self.names, self.numbers = chains, names, numbers
        self.vocabulary, self.chance = names + numbers + 2 + NOISE, guess_of(names, self.lines)
        self.shortest = -(-chains * self.lines // self.per_segment)

    def without_first(self, distance: int) -> float:
        """A variable is named by its own line and the next: the last one missing is told by the line behind it."""
        count, first, cells = self.lines, self.per_segment, distance * self.per_segment
        right = 0.0
        for missing in range(min(count, first) + 1):
            ways = math.comb(first, missing) * math.comb(cells - first, count - missing)
            unknown = count if missing == count else max(missing - 1, 0)
            known = count - unknown
            guessed = unknown * guess_of(self.names - known, unknown) if unknown else 0
            right += ways / math.comb(cells, count) * (known + guessed)
        return right / count

    def _plan(self, rows: int, distance: int, generator: Generator) -> Plan:
        equals, ask = self.names + self.numbers, self.names + self.numbers + 1
        shape = (rows, self.chains, self.lines)
        names_BCH = distinct(rows, self.chains * self.lines, self.names, generator).view(shape)
        numbers_BC1 = self.names + distinct(rows, self.chains, self.numbers, generator)[:, :, None]
        said_BCH = torch.cat([numbers_BC1, names_BCH[..., :-1]], 2)
        lines_BCHW = torch.stack([names_BCH, torch.full(shape, equals), said_BCH], 3)
        cells = distinct(rows, self.chains * self.lines, distance * self.per_segment, generator)
        cells_BCH = cells.view(shape).sort(2).values
        # Which chain is asked for: the first, since chains are drawn alike and their places apart from them.
        prompt_BSP = torch.stack([torch.full((rows, 1), ask), numbers_BC1[:, 0]], 2)
        ending_BQ, answers_BQ = endings(prompt_BSP, names_BCH[:, :1])
        line_BL = (ask + 1 + torch.arange(self.segment) % NOISE).repeat(rows, 1)
        return Plan(cells_BCH.flatten(1), lines_BCHW.flatten(1, 2), ending_BQ, answers_BQ, line_BL.clone)
