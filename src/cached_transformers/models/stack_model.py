"""What the models have in common: a body that is a stack of blocks with a memory, and where its tokens stand.

Positions, in all models: in the layers they count from the beginning of a row's stream, so that a memory knows how far
away its slots are. Without a state a segment begins at 0; with one it goes on where the row's clock stands, which
counts the tokens that are no padding. A class token is one of them: it stands in front of each segment, at a place of
its own. A model's `max_length` limits a segment, not the stream. `positions=None` takes the memory's own scheme, which
acts in the layers, and only where it has none the model's.

What is embedded at the entrance counts alike in models of one text (`LanguageModel`, `SequenceClassifier`); a table of
learned vectors refuses places that it has no vector for. It begins anew with each input where inputs are whole for
themselves: the sentences of an `EncoderDecoder`, whose translations begin at 0 as well, and the images of a
`VisionTransformer`, for which a state makes each row a sequence of images.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.attentions import create_attention
from cached_transformers.interfaces.capabilities import refuse_misfit
from cached_transformers.interfaces.memory import LayerMemory, ModelMemory
from cached_transformers.layers.attention import SelfAttention, shows_the_future
from cached_transformers.layers.block import Block, MemoryWeights
from cached_transformers.layers.bottleneck import BottleneckBlock
from cached_transformers.layers.context_attention import ContextAttention
from cached_transformers.layers.short_convolution import ShortConvolution
from cached_transformers.layers.stack import Stack, StackState
from cached_transformers.layers.switch import make_feed_forward
from cached_transformers.memories import create_memory, memory_specs
from cached_transformers.memories.parts.composite import one_scheme, side_by_side, spanning
from cached_transformers.memories.parts.fifo_store import as_kept
from cached_transformers.positions import Positions, make_positions
from cached_transformers.registry import MEMORIES
from cached_transformers.state import check, map_state

from .published import Published
from .segments import remembers
from .stack_options import StackOptions

WHERE_GIVEN: dict[str, str] = {
    "token_ids": "a model of tokens, as language_model or sequence_classifier",
    "token_map": "vision_transformer, or options of the memory that do without (variant='algorithm1' of grc)",
    "pieces": "language_model or encoder_decoder: a class token in front would have seen the first piece alone",
}
"""What some of the models give a memory, and which."""


class StackModel(Published):
    """Base of the models whose body is one `Stack`."""

    stack: Stack

    def init_state(self, batch_size: int) -> StackState:
        """State of rows that have seen nothing.

        Raises:
            ValueError: there is no row.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1 row")
        return self.stack.init_state(batch_size)

    def check_state(self, state: StackState | None, rows: int) -> None:
        """Refuse (ValueError) a state of another model, or of another number of rows; compiled code does not look."""
        if state is not None and not torch.compiler.is_compiling():
            check(state, self._layout(), rows)

    @torch.no_grad()
    def as_kept(self, state: StackState) -> StackState:
        """A state that training mode gave, as evaluation mode keeps it: of memories with `keep="kv"` keys and values of
        its hidden states, made with the weights as they are now. Other states come back as they are.

        Raises:
            ValueError: the model is in training mode.
        """
        if self.training:
            raise ValueError("in training mode hidden states are kept, from which the projections learn; call eval()")
        layers = zip(state.layers, self._layout().layers, self.stack.blocks, strict=True)
        return state._replace(
            layers=tuple(
                as_kept(part, layout, block.attention.project_kv)  # type: ignore[union-attr, arg-type]
                for part, layout, block in layers
            )
        )

    def _layout(self) -> StackState:
        """What a state of this model looks like, without contents."""
        like = self.stack.like()
        known = self.__dict__.setdefault("_layouts", {})  # no attribute that models would have to make
        kind = like.dtype, self.training
        if kind not in known:
            try:
                empty = self.stack.init_state(1, torch.empty_like(like, device="meta"))  # takes no memory
            except (RuntimeError, NotImplementedError):  # somebody's memory computes what meta tensors cannot
                empty = self.stack.init_state(1)
            known[kind] = map_state(lambda t: t.to("meta"), empty)
        layout: StackState = known[kind]
        return layout

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.stack.activation_checkpointing = enabled


