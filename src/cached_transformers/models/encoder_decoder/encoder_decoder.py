"""Encoder-decoder with a memory in the encoder.

Paper: "Attention is all you need" (arXiv:1706.03762), pre-norm by default; with a memory, the translation model of
"Cached Transformers" (arXiv:2312.12742, table 4). The options cover BART (arXiv:1910.13461), T5 (arXiv:1910.10683),
Switch Transformers (arXiv:2101.03961) and Marian. Original implementations: facebookresearch/fairseq
(`transformer_iwslt_de_en`, with the default sizes), huggingface/transformers.

Legend: B rows, N source tokens, T target tokens, D model width, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.attentions import AttentionSpec
from cached_transformers.checks import at_least_one, shares
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.layers.switch import ExpertsSpec
from cached_transformers.layers.token_loss import IGNORED, token_losses
from cached_transformers.memories import MemorySpec
from cached_transformers.positions import BucketedPositions, Positions, make_positions
from cached_transformers.registry import MODELS, unknown_name

from ..documents import refuse_documents
from ..inputs import check_padding, check_targets, check_tokens, shape_of
from ..segments import remembers
from ..stack_model import StackModel, acts_in_layers, embed_places, make_stack
from ..stack_options import StackOptions
from .initial_weights import initialise_weights
from .text_decoder import DecoderCache, Encoded, make_decoder

CACHE_LENGTH = 64
"""Default slots of a layer memory in the encoder: the paper's T_m for translation."""


