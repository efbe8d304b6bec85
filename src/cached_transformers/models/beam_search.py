"""Beam search: keep the K best continuations of a text and extend each by one token per step.

Legend: B rows, K beams, C = 2 K candidates, L results, T new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cached_transformers.state import State, reorder, replace, reset


class GrowingText(Protocol):
    """Interface of the texts that a search continues, one row each."""

    def after(self) -> State:
        """The state after all tokens, () for none; used where a continuation ends."""
        ...

    def read(self) -> Tensor:
        """Log-probabilities (rows, V) of the next token, float32 or wider."""
        ...

    def append(self, token_B: Tensor) -> None:
        """Append a token to each row."""
        ...

    def multiply(self, times: int) -> None:
        """Repeat each row `times` times."""
        ...

    def choose(self, rows_B: Tensor) -> None:
        """Reorder rows; rows may repeat within one `multiply`, and all rows of one may be dropped."""
        ...


class BestContinuations(NamedTuple):
    """The best finished continuations of each row, best first; the rank is minus infinity for none.

    The state has B L rows, or is (); None until a continuation is found.
    """

    rank_BL: Tensor
    score_BL: Tensor
    length_BL: Tensor
    tokens_BLT: Tensor
    state: State


def search(
    text: GrowingText,
    logp_BV: Tensor,
    tokens: int | Tensor,
    beams: int,
    eos: int | None,
    length_penalty: float,
    results: int = 1,
) -> BestContinuations:
    """Search the best continuations of a text, given the log-probabilities of its next token.

    A row is done when `beams` of its continuations have reached `eos` while among the K best candidates; one beam is
    greedy generation. Continuations without `eos` count as finished after the row's last step. Rows that are done leave
    the text, so results and cost of a row do not depend on other rows.

    Args:
        tokens: T, maximum of new tokens, for all rows or (B,) per row.
        results: L, at most K.
    """
    rows, device = len(logp_BV), logp_BV.device
    limit_B = tokens if isinstance(tokens, Tensor) else torch.full((rows,), tokens, device=device)
    most = int(limit_B.max())
    total_BK = logp_BV.new_full((rows, beams), -torch.inf)
    new_BKT = torch.full((rows, beams, most), 0 if eos is None else eos, device=device)
    ended_B = torch.zeros(rows, dtype=torch.long, device=device)
    none_BL = total_BK[:, :results].clone()
    lengths = ended_B[:, None].expand(-1, results)
    best = BestContinuations(none_BL, none_BL, lengths, new_BKT[:, :results], None)
    every, place_B = best, torch.arange(rows, device=device)
    text.multiply(beams)
    logp = logp_BV.repeat_interleave(beams, 0)
    total_BK[:, 0] = 0  # all beams are equal at first
    for step in range(most):
        words = logp.shape[-1]
        every_BC = (total_BK[..., None] + logp.view(-1, beams, words)).flatten(1)
        # A beam has one way to end, so at least K of 2 K candidates continue.
        total_BC, place_BC = every_BC.topk(min(2 * beams, every_BC.shape[1]))
        parent_BC, token_BC = place_BC // words, place_BC % words
        new_BCT = new_BKT.gather(1, parent_BC[..., None].expand(-1, -1, most))
        new_BCT[..., step] = token_BC

        first_B1 = torch.arange(len(place_B), device=device)[:, None] * beams
        ends_BC = torch.zeros_like(token_BC, dtype=torch.bool) if eos is None else token_BC == eos
        counts_BC = ends_BC & (torch.arange(ends_BC.shape[1], device=device) < beams) & total_BC.isfinite()
        last_B = limit_B == step + 1
        found_BC = total_BC.masked_fill(~(counts_BC | last_B[:, None]), -torch.inf)
        best = _better(best, found_BC, step + 1, length_penalty, new_BCT, text, first_B1 + parent_BC)
        ended_B = ended_B + counts_BC.sum(1)

        going_BK = ends_BC.to(torch.uint8).argsort(dim=1, stable=True)[:, :beams]
        total_BK = total_BC.masked_fill(ends_BC, -torch.inf).gather(1, going_BK)
        new_BKT = new_BCT.gather(1, going_BK[..., None].expand(-1, -1, most))
        rows_BK, token_BK = first_B1 + parent_BC.gather(1, going_BK), token_BC.gather(1, going_BK)
        done_B = last_B | (ended_B >= beams)
        if bool(done_B.any()):
            every = _settle(every, best, place_B[done_B], done_B)
            if bool(done_B.all()):
                break
            going_B = (~done_B).nonzero()[:, 0]
            place_B, limit_B, ended_B, total_BK, new_BKT, rows_BK, token_BK = (
                t[going_B] for t in (place_B, limit_B, ended_B, total_BK, new_BKT, rows_BK, token_BK)
            )
            best = _rows(best, going_B)
        text.choose(rows_BK.flatten())
        text.append(token_BK.flatten())
        logp = text.read()
    return every


def _better(
    best: BestContinuations,
    total_BC: Tensor,
    length: int,
    penalty: float,
    new_BCT: Tensor,
    text: GrowingText,
    where_BC: Tensor,
) -> BestContinuations:
    """The best of earlier results and candidates, whose states are the rows `where_BC` of the text's state."""
    if not bool(total_BC.isfinite().any()):
        return best  # without the cost of the text's state
    results = best.rank_BL.shape[1]
    rank_BX = torch.cat([best.rank_BL, total_BC / length**penalty], 1)
    rank_BX, order_BX = rank_BX.sort(dim=1, descending=True, stable=True)  # earlier results win ties
    rank_BL, from_BL = rank_BX[:, :results], order_BX[:, :results]
    old_BL, new_BL = from_BL.clamp(max=results - 1), (from_BL - results).clamp(min=0)
    fresh_BL = from_BL >= results

    def pick(old: Tensor, new: Tensor) -> Tensor:
        old_index, new_index, fresh = (
            t.view(*t.shape, *[1] * (old.dim() - 2)).expand(-1, -1, *old.shape[2:]) for t in (old_BL, new_BL, fresh_BL)
        )
        return torch.where(fresh, new.gather(1, new_index), old.gather(1, old_index))

    first_B1 = torch.arange(len(rank_BX), device=rank_BX.device)[:, None] * results
    taken = reorder(text.after(), where_BC.gather(1, new_BL).flatten())
    kept = taken if best.state is None else reorder(best.state, (first_B1 + old_BL).flatten())
    return BestContinuations(
        rank_BL,
        pick(best.score_BL, total_BC),
        torch.where(fresh_BL, length, best.length_BL.gather(1, old_BL)),
        pick(best.tokens_BLT, new_BCT),
        reset(kept, taken, fresh_BL.flatten()),
    )


def _settle(every: BestContinuations, best: BestContinuations, place_D: Tensor, done_B: Tensor) -> BestContinuations:
    """Copy the rows of `best` that are done into `every`."""
    found = _rows(best, done_B.nonzero()[:, 0])
    results = every.rank_BL.shape[1]
    place_DL = (place_D[:, None] * results + torch.arange(results, device=place_D.device)).flatten()
    rank, score, length, tokens = (t.index_copy(0, place_D, new) for t, new in zip(every[:4], found[:4], strict=True))
    state = every.state
    if state is None:
        state = reorder(found.state, torch.zeros_like(every.rank_BL, dtype=torch.long).flatten())
    state = replace(state, place_DL, found.state)
    return BestContinuations(rank, score, length, tokens, state)


def _rows(best: BestContinuations, rows: Tensor) -> BestContinuations:
    results = best.rank_BL.shape[1]
    rows_L = (rows[:, None] * results + torch.arange(results, device=rows.device)).flatten()
    rank, score, length, tokens = (t[rows] for t in best[:4])
    return BestContinuations(rank, score, length, tokens, None if best.state is None else reorder(best.state, rows_L))