def make_stack(
    options: StackOptions,
    *,
    positions: Positions | str | None = None,
    fallback: str = "none",
    causal: bool = False,
    gives: Collection[str] = (),
    memory_length: int | None = None,
    memory_size: tuple[int, int] | None = None,
    **facts: Any,
) -> Stack:
    """Stack of blocks with a memory.

    Args:
        options: what it is made of; its `positions` are for the model to understand.
        positions: of the layers: one scheme for all, or the name of a scheme that each layer gets one of; None for the
            memory's own.
        fallback: name of the scheme where the memory has none of its own.
        causal: no output depends on a later token.
        gives: words of `seam.fit` for what some models give a memory and others do not: "token_ids" (handed to the
            stack as `inputs`), "token_map" (`size`), and "pieces" where no token in front stands for the whole segment.
        memory_length: what a layer memory gets as `length` in the place of attention's.
        memory_size: (height, width) of the map of tokens, for a memory whose `length` the user did not set.
        facts: what memory and attention may ask for (length, size, prefix, sequence), beside depth, index, causal and
            norm.

    Raises:
        ValueError: unknown names, sizes that do not fit, pairs of memory and attention that exclude each other, or a
            memory that this model has no place for.
    """
    width, depth, heads = options.width, options.depth, options.heads
    memory, attention = options.memory, options.attention
    specs = memory_specs(memory)
    for name, _ in specs:
        if causal and "bidirectional" in getattr(MEMORIES.entry(name).factory, "needs", ()):
            raise ValueError(shows_the_future(name))  # before it is built, which may need what a causal model lacks
    # Both branches of a memory layer drop alike.
    facts |= {"dropout": options.attention_dropout, "causal": causal, "norm": options.norm}
    of_memory = facts if memory_length is None else facts | {"length": memory_length}

    def make_memory(number: int, index: int) -> LayerMemory | ModelMemory:
        name, chosen = specs[number]
        of_map = {} if memory_size is None or "length" in chosen else {"size": memory_size}
        return create_memory({"name": name, **chosen}, width, heads, depth=depth, index=index, **of_memory, **of_map)

    first = [make_memory(number, 0) for number in range(len(specs))]
    model_memory = spanning(first)
    for (name, _), made in zip(specs, first, strict=True):
        if causal and "bidirectional" in made.needs:
            raise ValueError(shows_the_future(name))  # an option may decide it
        _refuse_place(made, gives)
    of_attention = dict(facts)  # which has the memory's tokens in its segments
    if model_memory is not None and "length" in of_attention:
        of_attention["length"] += model_memory.extra_tokens

    def make_block(index: int) -> Block:
        of_model = [] if model_memory is None else [model_memory.layer_memory(index)]
        beside: list[Any] = [
            made if index == 0 else make_memory(number, index)
            for number, made in enumerate(first)
            if made is not model_memory
        ]
        layer_memory = side_by_side([*of_model, *beside])
        bringing = beside if model_memory is None else [model_memory, *beside]
        scheme = one_scheme(bringing) if positions is None else positions
        needs = frozenset() if model_memory is None else model_memory.needs

        def make_layer(kind: type[SelfAttention], **more: Any) -> SelfAttention:
            return kind(
                width,
                heads,
                core=create_attention(attention, width=width, heads=heads, depth=depth, index=index, **of_attention),
                positions=scheme
                if isinstance(scheme, Positions)
                else make_positions(scheme or fallback, width=width, heads=heads),
                norm=options.norm_before(),
                causal=causal,
                bias=options.bias,
                output_bias=options.bias,
                shared_query_key=options.shared_query_key,
                kv_heads=options.kv_heads,
                project_output=options.project_output,
                dropout=options.dropout,
                head_width=options.head_width,
                scale=options.attention_scale,
                **more,
            )

        def norms() -> tuple[nn.Module, nn.Module] | None:
            return (options.make_norm(), options.make_norm()) if options.norm == "post" else None

        if "memory_first" in needs:
            own = Block(make_layer(SelfAttention), feed_forward_of(options, index), norms=norms())
            layer: Any = make_layer(ContextAttention, memory=layer_memory, keys=True)
            make: Any = functools.partial(BottleneckBlock, memory_block=own)
        else:
            layer = make_layer(ContextAttention if "context_alone" in needs else SelfAttention, memory=layer_memory)
            make = Block
        positionwise = feed_forward_of(options, index)
        separate = "own_weights" in needs
        return make(
            layer,
            positionwise,
            slot_attention=None if model_memory is None else model_memory.slot_attention(index),
            memory_weights=MemoryWeights(layer, positionwise) if separate else None,
            short_convolution=ShortConvolution(width, taps) if (taps := options.short_convolution) > 1 else None,
            drop_path=options.drop_path * index / max(depth - 1, 1),
            norms=norms(),
        )

    norm = options.make_norm() if options.normed else None
    return Stack(make_block, depth, model_memory=model_memory, norm=norm, reversible=options.reversible)


def feed_forward_of(options: StackOptions, index: int) -> nn.Module:
    """The feed-forward of the layer `index`, with its norm where norms stand before sublayers."""
    return make_feed_forward(
        options.experts,
        options.width,
        options.feed_forward,
        index=index,
        depth=options.depth,
        norm=options.norm_before(),
        activation=options.activation,
        dropout=options.dropout,
        activation_dropout=options.activation_dropout,
        bias=options.feed_forward_bias,
    )


def _refuse_place(memory: LayerMemory | ModelMemory, gives: Collection[str]) -> None:
    """Refuse a memory that needs what this model does not give (ValueError)."""
    for word in sorted(memory.needs & WHERE_GIVEN.keys()):
        refuse_misfit({word: f"memory {type(memory).__name__}"}, gives, "this model", f"take {WHERE_GIVEN[word]}")


def acts_in_layers(stack: Stack) -> bool:
    """Whether a layer has a position scheme, as the memory's own."""
    return any(type(block.attention.positions) is not Positions for block in stack.blocks)  # type: ignore[union-attr]


def carries(stack: Stack) -> bool:
    """Whether a state holds anything beside the clock, so that a memory meets tokens of earlier segments."""
    return remembers(stack.init_state(1))


def embed_places(x_BND: Tensor, positions: Positions, places_BN1: Tensor) -> Tensor:
    """Tokens with their places embedded."""
    placed = positions.embed(places_BN1)
    return x_BND if placed is None else x_BND + placed.to(x_BND.dtype)
