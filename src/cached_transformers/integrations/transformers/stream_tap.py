"""A memory with a state in one attention layer of a model that somebody else wrote.

The state reaches the layer as a keyword of the call, so that it sees the right one when activation checkpointing runs
it again. That must not be reentrant, which would cut the graph. What a memory keeps is written where the block ends
that the layer is part of, from what went into the block and came out, as in a stack.

Legend: B rows, N tokens, L tokens of the open segment up to here, H heads, D width, P position channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.integrations.attention_hooks import Tap, no_loss
from cached_transformers.integrations.hosts import Host, Site
from cached_transformers.integrations.offload import with_weights
from cached_transformers.integrations.tracked_modules import Listener, root_of
from cached_transformers.interfaces.memory import Linear, ModelMemory, Offer, Query, Reading, Trace
from cached_transformers.state import State

from .forward_context import Handed
from .segment_cache import SegmentCache


class Passage:
    """What one pass over a piece of a segment hands down to the layers, and what they hand back.

    Attributes:
        states: of each layer that has a memory. after: theirs behind the segment.
        positions_BLP: in the stream, of all tokens of the segment up to here; the last ones are those of this pass.
            None in images, where nobody counts them.
        shift_B1: makes the host's place of a position in the stream when it is added.
        padding_BN: True = padding. writes: whether the piece is a whole segment, which the memory is to keep.
        segment: (start, length) of the tokens that are written; None for all.
        offers: what each layer attends beside the segment and its own memory; None for nothing.
        host_cache: where keys and values are kept; None where they are not.
        traces: of each layer; None where nobody looks at them.
        slots: of the memory that spans the layers, which is read in front of their blocks; None for nothing.
        slot_attentions: what reads them, by the layer's number.
        grad: whether the pass is part of a graph.
    """

    def __init__(
        self,
        states: tuple[State, ...],
        positions_BLP: Tensor | None,
        shift_B1: Tensor | None,
        padding_BN: Tensor | None = None,
        *,
        writes: bool = True,
        segment: tuple[int, int] | None = None,
        offers: Sequence[Offer | None] | None = None,
        host_cache: SegmentCache | None = None,
        traced: bool = False,
        slots: tuple[Any, ...] | None = None,
    ) -> None:
        self.states, self.positions_BLP, self.shift_B1, self.padding_BN = states, positions_BLP, shift_B1, padding_BN
        self.writes, self.segment, self.offers, self.host_cache = writes, segment, offers, host_cache
        self.slots: tuple[Any, ...] | None = slots
        self.slot_attentions: Mapping[str, nn.Module] = {}
        self.after = list(states)
        self.traces: list[Trace | None] | None = [None] * len(states) if traced else None
        self.grad = torch.is_grad_enabled()

    def in_front(self, number: int, x_BND: Tensor) -> Tensor:
        """What a layer's block gets in the place of its tokens."""
        if self.slots is None or str(number) not in self.slot_attentions:
            return x_BND
        read = self.slot_attentions[str(number)]
        return with_weights(read, read, x_BND, *self.slots)

    def segment_of_last(self, n: int) -> tuple[int, int] | None:
        """Where the segment's tokens stand among the last `n` up to here; None where there are no others."""
        if self.segment is None or self.positions_BLP is None:
            return None
        end = self.positions_BLP.shape[1]
        first, (start, length) = end - n, self.segment
        begin = max(start, first)
        return begin - first, max(min(start + length, end) - begin, 0)


def undeclared(memory: nn.Module, what: str = "a context", word: str = "context") -> str:
    """Message for slots that nobody would attend."""
    return f"memory {type(memory).__name__} offers {what} and does not say so; add {word!r} to its needs"


SLOT_ATTENTIONS = "slot_attentions"
"""Of what reads in front of blocks, among the children of the memory that it reads: it trains, is copied and saved
with that."""


def give_slot_attentions(memory: ModelMemory, depth: int) -> None:
    """Give a memory what its slots are read with in front of the blocks of a host.

    Raises:
        ValueError: there is nothing, or it is made for the place behind a layer's attention.
    """
    made = {str(index): memory.slot_attention(index) for index in range(depth)}
    readers = {index: module for index, module in made.items() if module is not None}
    behind = [type(module).__name__ for module in readers.values() if not getattr(module, "in_front", False)]
    if behind or not readers:
        why = f"of {behind[0]}, which does not say in_front=True" if behind else "and its slot_attention gives none"
        raise ValueError(f"memory {type(memory).__name__} needs slots to be read in front of blocks, {why}")
    setattr(memory, SLOT_ATTENTIONS, nn.ModuleDict(readers))


def slot_attentions_of(memory: ModelMemory) -> Mapping[str, nn.Module]:
    """What `give_slot_attentions` gave the memory, or a copy of it.

    Raises:
        ValueError: nothing, since the memory did not say that it has slots.
    """
    found = memory._modules.get(SLOT_ATTENTIONS)
    if found is None:
        raise ValueError(undeclared(memory, "slots", "slots_in_front"))
    return found  # type: ignore[return-value]


class Running(Handed):
    """While it is entered, a host's forward runs: its taps find the passage, and then every block has to have ended.

    Args:
        passage: what the layers are handed. taps: of the layers. model: see `Handed`.
    """

    def __init__(self, passage: Passage, taps: Sequence[StreamTap], model: nn.Module | None = None) -> None:
        super().__init__(passage, taps, model)

    def __enter__(self) -> None:
        for tap in self.receivers:
            tap.block.follow()
        super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[0] is None:
            for tap in self.receivers:
                tap.finish()


