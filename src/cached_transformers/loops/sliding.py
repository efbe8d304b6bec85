"""Sliding truncated backpropagation: the loss of every segment reaches back equally far.

Recurrent Memory Transformer (Bulatov et al. 2022, arXiv:2207.06881, "BPTT-k"; github.com/booydar/LM-RMT). If the state
is detached after every `bptt` segments, the last segment of a block gets no gradient from later losses. Sliding windows
sum over t the gradient of loss_t with the state detached before segment t - k, k = bptt - 1:

    S_{t+1}, loss_t = f(x_t, S_t)
    g_{t,j}   gradient of loss_t by S_j:   g_{t,t} = loss_t by S_t,   g_{t,j} = g_{t,j+1} by S_j,   0 below j = t - k
    gradient  sum over j of (loss_j + <S_{j+1}, sum over t = j+1 .. j+k of g_{t,j+1}>) by the weights

The state before the batch is not detached. The losses of the first `bptt` segments are therefore never truncated, and
share one backward.

Cost: each segment runs once and all are kept, as with blocks. The backward runs through a segment once for the weights
and up to k times more for the state only: about (1 + 0.4 k) times a plain backward. It is one `backward()` of the sum:
a segment is one node of the graph, which differentiates its own inner graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.state import State, detach, map_state, named_tensors

WINDOWS = ("blocks", "sliding")
"""Windows of the gradient: disjoint blocks, or one window that ends with each segment."""

Stream: TypeAlias = int
"""Number of the segment whose loss has a backward of its own, or SHARED."""
SHARED: Stream = -1
"""The losses that are never truncated."""


def read_sliding(
    read: Callable[..., ModelOutput],
    pieces: Sequence[Any],
    state: State | None,
    resets: Sequence[Tensor | None],
    bptt: int,
) -> Iterator[ModelOutput]:
    """Yield the outputs of `models.segments.read_segments`; the gradient of each loss reaches back `bptt` segments.

    Args:
        read: (piece, state, rows to reset or None) -> output of a segment.
        pieces: all segments.
        state: before the first piece; None for the start of a stream.
        resets: rows to reset before each of the first pieces.
        bptt: segments that a gradient crosses, including its own; at least 2 and fewer than the pieces.
    """
    window, total = bptt - 1, len(pieces)
    copies: dict[Stream, State] = {} if state is None else {SHARED: state}
    for index, piece in enumerate(pieces):
        into = _streams(index, window, total) if index else list(copies)
        segment = _SegmentGraph(into, _streams(index + 1, window, total), SHARED if index <= window else index)
        before = None if state is None else map_state(lambda t: t.detach().requires_grad_(t.requires_grad), state)
        # Views of the leaves: hooks on module inputs refuse leaves in `torch.autograd.grad`.
        called_with = None if before is None else map_state(lambda t: t.view_as(t), before)
        output = read(piece, called_with, resets[index] if index < len(resets) else None)
        losses, auxiliary, copies = segment.close(output, before, copies)
        state = next(iter(copies.values()), detach(output.state))
        yield ModelOutput(losses, detach(state), auxiliary)


def _streams(boundary: int, window: int, total: int) -> list[Stream]:
    """Streams whose gradient passes through the state before segment `boundary`."""
    own = range(max(boundary, window + 1), min(boundary + window, total))
    return [*([SHARED] if boundary <= min(window, total - 1) else []), *own]


@dataclass
class _SegmentGraph:
    """The inner graph of one segment.

    Attributes:
        into, out_of: streams through the state before the segment, and through the state after it.
        own: the stream of its own loss.
        sources: its losses and the tensors of the state after it.
        leaves: weights and other leaves of the graph.
        before: tensors of the state before it that require a gradient.
    """

    into: list[Stream]
    out_of: list[Stream]
    own: Stream
    sources: tuple[Tensor, ...] = ()
    leaves: tuple[Tensor, ...] = ()
    before: tuple[Tensor, ...] = ()

    def close(
        self, output: ModelOutput, before: State | None, states: dict[Stream, State]
    ) -> tuple[Tensor, Tensor, dict[Stream, State]]:
        """Losses and auxiliary loss as outputs of one node, and a copy of the state for each stream out of it."""
        heads, after = (output.outputs, output.auxiliary_loss), _differentiable(output.state)
        self.sources, self.before = (*heads, *after), () if before is None else tuple(_differentiable(before))
        self.leaves = tuple(_leaves(self.sources, self.before))
        if not (self.leaves or self.before):
            return *heads, {stream: output.state for stream in self.out_of}
        given = [t for stream in self.into for t in _differentiable(states[stream])]
        made = _SegmentNode.apply(self, *self.leaves, *given)
        copies = {}
        for number, stream in enumerate(self.out_of):
            of_stream = iter(made[len(heads) + number * len(after) :])
            copies[stream] = map_state(lambda t, own=of_stream: next(own) if t.requires_grad else t, output.state)
        return made[0], made[1], copies

    def gradients(self, own: tuple[Tensor | None, ...], later: dict[Stream, tuple[Any, ...]]) -> list[Tensor | None]:
        """Gradients of the leaves, and of each stream's copy of the state before the segment."""
        everything = frozenset(stream for stream, grads in later.items() if any(g is not None for g in grads))
        wanted = {stream: (stream == self.own, everything & {stream}) for stream in self.into}
        as_all = [stream for stream, asked in wanted.items() if asked == (True, everything)]
        found: dict[Stream, list[Tensor | None]] = {}
        for stream, (with_own, of) in wanted.items():
            if stream not in as_all:
                found[stream] = self._back(own if with_own else (), [later[s] for s in of], self.before, keep=True)
        # The last backward needs everything and frees the graph.
        inputs = (*self.leaves, *(self.before if as_all else ()))
        whole = self._back(own, [later[s] for s in everything], inputs, keep=False)
        for stream in as_all:
            found[stream] = whole[len(self.leaves) :]
        return [*whole[: len(self.leaves)], *(grad for stream in self.into for grad in found[stream])]

    def _back(
        self, own: tuple[Tensor | None, ...], later: Sequence[tuple[Any, ...]], inputs: tuple[Tensor, ...], keep: bool
    ) -> list[Tensor | None]:
        """Gradients of the inputs, given the gradients of the segment's losses and of the state after it."""
        none: list[Tensor | None] = [None] * len(inputs)
        summed = [_sum(grads) for grads in zip(*later, strict=True)]
        given = [*(own or (None, None)), *(summed or [None] * (len(self.sources) - 2))]
        pairs = [(t, g) for t, g in zip(self.sources, given, strict=True) if g is not None and t.requires_grad]
        if not (pairs and inputs):
            return none
        outputs, grads = zip(*pairs, strict=True)
        return list(torch.autograd.grad(outputs, inputs, grads, retain_graph=keep, allow_unused=True))


