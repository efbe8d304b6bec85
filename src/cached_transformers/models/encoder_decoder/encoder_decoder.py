"""Sequence to sequence: an encoder with a memory and a decoder that attends what it made of the source.

Paper: "Attention is all you need" (arXiv:1706.03762), with the norms before the sublayers unless told otherwise; with a
memory in the encoder the translation model of "Cached Transformers" (arXiv:2312.12742, table 4). The options cover BART
(arXiv:1910.13461), T5 (arXiv:1910.10683), Switch Transformers (arXiv:2101.03961) and Marian. Original implementations:
facebookresearch/fairseq (`transformer_iwslt_de_en`, whose sizes are the defaults), huggingface/transformers.

Legend: B rows, N source tokens, T target tokens, D model width, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one, shares
from cached_transformers.layers.stack import ModelOutput, StackState
from cached_transformers.layers.token_loss import IGNORED, token_losses
from cached_transformers.positions import BucketedPositions, Positions, make_positions
from cached_transformers.registry import MODELS, unknown_name

from ..documents import refuse_documents
from ..inputs import check_padding, check_targets, check_tokens
from ..stack_model import StackModel, acts_in_layers, carries, embed_places, make_stack
from ..stack_options import StackKeywords, StackOptions, takes_stack_options
from .initial_weights import initialise_weights
from .text_decoder import DecoderCache, Encoded, make_decoder

if TYPE_CHECKING:
    from typing_extensions import Unpack

CACHE_LENGTH = 64
"""Slots of a memory in the encoder's layers where its options say nothing: the paper's T_m for translation."""


@MODELS.register("encoder_decoder", paper="arXiv:1706.03762")
class EncoderDecoder(StackModel):
    """Encoder-decoder for translation and denoising; the encoder carries the memory.

    Args:
        vocabulary: source tokens, and target tokens unless `target_vocabulary` says otherwise.
        max_length: longest source, and longest target, in tokens.
        target_vocabulary: V; None for one vocabulary of both.
        width: D. depth: layers of the encoder. heads: per layer. feed_forward: hidden width.
        decoder_depth: layers of the decoder, as many as of the encoder when None.
        embedding_norm: whether a norm stands behind the embedding of each stack (BART).
        head_width: of attention, D / heads when None; others go without a memory (T5's d_kv).
        shared_embeddings: "all" (source, target and output share one table), "decoder" (target and output) or "none";
            None: "all" with one vocabulary, else "decoder".
        scale_embedding: whether embeddings are multiplied by sqrt(D).
        output_bias: whether the logits have a bias. output_scale: factor before the output projection (T5's 1 /
            sqrt(D)).
        buckets, reach: number of buckets of "bucketed" positions, and the distance from which on all are alike.
        output_dropout: behind both stacks (T5).
        init: "fairseq" (Xavier maps, embeddings N(0, 1 / D)), "t5", or a number, the deviation of normal weights
            (BART: 0.02); see `initialise_weights`.
        options: of both stacks, as the signature names them; see `StackOptions`. Memory and attention are the
            encoder's: the cache of a layer memory has 64 slots by default, and a memory that carries a state
            (grc_stream, rmt, ...) reads one sentence of a document after the other, `state` between them. `bias` is
            that of projections and feed-forward. Experts have no limit of capacity in evaluation unless told
            otherwise: with one, a translation would depend on its neighbours. `positions` are "sinusoidal",
            "learned", "bucketed" (T5's bias) or "none" in both stacks; the encoder also takes "rotary", "alibi" and
            "relative", beside which the decoder is "sinusoidal". None takes the memory's own scheme in the encoder,
            beside which the decoder is "sinusoidal", or else "sinusoidal" in both.

    Raises:
        ValueError: sizes that do not fit, unknown names, or pairs of memory and attention that exclude each other.
    """

    @takes_stack_options(
        *("memory", "attention", "positions", "norm", "norm_kind", "norm_eps", "final_norm", "bias"),
        *("attention_scale", "attention_dropout", "experts"),
        **{"activation": "relu", "dropout": 0.3, "activation_dropout": 0.0},
    )
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
        **options: Unpack[StackKeywords],
    ) -> None:
        super().__init__()
        stack = StackOptions(width, depth, heads, feed_forward, head_width=head_width, **options)
        stack = replace(stack, feed_forward_bias=stack.bias)
        at_least_one(vocabulary=vocabulary, target_vocabulary=target_vocabulary)
        at_least_one(max_length=max_length, decoder_depth=decoder_depth)
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
        self._carries = carries(self.stack)

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
        """Logits (B, T, V) for the token behind each of `decoder_inputs_BT`.

        Args:
            inputs_BN: source tokens. decoder_inputs_BT: target tokens, of which the first is the one that begins.
            padding: (B, N) bool, True = padding of the source. The target needs none: it is padded behind its end.
            state: state after the source before; None for rows that have read nothing.
            targets: (B, T) tokens to be said; then the outputs are their losses (B, T) in nats, in float32 or wider, 0
                where the target is -100.
            label_smoothing: share of the target's weight that is spread over all V tokens, as in
                `torch.nn.functional.cross_entropy`; only with `targets`.
            documents: refused: a row is one source and its target.

        Raises:
            ValueError: documents, shapes that do not fit, a state of another model, or (on the CPU, outside compiled
                code; an assertion of the device later elsewhere) a token that the vocabulary has not.
        """
        refuse_documents(documents, "EncoderDecoder reads one source a row, for one target")
        self._check_target(inputs_BN, decoder_inputs_BT, targets, label_smoothing)
        encoded = self.encode(inputs_BN, padding, state)
        behind_BT = None
        if self._experts and targets is not None:  # what stands behind an end must not take an expert's place
            behind_BT = (targets != IGNORED).flip(1).cumsum(1).flip(1) == 0
        h_BTD, losses = self.decoder(self._embed_target(decoder_inputs_BT), encoded, behind_BT)
        auxiliary_loss = torch.stack([encoded.auxiliary_loss, *losses]).sum() if losses else encoded.auxiliary_loss
        if targets is None:
            return ModelOutput(self._logits(h_BTD), encoded.state, auxiliary_loss)
        h_KD = self._scaled(self.output_dropout(h_BTD)).flatten(0, 1)
        loss_K = token_losses(h_KD, self.head, targets.flatten(), label_smoothing, IGNORED)
        return ModelOutput(loss_K.view_as(targets), encoded.state, auxiliary_loss)

    def encode(self, inputs_BN: Tensor, padding: Tensor | None = None, state: StackState | None = None) -> Encoded:
        """What the decoder needs of the sources, and the encoder's state behind them; arguments as of `forward`."""
        self._check_source(inputs_BN, padding, state)
        rows, n = inputs_BN.shape
        x_BND = self.embedding(inputs_BN)
        if self.embedding_scale != 1:
            x_BND = x_BND * self.embedding_scale
        place_BN1 = torch.arange(n, device=inputs_BN.device)[None, :, None].expand(rows, -1, -1)
        # Padding in front moves nothing: embedded places count tokens, and in the layers distances are what matters.
        counted = None if padding is None else ((~padding).cumsum(1) - 1).clamp(min=0)[..., None]
        x_BND = embed_places(x_BND, self.positions, place_BN1[:1] if counted is None else counted)
        x_BND = self.dropout(self.embedding_norm(x_BND))
        # Embedded places begin anew with each sentence; a memory of earlier ones needs those that count on.
        positions_BN1 = None if self._carries else place_BN1
        out = self.stack(x_BND, state, positions_BNP=positions_BN1, padding_BN=padding, inputs=inputs_BN)
        return Encoded(self.output_dropout(out.outputs), padding, out.state, out.auxiliary_loss)

    def decode(self, decoder_inputs_BT: Tensor, encoded: Encoded, *, last_only: bool = False) -> Tensor:
        """Logits (B, T, V) for the token behind each of `decoder_inputs_BT`; (B, 1, V) with `last_only`."""
        h_BTD, _ = self.decoder(self._embed_target(decoder_inputs_BT), encoded)
        return self._logits(h_BTD[:, -1:] if last_only else h_BTD)

    def begin(self, encoded: Encoded) -> DecoderCache:
        """What `step` needs to write texts token by token."""
        return self.decoder.begin(encoded)

    def step(self, tokens_BK: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (B, K, V) behind the next token of each of K continuations of each sentence."""
        return self._logits(self.decoder.step(self._embed_target(tokens_BK), cache))

    def _embed_target(self, tokens_BT: Tensor) -> Tensor:
        x_BTD: Tensor = self.target_embedding(tokens_BT)
        return x_BTD if self.embedding_scale == 1 else x_BTD * self.embedding_scale

    def _scaled(self, h_BTD: Tensor) -> Tensor:
        return h_BTD if self.output_scale == 1 else h_BTD * self.output_scale

    def _logits(self, h_BTD: Tensor) -> Tensor:
        return self.head(self._scaled(self.output_dropout(h_BTD)))  # type: ignore[no-any-return]

    def _check_source(self, inputs_BN: Tensor, padding: Tensor | None, state: StackState | None) -> None:
        check_tokens("inputs", inputs_BN, self.vocabulary, self.max_length)
        if padding is not None:
            check_padding(padding, inputs_BN)
        self.check_state(state, len(inputs_BN))

    def _check_target(
        self, inputs_BN: Tensor, decoder_inputs_BT: Tensor, targets: Tensor | None, label_smoothing: float
    ) -> None:
        what = "a token id of decoder_inputs"
        check_tokens("decoder_inputs", decoder_inputs_BT, self.target_vocabulary, self.max_length, what)
        if len(inputs_BN) != len(decoder_inputs_BT):
            raise ValueError(f"{len(inputs_BN)} rows of inputs, but {len(decoder_inputs_BT)} of decoder_inputs")
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
            f"shared_embeddings='all' needs one vocabulary, not {vocabulary} source and {target_vocabulary} target "
            "tokens; take 'decoder', or a vocabulary of both languages"
        )
    return shared
