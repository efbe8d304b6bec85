"""Convert encoder-decoders of transformers to `EncoderDecoder`: BART, Marian, T5, Switch Transformers.

    model = from_bart(BartForConditionalGeneration.from_pretrained(name), memory="grc")

In evaluation mode the result computes the same as the original, until it has a memory that is read. Papers:
arXiv:1910.13461 (BART), arXiv:1804.00344 (Marian), arXiv:1910.10683 (T5), arXiv:2101.03961 (Switch). Imports nothing of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, ModelMemory
from cached_transformers.models.encoder_decoder import EncoderDecoder

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""transformers' names of activations, and those of this package."""


def from_bart(model: Any, **options: Any) -> EncoderDecoder:
    """Convert BART.

    Args:
        model: `BartModel` or `BartForConditionalGeneration`.
        options: of `EncoderDecoder` (memory, attention, dropout, ...), instead of those of the configuration.

    Raises:
        ValueError: a model of another class, or one whose configuration has no counterpart here.
    """
    body = _body(model, "from_bart", ("BartModel", "BartForConditionalGeneration"))
    known = {"embedding_norm": True, **_bart_options(model)}
    return _build(model, body, known | options, _copy_bart)


def from_marian(model: Any, **options: Any) -> EncoderDecoder:
    """Convert Marian's translation models; arguments and errors as of `from_bart`.

    Their sinusoids have all sines before the cosines. They become "learned" positions, which training changes.
    """
    body = _body(model, "from_marian", ("MarianModel", "MarianMTModel"))
    return _build(model, body, _bart_options(model) | options, _copy_bart)


def from_t5(model: Any, *, max_length: int = 512, **options: Any) -> EncoderDecoder:
    """Convert T5, with its bucketed positions, RMS norms and unscaled logits.

    Args:
        model: `T5Model` or `T5ForConditionalGeneration`, of version 1.0 or 1.1.
        max_length: longest source, and longest target; T5 itself has no limit.
        options: as of `from_bart`.

    Raises:
        ValueError: as of `from_bart`.
    """
    body = _body(model, "from_t5", ("T5Model", "T5ForConditionalGeneration"))
    gated, scaled = model.config.is_gated_act, getattr(model.config, "scale_decoder_outputs", True)
    known = _t5_options(model, max_length, gated, scaled)
    return _build(model, body, known | options, _copy_t5)


def from_switch(model: Any, *, max_length: int = 512, **options: Any) -> EncoderDecoder:
    """Convert Switch Transformers; arguments as of `from_t5`.

    transformers drops a token after `expert_capacity` earlier tokens of its row at the same expert; here capacity has
    no limit in evaluation, and in training each expert has a share of the tokens of the batch.

    Raises:
        ValueError: as of `from_bart`; experts neither in all layers nor in every second one; a router with a bias.
    """
    body = _body(model, "from_switch", ("SwitchTransformersModel", "SwitchTransformersForConditionalGeneration"))
    config = model.config
    if config.router_bias:
        raise ValueError("router_bias=True has no counterpart here, where routers have no bias")
    every = {_every(body.encoder.block), _every(body.decoder.block)}
    if len(every) > 1:
        raise ValueError("encoder and decoder have experts in different layers, which are alike here")
    known = _t5_options(model, max_length, False, config.tie_word_embeddings)
    known["experts"] = {
        "experts": config.num_experts,
        "every": every.pop(),
        "balance_loss": config.router_aux_loss_coef,
        "z_loss": config.router_z_loss_coef,
        "jitter": config.router_jitter_noise,
    }
    return _build(model, body, known | options, _copy_t5)


def _body(model: Any, function: str, names: tuple[str, str]) -> Any:
    """The model without its head."""
    name = type(model).__name__
    if name not in names:
        raise ValueError(f"{function} takes a {' or a '.join(names)} of transformers, not a {name}")
    return model.model if hasattr(model, "model") else model


def _activation(name: str, gated: bool = False) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} has no counterpart here (known: {', '.join(ACTIVATIONS)})")
    return ("gated_" if gated else "") + ACTIVATIONS[name]


def _embeddings(model: Any) -> dict[str, Any]:
    """Options of the embedding tables, which may be shared."""
    body = model.model if hasattr(model, "model") else model
    source, target = body.encoder.embed_tokens.weight, body.decoder.embed_tokens.weight
    output = model.lm_head.weight if hasattr(model, "lm_head") else target
    shared = "none" if output is not target else "all" if source is target else "decoder"
    separate = None if len(source) == len(target) else len(target)
    return {"vocabulary": len(source), "target_vocabulary": separate, "shared_embeddings": shared}


