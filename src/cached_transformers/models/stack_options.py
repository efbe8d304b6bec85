"""What the stack of a model is made of: one object for all models, filled by a recipe or by keyword arguments.

A model names its sizes and what it alone has, and takes the rest of the options of its stack by keyword:

    class Classifier(StackModel):
        @takes_stack_options("memory", "attention", "dropout", activation="relu")
        def __init__(self, classes: int, width: int = 64, depth: int = 2, heads: int = 2, feed_forward: int = 128, *,
                     pool: str = "mean", **options: Unpack[StackKeywords]) -> None:
            super().__init__()
            stack = StackOptions(width, depth, heads, feed_forward, **options)

Each part has one reader. `StackOptions` is what the code reads: typed, frozen and checked. `StackKeywords` is what type
checkers and editors read. The decorator is for everybody who asks at run time: it gives the model's signature the
options that are offered, with their defaults, so that the registry, recipes and `help` see them, and everything else is
refused as by any function. A type checker cannot see which of the keywords one model leaves out; the signature does.

A decorator that built the whole signature of a `StackOptions` parameter would need less text, but no type checker
follows it; and a dataclass of options for each model would have to be built by every caller.
"""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Any, TypedDict, TypeVar

from torch import nn

from cached_transformers.attentions import AttentionSpec
from cached_transformers.checks import at_least_one, shares
from cached_transformers.layers.switch import ExpertsSpec
from cached_transformers.memories import MemorySpec
from cached_transformers.registry import unknown_name

F = TypeVar("F", bound=Callable[..., None])

NORMS: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
"""Kinds of norm: arXiv:1607.06450 and arXiv:1910.07467."""


DEEPEST = 4096
"""Layers; the deepest transformers have 1,000, and each is built one after the other."""


class StackKeywords(TypedDict, total=False):
    """Options of a stack that models take by keyword, as type checkers know them; see `StackOptions`."""

    memory: MemorySpec
    attention: AttentionSpec
    positions: str | None
    norm: str
    norm_kind: str
    norm_eps: float
    final_norm: bool | None
    activation: str
    bias: bool
    attention_scale: float | None
    shared_query_key: bool
    kv_heads: int | None
    project_output: bool
    dropout: float
    attention_dropout: float
    activation_dropout: float | None
    drop_path: float
    reversible: bool
    short_convolution: int
    experts: ExpertsSpec


@dataclass(frozen=True)
class StackOptions:
    """What a stack is made of.

    Args:
        width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        memory: None, a name, or {"name": ..., option: value}, layer memories and model memories alike; or a list of
            such, which stand side by side.
        attention: name, or {"name": ..., option: value}.
        positions: name of a scheme, as the model understands it; None for the memory's own, or else the model's.
        norm: "pre" (of what enters a sublayer, and of the stack's result) or "post" (of the residual sums).
        norm_kind: "layer" or "rms". norm_eps: what the norms add to the variance.
        final_norm: whether there is a norm behind the last block; None: if they are "pre".
        activation: "gelu", "gelu_tanh", "relu" or "silu", or one of them behind "gated_".
        bias: whether the projections of attention have biases. feed_forward_bias: the same for the feed-forward.
        head_width: of attention, D / heads when None; others go without a memory.
        attention_scale: factor of the logits, 1 / sqrt(head width) when None.
        shared_query_key: one projection serves as queries and keys (Reformer, arXiv:2001.04451).
        kv_heads: heads of keys and values, each of heads / kv_heads heads of queries (grouped queries,
            arXiv:2305.13245; 1 is one for all); as many as heads when None.
        project_output: whether attention has an output projection.
        dropout: after embeddings and sublayers. attention_dropout: on attention weights (no fused CPU kernel has it).
        activation_dropout: on the hidden units of the feed-forward; None takes `dropout`.
        drop_path: stochastic depth of the last layer, growing linearly from 0.
        reversible: activations are computed again from the result in backward; see `layers.reversible`.
        short_convolution: K, tokens that are mixed channel by channel in front of attention, the token itself
            included; the last K - 1 of a segment are carried into the next. 1 for none; see
            `layers.short_convolution`.
        experts: None, their number in every second layer, or {"experts": number, "every": layers, option: value}:
            Switch feed-forwards; see `layers.switch`.

    Raises:
        ValueError: sizes that do not fit, or an unknown norm. What memory, attention, activation and experts refuse is
            found when they are built.
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
        at_least_one(" layer", depth=self.depth)
        at_least_one(feed_forward=self.feed_forward)
        at_least_one("; 1 is for none", short_convolution=self.short_convolution)
        at_least_one("; None is width / heads", head_width=self.head_width)
        if self.depth > DEEPEST:
            raise ValueError(f"depth={self.depth} must be at most {DEEPEST} layers")
        if self.width < 1 or self.heads < 1 or (self.head_width is None and self.width % self.heads):
            raise ValueError(f"width={self.width} must be a positive multiple of heads={self.heads}")
        at_least_one(width=self.width)
        shares(dropout=self.dropout, attention_dropout=self.attention_dropout)
        shares(activation_dropout=self.activation_dropout, drop_path=self.drop_path)
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps} must be a small number, e.g. 1e-5; it is added to a variance")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm={self.norm!r} must be 'pre' or 'post'")
        if self.norm_kind not in NORMS:
            raise ValueError(unknown_name("norm_kind", self.norm_kind, list(NORMS)))

    @property
    def normed(self) -> bool:
        """Whether a norm stands behind the last block."""
        return self.norm == "pre" if self.final_norm is None else self.final_norm

    def make_norm(self) -> nn.Module:
        """A norm over the width, made anew at every call."""
        return NORMS[self.norm_kind](self.width, eps=self.norm_eps)

    def norm_before(self) -> nn.Module | None:
        """The norm of what enters a sublayer, made anew at every call; None where norms stand behind the sums."""
        return self.make_norm() if self.norm == "pre" else None


def takes_stack_options(*offered: str, **defaults: Any) -> Callable[[F], F]:
    """Decorator of a model's `__init__(self, ..., width, depth, heads, feed_forward, *, ..., **options)`.

    Its `options` are then complete, and its signature names each of them, behind the sizes.

    Args:
        offered: names of options of the stack that the model takes. defaults: more of them, which have another default
            there than in `StackOptions`.
    """
    known = {field.name: field for field in fields(StackOptions)}
    names = [*offered, *(name for name in defaults if name not in offered)]
    assert set(names) <= StackKeywords.__annotations__.keys(), names
    filled = {name: defaults.get(name, known[name].default) for name in names}
    types = typing.get_type_hints(StackOptions)

    def decorate(init: F) -> F:
        signature = inspect.signature(init)
        sizes, others = (
            [p for p in signature.parameters.values() if p.kind is kind]
            for kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        )
        shared = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=known[name].type)
            for name, default in filled.items()
        ]
        whole = signature.replace(parameters=[*sizes, *shared, *others])

        @functools.wraps(init)
        def complete(*arguments: Any, **options: Any) -> None:
            whole.bind(*arguments, **options)  # a TypeError, as of any function, for what is not offered
            init(*arguments, **{**filled, **options})

        told = {name: annotation for name, annotation in init.__annotations__.items() if name in whole.parameters}
        complete.__annotations__ = {**told, **{name: types[name] for name in names}, "return": None}
        complete.__signature__ = whole  # type: ignore[attr-defined]
        return complete  # type: ignore[return-value]

    return decorate
