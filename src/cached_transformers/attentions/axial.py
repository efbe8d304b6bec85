"""Axial attention (Ho et al. 2019, arXiv:1912.12180; github.com/google-research/google-research, axial/).

The sequence is a map, row by row, and a token attends along one axis at a time:

    row_i(v) = softmax over {j: row of j = row of i} of (q_i k_j / sqrt(E)) v_j
    col_i(v) = softmax over {j: column of j = column of i} of (q_i k_j / sqrt(E)) v_j
    layers: row in layers of even index, col in odd ones    sum: row_i(v) + col_i(v)    sequential: col_i(row(v))

Causal: only j <= i on either axis. Two layers, or "sequential" taken in this way, would reach what lies above and not
to the right. "sequential" therefore equals the paper's outer and inner decoders, on plain q, k and v: the rows
above are complete, so that attention along them needs no order; one softmax down the column takes their unmasked
results, and the masked one at the query's own place. Each token then reaches all before it.

    u_j = row_j(v) without order,  m_i = row_i(v) with it
    out_i = softmax over {j above i in its column, i itself} of (q_i k_j / sqrt(E)) (u_j above i, m_i at i)

Cost: N C (E + V) multiply-adds a head for row and N R (E + V) for col, where both divide N; "sum" and "sequential" have
both, and causal "sequential" the row twice. Least at C near sqrt(N).

What differs: the sequence need not fill its last row; class tokens (`prefix`) see all and are seen by all, on each
axis. The paper's shifts of the map, which make a model of images causal, belong to a model; here order is the
sequence's.

Legend: B rows of the batch, H heads, N tokens, E key width, V value width, R rows and C columns of the map, X lines of
an axis, Y places of a line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cached_transformers.interfaces.attention import AttentionOutput, Call, StepsFrom
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend, into_blocks, merge, paired_logits, seen_places
from .parts.flex import Sees
from .parts.kernels import FlexKernel
from .parts.pattern import PatternAttention, in_sequence
from .parts.windows import beside_class_tokens

MODES = ("layers", "row", "col", "sum", "sequential")


@ATTENTIONS.register(
    "axial",
    paper="arXiv:1912.12180",
    title="Axial attention",
    purpose="a regular pattern",
    equation="softmax over one row, or one column, of (q k^T / sqrt(E)) v; by turns of layers, summed, or in sequence",
    order="N sqrt(N)",
    cost="row: N C (E + V) multiply-adds a head; col: N R (E + V); sum and sequential: both, and the row twice for "
    "sequential causally; for R rows of C columns",
)
class AxialAttention(PatternAttention):
    """Attention along the rows or along the columns of a map.

    In the modes "sum" and "sequential", which are of two softmaxes, a context of a memory and the log-sum-exp are
    refused.

    Args:
        mode: "row", "col", "layers" (row in layers of even index, col in odd ones), "sum" or "sequential".
        columns: C; taken from `size` when None, else the least C with C^2 >= `length`.
        size: (rows, columns) of the map. A shorter sequence is the beginning of a map.
        length: of the longest sequence.
        index: of the layer.
        prefix: class tokens before the map, which see all and are seen by all.

    Raises:
        ValueError: an unknown mode; columns below 1, or nothing that tells them; columns that are not those of the map.
    """

    can = PatternAttention.can | {"causal"}
    steps_from: StepsFrom = "keys"

    def __init__(
        self,
        *,
        mode: str = "layers",
        columns: int | None = None,
        size: Sequence[int] | None = None,
        length: int | None = None,
        index: int = 0,
        prefix: int = 0,
        kernel: FlexKernel = "plain",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout, kernel=kernel)
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} must be one of {', '.join(MODES)}")
        if prefix < 0:
            raise ValueError(f"prefix={prefix} must be a number of class tokens, or 0")
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise ValueError(f"size={size} must be (rows, columns) of a map")
        if columns is None and size is not None:
            columns = size[1]
        elif columns is None and length is not None:
            columns = math.isqrt(max(1, length - prefix) - 1) + 1
        if columns is None:
            raise ValueError(
                "axial attention needs the columns of its map; give columns, size=(rows, columns) or length"
            )
        if columns < 1 or (size is not None and columns != size[1]):
            raise ValueError(f"columns={columns} must be at least 1, and those of size={size} where that is given")
        self.mode = ("row", "col")[index % 2] if mode == "layers" else mode
        self.columns, self.prefix = columns, prefix
        self.places = None if size is None else size[0] * size[1]
        self.on_map = size is not None
        if mode in ("sum", "sequential"):
            self.can = self.can - {"context", "lse"}
            self.steps_from = None  # of two softmaxes
            if kernel == "flex":
                raise ValueError(f"mode={mode!r} takes two softmaxes, but kernel='flex' has one; take kernel='plain'")
            self.kernel = "plain"

    def rule(self, heads: int, tokens: int, causal: bool) -> _Axis:
        self._check_fits(tokens)
        return _Axis(self.mode, self.columns, self.prefix)

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        self._check_fits(q_BHNE.shape[2])
        if self.mode == "sum":
            row, col = (self._axis(axis, q_BHNE, k_BHNE, v_BHNV, call) for axis in ("row", "col"))
            return AttentionOutput(row.out_BHNV + col.out_BHNV)
        if self.mode == "sequential":
            return AttentionOutput(self._sequential(q_BHNE, k_BHNE, v_BHNV, call))
        return self._axis(self.mode, q_BHNE, k_BHNE, v_BHNV, call)

    def _check_fits(self, tokens: int) -> None:
        if self.places is not None and tokens - self.prefix > self.places:
            raise ValueError(f"{tokens - self.prefix} tokens do not fit the map's size, {self.places} places")

    def _axis(
        self, axis: str, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, *, ordered: bool = True
    ) -> AttentionOutput:
        """Attention along one axis, beside class tokens. Without `ordered`, a causal order holds for these alone."""
        body = functools.partial(self._lines, axis, ordered)
        return beside_class_tokens(body, self.prefix, q_BHNE, k_BHNE, v_BHNV, call, dropout=self.drop)

    def _sequential(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> Tensor:
        rows = self._axis("row", q_BHNE, k_BHNE, v_BHNV, call).out_BHNV
        if not call.causal:
            return self._axis("col", q_BHNE, k_BHNE, rows, call).out_BHNV
        whole_rows = self._axis("row", q_BHNE, k_BHNE, v_BHNV, call, ordered=False).out_BHNV
        body = functools.partial(self._down, rows[:, :, self.prefix :])
        out = beside_class_tokens(body, self.prefix, q_BHNE, k_BHNE, whole_rows, call, dropout=self.drop)
        return out.out_BHNV

    def _down(self, row_BHNV: Tensor, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """One softmax over the values above in the column, and `row_BHNV` at the query's own place."""
        wanted = call._replace(want_lse=True)
        above = self._lines("col", True, q_BHNE, k_BHNE, v_BHNV, wanted, itself=False)
        assert above.lse_BHN is not None
        # Only a query that is padding itself could see padding here, and its result is unused.
        return AttentionOutput(*merge(above.out_BHNV, above.lse_BHN, row_BHNV, paired_logits(q_BHNE, k_BHNE)))

    def _lines(
        self,
        axis: str,
        ordered: bool,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        v_BHNV: Tensor,
        call: Call,
        *,
        itself: bool = True,
    ) -> AttentionOutput:
        """Attention along each line of an axis; in order, of places up to the query's own, or before it."""
        tokens, device = q_BHNE.shape[2], q_BHNE.device
        columns = min(self.columns, tokens)

        def lines(t_BHNE: Tensor) -> Tensor:
            t_BHRCE = into_blocks(t_BHNE, columns)
            return t_BHRCE if axis == "row" else t_BHRCE.transpose(2, 3)

        q, k, v = lines(q_BHNE), lines(k_BHNE), lines(v_BHNV)
        mask, causal = None, call.causal and ordered
        if causal:
            many = k.shape[3]
            mask = torch.ones(many, many, dtype=torch.bool, device=device).tril(0 if itself else -1)
        # The fill of the last row comes after all tokens, also down a column: in order, nothing sees it.
        if call.key_padding_mask is not None or (tokens % columns and not causal):
            place_RC = torch.arange(k.shape[2] * k.shape[3], device=device).view(-1, columns)
            place_XY = place_RC if axis == "row" else place_RC.T
            seen = seen_places(place_XY[:, None], tokens, call.key_padding_mask)
            mask = seen if mask is None else seen & mask
        out, lse = attend(q, k, v, mask, dropout=self.drop, want_lse=call.want_lse)
        if axis == "col":
            out, lse = out.transpose(2, 3), None if lse is None else lse.transpose(2, 3)
        return in_sequence(out, lse, tokens)


class _Axis(NamedTuple):
    """The line of a query on one axis; class tokens see all and are seen by all."""

    axis: str
    columns: int
    prefix: int

    def bind(self, length: int, device: torch.device) -> Sees:
        columns, prefix = self.columns, self.prefix

        def sees(row: Any, head: Any, i: Any, j: Any) -> Tensor:
            apart = (i - prefix) // columns - (j - prefix) // columns if self.axis == "row" else (i - j) % columns
            return (apart == 0) | (i < prefix) | (j < prefix)

        return sees