@MODELS.register("encoder_decoder", paper="arXiv:1706.03762")
class EncoderDecoder(StackModel):
    """Encoder-decoder for translation and denoising; the encoder carries the memory.

    Args:
        vocabulary: number of source tokens, and of target tokens without `target_vocabulary`.
        max_length: longest source, and longest target, in tokens.
        target_vocabulary: V; None for one shared vocabulary.
        width: D. depth: layers of the encoder. heads: per layer. feed_forward: hidden width.
        decoder_depth: layers of the decoder; `depth` when None.
        embedding_norm: add a norm after the embedding of each stack (BART).
        head_width: of attention, D / heads when None; other widths need a model without memory (T5's d_kv).
        shared_embeddings: "all" (source, target and output share one table), "decoder" (target and output) or "none";
            None: "all" with one vocabulary, else "decoder".
        scale_embedding: multiply embeddings by sqrt(D).
        output_bias: add a bias to the logits. output_scale: factor before the output projection (T5: 1 / sqrt(D)).
        buckets, reach: number of buckets of "bucketed" positions, and the distance where the last one begins.
        output_dropout: after both stacks (T5).
        init: "fairseq" (Xavier maps, embeddings N(0, 1 / D)), "t5", or a number, the deviation of normal weights
            (BART: 0.02); see `initialise_weights`.
        options: see `StackOptions`, for both stacks. Memory and attention are in the encoder: a layer memory has 64
            slots by default, and a memory with a state (grc_stream, rmt, ...) reads the sentences of a document one
            after the other, with `state` between them. `bias` is for projections and feed-forward. Experts have no
            capacity limit in evaluation by default, so a translation does not depend on other rows. `positions` are
            "sinusoidal", "learned", "bucketed" (T5's bias) or "none" in both stacks, or "rotary", "alibi" or "relative"
            in the encoder with "sinusoidal" in the decoder. None takes the memory's own scheme in the encoder and
            "sinusoidal" in the decoder, or else "sinusoidal" in both.

    Raises:
        ValueError: mismatched sizes, unknown names, or pairs of memory and attention that exclude each other.
    """

    def __init__(
        self,
        vocabulary: int,
        max_length: int = 512,
        target_vocabulary: int | None = None,
        width: int = 512,
        depth: int = 6,
        heads: int = 4,
        feed_forward: int = 1024,
        *,
        memory: MemorySpec = None,
        attention: AttentionSpec = "softmax",
        positions: str | None = None,
        norm: str = "pre",
        norm_kind: str = "layer",
        norm_eps: float = 1e-5,
        final_norm: bool | None = None,
        bias: bool = True,
        attention_scale: float | None = None,
        attention_dropout: float = 0.0,
        experts: ExpertsSpec = None,
        activation: str = "relu",
        dropout: float = 0.3,
        activation_dropout: float | None = 0.0,
        decoder_depth: int | None = None,
        embedding_norm: bool = False,
        head_width: int | None = None,
        shared_embeddings: str | None = None,
        scale_embedding: bool = True,
        output_bias: bool = False,
        output_scale: float = 1.0,
        buckets: int = 32,
        reach: int = 128,
        output_dropout: float = 0.0,
        init: str | float = "fairseq",
    ) -> None:
        super().__init__()
        stack = StackOptions.among(locals())
        stack = replace(stack, feed_forward_bias=stack.bias)
        at_least_one(target_vocabulary=target_vocabulary, max_length=max_length, decoder_depth=decoder_depth)
        shares(output_dropout=output_dropout)
        shared = _sharing(shared_embeddings, vocabulary, target_vocabulary)
        self.vocabulary, self.max_length = vocabulary, max_length
        self.target_vocabulary = vocabulary if target_vocabulary is None else target_vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.target_embedding = nn.Embedding(self.target_vocabulary, width)
        self.embedding_scale = width**0.5 if scale_embedding else 1.0
        self.output_scale = output_scale
        self.positions, in_layers, of_decoder = _schemes(stack, max_length, buckets, reach)
        self.embedding_norm = stack.make_norm() if embedding_norm else nn.Identity()
        self.dropout, self.output_dropout = nn.Dropout(stack.dropout), nn.Dropout(output_dropout)
        self.stack = make_stack(
            stack,
            positions=in_layers,
            memory_length=CACHE_LENGTH,
            gives=("token_ids", "pieces"),
            length=max_length,
            sequence=True,
        )
        if stack.positions is None and acts_in_layers(self.stack):
            self.positions = Positions()
        of_target = stack if decoder_depth is None else replace(stack, depth=decoder_depth)
        self.decoder = make_decoder(of_target, embedding_norm=embedding_norm, positions=of_decoder)
        self.head = nn.Linear(width, self.target_vocabulary, bias=output_bias)
        initialise_weights(self, [self.embedding.weight, self.target_embedding.weight, self.head.weight], init)
        if shared == "all":
            self.target_embedding.weight = self.embedding.weight
        if shared != "none":
            self.head.weight = self.target_embedding.weight
        self._experts = stack.experts is not None
        self._carries = remembers(self.stack.init_state(1))

    def set_activation_checkpointing(self, enabled: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        super().set_activation_checkpointing(enabled)
        self.decoder.activation_checkpointing = enabled

    def forward(
        self,
        inputs_BN: Tensor,
        decoder_inputs_BT: Tensor,
        padding: Tensor | None = None,
        state: StackState | None = None,
        targets: Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        documents: None = None,
    ) -> ModelOutput:
        """Logits (B, T, V) of the token after each of `decoder_inputs_BT`.

        Args:
            inputs_BN: source tokens. decoder_inputs_BT: target tokens, beginning with the start token.
            padding: (B, N) bool, True = padding of the source. The target is padded on the right and needs no mask.
            state: state after the previous source; None for the start.
            targets: (B, T) next target tokens; the outputs are then their losses (B, T) in nats, in float32 or wider, 0
                where the target is -100.
            label_smoothing: share of the target's weight that is spread over all V tokens, as in
                `torch.nn.functional.cross_entropy`; only with `targets`.
            documents: refused: a row is one source and its target.

        Raises:
            ValueError: documents, mismatched shapes, a state of another model, or a token outside the vocabulary (on
                the CPU, outside compiled code; otherwise a later device assertion).
        """
        refuse_documents(documents, "EncoderDecoder reads one source and one target per row")
        self._check_target(inputs_BN, decoder_inputs_BT, targets, label_smoothing)
        encoded = self.encode(inputs_BN, padding, state)
        padding_BT = None
        if self._experts and targets is not None:  # padding must not fill the capacity of experts
            padding_BT = (targets != IGNORED).flip(1).cumsum(1).flip(1) == 0
        h_BTD, losses = self.decoder(self._embed_target(decoder_inputs_BT), encoded, padding_BT)
        auxiliary_loss = torch.stack([encoded.auxiliary_loss, *losses]).sum() if losses else encoded.auxiliary_loss
        if targets is None:
            return ModelOutput(self._logits(h_BTD), encoded.state, auxiliary_loss)
        h_KD = self._scaled(self.output_dropout(h_BTD)).flatten(0, 1)
        loss_K = token_losses(h_KD, self.head, targets.flatten(), label_smoothing, IGNORED)
        return ModelOutput(loss_K.view_as(targets), encoded.state, auxiliary_loss)

    def encode(self, inputs_BN: Tensor, padding: Tensor | None = None, state: StackState | None = None) -> Encoded:
        """Encode the sources; arguments as in `forward`."""
        check_tokens("inputs", inputs_BN, self.vocabulary, self.max_length)
        if padding is not None:
            check_padding(padding, inputs_BN)
        self.check_state(state, len(inputs_BN))
        rows, n = inputs_BN.shape
        x_BND = self.embedding(inputs_BN)
        if self.embedding_scale != 1:
            x_BND = x_BND * self.embedding_scale
        place_BN1 = torch.arange(n, device=inputs_BN.device)[None, :, None].expand(rows, -1, -1)
        # Embedded positions count tokens without padding; layers use only distances.
        counted = None if padding is None else ((~padding).cumsum(1) - 1).clamp(min=0)[..., None]
        x_BND = embed_places(x_BND, self.positions, place_BN1[:1] if counted is None else counted)
        x_BND = self.dropout(self.embedding_norm(x_BND))
        # Embedded positions restart with each sentence; a memory of earlier sentences needs continued ones.
        positions_BN1 = None if self._carries else place_BN1
        out = self.stack(x_BND, state, positions_BNP=positions_BN1, padding_BN=padding, inputs=inputs_BN)
        return Encoded(self.output_dropout(out.outputs), padding, out.state, out.auxiliary_loss)

    def decode(self, decoder_inputs_BT: Tensor, encoded: Encoded, *, last_only: bool = False) -> Tensor:
        """Logits (B, T, V) of the token after each of `decoder_inputs_BT`; (B, 1, V) with `last_only`."""
        h_BTD, _ = self.decoder(self._embed_target(decoder_inputs_BT), encoded)
        return self._logits(h_BTD[:, -1:] if last_only else h_BTD)

    def begin(self, encoded: Encoded) -> DecoderCache:
        """Cache for decoding token by token with `step`."""
        return self.decoder.begin(encoded)

    def step(self, tokens_BK: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (B, K, V) after the next token of each of K continuations of each sentence."""
        return self._logits(self.decoder.step(self._embed_target(tokens_BK), cache))

    def _embed_target(self, tokens_BT: Tensor) -> Tensor:
        x_BTD: Tensor = self.target_embedding(tokens_BT)
        return x_BTD if self.embedding_scale == 1 else x_BTD * self.embedding_scale

    def _scaled(self, h_BTD: Tensor) -> Tensor:
        return h_BTD if self.output_scale == 1 else h_BTD * self.output_scale

    def _logits(self, h_BTD: Tensor) -> Tensor:
        return self.head(self._scaled(self.output_dropout(h_BTD)))  # type: ignore[no-any-return]

    def _check_target(
        self, inputs_BN: Tensor, decoder_inputs_BT: Tensor, targets: Tensor | None, label_smoothing: float
    ) -> None:
        what = "a token id of decoder_inputs"
        check_tokens("decoder_inputs", decoder_inputs_BT, self.target_vocabulary, self.max_length, what)
        shape, rows = shape_of("inputs", inputs_BN), len(decoder_inputs_BT)
        if shape[:1] != (rows,):
            raise ValueError(f"{(*shape, 0)[0]} rows of inputs, but {rows} of decoder_inputs")
        if not 0 <= label_smoothing < 1 or (label_smoothing and targets is None):
            raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 1), and needs targets")
        if targets is not None:
            check_targets(targets, decoder_inputs_BT, self.target_vocabulary, "decoder_inputs")


def _schemes(
    stack: StackOptions, length: int, buckets: int, reach: int
) -> tuple[Positions, Positions | str | None, Positions]:
    """Positions: embedded by the encoder, of the encoder's layers (None: the memory's own), of the decoder."""
    name, heads = stack.positions, stack.heads
    if name == "bucketed":
        one, other = (BucketedPositions(heads, buckets=buckets, reach=reach, causal=causal) for causal in (False, True))
        return Positions(), one, other
    sizes: dict[str, Any] = {"width": stack.width, "heads": heads, "length": length}
    if name is None or name in ("sinusoidal", "learned", "none"):
        embedded, of_decoder = (make_positions(name or "sinusoidal", **sizes) for _ in range(2))
        return embedded, "none" if name else None, of_decoder
    if name not in ("rotary", "alibi", "relative"):
        known = ["sinusoidal", "learned", "bucketed", "none", "rotary", "alibi", "relative"]
        raise ValueError(unknown_name("positions", name, known))
    return Positions(), name, make_positions("sinusoidal", **sizes)


def _sharing(shared: str | None, vocabulary: int, target_vocabulary: int | None) -> str:
    one = target_vocabulary is None or target_vocabulary == vocabulary
    if shared is None:
        return "all" if target_vocabulary is None else "decoder"
    if shared not in ("all", "decoder", "none"):
        raise ValueError(unknown_name("shared_embeddings", shared, ["all", "decoder", "none"]))
    if shared == "all" and not one:
        raise ValueError(
            f"shared_embeddings='all' needs one vocabulary, not {vocabulary} and {target_vocabulary}; take 'decoder'"
        )
    return shared
