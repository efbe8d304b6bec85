"""Retrieval of RULER (arXiv:2404.06654): needles hidden in a haystack, and questions about them at the end.

Legend: B rows, L tokens of a segment, C cells of a segment, W tokens of a needle, K keys, V values of a key, A digits,
S questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import IGNORED, NOISE, Episode, ProbeTask, distinct, nothing_asked

Haystack = Literal["line", "words", "needles"]


@PROBES.register(
    "niah",
    asks="holding",
    paper="arXiv:2404.06654",
    title="RULER",
    chance="1 / base",
    sizes="1 key, 2 digits; the paper: 1 or 4 keys, 1 or 4 values, 7 digits or a UUID",
    solved_by="one needle in a repeated line: a delta rule, not mere decay; several keys: binding a value to its key; "
    "several values of one key, in order: a store, since a delta rule overwrites all but the last",
)
class Needles(ProbeTask):
    """Needles, keys with values, anywhere except in the last segment, which asks for the values of some keys.

    A needle is "mark, key, digits of the value", in one of the cells of a segment. A question is "ask, key" followed by
    the values, each digit predicted from the digits before it; several values of one key are asked in the order of the
    text. The paper's multi-key, multi-value and multi-query tasks are `keys=4`, `values=4` and `keys=4, queries=4`,
    with `haystack="words"`. Ids: digits, words that serve as keys, mark, ask, noise.

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
        if words < (least := keys + (haystack == "needles")):
            raise ValueError(f"words={words} must be at least {least}: {keys} different keys, and those of the noise")
        self.segment, self.width, self.per_segment = segment, digits + 2, segment // (digits + 2)
        if segment < (least := max(self.width, queries * (1 + values * digits))):
            raise ValueError(f"segment={segment} must hold a needle or all questions and values; take at least {least}")
        self.keys, self.values, self.queries, self.digits = keys, values, queries, digits
        self.base, self.words, self.haystack = base, words, haystack
        self.mark, self.ask = base + words, base + words + 1
        self.vocabulary, self.chance = base + words + 2 + NOISE, 1 / base
        self.shortest = -(-keys * values // self.per_segment)

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        words_BK = self.base + torch.rand(rows, self.words, generator=generator).argsort(1)
        keys_BK, others_BK = words_BK[:, : self.keys], words_BK[:, self.keys :]
        values_BKVA = torch.randint(0, self.base, (rows, self.keys, self.values, self.digits), generator=generator)
        cells = distinct(rows, self.keys * self.values, distance * self.per_segment, generator)
        cells = cells.unflatten(1, (self.keys, self.values)).sort(2).values.flatten(1)
        needles = self._needles(keys_BK[:, :, None].expand(-1, -1, self.values), values_BKVA).flatten(1, 2)
        for index in range(distance + 1):
            inputs_BL = self._background(rows, others_BK, generator)
            here = cells - index * self.per_segment
            rows_I, items_I = ((here >= 0) & (here < self.per_segment)).nonzero(as_tuple=True)
            places_IW = here[rows_I, items_I, None] * self.width + torch.arange(self.width)
            inputs_BL[rows_I[:, None], places_IW] = needles[rows_I, items_I]
            if index < distance:
                yield nothing_asked(inputs_BL)
        asked_BS = keys_BK[:, : self.queries]  # in a random order already, independent of their places
        answers_BSA = values_BKVA[:, : self.queries].flatten(2)
        prompts_BSP = torch.stack([torch.full_like(asked_BS, self.ask), asked_BS], 2)
        ending = torch.cat([prompts_BSP, answers_BSA[..., :-1]], 2)
        targets = torch.cat([torch.full_like(prompts_BSP[..., :1], IGNORED), answers_BSA], 2).flatten(1)
        inputs_BL[:, -targets.shape[1] :] = ending.flatten(1)
        targets_BL = torch.full_like(inputs_BL, IGNORED)
        targets_BL[:, -targets.shape[1] :] = targets
        yield Episode(inputs_BL, targets_BL)

    def _needles(self, keys: Tensor, values_A: Tensor) -> Tensor:
        return torch.cat([torch.full_like(keys, self.mark)[..., None], keys[..., None], values_A], -1)

    def _background(self, rows: int, others_BK: Tensor, generator: Generator) -> Tensor:
        first, cells = self.ask + 1, self.per_segment
        if self.haystack == "words":
            return torch.randint(first, first + NOISE, (rows, self.segment), generator=generator)
        line_BL = (first + torch.arange(self.segment) % NOISE).repeat(rows, 1)
        if self.haystack == "needles":
            key_BC = others_BK.gather(1, torch.randint(0, others_BK.shape[1], (rows, cells), generator=generator))
            values_BCA = torch.randint(0, self.base, (rows, cells, self.digits), generator=generator)
            line_BL[:, : cells * self.width] = self._needles(key_BC, values_BCA).flatten(1)
        return line_BL
