"""Classifier of token sequences: the encoder of Long Range Arena (arXiv:2011.04006), pre-norm, with a class token.

Original implementation: google-research/long-range-arena, lra_benchmarks/models. The defaults keep its structure with
what is usual in PyTorch; exactly the arena's model is

    init="lra", bias=False, activation="gelu_tanh", norm_eps=1e-6, dropout=0.1, attention_dropout=0.1

Legend: B rows, N tokens (class token first), D model width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions import AttentionSpec
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.memories import MemorySpec
from cached_transformers.registry import MODELS, unknown_name
from cached_transformers.seam.positions import make_positions

from .parts import StackModel, initialise, make_stack


@MODELS.register("sequence_classifier", paper="arXiv:2011.04006")
class SequenceClassifier(StackModel):
    """Sequence classifier: embeddings, class token, positions, pre-norm blocks, a two-layer head on the class token.

    Args:
        vocabulary: number of token ids. classes: number of outputs. max_length: longest sequence.
        width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        head_width: hidden width of the head; None takes `feed_forward`, as the arena does.
        memory: None, a name, or {"name": ..., option: value}; its cache has max_length + 1 slots by default.
        attention: name, or {"name": ..., option: value}.
        positions: "sinusoidal", "learned", "rotary", "alibi" or "none".
        dropout: after embeddings and sublayers. attention_dropout: on attention weights (no fused CPU kernel has it).
        activation: "gelu", "gelu_tanh" or "relu". norm_eps: what the norms add to the variance.
        bias: whether the projections of attention have biases; a memory has an option of its own for that.
        shared_query_key: one projection serves as queries and keys. project_output: whether attention has an output
            projection. The arena's Reformer has the first without the second.
        init: "xavier", see `initialise`, or "lra", see `initialise_as_lra`.
        reversible: activations are computed again from the result in backward; see `layers.reversible`.

    Raises:
        ValueError: sizes that do not fit, unknown names, a sequence longer than `max_length`.
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        max_length: int,
        width: int = 512,
        depth: int = 4,
        heads: int = 8,
        feed_forward: int = 1024,
        memory: MemorySpec = None,
        attention: AttentionSpec = "softmax",
        positions: str = "sinusoidal",
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation: str = "gelu",
        norm_eps: float = 1e-5,
        bias: bool = True,
        shared_query_key: bool = False,
        project_output: bool = True,
        head_width: int | None = None,
        init: Literal["xavier", "lra"] = "xavier",
        reversible: bool = False,
    ) -> None:
        super().__init__()
        if init not in ("xavier", "lra"):
            raise ValueError(unknown_name("init", init, ["xavier", "lra"]))
        if head_width is not None and head_width < 1:
            raise ValueError(f"head_width={head_width} must be at least 1; null takes feed_forward")
        self.vocabulary, self.max_length = vocabulary, max_length
        self.embedding = nn.Embedding(vocabulary, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = make_positions(positions, width=width, heads=heads, length=max_length + 1)
        self.dropout = nn.Dropout(dropout)
        self.stack = make_stack(
            width,
            depth,
            heads,
            feed_forward,
            memory=memory,
            attention=attention,
            positions=self.positions,
            dropout=dropout,
            attention_dropout=attention_dropout,
            reversible=reversible,
            activation=activation,
            norm_eps=norm_eps,
            bias=bias,
            shared_query_key=shared_query_key,
            project_output=project_output,
            length=max_length + 1,
            sequence=True,
        )
        hidden = feed_forward if head_width is None else head_width
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        if init == "lra":
            initialise_as_lra(self)
        else:
            initialise(self)
            nn.init.normal_(self.embedding.weight)

    def forward(
        self, inputs_BN: Tensor, state: StackState | None = None, *, padding: Tensor | None = None
    ) -> ModelOutput:
        """Logits (B, classes) of token ids (B, N); `padding` is (B, N) bool, True = padding."""
        rows, n = inputs_BN.shape
        if n > self.max_length:
            raise ValueError(
                f"a sequence of {n} tokens, but max_length={self.max_length}; shorten it or build a longer model"
            )
        x_BND = torch.cat([self.class_token.expand(rows, -1, -1), self.embedding(inputs_BN)], 1)
        positions_BNP = torch.arange(n + 1, device=inputs_BN.device)[None, :, None].expand(rows, -1, -1)
        placed = self.positions.embed(positions_BNP)
        x_BND = self.dropout(x_BND if placed is None else x_BND + placed.to(x_BND.dtype))
        if padding is not None:
            padding = F.pad(padding, (1, 0), value=False)
        out = self.stack(x_BND, state, positions_BNP=positions_BNP, padding_BN=padding, inputs=inputs_BN)
        return out._replace(outputs=self.head(out.outputs[:, 0]))


def initialise_as_lra(model: SequenceClassifier) -> None:
    """Initial weights of the Long Range Arena; the class token is zero, and memories keep their own.

    Xavier-uniform projections of attention (queries, keys and values each for itself) and feed-forward maps, whose
    biases are N(0, 1e-6); embeddings N(0, 1); a head of truncated normal weights of variance 1 / inputs, without bias.
    """
    for block in model.stack.blocks:
        attention, positionwise = block.attention, block.feed_forward
        assert isinstance(attention, SelfAttention) and isinstance(positionwise, FeedForward)
        for weight in attention.qkv.weight.detach().split(attention.width):
            nn.init.xavier_uniform_(weight)
        if isinstance(attention.output, nn.Linear):
            nn.init.xavier_uniform_(attention.output.weight)
        for linear in (attention.qkv, attention.output):
            if isinstance(linear, nn.Linear) and linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for linear in (positionwise.enter, positionwise.leave):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)
    for linear in (model.head[0], model.head[2]):
        assert isinstance(linear, nn.Linear)
        # A normal distribution cut off at two standard deviations has 0.8796 of its own.
        std = math.sqrt(1 / linear.in_features) / 0.87962566103423978
        nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(linear.bias)
    nn.init.normal_(model.embedding.weight)
