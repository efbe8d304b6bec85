"""The context of a host's forward over one segment: everything that the hooks on its modules read and write.

The host's own code runs between the hooks, so that no argument leads from one to the next. They share a
`SegmentContext` instead, which is the current one of its thread while the host's forward runs. Activation checkpointing
runs blocks again in the backward pass, perhaps on another thread: `checkpoint_in_context` captures the context with the
block. It is a `threading.local`, since torch.compile cannot trace `contextvars.ContextVar.set`.

Legend: B rows, N tokens, L tokens of the partial segment up to here, H heads, D width, P position channels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import Offer, Query, Reading, Trace
from cached_transformers.state import State

from .memory_lookup import with_weights

CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute by which a module of transformers calls the block whose activations are recomputed in backward."""


class SegmentContext:
    """One pass over a segment, or over a part of it.

    Attributes:
        states: of each layer that has a memory. states_after: their states after the segment.
        positions_BLP: in the stream, of all tokens of the segment up to here; the last ones are those of this pass.
            None in images, which have no positions in a stream.
        shift_B1: added to a position in the stream, it gives the host's position id.
        padding_BN: True = padding. writes: whether the pass covers a whole segment, which the memories write.
        segment: (start, length) of the tokens that are written; None for all.
        offers: what each layer attends beside the segment and its own memory; None for nothing.
        kv_cache: the host's KV cache; None without one.
        traces: of each layer; None where the caller needs none.
        slots: of the model-level memory, to be read before the host's blocks; None for nothing.
        slot_attentions: the modules that read them, by the layer's number.
        back_BL: the columns that undo the order of the pass; None where it has no order of its own.
        embedded: tokens that replace the output of the host's embedding modules; None to embed as usual.
        opened_layers: of each layer, its opened memory, where that serves later tokens of the segment.
        varies: a layer's slots differ between tokens, so that a longer segment must be read from its start.
        grad: whether the pass is part of an autograd graph.
        inputs, attended: of each layer, its block's input, and its attention call until the block returns.
        recurrent: the states of the host's recurrent layers. recurrent_after: their states after the pass.
        lengths: the rows of each length and their columns, for recurrent layers; None before the first, and without
            padding.
    """

    def __init__(
        self,
        states: tuple[State, ...],
        positions_BLP: Tensor | None = None,
        shift_B1: Tensor | None = None,
        padding_BN: Tensor | None = None,
        *,
        writes: bool = True,
        segment: tuple[int, int] | None = None,
        offers: Sequence[Offer | None] | None = None,
        traced: bool = False,
        slots: tuple[Any, ...] | None = None,
        recurrent: tuple[State, ...] = (),
    ) -> None:
        self.recurrent = recurrent
        self.lengths: list[tuple[Tensor, Tensor]] | None = None
        self.recurrent_after: list[State | None] = [None] * len(recurrent)
        self.states, self.positions_BLP, self.shift_B1, self.padding_BN = states, positions_BLP, shift_B1, padding_BN
        self.writes, self.segment, self.offers = writes, segment, offers
        self.kv_cache: Any = None
        self.opened_layers: Sequence[Any] | None = None
        self.varies = False
        self.slots: tuple[Any, ...] | None = slots
        self.slot_attentions: Mapping[str, nn.Module] = {}
        self.back_BL: Tensor | None = None
        self.embedded: Tensor | None = None
        self.states_after = list(states)
        self.traces: list[Trace | None] | None = [None] * len(states) if traced else None
        self.grad = torch.is_grad_enabled()
        self.inputs: list[Tensor | None] = [None] * len(states)
        self.attended: list[AttentionCall | None] = [None] * len(states)
        self._last: tuple[Any, Tensor | None] = (None, None)

    def positions_of_last(self, x_BND: Tensor) -> Tensor | None:
        """(B, N, P): positions of the tokens of this pass, on their device; sliced once for all layers."""
        key = x_BND.shape[1], x_BND.device
        if self._last[0] != key and self.positions_BLP is not None:
            self._last = key, self.positions_BLP[:, -key[0] :].to(key[1])
        return self._last[1]

    def read_slots(self, number: int, x_BND: Tensor) -> Tensor:
        """The input of a layer's block, which the slots of the model-level memory may replace."""
        if self.slots is None or str(number) not in self.slot_attentions:
            return x_BND
        read = self.slot_attentions[str(number)]
        return with_weights(read, read, x_BND, *self.slots)

    def segment_of_last(self, n: int) -> tuple[int, int] | None:
        """(start, length) of the segment's tokens among the last `n` up to here; None where there are no others."""
        if self.segment is None or self.positions_BLP is None:
            return None
        end = self.positions_BLP.shape[1]
        first, (start, length) = end - n, self.segment
        begin = max(start, first)
        return begin - first, max(min(start + length, end) - begin, 0)


