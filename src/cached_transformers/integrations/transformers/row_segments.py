"""Find the columns of a batch that are the segments of its rows: the next N tokens of each, wherever its padding is.

Rows without padding, or with padding only after their texts, have their segments in the same columns. Otherwise each
row has its own: the first segments of all rows are read in one pass, then the second ones, and a row that has no more
waits as padding. The last columns, which fill no row's segment, remain as they are.

    a b c d e f g    segments of 3:  a b c | d e f   and partial:  g
    . . . h i j k                    h i j | . . .                 k

Legend: B rows, M columns, N those of one segment, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cached_transformers.checks import insist
from cached_transformers.memories.parts.recurrent import shown
from cached_transformers.models.segments import cut


class Segment(NamedTuple):
    """One segment of each row.

    Attributes:
        inputs: ids or embeddings, types, positions, (B, N, ...) each. padding_BN: True = padding.
        columns: of the call; the same for all rows, or each row's own, (B, N).
        before: tokens of the row before the segment, (B, 1) where rows differ.
        end: tokens of the row up to the segment's end; None where the segment is partial.
    """

    inputs: dict[str, Tensor]
    padding_BN: Tensor | None = None
    columns: slice | Tensor = slice(None)
    before: int | Tensor = 0
    end: int | Tensor | None = None

    def put(self, t_BMD: Tensor, values_BND: Tensor) -> Tensor:
        """(B, M, D) with the values of this segment in their columns; values of padding go to column M - 1."""
        columns, last = self.columns, t_BMD.shape[1] - 1
        if isinstance(columns, slice):
            columns = torch.arange(columns.start, columns.stop, device=t_BMD.device).expand(len(t_BMD), -1)
        if self.padding_BN is not None:
            columns = columns.masked_fill(self.padding_BN, last)
        return t_BMD.scatter(1, columns[..., None].expand_as(values_BND), values_BND)


def row_segments(
    inputs: dict[str, Tensor], length: int | None, padding_BM: Tensor | None, continues: bool, before: int | Tensor
) -> list[Segment]:
    """The segments of all rows, the partial one last. Position ids count from the first token of each.

    Args:
        inputs: by name, (B, M, ...) each. length: tokens in a segment; None for one of all columns.
        padding_BM: True = no token of a partial segment. continues: whether tokens may follow these.
        before: tokens of the row before these columns, (B, 1) where rows differ.

    Raises:
        ValueError: in a compiled graph, which cannot depend on values, rows differ in the columns of their segments.
    """
    columns = next(iter(inputs.values())).shape[1]
    if padding_BM is not None and length is not None and columns >= length and _differ(padding_BM, length, continues):
        layout = _of_each_row(~padding_BM, length)
    else:
        layout = []
        for part in cut(columns, length):
            padding_BN = None if padding_BM is None else padding_BM[:, part]
            layout.append((part, part.start, part.stop if part.stop - part.start == length else None, padding_BN))
    segments = []
    for part, first, end, padding_BN in layout:
        if continues and end is None and padding_BN is not None:  # next tokens follow those of each row
            order_BN = (~padding_BN).long().argsort(dim=1, stable=True)
            part, padding_BN = order_BN + part.start, in_order(padding_BN, order_BN)
        taken, first = {name: in_columns(t, part) for name, t in inputs.items()}, before + first
        if "position_ids" in taken:
            taken["position_ids"] = (taken["position_ids"] - first).clamp(min=0)
        segments.append(Segment(taken, padding_BN, part, first, None if end is None else before + end))
    return segments


def in_columns(t: Tensor, columns: slice | Tensor) -> Tensor:
    """These columns of (B, M, ...)."""
    return t[:, columns] if isinstance(columns, slice) else in_order(t, columns)


def in_order(t: Tensor, columns_BN: Tensor) -> Tensor:
    """Columns of (B, M, ...), other ones for each row."""
    return t[torch.arange(len(t), device=t.device)[:, None], columns_BN]


def finite_padding(inputs: dict[str, Tensor], padding_BM: Tensor | None) -> dict[str, Tensor]:
    """The inputs with embeddings of 0 at padding, so that not even NaN comes out of it."""
    embedded = inputs.get("inputs_embeds")
    return inputs if embedded is None else {**inputs, "inputs_embeds": shown(embedded, padding_BM)}


def _differ(padding_BM: Tensor, length: int, continues: bool) -> bool:
    """Return True if the rows' segments are in different columns."""
    columns = padding_BM.shape[1]
    # Padding after a text may fill a segment that has ended with the text, unless the text continues.
    shifted_BM = padding_BM[:, : columns - columns % length] if continues else padding_BM[:, :-1] & ~padding_BM[:, 1:]
    if not torch.compiler.is_compiling():
        return not isinstance(padding_BM, FakeTensor) and bool(shifted_BM.any())
    why = (
        f"padding before tokens shifts the first columns of a row's segments of {length} tokens, and a compiled graph "
        "cannot depend on them; pad on the right, or call the model without torch.compile"
    )
    insist(~shifted_BM.any(), why)
    return False


