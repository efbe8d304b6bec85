"""Which columns of a batch are the segments of its rows: the next so many tokens of each, whatever padding there is.

Rows without padding, or with padding behind their texts alone, have their segments in the same columns. Else each has
its own: the first segments of all rows are read in one pass, then the second ones, and a row that has no more waits
as padding. What no row has filled stays as it stands.

    a b c d e f g    segments of 3:  a b c | d e f   and open:  g
    . . . h i j k                    h i j | . . .              k

Legend: B rows, M columns, N those of one segment, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cached_transformers.checks import insist
from cached_transformers.models.segments import cut


class Segment(NamedTuple):
    """Part of the columns.

    Attributes:
        columns: the same ones of all rows, or of each row its own, (B, N).
        before: tokens of the row in front of it, (B, 1) where rows differ.
        behind: those that the row has with it, where the segment is full; None where it is open.
        padding_BN: True = padding, or none of this segment.
    """

    columns: slice | Tensor
    before: int | Tensor
    behind: int | Tensor | None
    padding_BN: Tensor | None

    def take(self, t: Tensor) -> Tensor:
        """These columns of (B, M, ...)."""
        if isinstance(self.columns, slice):
            return t[:, self.columns]
        return t.take_along_dim(self.columns.view(*self.columns.shape, *[1] * (t.dim() - 2)), 1)

    def put(self, t_BMD: Tensor, values_BND: Tensor) -> Tensor:
        """(B, M, D) with the values of this segment in their columns; M - 1 is the place of those of padding."""
        columns, last = self.columns, t_BMD.shape[1] - 1
        if isinstance(columns, slice):
            columns = torch.arange(columns.start, columns.stop, device=t_BMD.device).expand(len(t_BMD), -1)
        if self.padding_BN is not None:
            columns = columns.masked_fill(self.padding_BN, last)
        return t_BMD.scatter(1, columns[..., None].expand_as(values_BND), values_BND)


def row_segments(columns: int, length: int | None, padding_BM: Tensor | None, goes_on: bool) -> list[Segment]:
    """The segments of all rows, the open one last.

    Args:
        length: tokens in a segment; None for one of all columns. goes_on: whether tokens may follow these.
        padding_BM: True = no token of an open segment.

    Raises:
        ValueError: in a compiled graph, which cannot depend on values, rows differ in where their segments begin.
    """
    if padding_BM is not None and length is not None and columns >= length and _differ(padding_BM, length, goes_on):
        return _segments_of_rows(~padding_BM, length)
    parts = cut(columns, length)
    paddings = [None if padding_BM is None else padding_BM[:, part] for part in parts]
    behind = [part.stop if part.stop - part.start == length else None for part in parts]
    return [Segment(c, c.start, b, p) for c, b, p in zip(parts, behind, paddings, strict=True)]


def _differ(padding_BM: Tensor, length: int, goes_on: bool) -> bool:
    """Whether the rows' segments do not stand in the same columns."""
    columns = padding_BM.shape[1]
    # Behind a text, padding may fill a segment that has ended with the text, unless the text goes on.
    shifted_BM = padding_BM[:, : columns - columns % length] if goes_on else padding_BM[:, :-1] & ~padding_BM[:, 1:]
    if not torch.compiler.is_compiling():
        return not isinstance(padding_BM, FakeTensor) and bool(shifted_BM.any())
    why = (
        f"padding in front of tokens shifts where a row's segments of {length} tokens begin, on which a compiled graph "
        "cannot depend; pad on the right, or call the model without torch.compile"
    )
    insist(~shifted_BM.any(), why)
    return False


def _segments_of_rows(real_BM: Tensor, length: int) -> list[Segment]:
    full_B1 = real_BM.sum(1, keepdim=True) // length
    tokens_BM = (~real_BM).long().argsort(dim=1, stable=True)  # columns with tokens first
    full = full_B1[:, 0].tolist()
    segments = []
    for number in range(max(full)):
        columns_BN = tokens_BM[:, number * length : (number + 1) * length]
        waits_BN = None if min(full) > number else (full_B1 <= number).expand_as(columns_BN)
        before, behind = (full_B1.clamp(max=count) * length for count in (number, number + 1))
        segments.append(Segment(columns_BN, before, behind, waits_BN))
    begin_B1 = full_B1 * length
    open_BM = real_BM & (real_BM.cumsum(1) > begin_B1)
    some_M = open_BM.any(0)
    if bool(some_M.any()) or not segments:
        start, stop = int(some_M.long().argmax()), real_BM.shape[1]
        segments.append(Segment(slice(start, stop), begin_B1, None, ~open_BM[:, start:]))
    return segments


def places(padding_BM: Tensor, before: int | Tensor) -> Tensor:
    """(B, M): the place of each token in its row, counted from 0, with so many tokens `before` these columns.

    Padding behind a text counts on, as it does in the host alone.
    """
    passed_BM = padding_BM.long().cumsum(1).masked_fill(padding_BM, 0).cummax(1).values
    return before + torch.arange(padding_BM.shape[1], device=padding_BM.device) - passed_BM


def stream_positions(call: dict[str, Tensor], padding_BN: Tensor | None, clock_B: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a segment's tokens in the stream, (B, N, 1), and what makes places of them when added, (B, 1).

    The first token stands where the row's clock does; so does padding, as memories look at the first position.
    """
    places_BN = call.get("position_ids")
    if places_BN is None:
        rows, n = next(iter(call.values())).shape[:2]
        places_BN = torch.arange(n, device=clock_B.device).expand(rows, n)
    shift_B1 = _first_place(places_BN, padding_BN) - clock_B[:, None]
    positions_BN = places_BN - shift_B1
    if padding_BN is not None:
        positions_BN = torch.where(padding_BN, clock_B[:, None], positions_BN)
    return positions_BN[..., None], shift_B1


def _first_place(places_BN: Tensor, padding_BN: Tensor | None) -> Tensor:
    """(B, 1): that of each row's first token; 0 where it has none yet."""
    if padding_BN is None:
        return places_BN[:, :1]
    first_B1 = places_BN.masked_fill(padding_BN, places_BN.max()).amin(1, keepdim=True)
    return torch.where(padding_BN.all(1, keepdim=True), 0, first_B1)


def put_together(outs: list[Any], segments: list[Segment], columns: int) -> Any:
    """One output for all columns, of the outputs for each of the segments; zeros where there is padding."""

    def whole(parts: list[Tensor]) -> Tensor:
        rows, _, width = parts[0].shape
        t_BMD = parts[0].new_zeros(rows, columns + 1, width)
        for segment, part in zip(segments, parts, strict=True):
            t_BMD = segment.put(t_BMD, part)
        return t_BMD[:, :columns]

    out = outs[-1]
    out["last_hidden_state"] = whole([part.last_hidden_state for part in outs])
    if out.get("hidden_states") is not None:
        out["hidden_states"] = tuple(whole(list(parts)) for parts in zip(*(o.hidden_states for o in outs), strict=True))
    return out


def refuse_masks(mask: Any, rows: int, tokens: int, counted: str = "") -> None:
    """Refuse what is no mask of padding.

    Args:
        counted: which tokens there are, for the message.

    Raises:
        ValueError: it is of another shape than (rows, tokens).
    """
    if not isinstance(mask, Tensor) or mask.shape != (rows, tokens):
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(
            f"an attention mask of {found}: beside a memory it marks padding alone, 0 for padding, as "
            f"(rows, tokens) = {(rows, tokens)}{counted}"
        )
