"""A memory with a state in one attention layer of a decoder that somebody else wrote.

The state reaches the layer as a keyword of the call, so that it sees the right one when activation checkpointing runs
it again. That must not be reentrant, which would cut the graph.

Legend: B rows, N tokens, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.integrations.hosts import Host, Site
from cached_transformers.integrations.spots import Listener, root_of
from cached_transformers.integrations.taps import Tap, no_loss
from cached_transformers.seam.memory import Linear, Query, Trace
from cached_transformers.state import State


class Passage:
    """What one pass over a piece of a segment hands down to the layers, and what they hand back.

    Attributes:
        states: of each layer that has a memory. after: theirs behind the segment.
        padding_BN: True = padding. writes: whether the piece is a whole segment, which the memory is to keep.
        segment: (start, length) of the tokens that are written; None for all.
        grad: whether the pass is part of a graph.
    """

    def __init__(
        self,
        states: tuple[State, ...],
        padding_BN: Tensor | None = None,
        *,
        writes: bool = True,
        segment: tuple[int, int] | None = None,
    ) -> None:
        self.states, self.padding_BN, self.writes, self.segment = states, padding_BN, writes, segment
        self.after = list(states)
        self.grad = torch.is_grad_enabled()


class StreamTap(Tap):
    """Lets a memory with a state into one causal layer; the `number`-th that has one."""

    def __init__(self, site: Site, host: Host, number: int) -> None:
        super().__init__(site, host)
        assert host.stream is not None
        self.number, self.split = number, host.stream.split
        self.sources = [
            Listener(*root_of(site, module), partial(self.keep, place))
            for place, module in enumerate(host.stream.sources)
        ]
        self.spots += self.sources
        self.kept: dict[int, Tensor] = {}
        self.passage: Passage | None = None
        self.handed: Passage | None = None
        self.x_BND: Tensor | None = None

    def before_stream(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the passage out of the call: the layer's own attention function need not know of it."""
        self.passage = kwargs.pop("memory_passage", self.handed)
        if self.passage is None:
            raise ValueError(
                f"{type(layer).__name__} has a memory and was called without its state; call the model that "
                "add_memory was given, and checkpoint activations by its own gradient_checkpointing_enable()"
            )
        if self.passage.grad and not torch.is_grad_enabled():
            raise ValueError(
                "reentrant activation checkpointing would cut the graph that leads through the memory; leave "
                "use_reentrant=False, transformers' default"
            )
        self.kept = {}
        self.x_BND = args[0] if args else kwargs["hidden_states"]
        self.begin(Query(self.x_BND))
        return args, kwargs

    def keep(self, place: int, output: Tensor) -> None:
        """Hear a module that gives queries, keys or values; they are called in whatever order."""
        self.kept[place] = output

    def _mix(self, y_BND: Tensor, query: Query, linear: Linear) -> Tensor:
        passage, kept = self.passage, self.kept
        assert passage is not None
        self.passage, self.x_BND, self.kept = None, None, {}
        for place, source in enumerate(self.sources):
            if place not in kept:
                raise ValueError(self.passed_by(source))
        q, k, v = self.split(*(kept[place] for place in range(len(self.sources))))
        query = query._replace(q_BHNE=q, k_BHNE=k, v_BHNE=v, padding_BN=passage.padding_BN)
        state = passage.states[self.number]
        y_BND, reading = self._through(state, y_BND, query, linear)
        if passage.writes:
            trace = Trace(query.x_BND, y_BND, query, reading)
            if passage.segment is not None:
                trace = trace.narrow(*passage.segment)
            passage.after[self.number], loss = self.memory.write(state, trace)
            no_loss(loss, self.memory)
        return y_BND