def _bart_options(model: Any) -> dict[str, Any]:
    config = model.config
    pairs = {
        "attention_heads": (config.encoder_attention_heads, config.decoder_attention_heads),
        "ffn_dim": (config.encoder_ffn_dim, config.decoder_ffn_dim),
    }
    for name, (encoder, decoder) in pairs.items():
        if encoder != decoder:
            raise ValueError(f"encoder_{name}={encoder} and decoder_{name}={decoder} differ; they are one here")
    bias = getattr(model, "final_logits_bias", None)
    return {
        **_embeddings(model),
        "max_length": config.max_position_embeddings,
        "width": config.d_model,
        "depth": config.encoder_layers,
        "decoder_depth": config.decoder_layers,
        "heads": config.encoder_attention_heads,
        "feed_forward": config.encoder_ffn_dim,
        "positions": "learned",
        "norm": "post",
        "activation": _activation(config.activation_function),
        "scale_embedding": config.scale_embedding,
        "output_bias": bias is not None and bool(bias.any()),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
        "init": config.init_std,
    }


def _t5_options(model: Any, max_length: int, gated: bool, scaled: bool) -> dict[str, Any]:
    config = model.config
    return {
        **_embeddings(model),
        "max_length": max_length,
        "width": config.d_model,
        "depth": config.num_layers,
        "decoder_depth": config.num_decoder_layers,
        "heads": config.num_heads,
        "head_width": config.d_kv,
        "feed_forward": config.d_ff,
        "positions": "bucketed",
        "buckets": config.relative_attention_num_buckets,
        "reach": config.relative_attention_max_distance,
        "norm_kind": "rms",
        "norm_eps": config.layer_norm_epsilon,
        "activation": _activation(config.dense_act_fn, gated),
        "bias": False,
        "attention_scale": 1.0,
        "scale_embedding": False,
        "output_scale": config.d_model**-0.5 if scaled else 1.0,
        "dropout": config.dropout_rate,
        "attention_dropout": config.dropout_rate,
        "activation_dropout": config.dropout_rate,
        "output_dropout": config.dropout_rate,
        "init": "t5",
    }


def _every(blocks: Any) -> int:
    """1 or 2, if experts are in all layers or in every second one."""
    places = [i for i, block in enumerate(blocks) if hasattr(block.layer[-1].mlp, "experts")]
    for every in (1, 2):
        if places == [i for i in range(len(blocks)) if (i + 1) % every == 0]:
            return every
    raise ValueError(
        f"of {len(blocks)} layers {places} have experts; here all layers have them, or every second one (1, 3, 5, ...)"
    )


class _Copy:
    """Copies weights, and records their targets."""

    def __init__(self) -> None:
        self.written: set[int] = set()

    @torch.no_grad()
    def __call__(self, ours: Tensor, *theirs: Tensor) -> None:
        """Copy `theirs`, concatenated, to `ours`."""
        value = torch.cat([t.detach() for t in theirs])
        if value.shape != ours.shape:
            raise ValueError(f"a weight of shape {tuple(value.shape)} does not fit {tuple(ours.shape)}")
        ours.copy_(value)
        self.written.add(id(ours))

    def linear(self, ours: nn.Linear, *theirs: nn.Linear) -> None:
        """Copy linear maps with or without biases."""
        self(ours.weight, *(linear.weight for linear in theirs))
        if ours.bias is not None:
            self(ours.bias, *(linear.bias for linear in theirs))

    def norm(self, ours: nn.Module, theirs: nn.Module) -> None:
        """Copy a norm."""
        for name, parameter in ours.named_parameters():
            self(parameter, theirs.get_parameter(name))


def _build(model: Any, body: Any, options: dict[str, Any], copy: Callable[..., None]) -> EncoderDecoder:
    """An `EncoderDecoder` with the model's weights, in its dtype and mode, and on its device."""
    ours = EncoderDecoder(**options)
    copied = _Copy()
    copied(ours.embedding.weight, body.encoder.embed_tokens.weight)
    copied(ours.target_embedding.weight, body.decoder.embed_tokens.weight)
    copied(ours.head.weight, model.lm_head.weight if hasattr(model, "lm_head") else body.decoder.embed_tokens.weight)
    if ours.head.bias is not None:
        copied(ours.head.bias, model.final_logits_bias[0])
    copy(copied, ours, body)
    memories = [m for m in ours.modules() if isinstance(m, LayerMemory | ModelMemory)]
    new = {id(p) for memory in memories for p in memory.parameters()}
    new |= {id(p) for block in ours.stack.blocks for p in _of_model_memory(block)}
    left = [name for name, p in ours.named_parameters() if id(p) not in copied.written | new]
    if left:
        raise ValueError(
            f"options leave {', '.join(left[:4])} without a counterpart in {type(model).__name__}; memory, attention "
            "and dropout may differ from the original, not its structure"
        )
    first = next(model.parameters())
    return ours.to(first.device, first.dtype).train(model.training)


