"""Classifier of token sequences: the encoder of Long Range Arena (arXiv:2011.04006), pre-norm, with a class token.

Original implementation: google-research/long-range-arena, lra_benchmarks/models. The defaults keep its structure with
PyTorch's usual choices; the arena's exact model is

    init="lra", bias=False, activation="gelu_tanh", norm_eps=1e-6, dropout=0.1, attention_dropout=0.1

Legend: B rows, N tokens (class token first), D model width.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions import AttentionSpec
from cached_transformers.checks import at_least_one, insist
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.memories import MemorySpec
from cached_transformers.positions import LearnedPositions, Positions, make_positions
from cached_transformers.registry import MODELS

from .documents import check_suits
from .initial_weights import initialise
from .inputs import check_padding, check_tokens
from .segments import remembers
from .stack_model import StackModel, acts_in_layers, embed_places, make_stack
from .stack_options import StackOptions

NO_TOKEN = -1
"""Id of the class token among the token ids that a memory reads."""


@MODELS.register("sequence_classifier", paper="arXiv:2011.04006")
class SequenceClassifier(StackModel):
    """Sequence classifier: embeddings, class token, positions, pre-norm blocks, a two-layer head on the class token.

    Args:
        vocabulary: number of token ids. classes: number of outputs. max_length: longest sequence, or segment of one.
        width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        head_width: hidden width of the head; None takes `feed_forward`, as in the arena.
        pool: input of the head: the "class_token" before the segment; or the "last" token that is not padding, with a
            `LastTokenHead`, as in ERNIE-Doc (arXiv:2012.15688).
        init: "xavier", see `initialise`, or "lra", see `initialise_as_lra`.
        options: see `StackOptions`, for the stack. By default a memory's cache has max_length + 1 slots. `positions`
            are "sinusoidal", "learned", "rotary", "relative", "alibi" or "none"; None takes the memory's own scheme, or
            else "sinusoidal". The arena's Reformer has `shared_query_key` without `project_output`.

    Raises:
        ValueError: mismatched sizes, unknown names, a sequence longer than `max_length`.
    """

    answers_once = True  # one output per row: no packed documents

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        max_length: int,
        width: int = 512,
        depth: int = 4,
        heads: int = 8,
        feed_forward: int = 1024,
        *,
        memory: MemorySpec = None,
        attention: AttentionSpec = "softmax",
        positions: str | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation: str = "gelu",
        norm_eps: float = 1e-5,
        bias: bool = True,
        shared_query_key: bool = False,
        project_output: bool = True,
        reversible: bool = False,
        short_convolution: int = 1,
        head_width: int | None = None,
        pool: Literal["class_token", "last"] = "class_token",
        init: Literal["xavier", "lra"] = "xavier",
    ) -> None:
        super().__init__()
        stack = StackOptions.among({**locals(), "head_width": None})  # the name of another option here
        if pool == "last" and (init == "lra" or head_width is not None):
            raise ValueError(f"pool='last' has its own head; leave out init={init!r} and head_width={head_width}")
        at_least_one(max_length=max_length)
        at_least_one("; null takes feed_forward", head_width=head_width)
        self.vocabulary, self.max_length, self.pool = vocabulary, max_length, pool
        self.embedding = nn.Embedding(vocabulary, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        sizes: dict[str, Any] = {"width": width, "heads": heads, "length": max_length + 1}
        self.positions = make_positions(stack.positions or "sinusoidal", **sizes)
        self.dropout = nn.Dropout(stack.dropout)
        in_layers = None if stack.positions is None else self.positions
        self.stack = make_stack(stack, positions=in_layers, gives=("token_ids",), length=max_length + 1, sequence=True)
        if stack.positions is None and acts_in_layers(self.stack):
            self.positions = Positions()
        self._carries = remembers(self.stack.init_state(1))
        if pool == "last":
            self.head: nn.Module = LastTokenHead(width, classes)
        else:
            hidden = feed_forward if head_width is None else head_width
            self.head = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        if init == "lra":
            initialise_as_lra(self)
        else:
            initialise(self)
            nn.init.normal_(self.embedding.weight)

    def forward(
        self,
        inputs_BN: Tensor,
        state: StackState | None = None,
        *,
        padding: Tensor | None = None,
        documents: None = None,
    ) -> ModelOutput:
        """Logits (B, classes) of token ids (B, N).

        A row of padding keeps its state, and its logits are undefined.

        Args:
            inputs_BN: token ids.
            state: state after the previous segment of the text; None for the start of a text.
            padding: (B, N) bool, True = padding.
            documents: refused: a row is one text with one output.

        Raises:
            ValueError: documents, mismatched shapes or dtypes, a state of another model, a token outside the vocabulary
                (on the CPU, outside compiled code; otherwise a later device assertion), more than `max_length` tokens;
                or, with learned positions, a longer stream.
        """
        if documents is not None:
            check_suits(self)
        self.check_call(inputs_BN, state, padding=padding)
        if state is None and self._carries:
            state = self.stack.init_state(inputs_BN.shape[0], self.class_token)
        x_BND, options = self.embed(inputs_BN, state, padding)
        out = self.stack(x_BND, state, **options)
        if self.pool == "last":
            return out._replace(outputs=self.head(out.outputs, options["padding_BN"]))
        return out._replace(outputs=self.answer(out.outputs))

    def embed(
        self, inputs_BN: Tensor, state: StackState | None, padding: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Arguments of the stack besides the state: embedded tokens, and options."""
        rows, n = inputs_BN.shape
        x_BND = torch.cat([self.class_token.expand(rows, -1, -1), self.embedding(inputs_BN)], 1)
        if padding is not None:
            padding = torch.cat([padding.all(1, keepdim=True), padding], 1)
        if state is None:
            places_BN1 = torch.arange(n + 1, device=inputs_BN.device)[None, :, None].expand(rows, -1, -1)
        else:
            places_BN1 = self.stack.clock_positions(state, n + 1, padding)
            self._check_learned(places_BN1)
        x_BND = self.dropout(embed_places(x_BND, self.positions, places_BN1))
        ids_BN = F.pad(inputs_BN, (1, 0), value=NO_TOKEN)
        return x_BND, {"positions_BNP": places_BN1, "padding_BN": padding, "inputs": ids_BN}

    def answer(self, h_BND: Tensor, targets: None = None) -> Tensor:
        """Outputs of the model from the stack's result."""
        return self.head(h_BND[:, 0])  # type: ignore[no-any-return]

    def check_call(
        self,
        inputs_BN: Tensor,
        state: StackState | None = None,
        reset: None = None,
        padding: Tensor | None = None,
        targets: None = None,
    ) -> None:
        """Check the arguments of `forward`, and refuse targets of tokens (ValueError)."""
        check_tokens("inputs", inputs_BN, self.vocabulary, self.max_length)
        self.check_state(state, inputs_BN.shape[0])
        if padding is not None:
            check_padding(padding, inputs_BN)
        if targets is not None:
            raise ValueError("SequenceClassifier gives logits of classes, not losses of tokens; leave targets out")

    def _check_learned(self, places_BN1: Tensor) -> None:
        if isinstance(self.positions, LearnedPositions):
            insist(
                places_BN1.max() < self.positions.length,
                f"a stream longer than the {self.positions.length} vectors of positions='learned' (each segment has a "
                "class token); take positions='sinusoidal', or a larger max_length",
            )


