"""Packed rows: read several documents of one row as if each had a row of its own.

A segment is split into *pieces*, the tokens of one document in one row. Each piece is read as a row of its own, so no
other document can reach it, for any memory and attention:

    row 0   a a a a b b c    pieces:  a a a a    continues the state of row 0 (a began in an earlier segment)
    row 1   d . d d e e e             b b        begins with a fresh state
                                      c          begins with a fresh state; its state becomes the state of row 0
                                      d d d      continues the state of row 1
                                      e e e      begins with a fresh state; its state becomes the state of row 1

Padding inside a piece is left out, outputs return to their positions, and states of ended documents are dropped. The
next segment continues the row's state, or resets the row where a document begins (`resets_between`).

Pieces are read in groups of similar length, each padded to its own longest piece. If the longest piece has L tokens,
the groups hold lengths (L/2, L], (L/4, L/2], and so on. For T tokens in pieces, and P_g pieces of at most L_g tokens:

    sum over g of P_g L_g  <  2 T        at most log2(L) + 1 calls; nearly equal lengths cost about T

Neighbouring groups are merged if that adds at most `CALL` tokens of padding. A segment whose documents all begin at the
first token of a row, with padding only on the right, is read unchanged.

Legend: B rows, N columns, P pieces, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from cached_transformers.interfaces.memory import LayerMemory
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.state import State, join, reorder
from cached_transformers.state import reset as reset_rows

from .inputs import shape_of

PADDING = -1
"""Document id of padding; any negative number is padding."""

CALL = 64
"""Cost of a call of the model in tokens: two groups are merged for at most this much padding."""

COMPILED = (
    "pieces depend on the values of the ids, which a compiled graph cannot read; compile the model and call an "
    "uncompiled SegmentLoop with documents, or give each document a row of its own"
)


class DocumentGroup(NamedTuple):
    """Pieces of similar length, read in one call.

    Attributes:
        rows_P: row of each piece.
        places_Pn: index of each token in the flattened (B, N); after the end of a piece, its last token.
        padding_Pn: bool, True after the end of a piece; None if all are equally long.
        fresh_P: bool, pieces whose document begins here; None if there is none.
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


class DocumentPlan(NamedTuple):
    """Plan to read one segment.

    Attributes:
        groups: of all pieces, the longest first.
        source_BN: index of each position's output among the concatenated outputs of all groups, from 1; 0 at padding.
        last_B: index of each row's state after the segment among the B states before it, for a row without tokens, and
            then the states of all pieces.
    """

    groups: list[DocumentGroup]
    source_BN: Tensor
    last_B: Tensor

    @property
    def computed(self) -> int:
        """Computed tokens, including padding."""
        return sum(group.places_Pn.numel() for group in self.groups)

    def to(self, device: torch.device) -> DocumentPlan:
        """The plan on a device."""

        def moved(t: Any) -> Any:
            return t.to(device, non_blocking=True) if isinstance(t, Tensor) else t

        groups = [DocumentGroup(*map(moved, group)) for group in self.groups]
        return DocumentPlan(groups, moved(self.source_BN), moved(self.last_B))