class Attended(NamedTuple):
    """What a layer leaves for the end of its block."""

    passage: Passage
    query: Query
    reading: Reading
    weights_BHNL: Tensor | None = None


class StreamTap(Tap):
    """Lets a memory with a state into one layer; the `number`-th that has one."""

    def __init__(self, site: Site, host: Host, number: int) -> None:
        super().__init__(site, host)
        stream = host.stream
        assert stream is not None
        self.number, self.split = number, stream.split
        self.sources = [
            Listener(*root_of(site, chain[-1]), partial(self.keep, place)) for place, chain in enumerate(stream.sources)
        ]
        self.block = Listener(*root_of(site, stream.block), self.leave_block, self.enter_block)
        self.spots += [*self.sources, self.block]
        self.kept: dict[int, Tensor] = {}
        self.passage: Passage | None = None
        self.handed: Passage | None = None
        self.x_BND: Tensor | None = None
        self.reading: Reading | None = None
        self.attended: Attended | None = None

    def enter_block(self, *args: Any, **kwargs: Any) -> Any:
        """Hear what the block is called with, the tokens first; what is read in front of it takes their place."""
        given = self.x_BND = args[0] if args else next(iter(kwargs.values()))
        passage: Passage | None = kwargs.get("memory_passage", self.handed)
        if passage is None or passage.slots is None:
            return None
        self.x_BND = passage.in_front(self.number, given)
        if args:
            return (self.x_BND, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self.x_BND}

    def before_stream(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take the passage out of the call: the layer's own attention function need not know of it."""
        self.passage = passage = kwargs.pop("memory_passage", self.handed)
        if passage is None:
            raise ValueError(
                f"{type(layer).__name__} has a memory and was called without its state; call the model that "
                "add_memory was given, and checkpoint activations by its own gradient_checkpointing_enable()"
            )
        if passage.grad and not torch.is_grad_enabled():
            raise ValueError(
                "reentrant activation checkpointing would cut the graph that leads through the memory; leave "
                "use_reentrant=False, transformers' default"
            )
        x_BND = args[0] if args else kwargs["hidden_states"]
        positions_BNP, n = passage.positions_BLP, x_BND.shape[1]
        if positions_BNP is not None:
            positions_BNP = positions_BNP[:, -n:].to(x_BND.device)
        segment = passage.segment_of_last(n)
        self.begin(Query(x_BND, positions_BNP=positions_BNP, padding_BN=passage.padding_BN, segment=segment))
        self.reading, self.attended = self.look(kwargs), None
        self.kept = {}
        return args, kwargs

    def look(self, call: dict[str, Any]) -> Reading | None:
        """What the memory answers before the layer attends; None where it is read behind.

        Args:
            call: the keywords that the layer is called with, which may be changed.
        """
        return None

    def keep(self, place: int, output: Tensor) -> None:
        """Hear a module that gives queries, keys or values; they are called in whatever order."""
        self.kept[place] = output

    def _mix(self, y_BND: Tensor, query: Query, linear: Linear) -> Tensor:
        passage, kept, reading = self.passage, self.kept, self.reading
        assert passage is not None
        self.passage, self.reading, self.kept = None, None, {}
        for place, source in enumerate(self.sources):
            if place not in kept:
                raise ValueError(self.passed_by(source))
        query = self._with_heads(query, *self.split(*(kept[place] for place in range(len(self.sources)))))
        early = reading is not None
        y_BND, reading = self._through(passage.states[self.number], y_BND, query, linear, reading)
        if reading.context is not None and not early:
            raise ValueError(undeclared(self.memory))
        self.attended = Attended(passage, query, reading)
        return y_BND

    def _with_heads(self, query: Query, q_BHNE: Tensor | None, k_BGNE: Tensor, v_BGNE: Tensor) -> Query:
        """The query with keys and values that several heads share for each of them."""
        shared = self.heads // k_BGNE.shape[1]
        k_BHNE, v_BHNE = (t if shared == 1 else t.repeat_interleave(shared, 1) for t in (k_BGNE, v_BGNE))
        return query._replace(q_BHNE=q_BHNE, k_BHNE=k_BHNE, v_BHNE=v_BHNE)

    def leave_block(self, output: Any) -> None:
        """Hear what the block gives, and let the memory keep what it wants of the segment."""
        attended, x_BND = self.attended, self.x_BND
        self.attended, self.x_BND = None, None  # keep no activation alive
        if attended is None:
            return
        if x_BND is None:
            raise ValueError(self.passed_by(self.block))
        passage, query, reading, weights_BHNL = attended
        if not passage.writes and passage.traces is None:
            return
        trace = Trace(x_BND, output[0] if isinstance(output, tuple) else output, query, reading, weights_BHNL)
        if passage.traces is not None:
            passage.traces[self.number] = trace
        if passage.writes:
            memory, state = self.memory, passage.states[self.number]
            written = trace if passage.segment is None else trace.narrow(*passage.segment)
            passage.after[self.number], loss = with_weights(memory, memory.write, state, written)
            no_loss(loss, memory)

    def finish(self) -> None:
        """The model's forward is over.

        Raises:
            ValueError: the layer attended, and its block did not end.
        """
        if self.attended is not None:
            self.attended = None
            raise ValueError(self.passed_by(self.block))
