"""Texts in parallel: neighbouring segments of each row belong to neighbouring processes, and the state goes through.

    process 0   segments 0 .. k-1     S_k       -->   process 1   segments k .. 2k-1     S_2k   -->   ...
                micro-batch 0, 1, 2                               micro-batch 0, 1, 2, one step behind

Reading a row is sequential, and rows do not know of each other: a batch is cut into M micro-batches of rows that follow
each other through the P processes (GPipe, Huang et al. 2019, arXiv:1811.06965, with segments in the place of layers).
They work for M of M + P - 1 steps. Where memories live in layers, layer l of a segment needs of the segment before it
the state of layer l alone, so that this state leaves before layer l + 1 runs (`models/wavefront.py`): each micro-batch
is L smaller steps, and processes work for M L of M L + P - 1.

The gradient of the state goes back from process to process (`handover.py`), so that loss, state and gradients are those
of a `SegmentLoop` in one process. Every process has all weights and is given the whole batch: what it computes is its
own segments. Weights of memory and blocks thus get a part of their gradient in each; DDP round the pipeline adds up.

Legend: B rows, N tokens of all segments.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.loops.segments import Piece, SegmentLoop, refuse_inside, told_documents
from cached_transformers.memories.grc.shared_cache import caches
from cached_transformers.models.diagonal import check_layers
from cached_transformers.models.segments import read_segments
from cached_transformers.models.wavefront import read_by_layers
from cached_transformers.registry import unknown_name
from cached_transformers.state import State, detach, map_state

from .pipeline_comm import Line

ORDERS = ("segments", "wavefront")
"""Orders in which a process runs its layers: one segment after the other, or one layer after the other."""


class SegmentPipeline(SegmentLoop):
    """A segment loop whose segments several processes share: for texts too long for the time of one.

    All processes of the group call it with the same rows, and call `backward` of their loss. Process r of P reads its
    neighbouring share of the segments; where there are fewer segments than processes the last ones wait. Without other
    processes it is a `SegmentLoop` that reads micro-batch after micro-batch.

    The loss of a process is P times its share of the whole, so that the mean over processes is the loss of one process,
    of gradients as well: `DistributedDataParallel(pipeline, find_unused_parameters=True)` takes that mean, over the
    processes that read other rows, too, where it is made of all of them and `group` is of those that share rows. (A
    process may have no use of a weight, as the last one has none of what writes the memory.) Whoever multiplies the
    loss, as gradient scaling does, must do so alike in all processes.

    Buffers that segments write, such as running averages of a core, are each process' own.

    Args:
        model, segment_length, bptt, scoring: as of `SegmentLoop`. Where a window of `bptt` segments ends between two
            processes no gradient is sent.
        micro_batches: M, parts of the rows that follow each other through the processes; as equal as can be. Each keeps
            its activations until the backward. Auxiliary losses are means over them, weighted by rows.
        schedule: "segments", for every memory; or "wavefront", where the state of each layer leaves as soon as it is
            there, for our models whose memory lives in the layers.
        group: processes that share rows, of `torch.distributed`; None for all there are.

    Attributes:
        auxiliary_loss: what the last loss held beside the cross-entropy, detached.

    Raises:
        ValueError: a size below 1, a shared cache, which each segment of a step would write, or a schedule that does
            not suit the model.

    Example:
        >>> pipeline = SegmentPipeline(model, segment_length=512, bptt=8, micro_batches=4)  # in each of two processes
        >>> loss, state = pipeline(tokens[:, :-1], tokens[:, 1:], state)  # of all 8 segments
        >>> loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        segment_length: int,
        bptt: int = 1,
        *,
        micro_batches: int = 1,
        schedule: str = "segments",
        scoring: Callable[..., ModelOutput] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, segment_length, bptt, scoring=scoring)
        if micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches} must be at least 1")
        if schedule not in ORDERS:
            raise ValueError(unknown_name("schedule", schedule, list(ORDERS)))
        if schedule == "wavefront":
            check_layers(self.model, schedule)
            if scoring is not None:
                raise ValueError("schedule='wavefront' scores tokens by itself; leave scoring out, or take 'segments'")
        if any(True for _ in caches(self.model)):
            raise ValueError(
                "a cache that all rows share is written by each segment of a step, in its order, and processes of a "
                "pipeline would each write their own; take a memory with a state, as grc_stream, or SegmentLoop"
            )
        self.schedule, self.micro_batches = schedule, micro_batches
        self.line = Line(group)
        self._shapes: dict[tuple[int, bool], State] = {}

    def forward(
        self,
        inputs_BN: Tensor,
        targets_BN: Tensor,
        state: State | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
        places: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """P times this process' share of the loss of the batch, and the state after it, cut from the graph.

        Arguments are those of `SegmentLoop.forward`, of the whole batch; `state` is looked at by the first process.

        Returns:
            The loss; and, in the first process, which goes on with it, and in the one that read the last segment, the
            state behind the batch; None in the others.

        Raises:
            ValueError: as `SegmentLoop`, or fewer rows than micro-batches.
        """
        told = padding
        if documents is not None:
            documents, padding = told_documents(documents, padding, inputs_BN)
            told = None  # the ids say it
        pieces, resets = self._prepared(inputs_BN, targets_BN, reset, told, places, documents)
        if self.schedule == "wavefront":
            refuse_inside(pieces, self.schedule)
        if len(inputs_BN) < self.micro_batches:
            raise ValueError(
                f"micro_batches={self.micro_batches} of {len(inputs_BN)} rows; take as many micro-batches as rows, or "
                "fewer"
            )
        line = self.line
        line.settle()
        own, last = share(len(pieces), line.rank, line.size), min(line.size, len(pieces)) - 1
        # A part of the loss that is 0, by which a process without segments, too, takes part in a backward.
        total = auxiliary = next(self.model.parameters()).flatten()[:0].sum(dtype=torch.float32)
        after: list[State] = []
        resets = resets[own.start : own.stop]
        parts = torch.arange(len(inputs_BN)).tensor_split(self.micro_batches) if own else ()
        for number, rows in enumerate(slice(int(part[0]), int(part[-1]) + 1) for part in parts):
            mine = [_rows(piece, rows) for piece in pieces[own.start : own.stop]]
            before = None if state is None or line.rank else map_state(lambda t, r=rows: t[r], state)
            relay = _Relay(self, number, own, last, rows.stop - rows.start, inputs_BN.device)
            read = self._by_layers if self.schedule == "wavefront" else self._by_segments
            outs = read(relay, mine, before, [None if begin_B is None else begin_B[rows] for begin_B in resets])
            for out in outs:
                total = total + out.outputs.sum()
                auxiliary = auxiliary + out.auxiliary_loss * ((rows.stop - rows.start) / len(inputs_BN))
            total = total + sum(relay.zeros)
            after.append(detach(outs[-1].state))
        count = ((targets_BN != IGNORED) if padding is None else (targets_BN != IGNORED) & ~padding).sum().clamp(min=1)
        auxiliary = auxiliary * (line.size / len(pieces))
        self.auxiliary_loss = auxiliary.detach()
        return total * line.size / count + auxiliary, self._behind(after, last, len(inputs_BN), inputs_BN.device)

    def _by_segments(
        self, relay: _Relay, pieces: list[Piece], state: State | None, resets: list[Tensor | None]
    ) -> list[ModelOutput]:
        if relay.before is not None:
            state = relay.arrive(0, self._like(relay.rows))
        first = relay.own.start
        outs = list(read_segments(self._segment, pieces, state, resets, self.bptt, first=first))
        relay.leave(0, outs[-1].state)
        return outs

    def _by_layers(
        self, relay: _Relay, pieces: list[Piece], state: State | None, resets: list[Tensor | None]
    ) -> list[ModelOutput]:
        given = [piece[:3] for piece in pieces]
        return read_by_layers(self.model, given, state, resets, self.bptt, relay.own.start, relay.arrive, relay.leave)

    def _behind(self, after: list[State], last: int, rows: int, device: torch.device) -> State | None:
        """The state of all rows behind the batch, which the last process sends to the first."""
        line, whole = self.line, map_state(lambda *parts: torch.cat(parts), *after) if after else None
        if last and line.rank in (0, last):
            number, nothing = self.micro_batches * self._steps(), torch.zeros((), device=device)
            if line.rank == last:
                line.pass_on(number, whole, nothing, 0)
            else:
                whole, _ = line.take(number, self._like(rows), nothing, device, last)
        return whole if line.rank in (0, last) else None

    def _steps(self) -> int:
        """Messages of a micro-batch between two processes."""
        return 1 + len(self.model.stack.blocks) if self.schedule == "wavefront" else 1  # type: ignore[union-attr, arg-type]

    def _like(self, rows: int) -> State:
        """Shapes and types of a state."""
        key = (rows, self.model.training)
        if key not in self._shapes:
            with torch.no_grad():
                fresh = self.model.init_state(rows)  # type: ignore[operator]
            self._shapes[key] = map_state(lambda t: torch.empty_like(t, device="meta"), fresh)
        return self._shapes[key]


class _Relay:
    """What a micro-batch gets of the process before this one, and hands to the one behind it.

    Attributes:
        own: segments of this process. rows: of the micro-batch.
        before, behind: ranks of the neighbours; None where there is none.
        zeros: what has to be part of the loss.
    """

    def __init__(
        self, pipeline: SegmentPipeline, number: int, own: range, last: int, rows: int, device: torch.device
    ) -> None:
        rank = pipeline.line.rank
        self.line, self.own, self.rows, self.device = pipeline.line, own, rows, device
        self.before, self.behind = (rank - 1 if rank else None), (rank + 1 if rank < last else None)
        self.first = number * pipeline._steps()
        self.cut = own.stop % pipeline.bptt == 0
        self.thread = torch.zeros((), device=device, requires_grad=True)
        self.zeros: list[Tensor] = []

    def arrive(self, part: int, state: State) -> State:
        """What stands in the place of this part of the state, of which only shapes and types count."""
        if self.before is None:
            return state
        state, zero = self.line.take(self.first + part, state, self.thread, self.device, self.before)
        self.zeros.append(zero)
        return state

    def leave(self, part: int, state: State) -> State:
        """Hand this part of the state on."""
        if self.behind is not None:
            handed = detach(state) if self.cut else state
            self.zeros.append(self.line.pass_on(self.first + part, handed, self.thread, self.behind))
        return state


def share(segments: int, rank: int, processes: int) -> range:
    """Numbers of the segments that belong to a process: neighbours, as many as any other has or one more."""
    each, more = divmod(segments, processes)
    begin = rank * each + min(rank, more)
    return range(begin, begin + each + (rank < more))


def _rows(piece: Piece, rows: slice) -> Piece:
    return tuple(None if t is None else t[rows] for t in piece)  # type: ignore[return-value]
