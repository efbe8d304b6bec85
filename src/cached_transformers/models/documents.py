"""Rows in which several documents stand one behind the other, each of which is read as if it stood alone.

A segment of such rows is cut into *pieces*: the tokens that one document has in one row of it. Each piece is read as a
row of its own, so that nothing of another document can reach it, whatever the memory and the attention are:

    row 0   a a a a b b c    pieces:  a a a a    goes on with the state of row 0 (a stood in the segment before, too)
    row 1   d . d d e e e             b b        begins with a fresh state
                                      c          begins with a fresh state; its state is that of row 0 from here on
                                      d d d      goes on with the state of row 1
                                      e e e      begins with a fresh state; its state is that of row 1 from here on

Padding inside a piece is left out, outputs go back to their places, and the states of documents that have ended are
dropped. Who reads further segments goes on with the row's state where the document goes on, and resets the row where
another one begins (`resets_between`).

Pieces are read in groups of like length, each padded to its own longest: with L tokens in the longest piece of a
segment, those of (L/2, L] tokens, those of (L/4, L/2], and so on. Of T tokens in pieces, group g with P_g pieces of at
most L_g tokens, so many are computed:

    sum over g of P_g L_g  <  2 T        at most log2(L) + 1 calls; equal lengths, and those near each other, cost T

As a call has a price, too, neighbouring groups are read in one where that adds no more than `CALL` tokens of padding.

A segment in which no document begins behind a row's first token, and whose padding stands behind the text, is read as
it stands, at no cost but a look at the ids.

Legend: B rows, N columns, P pieces, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from cached_transformers.interfaces.memory import LayerMemory
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.state import State, join, reorder
from cached_transformers.state import reset as reset_rows

PADDING = -1
"""A document's id at places of padding; any negative number is one."""

CALL = 64
"""Tokens that a call of the model is worth: two groups become one for no more padding than so many."""

COMPILED = (
    "how rows are cut into documents depends on values, which a compiled graph cannot; compile the model inside, and "
    "call a SegmentLoop that is not compiled with documents, or give each document a row of its own"
)


class Group(NamedTuple):
    """Pieces of like length, which are read in one call.

    Attributes:
        rows_P: the row that each piece stands in.
        places_Pn: where its tokens stand, counted over all columns of all rows; behind its end, its last one.
        padding_Pn: bool, True behind a piece's end; None where all are equally long.
        fresh_P: bool, pieces whose document begins here; None where there is none.
        tokens: of all pieces, without padding.
    """

    rows_P: Tensor
    places_Pn: Tensor
    padding_Pn: Tensor | None
    fresh_P: Tensor | None
    tokens: int

    def take(self, t: Tensor) -> Tensor:
        """(P, n, ...) of (B, N, ...)."""
        return t.flatten(0, 1)[self.places_Pn]