def _of_model_memory(block: Any) -> Iterator[nn.Parameter]:
    """Parameters that a block has for a model memory."""
    for module in (block.slot_attention, block.memory_weights):
        if module is not None:
            yield from module.parameters()


def _copy_bart(copy: _Copy, ours: EncoderDecoder, theirs: Any) -> None:
    offset = getattr(theirs.encoder.embed_positions, "offset", 0)
    copy(ours.positions.weight, theirs.encoder.embed_positions.weight[offset:])  # type: ignore[arg-type]
    copy(ours.decoder.positions.weight, theirs.decoder.embed_positions.weight[offset:])  # type: ignore[arg-type]
    if hasattr(theirs.encoder, "layernorm_embedding"):
        copy.norm(ours.embedding_norm, theirs.encoder.layernorm_embedding)
        copy.norm(ours.decoder.embedding_norm, theirs.decoder.layernorm_embedding)
    blocks: Any
    for blocks, layers in ((ours.stack.blocks, theirs.encoder.layers), (ours.decoder.blocks, theirs.decoder.layers)):
        for block, layer in zip(blocks, layers, strict=True):
            mine, own = block.attention, layer.self_attn
            copy.linear(mine.qkv, own.q_proj, own.k_proj, own.v_proj)
            copy.linear(mine.output, own.out_proj)
            copy.norm(block.attention_norm, layer.self_attn_layer_norm)
            if hasattr(block, "cross_attention"):
                mine, own = block.cross_attention, layer.encoder_attn
                copy.linear(mine.query, own.q_proj)
                copy.linear(mine.key_value, own.k_proj, own.v_proj)
                copy.linear(mine.output, own.out_proj)
                copy.norm(block.cross_attention_norm, layer.encoder_attn_layer_norm)
            copy.linear(block.feed_forward.enter, layer.fc1)
            copy.linear(block.feed_forward.leave, layer.fc2)
            copy.norm(block.feed_forward_norm, layer.final_layer_norm)


def _copy_t5(copy: _Copy, ours: EncoderDecoder, theirs: Any) -> None:
    blocks: Any
    for blocks, stack in ((ours.stack.blocks, theirs.encoder), (ours.decoder.blocks, theirs.decoder)):
        for block, layer in zip(blocks, stack.block, strict=True):
            mine, own = block.attention, layer.layer[0].SelfAttention
            copy.norm(mine.norm, layer.layer[0].layer_norm)
            copy.linear(mine.qkv, own.q, own.k, own.v)
            copy.linear(mine.output, own.o)
            if hasattr(block, "cross_attention"):
                mine, own = block.cross_attention, layer.layer[1].EncDecAttention
                copy.norm(mine.norm, layer.layer[1].layer_norm)
                copy.linear(mine.query, own.q)
                copy.linear(mine.key_value, own.k, own.v)
                copy.linear(mine.output, own.o)
            copy.norm(block.feed_forward.norm, layer.layer[-1].layer_norm)
            _copy_t5_feed_forward(copy, block.feed_forward, layer.layer[-1])
    first = ours.stack.blocks[0].attention.positions.table  # type: ignore[union-attr]
    copy(first, theirs.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight)  # type: ignore[arg-type]
    second = ours.decoder.positions.table
    copy(second, theirs.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight)  # type: ignore[arg-type]
    copy.norm(ours.stack.norm, theirs.encoder.final_layer_norm)
    copy.norm(ours.decoder.norm, theirs.decoder.final_layer_norm)


def _copy_t5_feed_forward(copy: _Copy, mine: Any, layer: Any) -> None:
    theirs = layer.mlp if hasattr(layer, "mlp") else layer.DenseReluDense
    if hasattr(theirs, "experts"):
        experts = list(theirs.experts.values())
        copy(mine.router_ED, theirs.router.classifier.weight)
        copy(mine.enter_EDF, *(expert.wi.weight.T[None] for expert in experts))
        copy(mine.leave_EFD, *(expert.wo.weight.T[None] for expert in experts))
        return
    copy.linear(mine.enter, *((theirs.wi_0, theirs.wi_1) if hasattr(theirs, "wi_0") else (theirs.wi,)))
    copy.linear(mine.leave, theirs.wo)
