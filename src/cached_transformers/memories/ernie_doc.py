"""ERNIE-Doc (Ding et al. 2020, arXiv:2012.15688; github.com/PaddlePaddle/ERNIE, branch repro, ernie-doc).

Each layer attends the outputs that it gave itself in earlier segments, detached; and a document may be fed twice.

    Mem(n, t) = SG[last M of O^n before segment t],  keys and values of [Mem(n, t), O^{n-1}_t]

Reach: unbounded with a single layer, since an output that is stored has itself read the memory.

Legend: B rows, N tokens, M slots, K = M + N, T longest segment, H heads, E head width, D = H * E, P position channels,
Z distances that have a vector.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Context, ProjectKV, Trace
from cached_transformers.interfaces.probing import Probing, whole_episode
from cached_transformers.positions import KeptScheme, Positions
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import Pairs, Rows, push_made
from .transformer_xl import TransformerXL


class ErnieDocPositions(Positions):
    """A trained vector for each signed distance, and for the task that a key belongs to.

        logit_ij = [(q_i + u) . k_j + (q_i + v) . W_r N(R_d) + (q_i + w) . W_t N(G_task(j))] / sqrt(E)

    d = position of i - position of j, of either sign. N is LayerNorm without a bias, and W_r and W_t have none: the
    release has them, but they move all logits of a query alike, which softmax does not see. B H N (2 T + M) E
    multiply-adds, and one gather.

    Args:
        heads: H. head_width: E.
        longest: T, tokens of the longest segment. slots: M.
        tasks: number of tasks; the second channel of the positions is then the task of each token, and the term of G
            takes part. It says nothing where all keys have one task.
    """

    def __init__(self, heads: int, head_width: int, longest: int, slots: int, tasks: int = 0) -> None:
        super().__init__()
        at_least_one(": there is a vector for each distance up to both", longest=longest, slots=slots)
        width = heads * head_width
        self.heads, self.head_width, self.longest, self.slots, self.tasks = heads, head_width, longest, slots, tasks
        self.table = nn.Parameter(torch.randn(2 * longest + slots, width))
        self.table_norm, self.project = nn.LayerNorm(width, bias=False), nn.Linear(width, width, bias=False)
        self.content_bias, self.position_bias = (nn.Parameter(0.02 * torch.randn(heads, head_width)) for _ in range(2))
        if tasks:
            self.task_table = nn.Parameter(torch.randn(tasks, width))
            self.task_norm, self.project_task = nn.LayerNorm(width, bias=False), nn.Linear(width, width, bias=False)
            self.task_bias = nn.Parameter(0.02 * torch.randn(heads, head_width))

    def open(self, run: bool) -> Positions:
        return _ErnieDocTables(self)

    def query(self, q_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        return q_BHNE + self.content_bias[:, None]

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        return self.looked_up(q_BHNE, q_positions_BNP, k_positions_BMP, self.tables())

    def by_distance(self, q_BHNE: Tensor, count: int) -> Tensor | None:
        if self.tasks:
            return None
        self._check_length(q_BHNE.shape[2])
        # The release's order of rows, as below.
        row_K = torch.arange(count, device=q_BHNE.device)
        row_K = torch.where(row_K > 0, row_K + self.longest - 1, 0).clamp(max=len(self.table) - 1)
        table_HEK = self.tables()[0][..., row_K]
        return (q_BHNE + self.position_bias[:, None]) @ table_HEK / math.sqrt(self.head_width)

    def tables(self) -> list[Tensor]:
        """(H, E, Z) of distances, and of tasks where there are any."""
        tables = [self.project(self.table_norm(self.table))]
        if self.tasks:
            tables.append(self.project_task(self.task_norm(self.task_table)))
        return [table_ZD.unflatten(-1, (self.heads, self.head_width)).permute(1, 2, 0) for table_ZD in tables]

    def _check_length(self, tokens: int) -> None:
        if tokens > self.longest:
            raise ValueError(
                f"a segment of {tokens} tokens, but distances are trained for longest={self.longest}; "
                "take shorter segments, or a larger longest"
            )

    def looked_up(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, tables: list[Tensor]
    ) -> Tensor:
        """The bias, by what `tables` gave."""
        self._check_length(q_BHNE.shape[2])
        distance_BNK = q_positions_BNP[:, :, None, 0] - k_positions_BMP[:, None, :, 0]
        # The release's order: 0, -1, ..., 1 - T, then 1, 2, ... An empty slot may be anywhere, and takes the last.
        row_BNK = torch.where(distance_BNK > 0, distance_BNK + self.longest - 1, -distance_BNK)
        bias_BHNK = _picked(q_BHNE + self.position_bias[:, None], tables[0], row_BNK)
        if self.tasks:
            if k_positions_BMP.shape[-1] < 2:
                raise ValueError(f"tasks={self.tasks} needs positions of two channels, the second of them the task")
            task_BNK = k_positions_BMP[:, None, :, 1].expand_as(distance_BNK)
            bias_BHNK = bias_BHNK + _picked(q_BHNE + self.task_bias[:, None], tables[1], task_BNK)
        return bias_BHNK / math.sqrt(self.head_width)


class _ErnieDocTables(KeptScheme):
    """Trained distances for tokens that come one at a time: the tables are projected once."""

    def __init__(self, scheme: ErnieDocPositions) -> None:
        super().__init__(scheme)
        self._tables: list[Tensor] = scheme.tables()

    def bias(
        self, q_BHNE: Tensor, q_positions_BNP: Tensor, k_positions_BMP: Tensor, *, causal_run: bool = False
    ) -> Tensor:
        return self.scheme.looked_up(q_BHNE, q_positions_BNP, k_positions_BMP, self._tables)  # type: ignore[no-any-return]


def _picked(q_BHNE: Tensor, table_HEZ: Tensor, row_BNK: Tensor) -> Tensor:
    """(B, H, N, K): the products of queries with the rows that are named."""
    row_BNK = row_BNK.clamp(0, table_HEZ.shape[2] - 1)
    return (q_BHNE @ table_HEZ).gather(-1, row_BNK[:, None].expand(-1, len(table_HEZ), -1, -1))


@MEMORIES.register(
    "ernie_doc",
    paper="arXiv:2012.15688",
    title="ERNIE-Doc",
    carries="the last outputs of the same layer; documents may be read twice",
    purpose=("higher layers' results in lower layers", "a whole document, read more than once"),
    equations="keys and values of [SG(last M outputs of the same layer), segment]; positions as distances",
    state="per row and layer: M (4 D + 8) + 8 bytes; in evaluation with keep='kv' M (8 D + 8) + 8",
    cost="per token and layer: 2 D^2 M / N (keys and values of the memory; in evaluation with keep='kv' 2 D^2) + 3 M D "
    "multiply-adds",
    without={"stored_kv": "keep='hidden'"},
    reach="unbounded, through M slots a layer",
    gradient="none into the memory; its keys and values train the projections",
    probe=Probing(whole_episode),
)
class ErnieDoc(TransformerXL):
    """Keys and values of the last `length` outputs of the same layer.

    A document can be fed twice: `SegmentLoop(passes=2)`, with the loss of the second feed, where each segment has heard
    of all others. There a causal model has read a token's target before: no next-token loss.

    Args:
        width: D. heads: H.
        length: M, slots.
        start: "empty": nothing is attended before something was stored; "zeros": M rows of zeros are, as in the
            release, and dilute the first segments.
        relative, keep, sinks: see `TransformerXL`; keep="kv" with start="empty".
        longest: T; own position scheme with a trained vector per distance, for segments of at most T tokens;
            D (2 T + M) parameters a layer.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        start: str = "empty",
        relative: bool = True,
        longest: int | None = None,
        keep: Literal["hidden", "kv"] = "hidden",
        sinks: int = 0,
    ) -> None:
        super().__init__(width, heads, length, relative=relative, keep=keep, sinks=sinks)
        if start not in ("empty", "zeros"):
            raise ValueError(f"start={start!r} must be 'empty' or 'zeros' (rows of zeros that are attended)")
        if longest is not None and (longest < 1 or not relative):
            raise ValueError(
                f"longest={longest} is the longest segment that distances are trained for: at least 1; relative=True"
            )
        if keep == "kv" and start == "zeros":
            raise ValueError("start='zeros' attends keys and values that change with the weights; take keep='hidden'")
        self.start, self.longest = start, longest

    def position_scheme(self) -> Positions | None:
        if self.longest is None:
            return super().position_scheme()
        return ErnieDocPositions(self.heads, self.width // self.heads, self.longest, self.length)

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        state = super().init_state(batch_size, like)
        if self.start == "empty":
            return state
        rows = state.recent if self.sinks else state
        before_M1 = torch.arange(-self.length, 0, device=like.device)[:, None]
        rows = rows._replace(
            positions_BMP=before_M1.repeat(batch_size, 1, 1), count_B=torch.full_like(rows.count_B, self.length)
        )
        return state._replace(recent=rows) if self.sinks else rows

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        context = super().open(state, first_B1P, project_kv)
        if first_B1P is None:
            return context
        # The newest slot is right before the first token, also where a model counts from 0 in each segment. Of further
        # channels (the task) the slots have the first token's.
        slots_BM1 = context.positions_BMP[..., :1]
        placed_BM1 = slots_BM1 - slots_BM1[:, -1:] + first_B1P[..., :1] - 1
        others_BMP = first_B1P[..., 1:].expand(-1, slots_BM1.shape[1], -1)
        return context._replace(positions_BMP=torch.cat([placed_BM1, others_BMP], -1))

    def push(self, rows: Rows | Pairs, trace: Trace) -> Rows | Pairs:
        query = trace.query
        assert query.positions_BNP is not None
        return push_made(rows, trace.y_BND.detach(), trace, query.positions_BNP[..., :1], query.padding_BN)
