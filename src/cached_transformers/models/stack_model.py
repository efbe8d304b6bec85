"""Base of the models: a stack of blocks with a memory, and positions of tokens.

Positions in the layers count from the start of a row's stream, so a memory knows the distance of its slots: a segment
begins at the row's clock in the state, 0 without a state; the clock counts tokens that are not padding. A class token
takes the first position of each segment. `max_length` limits a segment, not the stream. `positions=None` takes the
memory's own scheme, or else the model's default.

Embedded positions count the same way in `LanguageModel` and `SequenceClassifier`; learned tables refuse positions
beyond their length. They restart with each input of an `EncoderDecoder` and each image of a `VisionTransformer`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.attentions import create_attention
from cached_transformers.checks import at_least_one
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

from .published import PublishedModel
from .stack_options import StackOptions

WHERE_GIVEN: dict[str, str] = {
    "token_ids": "a model of tokens, as language_model or sequence_classifier",
    "token_map": "vision_transformer, or options of the memory that do without (variant='algorithm1' of grc)",
    "pieces": "language_model or encoder_decoder: a class token would see only the first piece",
}
"""Inputs that only some models give a memory, and these models."""


class StackModel(PublishedModel):
    """Base of models with one `Stack`."""

    stack: Stack

    def init_state(self, batch_size: int) -> StackState:
        """Initial state of `batch_size` rows (ValueError: fewer than 1)."""
        if not torch.compiler.is_compiling():
            at_least_one(" row", batch_size=batch_size)
        return self.stack.init_state(batch_size)

    def check_state(self, state: StackState | None, rows: int) -> None:
        """Refuse (ValueError) a state of another model or another number of rows; compiled code skips the check."""
        if state is not None and not torch.compiler.is_compiling():
            check(state, self._layout(), rows)

    @torch.no_grad()
    def as_kept(self, state: StackState) -> StackState:
        """Convert a state of training mode to evaluation mode: memories with `keep="kv"` get keys and values of their
        hidden states, made with the current weights; other states are returned unchanged.

        Raises:
            ValueError: the model is in training mode.
        """
        if self.training:
            raise ValueError("training=True: training keeps hidden states; call eval() first")
        layers = zip(state.layers, self._layout().layers, self.stack.blocks, strict=True)
        return state._replace(
            layers=tuple(
                as_kept(part, layout, block.attention.project_kv)  # type: ignore[union-attr, arg-type]
                for part, layout, block in layers
            )
        )

    def _layout(self) -> StackState:
        """An initial state on the meta device."""
        like = self.stack.like()
        known = self.__dict__.setdefault("_layouts", {})
        kind = like.dtype, self.training
        if kind not in known:
            try:
                empty = self.stack.init_state(1, torch.empty_like(like, device="meta"))
            except (RuntimeError, NotImplementedError):  # a third-party memory may need values
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
    """Build a stack of blocks with a memory.

    Args:
        options: options of the stack; the model interprets its `positions`.
        positions: of the layers: one scheme for all, or the name of a scheme per layer; None for the memory's own.
        fallback: name of the scheme if the memory has none.
        causal: no output depends on a later token.
        gives: inputs that this model gives a memory, as in `interfaces.capabilities`: "token_ids" (passed to the stack
            as `inputs`), "token_map" (`size`), and "pieces" without a class token.
        memory_length: `length` of a layer memory, if it differs from attention's.
        memory_size: (height, width) of the token map, for a memory whose `length` the user did not set.
        facts: further arguments that memory and attention may take (length, size, prefix, sequence), besides depth,
            index, causal and norm.

    Raises:
        ValueError: unknown names, mismatched sizes, pairs of memory and attention that exclude each other, or a memory
            that needs inputs this model does not give.
    """
    width, depth, heads = options.width, options.depth, options.heads
    memory, attention = options.memory, options.attention
    specs = memory_specs(memory)
    for name, _ in specs:
        if causal and "bidirectional" in getattr(MEMORIES.entry(name).factory, "needs", ()):
            raise ValueError(shows_the_future(name))  # before building it, which may fail in a causal model
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
            raise ValueError(shows_the_future(name))  # depends on its options
        for word in sorted(made.needs & WHERE_GIVEN.keys()):
            refuse_misfit({word: f"memory {type(made).__name__}"}, gives, "this model", f"take {WHERE_GIVEN[word]}")
    of_attention = dict(facts)  # segments include the memory's tokens
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
    """Build the feed-forward of layer `index`, with its norm in a pre-norm stack."""
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


def acts_in_layers(stack: Stack) -> bool:
    """Return whether a layer has a position scheme, such as the memory's own."""
    return any(type(block.attention.positions) is not Positions for block in stack.blocks)  # type: ignore[union-attr]


def embed_places(x_BND: Tensor, positions: Positions, places_BN1: Tensor) -> Tensor:
    """Add embedded positions to tokens."""
    placed = positions.embed(places_BN1)
    return x_BND if placed is None else x_BND + placed.to(x_BND.dtype)