class _SegmentNode(torch.autograd.Function):
    """A segment as one node of the outer graph, with one copy of the state per stream."""

    @staticmethod
    def forward(ctx: Any, segment: _SegmentGraph, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.segment = segment
        losses, auxiliary, *after = segment.sources
        return losses.detach(), auxiliary.detach(), *(t.detach() for _ in segment.out_of for t in after)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, losses: Tensor | None, auxiliary: Tensor | None, *copies: Tensor | None) -> Any:
        segment: _SegmentGraph = ctx.segment
        each = len(segment.sources) - 2
        later = {s: copies[n * each : (n + 1) * each] for n, s in enumerate(segment.out_of)}
        return None, *segment.gradients((losses, auxiliary), later)


def _differentiable(state: State) -> list[Tensor]:
    """Tensors of a state that require a gradient."""
    return [t for _, t in named_tensors(state) if t.requires_grad]


def _sum(grads: Sequence[Tensor | None]) -> Tensor | None:
    found = [grad for grad in grads if grad is not None]
    return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None


def _leaves(sources: Sequence[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    """Leaves of a graph, without the known ones."""
    seen: set[Any] = set()
    found: dict[int, Tensor] = {id(t): t for t in sources if t.requires_grad and t.grad_fn is None}
    waiting = [t.grad_fn for t in sources if t.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of AccumulateGrad
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions if following is not None]
    for t in known:
        found.pop(id(t), None)
    return list(found.values())
