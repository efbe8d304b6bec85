"""Causal language model that carries a memory from segment to segment.

Legend: B rows, N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions import AttentionSpec
from cached_transformers.checks import shares
from cached_transformers.interfaces.incremental import asks
from cached_transformers.layers.block import Block
from cached_transformers.layers.incremental_decoding import StackDecoder, is_watched, passed_by, why_in_one_piece
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.layers.switch import ExpertsSpec
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.memories import MemorySpec
from cached_transformers.positions import make_positions, share_biases
from cached_transformers.registry import MODELS

from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from .documents import check_suits, read_documents
from .generation import Generation, generate
from .initial_weights import initialise
from .inputs import check_padding, check_places, check_targets, check_tokens
from .segments import begun
from .stack_model import StackModel, embed_places, make_stack
from .stack_options import StackOptions


@MODELS.register("language_model")
class LanguageModel(StackModel):
    """Decoder-only language model over segments of a stream.

    Args:
        vocabulary: V. width: D. depth: layers. heads: per layer. feed_forward: hidden width.
        options: see `StackOptions`, for the stack. The attention must have a causal form. `positions` are "rotary",
            "relative", "alibi", "sinusoidal" or "none"; None takes the memory's own scheme, or else "rotary".
        scale_embedding: multiply embeddings by sqrt(D) (arXiv:1706.03762, section 3.4).
        tied: share the embedding's weights with the output projection.
        cutoffs: token ids at which a rarer cluster begins, for an adaptive embedding and softmax
            (`models/adaptive.py`), which returns log-probabilities; [] for a single cluster, None for a plain
            embedding and a linear output without bias.
        embedding_width: of the first cluster, D when None; a value makes the model adaptive. div_value: ratio of the
            widths of consecutive clusters.
        tied_projections: share the projections of embedding and softmax, for all clusters or for each.
        shared_biases: one pair of biases u, v for the relative positions of all layers.
        initial_std: deviation of normal initial weights, 0.02 in Transformer-XL; None for Xavier weights.
        projection_std: the same for the projections of an adaptive embedding; only with `initial_std`.
        output_dropout: before the output projection.

    Raises:
        ValueError: mismatched sizes, unknown names, or a memory that is not causal.
    """

    scores_last = True  # `forward` takes `last_only`

    def __init__(
        self,
        vocabulary: int,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        feed_forward: int = 1024,
        *,
        memory: MemorySpec = None,
        attention: AttentionSpec = "softmax",
        positions: str | None = None,
        norm: str = "pre",
        activation: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        reversible: bool = False,
        short_convolution: int = 1,
        experts: ExpertsSpec = None,
        kv_heads: int | None = None,
        scale_embedding: bool = False,
        tied: bool = True,
        cutoffs: list[int] | None = None,
        embedding_width: int | None = None,
        div_value: int = 1,
        tied_projections: bool | list[bool] = True,
        shared_biases: bool = False,
        initial_std: float | None = None,
        projection_std: float = 0.01,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        stack = StackOptions.among(locals())
        shares(output_dropout=output_dropout)
        self.vocabulary = vocabulary
        adaptive = cutoffs is not None or embedding_width is not None
        if not adaptive and (div_value != 1 or tied_projections is not True):
            raise ValueError(
                f"div_value={div_value} and tied_projections={tied_projections} need cutoffs or embedding_width"
            )
        sizes: dict[str, Any] = {"embedding_width": embedding_width, "div_value": div_value}
        self.embedding: nn.Embedding | AdaptiveEmbedding = (
            AdaptiveEmbedding(vocabulary, width, cutoffs or (), **sizes)
            if adaptive
            else nn.Embedding(vocabulary, width)
        )
        self.embedding_scale = width**0.5 if scale_embedding else 1.0
        embedded = stack.positions == "sinusoidal"
        self.positions = make_positions("sinusoidal" if embedded else "none", width=width, heads=heads)
        self.dropout, self.output_dropout = nn.Dropout(stack.dropout), nn.Dropout(output_dropout)
        in_layers = "none" if embedded else stack.positions
        self.stack = make_stack(
            stack, positions=in_layers, fallback="rotary", causal=True, gives=("token_ids", "pieces"), sequence=True
        )
        if shared_biases:
            share_biases(block.attention.positions for block in self.stack.blocks if isinstance(block, Block))
        self.head: nn.Linear | AdaptiveSoftmax = (
            AdaptiveSoftmax(self.embedding, tied=tied, tied_projections=tied_projections)
            if isinstance(self.embedding, AdaptiveEmbedding)
            else nn.Linear(width, vocabulary, bias=False)
        )
        initialise(self, initial_std, projection_std)
        if tied and isinstance(self.embedding, nn.Embedding):
            self.head.weight = self.embedding.weight

    @property
    def scores_targets(self) -> bool:
        """Return whether `token_losses` should pass `targets` instead of computing losses from all logits."""
        return isinstance(self.head, AdaptiveSoftmax)

    def forward(
        self,
        inputs_BN: Tensor,
        state: StackState | None = None,
        reset: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        targets: Tensor | None = None,
        last_only: bool = False,
        places: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> ModelOutput:
        """Logits (B, N, V) of the next token at each position; log-probabilities for an adaptive model.

        Args:
            inputs_BN: token ids.
            state: state after the last segment; None for the start of a stream.
            reset: (B,) bool, rows that begin a new document.
            padding: (B, N) bool, True = padding.
            targets: (B, N) next tokens; the outputs are then their losses (B, N) in nats, in float32 or wider, 0 where
                the target is -100.
            last_only: outputs of the last position only, (B, 1, V).
            places: (B, N, 2) numbers of each token's sentence and paragraph in the stream, for `segatron`, instead of
                its own count; -1 continues the token before.
            documents: (B, N) ids of documents packed into a row, negative at padding, unique within this call. The
                first document continues the row's state, unless it is reset; each further one is read as in a row of
                its own (`models/documents.py`). CPU ids avoid a wait for the device.

        Raises:
            ValueError: mismatched shapes, a state of another model, a token outside the vocabulary (on the CPU, outside
                compiled code; otherwise a later device assertion); documents in a compiled call, a document that begins
                twice, or documents with a memory shared by all rows in training.
        """
        self.check_call(inputs_BN, state, reset, padding, targets)
        state = begun(self, state, reset, inputs_BN.shape[0])
        if documents is not None:
            check_suits(self)
            given = (inputs_BN, targets, places)
            out = read_documents(self._read, documents, padding, given, state, self.init_state)
            return out._replace(outputs=out.outputs[:, -1:]) if last_only else out
        return self._read(inputs_BN, targets, places, state, padding, last_only)

    def _read(
        self,
        inputs_BN: Tensor,
        targets: Tensor | None,
        places: Tensor | None,
        state: StackState,
        padding: Tensor | None,
        last_only: bool = False,
    ) -> ModelOutput:
        """`forward` after its checks and resets."""
        x_BND, options = self.embed(inputs_BN, state, padding)
        if places is not None:
            self._check_places(places, inputs_BN)
            clock_BN1 = self.stack.clock_positions(state, inputs_BN.shape[1], padding)
            options["positions_BNP"] = torch.cat([clock_BN1, places], -1)
        out = self.stack(x_BND, state, **options)
        return out._replace(outputs=self.answer(out.outputs[:, -1:] if last_only else out.outputs, targets))

    def embed(
        self, inputs_BN: Tensor, state: StackState, padding: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Arguments of the stack besides the state: embedded tokens, and options."""
        x_BND = self._embed(inputs_BN, self.stack.clock_positions(state, inputs_BN.shape[1], padding))
        return x_BND, {"padding_BN": padding, "inputs": inputs_BN}

    def answer(self, h_BND: Tensor, targets: Tensor | None = None) -> Tensor:
        """Outputs of the model from the stack's result."""
        h_BND = self.output_dropout(h_BND)
        return self.head(h_BND) if targets is None else self._losses(h_BND, targets)  # type: ignore[no-any-return]

    def _embed(self, inputs_BN: Tensor, places_BN1: Tensor) -> Tensor:
        x_BND = self.embedding(inputs_BN)
        if self.embedding_scale != 1:
            x_BND = x_BND * self.embedding_scale
        embedded: Tensor = self.dropout(embed_places(x_BND, self.positions, places_BN1))
        return embedded

    def ask_prompt(self, inputs_BN: Tensor, state: StackState) -> StackState:
        """Return the state with the choice of a prompt's last segment; see `interfaces.incremental`."""
        if not asks(self.stack.model_memory):
            return state
        check_tokens("inputs", inputs_BN, self.vocabulary)
        x_BND, options = self.embed(inputs_BN, state)
        return self.stack.ask(x_BND, state, **options)

    def why_in_one_piece(self) -> str | None:
        """Say why `begin` and `step` cannot decode token by token; None if they can."""
        return passed_by(self) if is_watched(self) else why_in_one_piece(self.stack)

    def begin(self, state: StackState, continuations: int = 1, *, steps: int = 32) -> StackDecoder:
        """Begin a segment for `step`; the state is not changed.

        Args:
            state: before the segment. continuations: K; each K neighbouring rows continue one text. steps: tokens to
                reserve room for.
        """
        return StackDecoder(self.stack, state, continuations, steps)

    def step(self, inputs_BN: Tensor, opened: StackDecoder, places: Tensor | None = None) -> Tensor:
        """Logits (B, V) after the next tokens of a partial segment: any number at first, then one at a time.

        For evaluation mode. Equals `forward`, at the cost of the new tokens.
        """
        if opened.read == 0:
            check_tokens("inputs", inputs_BN, self.vocabulary)
        if places is not None:
            self._check_places(places, inputs_BN)
        h_BND = opened(self._embed(inputs_BN, opened.positions(inputs_BN.shape[1])), inputs_BN, places)
        return self.answer(h_BND[:, -1])

    def _losses(self, h_BND: Tensor, targets_BN: Tensor) -> Tensor:
        if isinstance(self.head, AdaptiveSoftmax):
            return self.head.losses(h_BND, targets_BN, IGNORED)
        logits_BNV = self.head(h_BND)
        wide = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
        losses = F.cross_entropy(wide.flatten(0, 1), targets_BN.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view_as(targets_BN)

    def check_call(
        self,
        inputs_BN: Tensor,
        state: StackState | None = None,
        reset: Tensor | None = None,
        padding: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> None:
        """Check the arguments of `forward` (ValueError)."""
        check_tokens("inputs", inputs_BN, self.vocabulary)
        if padding is not None:
            check_padding(padding, inputs_BN)
        if targets is not None:
            check_targets(targets, inputs_BN, self.vocabulary)
        rows = inputs_BN.shape[:1]
        if reset is not None and (reset.shape != rows or reset.dtype != torch.bool):
            raise ValueError(
                f"reset of shape {tuple(reset.shape)} and dtype {reset.dtype} must be bool, one per row ({rows[0]})"
            )
        self.check_state(state, rows[0])

    def _check_places(self, places: Tensor, inputs_BN: Tensor) -> None:
        check_places(places, inputs_BN)
        if not getattr(self.stack.model_memory, "takes_places", False):
            raise ValueError("places need a memory that takes them (segatron); leave them out")

    def generate(self, prompt_BN: Tensor, state: StackState | None = None, **options: Any) -> Generation:
        """Continue a text; see `models.generation.generate`."""
        return generate(self, prompt_BN, state, **options)
