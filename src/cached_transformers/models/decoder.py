"""Causal language model that carries a memory from segment to segment.

Legend: B rows, N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from ..layers.block import ModelOutput, StackState
from ..layers.positions import make_positions
from ..memories import MemorySpec
from ..registry import MODELS
from ..state import reset as reset_rows
from .parts import StackModel, initialise, make_stack


@MODELS.register("language_model")
class LanguageModel(StackModel):
    """Decoder-only language model over segments of a stream.

    Args:
        vocabulary: V. width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        memory: None, a name, or {"name": ..., option: value}; layer memories and model memories alike.
        attention: name of the attention core, which must have a causal form.
        positions: "rotary", "relative", "alibi", "sinusoidal" or "none"; all count from the beginning of the stream.
            None takes the memory's own scheme, or else "rotary".
        norm: "pre" or "post" the residual sums. activation: "gelu" or "relu". bias: of attention's projections.
        tied: whether the output projection shares the embedding's weights.
        scale_embedding: multiply embeddings by sqrt(D).
        dropout: after embeddings and sublayers. attention_dropout: on attention weights (no fused CPU kernel has it).

    Raises:
        ValueError: sizes that do not fit, unknown names, or a memory that would show a token its future.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        feed_forward: int = 1024,
        memory: MemorySpec = None,
        attention: str = "softmax",
        positions: str | None = None,
        norm: str = "pre",
        activation: str = "gelu",
        bias: bool = True,
        tied: bool = True,
        scale_embedding: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding_scale = math.sqrt(width) if scale_embedding else 1.0
        self.embedding = nn.Embedding(vocabulary, width)
        embedded = positions == "sinusoidal"
        self.positions = make_positions("sinusoidal" if embedded else "none", width=width, heads=heads)
        self.dropout = nn.Dropout(dropout)
        self.stack = make_stack(
            width,
            depth,
            heads,
            feed_forward,
            memory=memory,
            attention=attention,
            positions="none" if embedded else positions,
            fallback="rotary",
            norm=norm,
            activation=activation,
            bias=bias,
            dropout=dropout,
            attention_dropout=attention_dropout,
            causal=True,
            sequence=True,
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        initialise(self)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        inputs_BN: Tensor,
        state: StackState | None = None,
        reset: Tensor | None = None,
        *,
        padding: Tensor | None = None,
    ) -> ModelOutput:
        """Logits (B, N, V) for the next token at each place of the segment.

        Args:
            inputs_BN: token ids.
            state: state after the last segment; None for the start of a stream.
            reset: (B,) bool, rows that begin a new document and forget.
            padding: (B, N) bool, True = padding.
        """
        rows = inputs_BN.shape[0]
        if state is None:
            state = self.init_state(rows)
        elif state.clock_B.shape[0] != rows:
            raise ValueError(
                f"the state has {state.clock_B.shape[0]} rows, the segment {rows}; rows keep their place in a stream"
            )
        if reset is not None:
            state = reset_rows(state, self.init_state(rows), reset)
        x_BND = self.embedding(inputs_BN) * self.embedding_scale
        placed = self.positions.embed(self.stack.clock_positions(state, inputs_BN.shape[1], padding))
        x_BND = self.dropout(x_BND if placed is None else x_BND + placed.to(x_BND.dtype))
        out = self.stack(x_BND, state, padding_BN=padding, inputs=inputs_BN)
        return out._replace(outputs=self.head(out.outputs))
