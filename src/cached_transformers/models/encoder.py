"""Classifier of token sequences: the encoder of Long Range Arena (arXiv:2011.04006), pre-norm, with a class token.

Legend: B rows, N tokens (class token first), D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attentions import AttentionSpec
from ..layers.block import ModelOutput, StackState
from ..layers.positions import make_positions
from ..memories import MemorySpec
from ..registry import MODELS
from .parts import StackModel, initialise, make_stack


@MODELS.register("sequence_classifier", paper="arXiv:2011.04006")
class SequenceClassifier(StackModel):
    """Sequence classifier: embeddings, class token, positions, pre-norm blocks, a two-layer head on the class token.

    Args:
        vocabulary: number of token ids. classes: number of outputs. max_length: longest sequence.
        width: D. depth: layers. heads: per layer. feed_forward: hidden width, also of the head.
        memory: None, a name, or {"name": ..., option: value}; its cache has max_length + 1 slots by default.
        attention: name, or {"name": ..., option: value}.
        positions: "sinusoidal", "learned", "rotary", "alibi" or "none".
        dropout: after embeddings and sublayers. attention_dropout: on attention weights (no fused CPU kernel has it).

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
    ) -> None:
        super().__init__()
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
            length=max_length + 1,
            sequence=True,
        )
        self.head = nn.Sequential(nn.Linear(width, feed_forward), nn.ReLU(), nn.Linear(feed_forward, classes))
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