class AttentionCall:
    """One call of an attention layer that has a memory, from the layer's input on.

    Attributes:
        hook: of the layer. query: for the memory. context: of the segment; None for a memory without a state.
        reading: the memory's answer, where it was read before the layer attends.
        projected: outputs of the modules that give queries, keys and values, by their place in `Stream.sources`.
        mask: the layer's attention mask. gather: see `Context.gather`. weights_BHWL: the layer's attention weights.
        term_BND: to be added to the queries; None where there is none, and after it was added.
        slots_BGME: the slots' keys with their positions. places_BL: position ids of slots and tokens.
    """

    def __init__(self, hook: Any, query: Query, context: SegmentContext | None = None) -> None:
        self.hook, self.query, self.context = hook, query, context
        self.reading: Reading | None = None
        self.term_BND: Tensor | None = None
        self.projected: dict[int, Tensor] = {}
        self.mask: Tensor | None = None
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.weights_BHWL: Tensor | None = None
        self.slots_BGME: Tensor | None = None
        self.places_BL: Tensor | None = None


class ModelCall:
    """A call of a model around the body that has the layers, with the memory's state before and after it.

    Attributes:
        forward: the body's forward, which takes the state here. documents: in the rows of the call.
    """

    def __init__(self, forward: Any, state: State | None, documents: Any = None) -> None:
        self.forward, self.state, self.documents = forward, state, documents
        self.state_after: State | None = None


class RunningCalls:
    """The calls that run on one thread.

    Attributes:
        segment: the context of the host's forward. model: the call of a model around its body.
        attention: the call of the attention layer that runs, until its projection mixes the memory in.
        aside: an attention that runs now is the memory's, not the layer's own.
        prompt_end: columns of a prompt, up to which `generate` reads before it writes.
        grid: the patch embedding that ran last, and the (height, width) of its tokens.
    """

    def __init__(self) -> None:
        self.segment: SegmentContext | None = None
        self.model: ModelCall | None = None
        self.attention: AttentionCall | None = None
        self.aside = False
        self.prompt_end: int | None = None
        self.grid: tuple[Any, tuple[int, int]] | None = None


class _Local(threading.local):
    def __init__(self) -> None:  # once per thread
        # An object, since compiled code does not keep assignments to a threading.local itself.
        self.calls = RunningCalls()


_LOCAL = _Local()


def running() -> RunningCalls:
    """The calls that run on this thread."""
    return _LOCAL.calls


class entered:
    """Context manager: make a context the current one of this thread."""

    def __init__(self, context: SegmentContext) -> None:
        self.context = context

    def __enter__(self) -> None:
        calls = running()
        self.before, calls.segment = calls.segment, self.context

    def __exit__(self, *raised: Any) -> None:
        calls = running()
        calls.segment, calls.attention = self.before, None


def checkpoint_in_context(plain: Callable[..., Any], block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint a block by `plain` so that it finds the current context whenever it runs again."""
    context = running().segment
    return plain(block if context is None else partial(_run, context, block), *args, **kwargs)


def _run(context: SegmentContext, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with entered(context):
        return block(*args, **kwargs)


def capture_checkpoints(model: nn.Module) -> None:
    """Let the blocks that transformers checkpoints keep their context, from now on."""
    for module in model.modules():
        plain = vars(module).get(CHECKPOINT)
        if plain is not None and getattr(plain, "func", None) is not checkpoint_in_context:
            vars(module)[CHECKPOINT] = partial(checkpoint_in_context, plain)


def release_checkpoints(model: nn.Module) -> None:
    """Undo `capture_checkpoints`."""
    for module in model.modules():
        found = vars(module).get(CHECKPOINT)
        if isinstance(found, partial) and found.func is checkpoint_in_context:
            vars(module)[CHECKPOINT] = found.args[0]
