"""Beam search over the continuations of a text: the K best are kept, and grow by one token a step.

Legend: B rows, K beams, C = 2 K candidates, T new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..state import State, reorder, reset

if TYPE_CHECKING:
    from .generation import Text


class Best(NamedTuple):
    """The best finished continuation of each row so far; its rank is minus infinity where there is none."""

    rank_B: Tensor
    score_B: Tensor
    length_B: Tensor
    tokens_BT: Tensor
    state: State


def search(text: Text, logp_BV: Tensor, tokens: int, beams: int, eos: int | None, length_penalty: float) -> Best:
    """The best continuations of a text, given the log-probabilities of its next token.

    A row is done when `beams` of its continuations have met `eos` while among the K best candidates; with one beam that
    is greedy generation.
    """
    rows, device = text.open_BN.shape[0], text.open_BN.device
    first_B1 = torch.arange(rows, device=device)[:, None] * beams
    total_BK = logp_BV.new_full((rows, beams), -torch.inf)
    new_BKT = torch.full((rows, beams, tokens), 0 if eos is None else eos, device=device)
    none_B = total_BK[:, 0].clone()
    ended_B = torch.zeros(rows, dtype=torch.long, device=device)
    best = Best(none_B, none_B, ended_B, new_BKT[:, 0], text.after)
    text.multiply(beams)
    logp = logp_BV.repeat_interleave(beams, 0)
    total_BK[:, 0] = 0  # the beams are all alike yet
    for step in range(tokens):
        words = logp.shape[-1]
        every_BC = (total_BK[..., None] + logp.view(rows, beams, words)).flatten(1)
        # A beam ends in one way only, so that of 2 K candidates at least K go on.
        total_BC, place_BC = every_BC.topk(min(2 * beams, every_BC.shape[1]))
        parent_BC, token_BC = place_BC // words, place_BC % words
        new_BCT = new_BKT.gather(1, parent_BC[..., None].expand(-1, -1, tokens))
        new_BCT[..., step] = token_BC

        last = step == tokens - 1
        ends_BC = torch.zeros_like(token_BC, dtype=torch.bool) if eos is None else token_BC == eos
        counts_BC = ends_BC & (torch.arange(ends_BC.shape[1], device=device) < beams) & total_BC.isfinite()
        open_B1 = ended_B[:, None] < beams
        finished_BC = (counts_BC | last) & open_B1
        found_BC = total_BC.masked_fill(~finished_BC, -torch.inf)
        best = _better(best, found_BC, step + 1, length_penalty, new_BCT, text.after, first_B1 + parent_BC)
        ended_B = ended_B + counts_BC.sum(1)
        if last or (eos is not None and bool((ended_B >= beams).all())):
            break

        going_BK = ends_BC.to(torch.uint8).argsort(dim=1, stable=True)[:, :beams]
        total_BK = total_BC.masked_fill(ends_BC, -torch.inf).gather(1, going_BK)
        new_BKT = new_BCT.gather(1, going_BK[..., None].expand(-1, -1, tokens))
        text.choose((first_B1 + parent_BC.gather(1, going_BK)).flatten())
        text.append(token_BC.gather(1, going_BK).flatten())
        logp = text.read()
    return best


def _better(
    best: Best, total_BC: Tensor, length: int, penalty: float, new_BCT: Tensor, states: State, where_BC: Tensor
) -> Best:
    """The better of what was found before and the best candidate, whose state is row `where_BC` of `states`."""
    score_B, which_B = total_BC.max(1)
    rank_B = score_B / length**penalty
    worse_B = rank_B <= best.rank_B
    pick = which_B[:, None]
    tokens_BT = new_BCT.gather(1, pick[..., None].expand(-1, -1, new_BCT.shape[-1]))[:, 0]
    found = Best(
        rank_B,
        score_B,
        torch.full_like(best.length_B, length),
        tokens_BT,
        reorder(states, where_BC.gather(1, pick)[:, 0]),
    )
    return reset(found, best, worse_B)
