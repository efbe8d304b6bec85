"""What the models have in common: a body that is a stack, building it from names, and initial weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from cached_transformers.attentions import AttentionSpec, create_attention
from cached_transformers.layers.attention import SelfAttention, shows_the_future
from cached_transformers.layers.block import Block, MemoryWeights
from cached_transformers.layers.context_attention import ContextAttention
from cached_transformers.layers.stack import Stack, StackState
from cached_transformers.layers.switch import ExpertsSpec, make_feed_forward
from cached_transformers.memories import MemorySpec, create_memory, memory_spec
from cached_transformers.registry import MEMORIES, unknown_name
from cached_transformers.seam.memory import LayerMemory, ModelMemory
from cached_transformers.seam.positions import Positions, RelativePositions, make_positions

from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax


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
    memory: MemorySpec,
    attention: AttentionSpec,
    positions: Positions | str | None = None,
    fallback: str = "none",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    drop_path: float = 0.0,
    causal: bool = False,
    norm: str = "pre",
    norm_eps: float = 1e-5,
    norm_kind: str = "layer",
    final_norm: bool | None = None,
    activation: str = "gelu",
    activation_dropout: float | None = None,
    bias: bool = True,
    feed_forward_bias: bool = True,
    head_width: int | None = None,
    attention_scale: float | None = None,
    memory_length: int | None = None,
    shared_query_key: bool = False,
    project_output: bool = True,
    reversible: bool = False,
    experts: ExpertsSpec = None,
    **known: Any,
) -> Stack:
    """Stack of blocks with a memory.

    Args:
        memory: None, a name, or {"name": ..., option: value}.
        positions: one scheme for all layers, or the name of a scheme that each layer gets one of; None for the
            memory's own.
        attention: name, or {"name": ..., option: value}.
        fallback: name of the scheme where the memory has none of its own.
        norm: "pre" (of what enters a sublayer, and of the stack's result) or "post" (of the residual sums).
        norm_eps: what the norms add to the variance. norm_kind: "layer" or "rms" (arXiv:1910.07467).
        final_norm: whether there is a norm behind the last block; None: if they are "pre".
        activation_dropout: on the hidden units of the feed-forward; None takes `dropout`.
        bias: whether the projections of attention have biases. feed_forward_bias: the same for the feed-forward.
        head_width, attention_scale: see `SelfAttention`.
        memory_length: what a layer memory is told as `length` in the place of attention's.
        shared_query_key, project_output: see `SelfAttention`.
        reversible: see `Stack`.
        experts: None, the number of experts, or a mapping; see `make_feed_forward`.
        known: facts that memory and attention may ask for (length, size, prefix, sequence), beside depth, index, causal
            and norm.

    Raises:
        ValueError: unknown names, sizes that do not fit, pairs of memory and attention that exclude each other.
    """
    if heads < 1 or (head_width is None and width % heads):
        raise ValueError(f"width={width} must be a positive multiple of heads={heads}")
    if norm not in ("pre", "post"):
        raise ValueError(f"norm={norm!r} must be 'pre' or 'post'")
    spec = memory_spec(memory)
    if causal and spec is not None and "whole_segment" in getattr(MEMORIES.entry(spec[0]).factory, "needs", ()):
        raise ValueError(shows_the_future(spec[0]))  # before it is built, which may need what a causal model lacks
    known["dropout"] = attention_dropout  # both branches of a memory layer drop alike
    known |= {"causal": causal, "norm": norm}

    norm_of = norm_maker(norm_kind, width, norm_eps)
    told = known if memory_length is None else known | {"length": memory_length}

    def make_memory(index: int) -> LayerMemory | ModelMemory:
        return create_memory(memory, width, heads, depth=depth, index=index, **told)

    first = make_memory(0)
    model_memory = first if isinstance(first, ModelMemory) else None
    if causal and spec is not None and "whole_segment" in first.needs:
        raise ValueError(shows_the_future(spec[0]))  # an option may decide it
    seen = dict(known)  # by attention, which has the memory's tokens in its segments
    if model_memory is not None and "length" in seen:
        seen["length"] += model_memory.extra_tokens

    def make_block(index: int) -> Block:
        if model_memory is not None:
            own: LayerMemory | ModelMemory = model_memory.layer_memory(index)
        else:
            own = first if index == 0 else make_memory(index)
        scheme = (model_memory or own).position_scheme() if positions is None else positions
        if not isinstance(scheme, Positions):
            scheme = make_positions(scheme or fallback, width=width, heads=heads)
        alone = model_memory is not None and "context_alone" in model_memory.needs
        layer = (ContextAttention if alone else SelfAttention)(
            width,
            heads,
            core=create_attention(attention, width=width, heads=heads, depth=depth, index=index, **seen),
            memory=own,  # type: ignore[arg-type]
            positions=scheme,
            norm=norm_of() if norm == "pre" else None,
            causal=causal,
            bias=bias,
            output_bias=bias,
            shared_query_key=shared_query_key,
            project_output=project_output,
            dropout=dropout,
            head_width=head_width,
            scale=attention_scale,
            **({} if model_memory is None else model_memory.layer_options(index)),
        )
        enter = norm_of() if norm == "pre" else None
        positionwise = make_feed_forward(
            experts,
            width,
            feed_forward,
            index=index,
            depth=depth,
            norm=enter,
            activation=activation,
            dropout=dropout,
            activation_dropout=activation_dropout,
            bias=feed_forward_bias,
        )
        separate = model_memory is not None and "own_weights" in model_memory.needs
        return Block(
            layer,
            positionwise,
            slot_attention=None if model_memory is None else model_memory.slot_attention(index),
            memory_weights=MemoryWeights(layer, positionwise) if separate else None,
            drop_path=drop_path * index / max(depth - 1, 1),
            norms=(norm_of(), norm_of()) if norm == "post" else None,
        )

    final = norm == "pre" if final_norm is None else final_norm
    return Stack(make_block, depth, model_memory=model_memory, norm=norm_of() if final else None, reversible=reversible)


def norm_maker(kind: str, width: int, eps: float) -> Callable[[], nn.Module]:
    """What makes norms over `width` channels: "layer" (arXiv:1607.06450) or "rms" (arXiv:1910.07467).

    Raises:
        ValueError: an unknown kind.
    """
    makers: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    if kind not in makers:
        raise ValueError(unknown_name("kind of norm", kind, list(makers)))
    return partial(makers[kind], width, eps=eps)


def initialise(model: nn.Module, std: float | None = None, projection_std: float = 0.01) -> None:
    """Xavier-uniform linear maps with zero biases, embeddings of 0.02; memories and convolutions keep their own.

    With `std` the initial weights of Transformer-XL instead (github.com/kimiyoung/transformer-xl): N(0, std) linear
    maps, embeddings and relative biases, N(1, std) norms, N(0, projection_std) projections of adaptive embeddings.
    """
    skip = {
        id(m) for memory in model.modules() if isinstance(memory, LayerMemory | ModelMemory) for m in memory.modules()
    }
    for module in model.modules():
        if id(module) in skip:
            continue
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight) if std is None else nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02) if std is None else nn.init.normal_(module.weight, std=std)
        elif isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax):
            module.reset_parameters(std, projection_std)
        elif isinstance(module, nn.LayerNorm) and std is not None:
            nn.init.normal_(module.weight, 1.0, std)
        elif isinstance(module, RelativePositions) and std is not None:
            nn.init.normal_(module.content_bias, std=std)
            nn.init.normal_(module.position_bias, std=std)
