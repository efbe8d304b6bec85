"""Many questions about a list of pairs (MQAR; Arora et al. 2023, arXiv:2312.04927, github.com/HazyResearch/zoology).

Pairs of key and value come first; later each key occurs once more, with its value as the target, among blanks or random
ids. The paper spreads the questions over the text by a power law, P(gap g) ~ a (g + 1)^(a - 1); the default here puts
them all into the last segment, so that only a memory answers them.

Legend: B rows, L tokens of a segment, P pairs in the list, Q questions, S slots of two tokens that may hold a question.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import IGNORED, Episode, StreamedTask, distinct

BLOCK = 65_536
"""Slots sampled together."""


@PROBES.register(
    "mqar",
    asks="binding",
    paper="arXiv:2312.04927",
    title="Zoology",
    chance="2 / vocabulary",
    sizes="vocabulary 64, 4 pairs, 64 tokens; the paper: vocabulary 8192, 4 to 64 pairs in 64 to 512 tokens",
    solved_by="a store that reaches the pairs; a state with keys wider than the number of pairs (a sum, or better a "
    "delta rule); with second values no plain sum",
)
class MQAR(StreamedTask):
    """Keys of a list of pairs occur again; the target at each is its value.

    Figure 2 of the paper is `vocabulary=8192` with (tokens, pairs) of (64, 4), (128, 8), (256, 16), (512, 64), one
    segment as long as the text, `spread=0.01` and `random_fill=False`; a text has (distance + 1) L tokens here.
    Ids: blank; keys 1 ... V / 2 - 1; values V / 2 ... V - 1, both without repetition in a row.

    Args:
        segment: L, even. pairs: keys of the list. vocabulary: V.
        spread: a of the power law over the text after the list, .01 in the paper, 1 uniform; None for questions in the
            last segment only, at most one per slot. At distance 0, if a segment has room, they follow the list:
            attention learns to bind before a memory has to.
        random_fill: random ids of all kinds instead of blanks; they mean nothing.
        rewritten: number of keys that get a second value after the list; the last value counts.

    Raises:
        ValueError: an odd segment, fewer ids than the pairs need, more second values than keys.
    """

    def __init__(
        self,
        segment: int = 16,
        pairs: int = 4,
        vocabulary: int = 64,
        spread: float | None = None,
        random_fill: bool = False,
        rewritten: int = 0,
    ) -> None:
        if segment < 2 or segment % 2:
            raise ValueError(f"segment={segment} must be even and at least 2: a question takes two tokens")
        if not 0 <= rewritten <= pairs or pairs < 1:
            raise ValueError(f"rewritten={rewritten} must be 0 to pairs={pairs}, and there is at least one pair")
        least = 2 * (pairs + max(rewritten, 1))
        if vocabulary < least or vocabulary % 2:
            raise ValueError(
                f"vocabulary={vocabulary} must be even and hold a blank, {pairs} keys and {pairs + rewritten} values, "
                f"half of them values; take at least {least}"
            )
        if spread is not None and spread <= 0:
            raise ValueError(f"spread={spread} must be above 0; 0.01 is the paper's, 1 is uniform")
        self.segment, self.pairs, self.vocabulary, self.spread = segment, pairs, vocabulary, spread
        self.random_fill, self.rewritten, self.chance = random_fill, rewritten, 2 / vocabulary
        self.list_tokens = 2 * (pairs + rewritten)
        needed = self.list_tokens + 2 * pairs  # spread: a slot for every key
        tokens = self.list_tokens + segment if spread is None else needed
        self.shortest = 0 if needed <= segment else -(-tokens // segment) - 1

    def without_first(self, distance: int) -> float:
        """Return the best accuracy; questions in the first segment count as answered, since attention sees the list."""
        in_first = min(self.segment // 2, self.pairs + self.rewritten)
        later = max(self.pairs - in_first, 0) * (1 - self.rewritten / self.pairs) / self.pairs
        later += min(self.rewritten, self.pairs + self.rewritten - in_first) / self.pairs
        known = later + (1 - later) * self.chance
        near = self._asked_in_first(distance)
        return near + (1 - near) * known

    def _asked_in_first(self, distance: int) -> float:
        """Return the share of questions in the first segment, counted on a thousand episodes."""
        if (distance and self.spread is None) or self.list_tokens >= self.segment:
            return 0.0
        places_BQ, _ = self._questions(1000, distance, torch.Generator().manual_seed(0))
        return (places_BQ < self.segment).double().mean().item()

    def _questions(self, rows: int, distance: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return places of questions in tokens from the first segment, and indices of their keys, (B, Q) each."""
        if self.spread is None:
            first = distance * self.segment if distance else self.list_tokens
            slots, count = ((distance + 1) * self.segment - first) // 2, min(self.pairs, self.segment // 2)
            slots_BQ = distinct(rows, count, slots, generator)
            return first + 2 * slots_BQ, distinct(rows, count, self.pairs, generator)
        slots = ((distance + 1) * self.segment - self.list_tokens) // 2
        slots_BQ = power_law_slots(rows, self.pairs, slots, self.spread, generator)
        return self.list_tokens + 2 * slots_BQ, torch.arange(self.pairs).expand(rows, -1)

    def _list(self, rows: int, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tokens of the list, the keys, and the last value of each key, (B, pairs) both."""
        half = self.vocabulary // 2
        keys_BQ = 1 + distinct(rows, self.pairs, half - 1, generator)
        values_BP = half + distinct(rows, self.pairs + self.rewritten, half, generator)
        again_BP = distinct(rows, self.rewritten, self.pairs, generator)
        pairs_BP2 = torch.stack([torch.cat([keys_BQ, keys_BQ.gather(1, again_BP)], 1), values_BP], 2)
        answers_BQ = values_BP[:, : self.pairs].scatter(1, again_BP, values_BP[:, self.pairs :])
        return pairs_BP2.flatten(1), keys_BQ, answers_BQ

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        list_BN, keys_BQ, answers_BQ = self._list(rows, generator)
        places_BQ, which_BQ = self._questions(rows, distance, generator)
        keys_BQ, answers_BQ = keys_BQ.gather(1, which_BQ), answers_BQ.gather(1, which_BQ)
        for begin in range(0, (distance + 1) * self.segment, self.segment):
            inputs_BL = torch.zeros(rows, self.segment, dtype=torch.long)
            if self.random_fill:
                inputs_BL = torch.randint(0, self.vocabulary, (rows, self.segment), generator=generator)
            listed_BN = list_BN[:, begin : begin + self.segment]
            inputs_BL[:, : listed_BN.shape[1]] = listed_BN
            targets_BL = torch.full_like(inputs_BL, IGNORED)
            rows_I, asked_I = ((places_BQ >= begin) & (places_BQ < begin + self.segment)).nonzero(as_tuple=True)
            if len(rows_I):
                at = rows_I, places_BQ[rows_I, asked_I] - begin
                inputs_BL[at], targets_BL[at] = keys_BQ[rows_I, asked_I], answers_BQ[rows_I, asked_I]
            yield Episode(inputs_BL, targets_BL)


def power_law_slots(rows: int, count: int, slots: int, a: float, generator: Generator) -> Tensor:
    """Sample slots g of 0 ... S - 1 per row without replacement, with P(g) ~ (g + 1)^(a - 1), (B, Q).

    Such sampling is a race: slot g arrives after an exponential time of rate P(g), and the first arrivals are the
    sample, in their order. So any number of slots can be sampled in blocks.
    """
    first_BQ, times_BQ = torch.empty(rows, 0, dtype=torch.long), torch.empty(rows, 0, dtype=torch.float64)
    for begin in range(0, slots, BLOCK):
        g_S = torch.arange(begin, min(begin + BLOCK, slots))
        times_BS = torch.empty(rows, len(g_S), dtype=torch.float64).exponential_(generator=generator)
        times_BS = torch.cat([times_BQ, times_BS * (g_S + 1.0).double() ** (1 - a)], 1)
        slots_BS = torch.cat([first_BQ, g_S.expand(rows, -1)], 1)
        times_BQ, order_BQ = times_BS.topk(min(count, times_BS.shape[1]), largest=False)
        first_BQ = slots_BS.gather(1, order_BQ)
    return first_BQ
