"""A first-in first-out store of hidden states with their positions, or of their keys and values, for the memories that
keep them; the best slots of a bounded cache; and contexts made of hidden states.

Legend: B rows, N tokens, M slots, L = M + N, D model width, W = 2 D, H heads, E head width, P position channels; X any
dimensions (rows, or rows and heads), C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import none_true
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Trace
from cached_transformers.state import State

own_word("stored_kv", "keys and values, to be stored instead of hidden states")


def filled(x_XMC: Tensor, valid_XM: Tensor) -> Tensor:
    """The entries with 0 in empty slots, whatever these hold."""
    return x_XMC if none_true(~valid_XM) else torch.where(valid_XM[..., None], x_XMC, 0)


def last_slots(count_B: Tensor, slots: int) -> Tensor:
    """(B, M) bool, the last `count_B` of the slots of each row: those that hold something."""
    return torch.arange(slots, device=count_B.device) >= slots - count_B[:, None]


def right_before(first_B1P: Tensor, slots: int) -> Tensor:
    """(B, M, P): the places of as many tokens right before the segment."""
    return first_B1P + torch.arange(-slots, 0, device=first_B1P.device)[:, None]


class Rows(NamedTuple):
    """The last M hidden states of each row, newest last, their positions, and how many of them are real.

    The layout is fixed: a row with fewer than M holds zeros in front. 4 M D + 8 M P + 8 bytes a row in float32.
    """

    hidden_BMD: Tensor
    positions_BMP: Tensor
    count_B: Tensor

    @property
    def valid_BM(self) -> Tensor:
        """bool, the slots that hold something."""
        return last_slots(self.count_B, self.hidden_BMD.shape[1])

    @property
    def clean_BMD(self) -> Tensor:
        """The hidden states, with zeros in empty slots whatever it holds: a NaN would come back as a gradient."""
        return filled(self.hidden_BMD, self.valid_BM)


class Pairs(NamedTuple):
    """`Rows` with keys and values instead of hidden states, all keys of a slot, then all its values.

    They are projected once, when they are stored, so that nothing trains the projections: for evaluation.
    """

    pairs_BMW: Tensor
    positions_BMP: Tensor
    count_B: Tensor

    @property
    def valid_BM(self) -> Tensor:
        """bool, the slots that hold something."""
        return last_slots(self.count_B, self.pairs_BMW.shape[1])


def empty_rows(batch_size: int, slots: int, width: int, like: Tensor, channels: int = 1) -> Rows:
    """A store that holds nothing."""
    positions_BMP = torch.zeros(batch_size, slots, channels, dtype=torch.long, device=like.device)
    count_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
    return Rows(like.new_zeros(batch_size, slots, width), positions_BMP, count_B)


def empty_pairs(batch_size: int, slots: int, width: int, like: Tensor, channels: int = 1) -> Pairs:
    """The same of keys and values."""
    return Pairs(*empty_rows(batch_size, slots, 2 * width, like, channels))


def push_made(
    rows: Rows | Pairs, hidden_BND: Tensor, trace: Trace, positions_BNP: Tensor, padding_BN: Tensor | None
) -> Rows | Pairs:
    """Push hidden states, or keys and values that the reading's `carry` makes of them."""
    if not isinstance(rows, Pairs):
        return push(rows, hidden_BND, positions_BNP, padding_BN)
    pairs_BNW = side_by_side(*trace.reading.carry(hidden_BND)).detach()
    return Pairs(*push(Rows(*rows), pairs_BNW, positions_BNP, padding_BN))


def side_by_side(*made_BHME: Tensor) -> Tensor:
    """(B, M, W): the keys of all heads, then the values, and so on."""
    return torch.cat([t.transpose(1, 2).flatten(2) for t in made_BHME], -1)