class LastTokenHead(nn.Module):
    """Logits of the last token that is not padding: linear map, tanh, linear map (BERT's pooler).

    Args:
        width: D. classes: number of outputs.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool = nn.Linear(width, width)
        self.classify = nn.Linear(width, classes)

    def forward(self, x_BND: Tensor, padding_BN: Tensor | None = None) -> Tensor:
        """Logits (B, classes) from the outputs of a stack; padding is True."""
        if padding_BN is None:
            last_BD = x_BND[:, -1]
        else:
            place_BN = torch.arange(x_BND.shape[1], device=x_BND.device).masked_fill(padding_BN, -1)
            last_BD = x_BND[torch.arange(x_BND.shape[0], device=x_BND.device), place_BN.amax(1).clamp(min=0)]
        return self.classify(self.pool(last_BD).tanh())  # type: ignore[no-any-return]


def initialise_as_lra(model: SequenceClassifier) -> None:
    """Initial weights of the Long Range Arena; the class token is zero, and memories keep their own.

    Xavier-uniform projections of attention (queries, keys and values separately) and feed-forward maps, whose biases
    are N(0, 1e-6); embeddings N(0, 1); a head of truncated normal weights of variance 1 / inputs, biases zero.
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
    assert isinstance(model.head, nn.Sequential)
    for linear in (model.head[0], model.head[2]):
        assert isinstance(linear, nn.Linear)
        # A normal distribution truncated at two deviations has 0.8796 of its deviation.
        std = math.sqrt(1 / linear.in_features) / 0.87962566103423978
        nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(linear.bias)
    nn.init.normal_(model.embedding.weight)
