"""A state handed from process to process, and its gradient handed back.

    process r      ...  S = f(x, S')   --S-->   process r + 1   ...  loss = g(S)
                   dL/dS by autograd   <--dL/dS--

Each end is a node of its process' own graph: `_Arrived` sends gradients in its backward, `_Left` waits for them. So a
plain `backward()` in every process is that of the whole, in the reverse order of what was handed over.

A message is one buffer of bytes: a number, which of the tensors want a gradient, and the tensors. What is received is
checked against its number, since some backends match messages by their order alone (NCCL knows no tags).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cached_transformers.state import State, map_state, named_tensors

_WORD = 8
"""Bytes of a number; tensors begin at multiples of it."""


class Line:
    """The processes of a pipeline, seen from one of them.

    Args:
        group: of `torch.distributed`; None for all processes, or for this one where there are no others.

    Attributes:
        rank, size: of this process in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        there = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank, self.size = (dist.get_rank(group), dist.get_world_size(group)) if there else (0, 1)
        self._on_their_way: list[tuple[Any, Tensor]] = []

    def pass_on(self, number: int, state: State, thread: Tensor, to: int) -> Tensor:
        """Send a state; a zero (a scalar) that has to be part of the loss, so that gradients are waited for.

        Args:
            number: by which both ends know it, at least 0.
            thread: any tensor that wants a gradient; it gets zero. to: rank of the process.
        """
        tensors = [t for _, t in named_tensors(state)]
        wants = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        self._send(to, number, [number, *wants], [t.detach() for t in tensors])
        wanting = [t for t, wanted in zip(tensors, wants, strict=True) if wanted]
        return _Left.apply(self, number, to, thread, *wanting) if wanting else thread.detach()  # type: ignore[no-any-return]

    def take(self, number: int, like: State, thread: Tensor, device: torch.device, source: int) -> tuple[State, Tensor]:
        """The state that a process sends under this number, and a zero that has to be part of the loss.

        Args:
            like: of the structure, shapes and types of the state, on any device.

        Raises:
            RuntimeError: something else was sent.
        """
        expected = [t for _, t in named_tensors(like)]
        words, tensors = self._receive(source, number, 1 + len(expected), expected, device)
        tensors = [t.clone() for t in tensors]  # a state's tensors share no memory with each other
        wanting = [t for t, wanted in zip(tensors, words[1:], strict=True) if wanted]
        zero = thread.detach()
        if wanting:
            zero, *wanting = _Arrived.apply(self, number, source, thread, *wanting)
        graph, plain = iter(wanting), iter(zip(tensors, words[1:], strict=True))

        def chosen(_: Tensor) -> Tensor:
            t, wanted = next(plain)
            return next(graph) if wanted else t

        return map_state(chosen, like), zero

    def settle(self) -> None:
        """Wait until what was sent has left, and let go of it."""
        for work, _ in self._on_their_way:
            work.wait()
        self._on_their_way = []

    def _send(self, to: int, number: int, words: Sequence[int], tensors: Sequence[Tensor]) -> None:
        head = torch.tensor(words, dtype=torch.int64)
        device = tensors[0].device if tensors else head.device
        buffer = torch.cat([_as_bytes(head.to(device)), *map(_as_bytes, tensors)])
        self._on_their_way = [(work, held) for work, held in self._on_their_way if not work.is_completed()]
        work = dist.isend(buffer, self._process(to), self.group, number)
        self._on_their_way.append((work, buffer))

    def _receive(
        self, source: int, number: int, words: int, like: Sequence[Tensor], device: torch.device
    ) -> tuple[list[int], list[Tensor]]:
        sizes = [_WORD * words, *(_room(t) for t in like)]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.recv(buffer, self._process(source), self.group, number)
        head, *parts = buffer.split(sizes)
        found = head.view(torch.int64).tolist()
        if found[0] != number:
            raise RuntimeError(
                f"process {self.rank} of the pipeline waited for message {number} of process {source} and got "
                f"{found[0]}; all processes must call the pipeline with the same batch, and its backward once for each"
            )
        tensors = [
            part[: t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for part, t in zip(parts, like, strict=True)
        ]
        return found, tensors

    def _process(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class _Left(torch.autograd.Function):
    """The end of what this process computes of a state."""

    @staticmethod
    def forward(ctx: Any, line: Line, number: int, to: int, thread: Tensor, *wanting: Tensor) -> Tensor:
        ctx.call = line, number, to
        ctx.like = [torch.empty_like(t, device="meta") for t in wanting]
        ctx.device = wanting[0].device
        return torch.zeros_like(thread)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, zero: Tensor) -> Any:
        line, number, to = ctx.call
        _, grads = line._receive(to, number, 1, ctx.like, ctx.device)
        return None, None, None, None, *grads


class _Arrived(torch.autograd.Function):
    """The beginning of what this process computes with a state."""

    @staticmethod
    def forward(ctx: Any, line: Line, number: int, source: int, thread: Tensor, *wanting: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = line, number, source
        ctx.like = [torch.empty_like(t, device="meta") for t in wanting]
        ctx.device = wanting[0].device
        return torch.zeros_like(thread), *(t.view_as(t) for t in wanting)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, zero: Tensor | None, *grads: Tensor | None) -> Any:
        line, number, source = ctx.call
        pairs = zip(grads, ctx.like, strict=True)
        sent = [torch.zeros_like(t, device=ctx.device) if grad is None else grad.to(t.dtype) for grad, t in pairs]
        line._send(source, number, [number], sent)
        return (None,) * (4 + len(grads))


def _room(t: Tensor) -> int:
    """Bytes that a tensor takes in a message."""
    return -(-prod(t.shape) * t.element_size() // _WORD) * _WORD


def _as_bytes(t: Tensor) -> Tensor:
    """A tensor as bytes, filled up to a multiple of a word."""
    flat = t.contiguous().reshape(-1).view(torch.uint8)
    missing = _room(t) - flat.numel()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