def _of_each_row(real_BM: Tensor, length: int) -> list[tuple[Any, Any, Any, Tensor | None]]:
    """(columns, tokens before, tokens up to the end, padding) of each segment."""
    full_B1 = real_BM.sum(1, keepdim=True) // length
    tokens_BM = (~real_BM).long().argsort(dim=1, stable=True)  # columns with tokens first
    full = full_B1[:, 0].tolist()
    layout: list[tuple[Any, Any, Any, Tensor | None]] = []
    for number in range(max(full)):
        columns_BN = tokens_BM[:, number * length : (number + 1) * length]
        waits_BN = None if min(full) > number else (full_B1 <= number).expand_as(columns_BN)
        before, end = (full_B1.clamp(max=count) * length for count in (number, number + 1))
        layout.append((columns_BN, before, end, waits_BN))
    first_B1 = full_B1 * length
    partial_BM = real_BM & (real_BM.cumsum(1) > first_B1)
    some_M = partial_BM.any(0)
    if bool(some_M.any()) or not layout:
        start, stop = int(some_M.long().argmax()), real_BM.shape[1]
        layout.append((slice(start, stop), first_B1, None, ~partial_BM[:, start:]))
    return layout


def stream_positions(inputs: dict[str, Tensor], padding_BN: Tensor | None, clock_B: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of a segment's tokens in the stream, (B, N, 1), and the shift (B, 1) to position ids.

    The first token is at the row's clock; so is padding, as memories look at the first position.
    """
    ids_BN = inputs.get("position_ids")
    if ids_BN is None:
        rows, n = next(iter(inputs.values())).shape[:2]
        ids_BN = torch.arange(n, device=clock_B.device)[None]
        if padding_BN is None:
            clock_B1 = clock_B[:, None]
            return (ids_BN + clock_B1)[..., None], -clock_B1
        ids_BN = ids_BN.expand(rows, n)
    if padding_BN is None:
        first_B1 = ids_BN[:, :1]
    else:
        first_B1 = ids_BN.masked_fill(padding_BN, ids_BN.max()).amin(1, keepdim=True)
        first_B1 = torch.where(padding_BN.all(1, keepdim=True), 0, first_B1)
    shift_B1 = first_B1 - clock_B[:, None]
    positions_BN = ids_BN - shift_B1
    if padding_BN is not None:
        positions_BN = torch.where(padding_BN, clock_B[:, None], positions_BN)
    return positions_BN[..., None], shift_B1


def mapped(outs: list[Any], join: Callable[[list[Tensor]], Tensor]) -> Any:
    """The last of a host's outputs, with hidden states joined from those of all."""
    out = outs[-1]
    out["last_hidden_state"] = join([part.last_hidden_state for part in outs])
    if out.get("hidden_states") is not None:
        out["hidden_states"] = tuple(join(list(parts)) for parts in zip(*(o.hidden_states for o in outs), strict=True))
    return out


def narrowed(out: Any, start: int, length: int) -> Any:
    """The output for some neighbouring tokens."""
    return mapped([out], lambda parts: parts[0].narrow(1, start, length))


def joined(outs: list[Any]) -> Any:
    """One output for parts that follow each other."""
    return outs[0] if len(outs) == 1 else mapped(outs, lambda parts: torch.cat(parts, 1))


def joined_segments(outs: list[Any], segments: list[Segment], columns: int) -> Any:
    """One output for all columns, of the outputs for each of the segments; zeros at padding."""
    same = all(isinstance(segment.columns, slice) for segment in segments)
    if same and sum(out.last_hidden_state.shape[1] for out in outs) == columns:
        return joined(outs)

    def scatter(parts: list[Tensor]) -> Tensor:
        rows, _, width = parts[0].shape
        t_BMD = parts[0].new_zeros(rows, columns + 1, width)
        for segment, part in zip(segments, parts, strict=True):
            t_BMD = segment.put(t_BMD, part)
        return t_BMD[:, :columns]

    return mapped(outs, scatter)


def refuse_masks(mask: Any, rows: int, tokens: int, counted: str = "") -> None:
    """Refuse (ValueError) a mask that is not one of padding, (rows, tokens); `counted`: the tokens, for the message."""
    if not isinstance(mask, Tensor) or mask.shape != (rows, tokens):
        found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise ValueError(
            f"attention_mask of {found}: beside a memory it marks only padding, 0 for padding, as "
            f"(rows, tokens) = {(rows, tokens)}{counted}"
        )