class Plan(NamedTuple):
    """How one segment is read.

    Attributes:
        groups: of all pieces, the longest first.
        source_BN: where each place's output stands among those of all groups, one behind the other, from 1; 0 where
            there is padding.
        last_B: where the state behind the segment stands: the row's own one, for a row without a token, or that of its
            last piece, with the groups' pieces counted on behind the B rows.
    """

    groups: list[Group]
    source_BN: Tensor
    last_B: Tensor

    @property
    def computed(self) -> int:
        """Tokens that are computed, padding among them."""
        return sum(group.places_Pn.numel() for group in self.groups)

    def to(self, device: torch.device) -> Plan:
        """The same with its tensors on a device."""

        def moved(t: Any) -> Any:
            return t.to(device, non_blocking=True) if isinstance(t, Tensor) else t

        groups = [Group(*map(moved, group)) for group in self.groups]
        return Plan(groups, moved(self.source_BN), moved(self.last_B))


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, tokens: int | None = None) -> Tensor:
    """Document ids (1, `tokens`) of one row, of the bounds that attention of variable length is given.

    Args:
        cu_seqlens: (K + 1) whole numbers: where each of K documents begins, and where the last one ends. They begin
            with 0 and never fall; two that are equal hold an empty document between them.
        tokens: columns of the row; what stands behind the last document is padding. None for no padding.

    Raises:
        ValueError: another shape or dtype, bounds that fall or begin elsewhere, or fewer tokens than they hold.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not _whole(cu_seqlens):
        raise ValueError(
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype} must be bounds of documents, "
            "(documents + 1) whole numbers"
        )
    lengths_K = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or bool((lengths_K < 0).any()):
        raise ValueError(
            f"cu_seqlens={cu_seqlens.tolist()} must begin with 0 and never fall: torch.cat([torch.zeros(1), "
            "lengths.cumsum(0)]) of the documents' lengths"
        )
    held = int(cu_seqlens[-1])
    if held == 0 or (tokens is not None and tokens < held):
        raise ValueError(
            f"cu_seqlens end at {held}, tokens={tokens}; documents hold at least one token, and no more than their row"
        )
    ids_T = torch.arange(len(lengths_K), device=cu_seqlens.device).repeat_interleave(lengths_K.long())
    padding_T = ids_T.new_full(((held if tokens is None else tokens) - held,), PADDING)
    return torch.cat([ids_T, padding_T])[None]


def document_ids_from_position_ids(position_ids_BN: Tensor, padding: Tensor | None = None) -> Tensor:
    """Document ids (B, N) of places that begin again with each document.

    Inside a row a document begins where a place is 0. A row's first token may have any place: its document has begun
    in an earlier segment.

    Args:
        position_ids_BN: the place of each token in its document, whole numbers.
        padding: (B, N) bool, True = padding, whose places mean nothing.

    Raises:
        ValueError: other shapes or dtypes, or a place that is neither 0 nor the next one of its document.
    """
    if position_ids_BN.dim() != 2 or not _whole(position_ids_BN):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids_BN.shape)} and dtype {position_ids_BN.dtype} must be places of "
            "tokens, (rows, tokens), whole numbers"
        )
    if padding is not None and (padding.shape != position_ids_BN.shape or padding.dtype != torch.bool):
        raise ValueError(
            f"padding of shape {tuple(padding.shape)} and dtype {padding.dtype} must be bool, True = padding, of the "
            f"shape of position_ids, {tuple(position_ids_BN.shape)}"
        )
    real_BN = torch.ones_like(position_ids_BN, dtype=torch.bool) if padding is None else ~padding
    before_BN = _before(position_ids_BN, real_BN)
    first_BN = real_BN & (real_BN.cumsum(1) == 1)
    begins_BN = real_BN & (first_BN | (position_ids_BN == 0))
    wrong_BN = real_BN & ~begins_BN & (position_ids_BN != before_BN + 1)
    if bool(wrong_BN.any()):
        row, column = wrong_BN.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}] is {int(position_ids_BN[row, column])}, behind "
            f"{int(before_BN[row, column])}; inside a row each is 0, where a document begins, or the one before "
            "it + 1: mark padding by padding, or give ids of the documents themselves"
        )
    return (begins_BN.long().cumsum(1) - 1).masked_fill(~real_BN, PADDING)


def check_documents(documents: Tensor, rows: int, columns: int) -> None:
    """Refuse (ValueError) what is no id of a document for each place; `plan_documents` looks at values."""
    if tuple(documents.shape) != (rows, columns) or not _whole(documents):
        raise ValueError(
            f"documents of shape {tuple(documents.shape)} and dtype {documents.dtype} must be an id for each place, "
            f"{(rows, columns)}, whole numbers, negative at padding; document_ids_from_cu_seqlens and "
            "document_ids_from_position_ids make them"
        )


def ids_of(documents: Tensor, padding: Tensor | None = None) -> Tensor:
    """Ids where the plan is made, on the CPU, as long; -1 at padding. Ids that are there already make no device wait.

    Raises:
        ValueError: in compiled code.
    """
    if torch.compiler.is_compiling():
        raise ValueError(f"documents in a compiled call: {COMPILED}")
    ids_BN = documents.cpu().long().clamp(min=PADDING)
    return ids_BN if padding is None else ids_BN.masked_fill(padding.cpu(), PADDING)


def plan_documents(ids_BN: Tensor) -> Plan | None:
    """How a segment with these ids is read; None where it is read as it stands.

    Args:
        ids_BN: of `ids_of`.

    Raises:
        ValueError: a document has ended in a row and begins there again.
    """
    if isinstance(ids_BN, FakeTensor):  # without values, on which operations are counted
        return None
    rows, columns = ids_BN.shape
    real_BN = ids_BN >= 0
    begins_BN = real_BN & (ids_BN != _before(ids_BN, real_BN))
    row_P, column_P = begins_BN.nonzero().unbind(1)
    _refuse_again(ids_BN, row_P, column_P)
    fresh_P = torch.zeros_like(row_P, dtype=torch.bool)
    fresh_P[1:] = row_P[1:] == row_P[:-1]
    in_front = not bool((real_BN[:, 1:] & ~real_BN[:, :-1]).any())
    if len(row_P) == 0 or (in_front and not bool(fresh_P.any())):
        return None
    places_T = real_BN.flatten().nonzero()[:, 0]
    length_P = torch.bincount(begins_BN.flatten()[places_T].cumsum(0) - 1, minlength=len(row_P))
    start_P = length_P.cumsum(0) - length_P
    kind_P = _kinds(length_P)
    last_B = torch.arange(rows)
    source_BN = torch.zeros(rows * columns, dtype=torch.long)
    groups, pieces, outputs = [], rows, 1
    for kind in range(int(kind_P.max()) + 1):
        member_P = (kind_P == kind).nonzero()[:, 0]
        length = length_P[member_P]
        step_n = torch.arange(int(length.max()))
        behind_Pn = step_n >= length[:, None]
        places_Pn = places_T[start_P[member_P, None] + torch.minimum(step_n, length[:, None] - 1)]
        fresh, own = fresh_P[member_P], ~behind_Pn
        padding = behind_Pn if bool(behind_Pn.any()) else None
        groups.append(
            Group(row_P[member_P], places_Pn, padding, fresh if bool(fresh.any()) else None, int(length.sum()))
        )
        source_BN[places_Pn[own]] = outputs + own.flatten().nonzero()[:, 0]
        ends_P = torch.ones_like(fresh_P)
        ends_P[:-1] = row_P[1:] != row_P[:-1]
        ends = ends_P[member_P]
        last_B[row_P[member_P[ends]]] = pieces + ends.nonzero()[:, 0]
        pieces, outputs = pieces + len(member_P), outputs + places_Pn.numel()
    return Plan(groups, source_BN.view(rows, columns), last_B)


def read_documents(
    read: Callable[..., ModelOutput],
    documents: Tensor,
    padding: Tensor | None,
    given: Sequence[Tensor | None],
    state: State,
    init_state: Callable[[int], State],
) -> ModelOutput:
    """One segment of rows of documents, piece by piece where it has to be; see `read_plan`.

    Args:
        documents: (B, N), the document of each token; a negative id is padding. The first document of a row goes on
            with the row's state, every other one begins with a fresh state.
        padding: (B, N) bool, what is padding beside that.

    Raises:
        ValueError: as `check_documents`, `ids_of`, `plan_documents` and `read_plan`.
    """
    inputs = next(t for t in given if t is not None)
    check_documents(documents, *inputs.shape[:2])
    ids_BN = ids_of(documents, padding)
    plan = plan_documents(ids_BN)
    if plan is not None:
        return read_plan(read, plan, given, state, init_state)
    if not isinstance(ids_BN, FakeTensor):
        real_BN = ids_BN >= 0
        padding = None if bool(real_BN.all()) else ~real_BN.to(inputs.device)
    return read(*given, state, padding)


def read_plan(
    read: Callable[..., ModelOutput],
    plan: Plan,
    given: Sequence[Tensor | None],
    state: State,
    init_state: Callable[[int], State],
) -> ModelOutput:
    """One segment, group after group.

    Args:
        read: reads rows: (what it is given of `given`, state before, padding or None) -> their `ModelOutput`, whose
            outputs are one for each token.
        given: inputs, targets and what else is of a token each, (B, N, ...); None stays None.
        state: of the rows, before the segment. init_state: a fresh one of so many rows.

    Returns:
        Outputs in their places, 0 at padding; the states of the rows; and the mean of the groups' auxiliary losses,
        weighed by their tokens. What a memory weighs alike in a call, as its rows, it weighs alike in a group.

    Raises:
        ValueError: outputs that are not one for each token.
    """
    device = next(t.device for t in given if t is not None)
    plan = plan.to(device)
    outs: list[ModelOutput] = []
    for group in plan.groups:
        before = reorder(state, group.rows_P)
        if group.fresh_P is not None:
            before = reset_rows(before, init_state(len(group.rows_P)), group.fresh_P)
        out = read(*(None if t is None else group.take(t) for t in given), before, group.padding_Pn)
        if out.outputs.shape[:2] != group.places_Pn.shape:
            raise ValueError(
                f"outputs of shape {tuple(out.outputs.shape)} for {tuple(group.places_Pn.shape)} tokens: a model that "
                "answers once for a row cannot be told of several documents in it; give each document a row of its own"
            )
        outs.append(out)
    first = outs[0].outputs
    flat = torch.cat([first.new_zeros(1, *first.shape[2:]), *(out.outputs.flatten(0, 1) for out in outs)])
    tokens = sum(group.tokens for group in plan.groups)
    losses = [out.auxiliary_loss * (group.tokens / tokens) for out, group in zip(outs, plan.groups, strict=True)]
    placed = flat.index_select(0, plan.source_BN.flatten()).unflatten(0, plan.source_BN.shape)
    after = reorder(join([state, *(out.state for out in outs)]), plan.last_B)
    return ModelOutput(placed, after, torch.stack(losses).sum())


def resets_between(ids_BN: Tensor, parts: Sequence[slice]) -> list[Tensor | None]:
    """For each of the segments, the rows (B,) bool whose first document there is not the one that they read before.

    The first segment has none: whoever calls says by a reset whether a row's document has begun before it.

    Args:
        ids_BN: of `ids_of`. parts: the columns of the segments.

    Raises:
        ValueError: as `plan_documents`.
    """
    real_BN = ids_BN >= 0
    before_BN = _before(ids_BN, real_BN)
    begins_BN = real_BN & (ids_BN != before_BN)
    _refuse_again(ids_BN, *begins_BN.nonzero().unbind(1))
    begins_BN &= before_BN >= 0
    resets: list[Tensor | None] = []
    for part in parts:
        first_BN = real_BN[:, part] & (real_BN[:, part].cumsum(1) == 1)
        rows_B = (begins_BN[:, part] & first_BN).any(1)
        resets.append(rows_B if bool(rows_B.any()) else None)
    return resets


def check_suits(model: nn.Module) -> None:
    """Refuse (ValueError) a model that cannot be told of documents in a row.

    It answers once for a row, or has a memory that all rows write in training, which would be once a group.
    """
    if getattr(model, "answers_once", False):
        refuse_documents(True, f"{type(model).__name__} answers once for a row, and not for each document in it")
    for name, module in model.named_modules():
        if isinstance(module, LayerMemory) and module.shared and module.training:
            why = "is one for all rows, which each of the calls that packed rows take would write in training"
            refuse_documents(True, f"memory {type(module).__name__} ({name}) {why}")


def refuse_documents(documents: Any, why: str) -> None:
    """Refuse (ValueError) documents, where some are given, to what cannot be told of them."""
    if documents is not None:
        raise ValueError(f"documents: {why}; give each document a row of its own, padded behind it")


def _whole(t: Tensor) -> bool:
    return t.dtype in (torch.int64, torch.int32)


def _before(t_BN: Tensor, real_BN: Tensor) -> Tensor:
    """The value of the last token in front of each place, -1 where there is none."""
    place_BN = torch.arange(t_BN.shape[1], device=t_BN.device).expand_as(t_BN)
    last_BN = place_BN.masked_fill(~real_BN, -1).cummax(1).values.roll(1, 1)
    last_BN[:, 0] = -1
    return t_BN.gather(1, last_BN.clamp(min=0)).masked_fill(last_BN < 0, -1)


def _kinds(length_P: Tensor) -> Tensor:
    """The number of the group of each piece, from the longest on."""
    # Of equal exponents are L // length of at least 2^k and below 2^(k+1), which is length in (L / 2^(k+1), L / 2^k].
    kind_P = torch.frexp((length_P.max() // length_P).double()).exponent.unique(return_inverse=True)[1]
    count = torch.bincount(kind_P).tolist()
    longest = [int(length_P[kind_P == kind].max()) for kind in range(len(count))]
    while len(count) > 1:
        more = [count[kind] * (longest[kind - 1] - longest[kind]) for kind in range(1, len(count))]
        joined = more.index(min(more))
        if more[joined] > CALL:
            break
        count[joined] += count.pop(joined + 1)
        longest.pop(joined + 1)
        kind_P = kind_P - (kind_P > joined).long()
    return kind_P


def _refuse_again(ids_BN: Tensor, row_P: Tensor, column_P: Tensor) -> None:
    """Refuse (ValueError) a document of which a row has two pieces, which begin at these places."""
    id_P = ids_BN[row_P, column_P]
    _, kind_P, count = torch.stack([row_P, id_P], 1).unique(dim=0, return_inverse=True, return_counts=True)
    again = (count[kind_P] > 1).nonzero()[:, 0]
    if len(again):
        place = int(again[-1])
        raise ValueError(
            f"documents[{int(row_P[place])}, {int(column_P[place])}] is {int(id_P[place])}, a document that has ended "
            "in its row before; the tokens of a document stand in one run, and another document has another id"
        )
