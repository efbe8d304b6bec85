"""Classifier of token sequences: the encoder of Long Range Arena (arXiv:2011.04006), pre-norm, with a class token.

Original implementation: google-research/long-range-arena, lra_benchmarks/models. The defaults keep its structure with
what is usual in PyTorch; exactly the arena's model is

    init="lra", bias=False, activation="gelu_tanh", norm_eps=1e-6, dropout=0.1, attention_dropout=0.1

Legend: B rows, N tokens (class token first), D model width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one, insist
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.positions import LearnedPositions, Positions, make_positions
from cached_transformers.registry import MODELS, unknown_name

from .documents import check_suits
from .initial_weights import initialise
from .inputs import check_padding, check_tokens
from .stack_model import StackModel, acts_in_layers, carries, embed_places, make_stack
from .stack_options import StackKeywords, StackOptions, takes_stack_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

NO_TOKEN = -1
"""Where the class token stands among the token ids that a memory is shown: the id of no token."""


@MODELS.register("sequence_classifier", paper="arXiv:2011.04006")
class SequenceClassifier(StackModel):
    """Sequence classifier: embeddings, class token, positions, pre-norm blocks, a two-layer head on the class token.

    Args:
        vocabulary: number of token ids. classes: number of outputs. max_length: longest sequence, or segment of one.
        width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        head_width: hidden width of the head; None takes `feed_forward`, as the arena does.
        pool: what the head reads: the "class_token" in front of the segment; or the "last" token that is no padding,
            by a `LastTokenHead`, as ERNIE-Doc (arXiv:2012.15688) does.
        init: "xavier", see `initialise`, or "lra", see `initialise_as_lra`.
        options: of the stack, as the signature names them; see `StackOptions`. By default a memory's cache has
            max_length + 1 slots. `positions` are "sinusoidal", "learned", "rotary", "relative", "alibi" or "none"; None
            takes the memory's own scheme, or else "sinusoidal". The arena's Reformer has `shared_query_key` without
            `project_output`.

    Raises:
        ValueError: sizes that do not fit, unknown names, a sequence longer than `max_length`.
    """

    answers_once = True
    """A row has one answer, so that documents cannot stand behind each other in it."""

    @takes_stack_options(
        *("memory", "attention", "positions", "dropout", "attention_dropout", "activation", "norm_eps", "bias"),
        *("shared_query_key", "project_output", "reversible", "short_convolution"),
    )
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
        head_width: int | None = None,
        pool: Literal["class_token", "last"] = "class_token",
        init: Literal["xavier", "lra"] = "xavier",
        **options: Unpack[StackKeywords],
    ) -> None:
        super().__init__()
        stack = StackOptions(width, depth, heads, feed_forward, **options)
        if init not in ("xavier", "lra"):
            raise ValueError(unknown_name("init", init, ["xavier", "lra"]))
        if pool not in ("class_token", "last"):
            raise ValueError(unknown_name("pool", pool, ["class_token", "last"]))
        if pool == "last" and (init == "lra" or head_width is not None):
            raise ValueError(
                f"pool='last' has a head of ERNIE-Doc, without init={init!r} and head_width={head_width}; "
                "take pool='class_token', or leave these out"
            )
        at_least_one(vocabulary=vocabulary, classes=classes, max_length=max_length)
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
        self._carries = carries(self.stack)
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

        A row that is padding and nothing else leaves its state as it was, and its logits mean nothing.

        Args:
            inputs_BN: token ids.
            state: state after the segment before, of the same text; None for the start of a text.
            padding: (B, N) bool, True = padding.
            documents: refused: a row is one text, with one answer.

        Raises:
            ValueError: documents, shapes or dtypes that do not fit, a state of another model, a token that the
                vocabulary has not (on the CPU, outside compiled code; an assertion of the device later elsewhere), more
                than `max_length` tokens; or, with learned positions, a stream that is longer.
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
        """What the stack is called with, beside the state before the segment: embedded tokens, and options."""
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
        """What `forward` gives for the stack's result."""
        return self.head(h_BND[:, 0])  # type: ignore[no-any-return]

    def check_call(
        self,
        inputs_BN: Tensor,
        state: StackState | None = None,
        reset: None = None,
        padding: Tensor | None = None,
        targets: None = None,
    ) -> None:
        """Refuse (ValueError) what `forward` refuses, and targets, of which a class has none."""
        check_tokens("a sequence", inputs_BN, self.vocabulary, self.max_length)
        self.check_state(state, inputs_BN.shape[0])
        if padding is not None:
            check_padding(padding, inputs_BN)
        if targets is not None:
            raise ValueError("SequenceClassifier gives logits of classes, not losses of tokens; leave targets out")

    def _check_learned(self, places_BN1: Tensor) -> None:
        if isinstance(self.positions, LearnedPositions):
            insist(
                places_BN1.max() < self.positions.length,
                f"a stream longer than the {self.positions.length} places that positions='learned' has vectors for "
                "(each segment has a class token); take positions='sinusoidal', or a larger max_length",
            )


class LastTokenHead(nn.Module):
    """Logits of the last token that is no padding: a linear map, tanh, and another one (BERT's pooler).

    Args:
        width: D. classes: number of outputs.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool = nn.Linear(width, width)
        self.classify = nn.Linear(width, classes)

    def forward(self, x_BND: Tensor, padding_BN: Tensor | None = None) -> Tensor:
        """(B, classes) from the outputs of a stack, whose padding is marked with True."""
        if padding_BN is None:
            last_BD = x_BND[:, -1]
        else:
            place_BN = torch.arange(x_BND.shape[1], device=x_BND.device).masked_fill(padding_BN, -1)
            last_BD = x_BND[torch.arange(x_BND.shape[0], device=x_BND.device), place_BN.amax(1).clamp(min=0)]
        return self.classify(self.pool(last_BD).tanh())  # type: ignore[no-any-return]


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
    assert isinstance(model.head, nn.Sequential)
    for linear in (model.head[0], model.head[2]):
        assert isinstance(linear, nn.Linear)
        # A normal distribution cut off at two standard deviations has 0.8796 of its own.
        std = math.sqrt(1 / linear.in_features) / 0.87962566103423978
        nn.init.trunc_normal_(linear.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(linear.bias)
    nn.init.normal_(model.embedding.weight)
