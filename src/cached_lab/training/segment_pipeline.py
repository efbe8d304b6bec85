"""Segment-parallel training: each process reads neighbouring segments of every row and sends the state to the next.

    process 0   segments 0 .. k-1   --state-->   process 1   segments k .. 2k-1   --state-->   ...
                dL/dS by autograd   <--dL/dS--

Each end of a message is a node of its process' autograd graph: `_Receive` sends gradients in its backward and `_Send`
waits for them. A plain `backward()` in every process is therefore the backward of the whole. Every process has all
weights and receives the whole batch, and activations are divided.

Legend: B rows, N tokens of all segments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.loops.segments import SegmentLoop, SegmentPiece, told_documents
from cached_transformers.memories.grc.shared_cache import caches
from cached_transformers.models.segments import read_segments
from cached_transformers.state import State, detach, map_state, named_tensors

_STATE, _FINAL_STATE, _GRADIENT = "state", "final state", "gradient"
"""Kinds of messages: a state for the next process, the last state for the first process, and a state's gradient."""


class SegmentPipeline(SegmentLoop):
    """Segment loop whose segments are divided over processes, for rows whose activations are too large for one.

    All processes of the group call it with the same rows and call `backward` on their loss. If there are fewer segments
    than processes, the last processes only wait. The loss of a process is P times its share of the whole loss, so that
    the mean over processes is the loss of one process, and gradients likewise: wrap it in
    `DistributedDataParallel(pipeline, find_unused_parameters=True)` over all processes, including those that read other
    rows. Buffers that segments write, such as running averages, are local to each process.

    Args:
        model, segment_length, bptt, scoring: see `SegmentLoop`. Where a window of `bptt` segments ends between two
            processes, no gradient is sent.
        group: processes that share rows, from `torch.distributed`; None for all processes.

    Attributes:
        auxiliary_loss: part of the last loss beside the cross-entropy, detached.

    Raises:
        ValueError: a size below 1, or a cache shared by rows, which every process would update on its own.

    Example:
        >>> pipeline = SegmentPipeline(model, segment_length=512, bptt=8)  # in each of two processes
        >>> loss, state = pipeline(tokens[:, :-1], tokens[:, 1:], state)  # of all 8 segments
        >>> loss.backward()
    """

    def __init__(
        self,
        model: nn.Module,
        segment_length: int,
        bptt: int = 1,
        *,
        scoring: Callable[..., ModelOutput] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(model, segment_length, bptt, scoring=scoring)
        if any(True for _ in caches(self.model)):
            raise ValueError("a cache shared by all rows would differ in each process; use a memory with a state")
        self.messages = Messages(group)

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
        """Return P times this process' share of the loss, and the detached state after the batch.

        Arguments are those of `SegmentLoop.forward` for the whole batch; only the first process uses `state`. The state
        is None but in the first process and in the one that read the last segment.
        """
        told = padding
        if documents is not None:
            documents, padding = told_documents(documents, padding, inputs_BN)
            told = None  # the ids contain it
        pieces, resets = self._prepared(SegmentPiece(inputs_BN, targets_BN, told, places, documents), reset)
        messages, rank = self.messages, self.messages.rank
        own, last = share(len(pieces), rank, messages.size), min(messages.size, len(pieces)) - 1
        # A sum over nothing, so that a process without segments takes part in the backward, too.
        total = auxiliary = next(self.model.parameters()).flatten()[:0].sum(dtype=torch.float32)
        zero = torch.zeros((), device=inputs_BN.device, requires_grad=True)
        after: State | None = None
        if own:
            if rank:
                state, received = messages.receive_state(rank - 1, _STATE, zero)
                total = total + received
            mine = slice(own.start, own.stop)
            outs = list(read_segments(self._segment, pieces[mine], state, resets[mine], self.bptt, first=own.start))
            for out in outs:
                total = total + out.outputs.sum()
                auxiliary = auxiliary + out.auxiliary_loss
            after = detach(outs[-1].state)
            if rank < last:
                sent = after if own.stop % self.bptt == 0 else outs[-1].state
                total = total + messages.send_state(rank + 1, _STATE, sent, zero)
        if last and rank == last:
            messages.send_state(0, _FINAL_STATE, after, zero.detach())
        elif last and rank == 0:
            after, _ = messages.receive_state(last, _FINAL_STATE, zero.detach())
        count = ((targets_BN != IGNORED) if padding is None else (targets_BN != IGNORED) & ~padding).sum().clamp(min=1)
        auxiliary = auxiliary * (messages.size / len(pieces))
        self.auxiliary_loss = auxiliary.detach()
        return total * messages.size / count + auxiliary, after if rank in (0, last) else None


class Messages:
    """Blocking messages between the processes of a pipeline, through CPU memory.

    Each names its kind: a receiver that expects another kind was called out of turn.

    Args:
        group: from `torch.distributed`; None for all processes, or for this one if there is no process group.

    Attributes:
        rank, size: of this process in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if distributed else (0, 1)

    def send_state(self, to: int, kind: str, state: State, zero: Tensor) -> Tensor:
        """Send a state; return a zero that must be added to the loss, so that backward waits for the gradient.

        Args:
            zero: scalar that requires a gradient.
        """
        tensors = [t for _, t in named_tensors(state)]
        flags = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        self.send(to, kind, (flags, map_state(_on_cpu, state)))
        tracked = [t for t, flag in zip(tensors, flags, strict=True) if flag]
        return _Send.apply(self, to, zero, *tracked) if tracked else zero.detach()  # type: ignore[no-any-return]

    def receive_state(self, source: int, kind: str, zero: Tensor) -> tuple[State, Tensor]:
        """Receive a state; return it and a zero for the loss."""
        flags, state = self.receive(source, kind)
        state = map_state(lambda t: t.to(zero.device), state)
        tensors, zero_out = [t for _, t in named_tensors(state)], zero.detach()
        if any(flags):
            tracked = [t for t, flag in zip(tensors, flags, strict=True) if flag]
            zero_out, *tracked = _Receive.apply(self, source, zero, *tracked)
            with_graph, found = iter(tracked), iter(zip(tensors, flags, strict=True))
            state = map_state(lambda t: next(with_graph) if next(found)[1] else t, state)
        return state, zero_out

    def send(self, to: int, kind: str, content: Any) -> None:
        """Send a content to a process of the group."""
        dist.send_object_list([(kind, content)], self._global_rank(to), self.group)

    def receive(self, source: int, kind: str) -> Any:
        """Receive the content of one message (RuntimeError: it is of another kind)."""
        box: list[Any] = [None]
        dist.recv_object_list(box, self._global_rank(source), self.group)
        found, content = box[0]
        if found != kind:
            raise RuntimeError(
                f"process {self.rank} of the pipeline expected {kind!r} from process {source} and got {found!r}; call "
                "the pipeline with the same batch in all processes, and backward once after each call"
            )
        return content

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class _Send(torch.autograd.Function):
    """The end of this process' graph: its backward receives the gradient of the sent tensors."""

    @staticmethod
    def forward(ctx: Any, messages: Messages, to: int, zero: Tensor, *tracked: Tensor) -> Tensor:
        ctx.call = messages, to
        return torch.zeros_like(zero)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, zero: Tensor) -> Any:
        messages, to = ctx.call
        received = messages.receive(to, _GRADIENT)
        return None, None, None, *(grad if grad is None else grad.to(zero.device) for grad in received)


class _Receive(torch.autograd.Function):
    """The beginning of this process' graph: its backward sends the gradient of the received tensors."""

    @staticmethod
    def forward(ctx: Any, messages: Messages, source: int, zero: Tensor, *tracked: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = messages, source
        return torch.zeros_like(zero), *(t.view_as(t) for t in tracked)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, zero: Tensor | None, *grads: Tensor | None) -> Any:
        messages, source = ctx.call
        messages.send(source, _GRADIENT, [grad if grad is None else _on_cpu(grad) for grad in grads])
        return (None,) * (3 + len(grads))


def _on_cpu(t: Tensor) -> Tensor:
    """Return a copy that can be pickled without the rest of its storage."""
    return t.detach().to("cpu", copy=True).contiguous()


def share(segments: int, rank: int, processes: int) -> range:
    """Return the numbers of the segments that a process reads; shares differ by at most one segment."""
    each, more = divmod(segments, processes)
    begin = rank * each + min(rank, more)
    return range(begin, begin + each + (rank < more))
