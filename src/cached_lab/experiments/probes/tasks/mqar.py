"""Many questions about a list of pairs (MQAR; Arora et al. 2023, arXiv:2312.04927, github.com/HazyResearch/zoology).

Pairs of key and value come first; later each key occurs once more, with its value as the target, among blanks. The
paper spreads the questions over the text by a power law, P(gap g) ~ a (g + 1)^(a - 1); the default here puts them all
into the last segment, so that only a memory answers them.

Legend: B rows, L tokens of a segment, P pairs in the list, Q questions, S slots of two tokens that may hold a question.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from cached_lab.registries import PROBES

from .base import IGNORED, Episode, ProbeTask, distinct


@PROBES.register(
    "mqar",
    asks="binding",
    paper="arXiv:2312.04927",
    title="Zoology",
    chance="2 / vocabulary",
    sizes="vocabulary 64, 4 pairs, 64 tokens; the paper: vocabulary 8192, 4 to 64 pairs in 64 to 512 tokens",
    solved_by="a store that reaches the pairs; a state with keys wider than the number of pairs (a sum, or better a "
    "delta rule)",
)
class MQAR(ProbeTask):
    """Keys of a list of pairs occur again; the target at each is its value.

    Figure 2 of the paper is `vocabulary=8192` with (tokens, pairs) of (64, 4), (128, 8), (256, 16), (512, 64), one
    segment as long as the text, and `spread=0.01`; a text has (distance + 1) L tokens here.
    Ids: blank; keys 1 ... V / 2 - 1; values V / 2 ... V - 1, both without repetition in a row.

    Args:
        segment: L, even. pairs: keys of the list. vocabulary: V.
        spread: a of the power law over the text after the list, .01 in the paper, 1 uniform; None for questions in the
            last segment only, at most one per slot. At distance 0, if a segment has room, they follow the list:
            attention learns to bind before a memory has to.

    Raises:
        ValueError: an odd segment, fewer ids than the pairs need.
    """

    def __init__(self, segment: int = 16, pairs: int = 4, vocabulary: int = 64, spread: float | None = None) -> None:
        if segment < 2 or segment % 2:
            raise ValueError(f"segment={segment} must be even and at least 2: a question takes two tokens")
        if pairs < 1 or vocabulary < 2 * (pairs + 1) or vocabulary % 2:
            raise ValueError(
                f"vocabulary={vocabulary} must be even and hold a blank, pairs={pairs} keys (at least 1) and as many "
                f"values, half of it values; take at least {2 * (pairs + 1)}"
            )
        if spread is not None and spread <= 0:
            raise ValueError(f"spread={spread} must be above 0; 0.01 is the paper's, 1 is uniform")
        self.segment, self.pairs, self.vocabulary, self.spread = segment, pairs, vocabulary, spread
        self.chance = 2 / vocabulary
        tokens = 2 * pairs + segment if spread is None else 4 * pairs  # spread: a slot for every key
        self.shortest = 0 if 4 * pairs <= segment else -(-tokens // segment) - 1

    def _questions(self, rows: int, distance: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Return places of questions in tokens from the first segment, and indices of their keys, (B, Q) each."""
        first = distance * self.segment if self.spread is None and distance else 2 * self.pairs
        slots = ((distance + 1) * self.segment - first) // 2
        if self.spread is None:
            count = min(self.pairs, self.segment // 2)
            slots_BQ = distinct(rows, count, slots, generator)
            return first + 2 * slots_BQ, distinct(rows, count, self.pairs, generator)
        slots_BQ = power_law_slots(rows, self.pairs, slots, self.spread, generator)
        return first + 2 * slots_BQ, torch.arange(self.pairs).expand(rows, -1)

    def _segments(self, rows: int, distance: int, generator: Generator) -> Iterator[Episode]:
        half = self.vocabulary // 2
        keys_BQ = 1 + distinct(rows, self.pairs, half - 1, generator)
        answers_BQ = half + distinct(rows, self.pairs, half, generator)
        list_BN = torch.stack([keys_BQ, answers_BQ], 2).flatten(1)
        places_BQ, which_BQ = self._questions(rows, distance, generator)
        keys_BQ, answers_BQ = keys_BQ.gather(1, which_BQ), answers_BQ.gather(1, which_BQ)
        for begin in range(0, (distance + 1) * self.segment, self.segment):
            inputs_BL = torch.zeros(rows, self.segment, dtype=torch.long)
            listed_BN = list_BN[:, begin : begin + self.segment]
            inputs_BL[:, : listed_BN.shape[1]] = listed_BN
            targets_BL = torch.full_like(inputs_BL, IGNORED)
            rows_I, asked_I = ((places_BQ >= begin) & (places_BQ < begin + self.segment)).nonzero(as_tuple=True)
            at = rows_I, places_BQ[rows_I, asked_I] - begin
            inputs_BL[at], targets_BL[at] = keys_BQ[rows_I, asked_I], answers_BQ[rows_I, asked_I]
            yield Episode(inputs_BL, targets_BL)


def power_law_slots(rows: int, count: int, slots: int, a: float, generator: Generator) -> Tensor:
    """Sample slots g of 0 ... S - 1 per row without replacement, with P(g) ~ (g + 1)^(a - 1), (B, Q).

    Such sampling is a race: slot g arrives after an exponential time of rate P(g), and the first arrivals are the
    sample, in their order.
    """
    g_S = torch.arange(slots)
    times_BS = torch.empty(rows, slots, dtype=torch.float64).exponential_(generator=generator)
    return (times_BS * (g_S + 1.0).double() ** (1 - a)).topk(count, largest=False).indices