def document_ids_from_cu_seqlens(cu_seqlens: Tensor, tokens: int | None = None) -> Tensor:
    """Document ids (1, `tokens`) of one row from the bounds of variable-length attention.

    Args:
        cu_seqlens: (K + 1) integers: the starts of K documents and the end of the last; they begin with 0 and never
            fall. Two equal bounds enclose an empty document.
        tokens: columns of the row; columns after the last document are padding. None for no padding.

    Raises:
        ValueError: another shape or dtype, invalid bounds, or fewer tokens than they hold.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not _whole(cu_seqlens):
        raise ValueError(
            f"cu_seqlens of shape {tuple(cu_seqlens.shape)} and {cu_seqlens.dtype} must be (documents + 1) integers"
        )
    lengths_K = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or bool((lengths_K < 0).any()):
        raise ValueError(f"cu_seqlens={cu_seqlens.tolist()} must begin with 0 and never fall; take cumulative lengths")
    held = int(cu_seqlens[-1])
    if held == 0 or (tokens is not None and tokens < held):
        raise ValueError(
            f"cu_seqlens end at {held}, tokens={tokens}; a row holds at least one token, and all documents"
        )
    ids_T = torch.arange(len(lengths_K), device=cu_seqlens.device).repeat_interleave(lengths_K.long())
    padding_T = ids_T.new_full(((held if tokens is None else tokens) - held,), PADDING)
    return torch.cat([ids_T, padding_T])[None]


def document_ids_from_position_ids(position_ids_BN: Tensor, padding: Tensor | None = None) -> Tensor:
    """Document ids (B, N) from positions that restart at 0 with each document.

    A row's first token may have any position: its document began in an earlier segment.

    Args:
        position_ids_BN: position of each token in its document, integers.
        padding: (B, N) bool, True = padding, whose positions are ignored.

    Raises:
        ValueError: other shapes or dtypes, or a position that is neither 0 nor one more than the position before.
    """
    if position_ids_BN.dim() != 2 or not _whole(position_ids_BN):
        raise ValueError(
            f"position_ids of shape {tuple(position_ids_BN.shape)}, {position_ids_BN.dtype} must be (B, N) integers"
        )
    if padding is not None and (padding.shape != position_ids_BN.shape or padding.dtype != torch.bool):
        raise ValueError(
            f"padding of shape {tuple(padding.shape)}, {padding.dtype} must be bool, of the shape of position_ids"
        )
    real_BN = torch.ones_like(position_ids_BN, dtype=torch.bool) if padding is None else ~padding
    before_BN = value_before(position_ids_BN, real_BN)
    first_BN = real_BN & (real_BN.cumsum(1) == 1)
    begins_BN = real_BN & (first_BN | (position_ids_BN == 0))
    wrong_BN = real_BN & ~begins_BN & (position_ids_BN != before_BN + 1)
    if bool(wrong_BN.any()):
        row, column = wrong_BN.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids[{row}, {column}] is {int(position_ids_BN[row, column])}, after "
            f"{int(before_BN[row, column])}; it must be 0 or the next position: give padding, or document ids"
        )
    return (begins_BN.long().cumsum(1) - 1).masked_fill(~real_BN, PADDING)


def check_documents(documents: Tensor, rows: int, columns: int) -> None:
    """Refuse (ValueError) ids of another shape or dtype; `plan_documents` checks values."""
    if shape_of("documents", documents) != (rows, columns) or not _whole(documents):
        raise ValueError(
            f"documents of shape {tuple(documents.shape)} and dtype {documents.dtype} must be an id for each token, "
            f"{(rows, columns)}, whole numbers, negative at padding"
        )


def ids_of(documents: Tensor, padding: Tensor | None = None) -> Tensor:
    """Return ids on the CPU, as long, -1 at padding (ValueError: in compiled code)."""
    if torch.compiler.is_compiling():
        raise ValueError(f"documents in a compiled call: {COMPILED}")
    ids_BN = documents.cpu().long().clamp(min=PADDING)
    return ids_BN if padding is None else ids_BN.masked_fill(padding.cpu(), PADDING)


def plan_documents(ids_BN: Tensor) -> DocumentPlan | None:
    """Plan to read a segment with these ids (of `ids_of`); None if it can be read unchanged.

    Raises:
        ValueError: a document ends in a row and begins there again.
    """
    if isinstance(ids_BN, FakeTensor):  # counting operations: no values
        return None
    rows, columns = ids_BN.shape
    real_BN = ids_BN >= 0
    begins_BN = real_BN & (ids_BN != value_before(ids_BN, real_BN))
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
            DocumentGroup(row_P[member_P], places_Pn, padding, fresh if bool(fresh.any()) else None, int(length.sum()))
        )
        source_BN[places_Pn[own]] = outputs + own.flatten().nonzero()[:, 0]
        ends_P = torch.ones_like(fresh_P)
        ends_P[:-1] = row_P[1:] != row_P[:-1]
        ends = ends_P[member_P]
        last_B[row_P[member_P[ends]]] = pieces + ends.nonzero()[:, 0]
        pieces, outputs = pieces + len(member_P), outputs + places_Pn.numel()
    return DocumentPlan(groups, source_BN.view(rows, columns), last_B)


def read_documents(
    read: Callable[..., ModelOutput],
    documents: Tensor,
    padding: Tensor | None,
    given: Sequence[Tensor | None],
    state: State,
    init_state: Callable[[int], State],
) -> ModelOutput:
    """Read one segment of packed rows, piece by piece if necessary; see `read_plan`.

    Args:
        documents: (B, N) document ids, negative at padding. The first document of a row continues the row's state,
            every further one begins with a fresh state.
        padding: (B, N) bool, further padding.

    Raises:
        ValueError: see `check_documents`, `ids_of`, `plan_documents` and `read_plan`.
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
    plan: DocumentPlan,
    given: Sequence[Tensor | None],
    state: State,
    init_state: Callable[[int], State],
) -> ModelOutput:
    """Read one segment, group after group.

    Args:
        read: (tensors of `given`, state before, padding or None) -> `ModelOutput` with one output per token.
        given: inputs, targets and other tensors (B, N, ...); None stays None.
        state: of the rows, before the segment. init_state: makes a fresh state of a number of rows.

    Returns:
        Outputs at their positions, 0 at padding; the states of the rows; and the mean of the groups' auxiliary losses,
        weighted by tokens.

    Raises:
        ValueError: outputs that are not one per token.
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
                "answers once for a row cannot read packed documents; give each document a row of its own"
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
    """Rows (B,) bool to reset before each segment, because another document begins there; None for no row.

    Resets before the first segment are the caller's.

    Args:
        ids_BN: of `ids_of`. parts: the columns of the segments.

    Raises:
        ValueError: see `plan_documents`.
    """
    real_BN = ids_BN >= 0
    before_BN = value_before(ids_BN, real_BN)
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
    """Refuse (ValueError) a model that cannot read packed rows: it answers once per row, or all rows write one memory
    in training."""
    if getattr(model, "answers_once", False):
        refuse_documents(True, f"{type(model).__name__} answers once for a row, not once per document")
    for name, module in model.named_modules():
        if isinstance(module, LayerMemory) and module.shared and module.training:
            why = "is one for all rows, and each call of a packed segment would write it in training"
            refuse_documents(True, f"memory {type(module).__name__} ({name}) {why}")


def refuse_documents(documents: Any, why: str) -> None:
    """Refuse (ValueError) documents, unless they are None."""
    if documents is not None:
        raise ValueError(f"documents: {why}; give each document a row of its own, padded on the right")


def _whole(t: Tensor) -> bool:
    return t.dtype in (torch.int64, torch.int32)


def column_before(real_BN: Tensor) -> Tensor:
    """The column of the last token before each column, -1 for none."""
    columns_BN = torch.arange(real_BN.shape[1], device=real_BN.device).expand_as(real_BN)
    last_BN = columns_BN.masked_fill(~real_BN, -1).cummax(1).values
    return F.pad(last_BN[:, :-1], (1, 0), value=-1)


def value_before(t_BN: Tensor, real_BN: Tensor) -> Tensor:
    """The value at the last token before each position, -1 for none."""
    last_BN = column_before(real_BN)
    return t_BN.gather(1, last_BN.clamp(min=0)).masked_fill(last_BN < 0, -1)


def _kinds(length_P: Tensor) -> Tensor:
    """Group of each piece, the longest pieces first."""
    # Equal exponents: L // length in [2^k, 2^(k+1)), so length in (L / 2^(k+1), L / 2^k].
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
    """Refuse (ValueError) a document with two pieces in a row, given where pieces begin."""
    id_P = ids_BN[row_P, column_P]
    _, kind_P, count = torch.stack([row_P, id_P], 1).unique(dim=0, return_inverse=True, return_counts=True)
    again = (count[kind_P] > 1).nonzero()[:, 0]
    if len(again):
        place = int(again[-1])
        raise ValueError(
            f"documents[{int(row_P[place])}, {int(column_P[place])}] is {int(id_P[place])}, a document that has ended "
            "earlier in its row; the tokens of a document must be consecutive, and each document needs its own id"
        )
