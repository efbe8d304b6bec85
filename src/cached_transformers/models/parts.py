"""What the models have in common: a body that is a stack, building it from names, and initial weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..layers.attention import SelfAttention, shows_the_future
from ..layers.block import Block, SlotAttention, Stack, StackState
from ..layers.feed_forward import FeedForward
from ..layers.positions import Positions
from ..memories import create_memory, memory_spec
from ..memories.base import LayerMemory, ModelMemory
from ..registry import ATTENTIONS, MEMORIES


class StackModel(nn.Module):
    """Base of the models whose body is one `Stack`."""

    stack: Stack

    def init_state(self, batch_size: int) -> StackState:
        """State of rows that have seen nothing."""
        return self.stack.init_state(batch_size)

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.stack.activation_checkpointing = enabled


def make_stack(
    width: int,
    depth: int,
    heads: int,
    feed_forward: int,
    *,
    memory: str | dict[str, Any] | None,
    attention: str,
    positions: Positions | None = None,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    drop_path: float = 0.0,
    causal: bool = False,
    **known: Any,
) -> Stack:
    """Stack of pre-norm blocks; `known` are facts that a memory may ask for (length, size, prefix, sequence).

    Raises:
        ValueError: unknown names, sizes that do not fit, pairs of memory and attention that exclude each other.
    """
    if heads < 1 or width % heads:
        raise ValueError(f"width={width} must be a positive multiple of heads={heads}")
    spec = memory_spec(memory)
    if causal and spec is not None and not getattr(MEMORIES.entry(spec[0]).factory, "causal", True):
        raise ValueError(shows_the_future(spec[0]))  # before it is built, which may need what a causal model lacks
    known["dropout"] = attention_dropout  # both branches of a memory layer drop alike
    first = create_memory(memory, width, heads, depth=depth, **known)
    spans = isinstance(first, ModelMemory)

    def make_block(index: int) -> Block:
        own = (
            LayerMemory()
            if spans
            else first
            if index == 0
            else create_memory(memory, width, heads, depth=depth, **known)
        )
        layer = SelfAttention(
            width,
            heads,
            core=ATTENTIONS.create(attention, dropout=attention_dropout),
            memory=own,  # type: ignore[arg-type]
            positions=positions,
            norm=nn.LayerNorm(width),
            causal=causal,
            dropout=dropout,
        )
        return Block(
            layer,
            FeedForward(width, feed_forward, norm=nn.LayerNorm(width), dropout=dropout),
            slot_attention=SlotAttention(width, heads) if first.insertion == "sublayer" else None,
            drop_path=drop_path * index / max(depth - 1, 1),
        )

    return Stack(make_block, depth, model_memory=first if spans else None, width=width)  # type: ignore[arg-type]


def initialise(model: nn.Module) -> None:
    """Xavier-uniform linear maps with zero biases, embeddings of 0.02; memories and convolutions keep their own."""
    skip = {
        id(m) for memory in model.modules() if isinstance(memory, LayerMemory | ModelMemory) for m in memory.modules()
    }
    for module in model.modules():
        if id(module) in skip:
            continue
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02)