def stored_pair(query: Query, groups: int) -> tuple[Tensor, Tensor]:
    """Keys and values (B, G, N, E) of the segment's tokens, without the repetition for every query head; detached."""
    assert query.k_BHNE is not None and query.v_BHNE is not None
    k_BGNE, v_BGNE = (t[:, :: t.shape[1] // groups].detach() for t in (query.k_BHNE, query.v_BHNE))
    return k_BGNE, v_BGNE


def keys_values(pairs_BMW: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values (B, H, M, E) again."""
    k_BHME, v_BHME = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in pairs_BMW.chunk(2, -1))
    return k_BHME, v_BHME


def read_store(
    state: Rows | Pairs, memory: nn.Module, heads: int, project_kv: ProjectKV
) -> tuple[Tensor, Tensor, bool]:
    """Keys and values (B, H, M, E) of a store, and whether those of empty slots are finite, too."""
    if not isinstance(state, Pairs):
        return *project_kv(state.clean_BMD), True
    refuse_training(memory.training, type(memory).__name__)
    return *keys_values(state.pairs_BMW, heads), False


def lined_up(older: Rows | Pairs, newer: Rows | Pairs) -> Any:
    """Two stores as one, of the newer's kind, with its empty slots before all others."""
    first, second = Rows(*older), Rows(*newer)
    slots, gap_B1 = second.hidden_BMD.shape[1], second.hidden_BMD.shape[1] - second.count_B[:, None]
    total = first.hidden_BMD.shape[1] + slots
    place_M = torch.arange(total, device=second.count_B.device)
    # Empty slots of the newer lie between the two; older entries move up to close the gap.
    index_BM = torch.where(place_M >= total - slots + gap_B1, place_M, place_M - gap_B1).clamp(min=0)
    hidden_BMD = torch.cat([first.clean_BMD, second.clean_BMD], 1)
    positions_BMP = torch.cat([first.positions_BMP, second.positions_BMP], 1)
    valid_BM = place_M >= total - (first.count_B + second.count_B)[:, None]
    hidden_BMD = torch.where(valid_BM[..., None], taken(hidden_BMD, index_BM), 0)
    positions_BMP = taken(positions_BMP, index_BM)
    return type(newer)(hidden_BMD, positions_BMP, first.count_B + second.count_B)


def as_kept(state: State, layout: State, project_kv: ProjectKV) -> State:
    """A layer's state with keys and values instead of hidden states, wherever the layout has them."""
    if isinstance(layout, Pairs) and isinstance(state, Rows):
        return Pairs(side_by_side(*project_kv(state.clean_BMD)), state.positions_BMP, state.count_B)
    if isinstance(state, Tensor | Pairs):
        return state
    parts = [as_kept(part, like, project_kv) for part, like in zip(state, layout, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def refuse_training(training: bool, memory: str) -> None:
    """Refuse (ValueError) keys and values in training, where they would leave the projections untrained."""
    if training:
        raise ValueError(
            f"the state of {memory} holds keys and values, as keep='kv' makes them in evaluation, from which its "
            "projections learn nothing; begin with init_state in training mode, call eval(), or take keep='hidden'"
        )


def push(rows: Rows, hidden_BND: Tensor, positions_BNP: Tensor, padding_BN: Tensor | None = None) -> Rows:
    """Store hidden states, but no padding, after those that are there; the store may be a view of its input."""
    if padding_BN is not None:
        return push_out(rows, hidden_BND, positions_BNP, padding_BN)[0]
    slots, n = rows.hidden_BMD.shape[1], hidden_BND.shape[1]
    stay, first = max(slots - n, 0), max(n - slots, 0)

    def joined(old: Tensor, new: Tensor) -> Tensor:
        new = new[:, first:].to(old.dtype).expand(old.shape[0], -1, -1)
        return torch.cat([old[:, slots - stay :], new], 1) if stay else new

    hidden_BMD, positions_BMP = joined(rows.hidden_BMD, hidden_BND), joined(rows.positions_BMP, positions_BNP)
    return Rows(hidden_BMD, positions_BMP, (rows.count_B + n).clamp(max=slots))


def push_out(
    rows: Rows, hidden_BND: Tensor, positions_BNP: Tensor, padding_BN: Tensor | None = None
) -> tuple[Rows, Rows]:
    """The store after `push`; and the N states, oldest first, that had to leave or never were (`count_B` are real)."""
    slots, n = rows.hidden_BMD.shape[1], hidden_BND.shape[1]
    hidden_BLD = torch.cat([rows.hidden_BMD, hidden_BND.to(rows.hidden_BMD.dtype)], 1)
    positions_BLP = torch.cat([rows.positions_BMP, positions_BNP.expand(hidden_BND.shape[0], -1, -1)], 1)
    if padding_BN is None:
        total_B = rows.count_B + n
    else:
        valid_BL = torch.cat([rows.valid_BM, ~padding_BN], 1)
        # Real entries come last, in order; the others are cleared.
        order_BL = valid_BL.to(torch.uint8).argsort(dim=1, stable=True)
        real_BL1 = taken(valid_BL, order_BL)[..., None]
        hidden_BLD = torch.where(real_BL1, taken(hidden_BLD, order_BL), 0)
        positions_BLP = torch.where(real_BL1, taken(positions_BLP, order_BL), 0)
        total_B = valid_BL.sum(1)
    left = Rows(hidden_BLD[:, :n], positions_BLP[:, :n], (total_B - slots).clamp(min=0))
    return Rows(hidden_BLD[:, n:], positions_BLP[:, n:], total_B.clamp(max=slots)), left


def taken(x_BLC: Tensor, index_BM: Tensor) -> Tensor:
    """(B, M, C): the entries with these indices; in whole rows, several times as fast as `gather`."""
    return x_BLC[torch.arange(len(x_BLC), device=x_BLC.device)[:, None], index_BM]


def best(score_XL: Tensor, valid_XL: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Indices of the kept entries, (X, M), oldest first, of equals the last; and whether they are real, empty first."""
    total, score_XL = score_XL.shape[-1], score_XL.masked_fill(~valid_XL, -torch.inf)
    chosen_XM = total - 1 - score_XL.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :slots]
    real_XM = valid_XL.gather(-1, chosen_XM)
    order_XM = torch.where(real_XM, chosen_XM, chosen_XM - total).sort(-1).values
    return order_XM % total, order_XM >= 0


def kept(old_XMC: Tensor, new_XNC: Tensor, index_XM: Tensor, real_XM: Tensor) -> Tensor:
    """(X, M, C): stored and new entries selected by `best`; 0 in empty slots."""
    both_XLC = new_XNC.to(old_XMC.dtype).expand(*old_XMC.shape[:-2], -1, -1)
    if old_XMC.shape[-2]:
        both_XLC = torch.cat([old_XMC, both_XLC], -2)
    chosen_XMC = taken(both_XLC.flatten(0, -3), index_XM.flatten(0, -2)).view(*index_XM.shape, both_XLC.shape[-1])
    return chosen_XMC if none_true(~real_XM) else chosen_XMC.masked_fill_(~real_XM[..., None], 0)


def from_last(valid_XL: Tensor) -> Tensor:
    """Number of real entries from each one to the end, itself included."""
    return valid_XL.flip(-1).cumsum(-1).flip(-1)


def recalled(
    project_kv: ProjectKV,
    *,
    hidden_BMD: Tensor,
    positions_BMP: Tensor,
    valid_BM: Tensor,
    weight_BM: Tensor | None = None,
    consecutive: bool = False,
) -> Context:
    """Hidden states (inputs of the layer, before its norm) as a context; values are multiplied by `weight_BM`.

    A model memory offers `functools.partial(recalled, hidden_BMD=..., ...)`, to which the layer gives its projections.
    """
    k_BHME, v_BHME = project_kv(filled(hidden_BMD, valid_BM))
    if weight_BM is not None:
        v_BHME = v_BHME * weight_BM[:, None, :, None]
    return Context(k_BHME, v_BHME, positions_BMP, valid_BM, consecutive, clean=True)
