"""Options of a model's stack of blocks, typed and checked.

Each model names the options that it offers in its own signature and passes them on:

    stack = StackOptions.among(locals())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from cached_transformers.annotations import checked
from cached_transformers.attentions import AttentionSpec
from cached_transformers.checks import at_least_one, shares
from cached_transformers.layers.switch import ExpertsSpec
from cached_transformers.memories import MemorySpec
from cached_transformers.memories.parts.options import check_positive
from cached_transformers.registry import unknown_name

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
"""Kinds of norm: arXiv:1607.06450 and arXiv:1910.07467."""
DEEPEST = 4096
"""Most layers; the deepest transformers have 1,000."""


@checked
@dataclass(frozen=True)
class StackOptions:
    """Options of a stack.

    Args:
        width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        memory: None, a name, or {"name": ..., option: value}, for layer memories and model-level memories; or a list
            of them, used side by side.
        attention: name, or {"name": ..., option: value}.
        positions: name of a scheme, as the model defines it; None for the memory's own, or else the model's default.
        norm: "pre" (before sublayers and after the stack) or "post" (after residual sums).
        norm_kind: "layer" or "rms". norm_eps: added to the variance.
        final_norm: whether a norm follows the last block; None: with "pre".
        activation: "gelu", "gelu_tanh", "relu" or "silu", or one of them after "gated_".
        bias: whether the projections of attention have biases. feed_forward_bias: the same for the feed-forward.
        head_width: of attention, D / heads when None; other widths need a model without memory.
        attention_scale: factor of the logits, 1 / sqrt(head width) when None.
        shared_query_key: one projection serves as queries and keys (Reformer, arXiv:2001.04451).
        kv_heads: heads of keys and values, each for heads / kv_heads heads of queries (grouped queries,
            arXiv:2305.13245; 1 is multi-query attention); as many as heads when None.
        project_output: whether attention has an output projection.
        dropout: after embeddings and sublayers. attention_dropout: on attention weights (no fused CPU kernel has it).
        activation_dropout: on the hidden units of the feed-forward; None takes `dropout`.
        drop_path: stochastic depth of the last layer, growing linearly from 0.
        reversible: recompute activations from the result in the backward; see `layers.reversible`.
        short_convolution: K, taps of a causal convolution before attention; 1 for none; see
            `layers.short_convolution`.
        experts: None, their number in every second layer, or {"experts": number, "every": layers, option: value}:
            Switch feed-forwards; see `layers.switch`.

    Raises:
        ValueError: mismatched sizes, or an unknown norm. Memory, attention, activation and experts are checked when
            they are built.
    """

    width: int
    depth: int
    heads: int
    feed_forward: int
    memory: MemorySpec = None
    attention: AttentionSpec = "softmax"
    positions: str | None = None
    norm: str = "pre"
    norm_kind: str = "layer"
    norm_eps: float = 1e-5
    final_norm: bool | None = None
    activation: str = "gelu"
    bias: bool = True
    feed_forward_bias: bool = True
    head_width: int | None = None
    attention_scale: float | None = None
    shared_query_key: bool = False
    kv_heads: int | None = None
    project_output: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float | None = None
    drop_path: float = 0.0
    reversible: bool = False
    short_convolution: int = 1
    experts: ExpertsSpec = None

    def __post_init__(self) -> None:
        at_least_one("; 1 is for none", short_convolution=self.short_convolution)
        at_least_one("; None is width / heads", head_width=self.head_width)
        if self.depth > DEEPEST:
            raise ValueError(f"depth={self.depth} must be at most {DEEPEST} layers")
        if self.head_width is None and self.width % self.heads:
            raise ValueError(f"width={self.width} must be a positive multiple of heads={self.heads}")
        check_positive(attention_scale=self.attention_scale)
        shares(dropout=self.dropout, attention_dropout=self.attention_dropout)
        shares(activation_dropout=self.activation_dropout, drop_path=self.drop_path)
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps} must be a small number, e.g. 1e-5; it is added to a variance")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm={self.norm!r} must be 'pre' or 'post'")
        if self.norm_kind not in NORMS:
            raise ValueError(unknown_name("norm_kind", self.norm_kind, list(NORMS)))

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> StackOptions:
        """The options of a stack among a model's arguments, by name."""
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    @property
    def normed(self) -> bool:
        """Return whether a norm follows the last block."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    def make_norm(self) -> nn.Module:
        """Make a new norm over the width."""
        return NORMS[self.norm_kind](self.width, eps=self.norm_eps)

    def norm_before(self) -> nn.Module | None:
        """Make a new norm for the input of a sublayer; None for a post-norm stack."""
        return self.make_norm() if self.norm == "pre" else None
