"""Convert encoder-decoders of transformers to `EncoderDecoder`: BART and Marian, T5 and Switch Transformers.

    model = from_bart(BartForConditionalGeneration.from_pretrained(name), memory="grc")

In evaluation mode the result computes the same as the original, until it has a memory that is read. Papers:
arXiv:1910.13461 (BART), arXiv:1804.00344 (Marian), arXiv:1910.10683 (T5), arXiv:2101.03961 (Switch). Imports nothing of
transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, ModelMemory
from cached_transformers.models.encoder_decoder import EncoderDecoder

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "swish": "silu"}
ACTIVATIONS |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "gelu_tanh")
"""transformers' names of activations, and those of this package."""

BART_LAYER = {
    "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key_value": "encoder_attn.k_proj encoder_attn.v_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward.enter": "fc1",
    "feed_forward.leave": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
"""Modules of a block, and those of BART's layer whose weights they take, one after another."""

T5_LAYER = {
    "attention.norm": "layer.0.layer_norm",
    "attention.qkv": "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v",
    "attention.output": "layer.0.SelfAttention.o",
    "cross_attention.norm": "layer.1.layer_norm",
    "cross_attention.query": "layer.1.EncDecAttention.q",
    "cross_attention.key_value": "layer.1.EncDecAttention.k layer.1.EncDecAttention.v",
    "cross_attention.output": "layer.1.EncDecAttention.o",
}
"""The same of T5's layer, but for its feed-forward network."""


def from_bart(model: Any, **options: Any) -> EncoderDecoder:
    """Convert BART or Marian, whose sinusoids become "learned" positions, which training changes.

    Args:
        model: `BartForConditionalGeneration` or `MarianMTModel`, or the model inside of it.
        options: of `EncoderDecoder` (memory, attention, dropout, ...), instead of those of the configuration.

    Raises:
        ValueError: a model of another class, or one whose configuration has no counterpart here; options that change
            its structure.
    """
    body = _body(model, "BartModel", "BartForConditionalGeneration", "MarianModel", "MarianMTModel")
    config, bias = model.config, getattr(model, "final_logits_bias", None)
    for name in ("attention_heads", "ffn_dim"):
        encoder, decoder = (getattr(config, f"{side}_{name}") for side in ("encoder", "decoder"))
        if encoder != decoder:
            raise ValueError(f"encoder_{name}={encoder} and decoder_{name}={decoder} differ; they are one here")
    known = {
        "max_length": config.max_position_embeddings,
        "depth": config.encoder_layers,
        "decoder_depth": config.decoder_layers,
        "heads": config.encoder_attention_heads,
        "feed_forward": config.encoder_ffn_dim,
        "positions": "learned",
        "norm": "post",
        "embedding_norm": hasattr(body.encoder, "layernorm_embedding"),
        "activation": _activation(config.activation_function),
        "output_bias": bias is not None and bool(bias.any()),
        "init": config.init_std,
    }
    alike = ("scale_embedding", "dropout", "attention_dropout", "activation_dropout")
    known |= {name: getattr(config, name) for name in alike}
    return _build(model, body, known | options, _bart_weights)


def from_t5(model: Any, *, max_length: int = 512, **options: Any) -> EncoderDecoder:
    """Convert T5 of version 1.0 or 1.1, with its bucketed positions and RMS norms; or Switch Transformers.

    transformers' Switch drops a token after `expert_capacity` earlier tokens of its row at the same expert; here
    capacity has no limit in evaluation, and in training each expert has a share of the tokens of the batch.

    Args:
        model: `T5ForConditionalGeneration` or `SwitchTransformersForConditionalGeneration`, or the model inside of it.
        max_length: longest source, and longest target; T5 itself has no limit.
        options: as of `from_bart`.

    Raises:
        ValueError: as of `from_bart`; experts neither in all layers nor in every second one; a router with a bias.
    """
    switch = "SwitchTransformersModel", "SwitchTransformersForConditionalGeneration"
    body, config = _body(model, "T5Model", "T5ForConditionalGeneration", *switch), model.config
    gated, scaled = getattr(config, "is_gated_act", False), getattr(config, "scale_decoder_outputs", True)
    known = {
        "max_length": max_length,
        "depth": config.num_layers,
        "decoder_depth": config.num_decoder_layers,
        "heads": config.num_heads,
        "head_width": config.d_kv,
        "feed_forward": config.d_ff,
        "buckets": config.relative_attention_num_buckets,
        "reach": config.relative_attention_max_distance,
        "norm_eps": config.layer_norm_epsilon,
        "activation": _activation(config.dense_act_fn, gated),
    }
    known |= {"positions": "bucketed", "norm_kind": "rms", "bias": False, "init": "t5"}
    known |= {"attention_scale": 1.0, "scale_embedding": False}
    dropouts = ("dropout", "attention_dropout", "activation_dropout", "output_dropout")
    known |= dict.fromkeys(dropouts, config.dropout_rate)
    if type(model).__name__ in switch:
        if config.router_bias:
            raise ValueError("router_bias=True has no counterpart here, where routers have no bias")
        gated, scaled = False, config.tie_word_embeddings
        known["activation"] = _activation(config.dense_act_fn)
        known["experts"] = {
            "experts": config.num_experts,
            "every": _every(body),
            "balance_loss": config.router_aux_loss_coef,
            "z_loss": config.router_z_loss_coef,
            "jitter": config.router_jitter_noise,
        }
    known["output_scale"] = config.d_model**-0.5 if scaled else 1.0
    return _build(model, body, known | options, _t5_weights)


def _body(model: Any, *names: str) -> Any:
    """The model without its head."""
    if type(model).__name__ not in names:
        raise ValueError(f"model={type(model).__name__}: takes a {' or a '.join(names)} of transformers")
    return model.model if hasattr(model, "model") else model


def _activation(name: str, gated: bool = False) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} has no counterpart here (known: {', '.join(ACTIVATIONS)})")
    return ("gated_" if gated else "") + ACTIVATIONS[name]


def _every(body: Any) -> int:
    """1 or 2, if experts are in all layers or in every second one, of encoder and decoder alike."""
    places = [
        ["experts" in dict(b.layer[-1].mlp.named_children()) for b in s.block] for s in (body.encoder, body.decoder)
    ]
    for every in (1, 2):
        if all(has == [(i + 1) % every == 0 for i in range(len(has))] for has in places):
            return every
    raise ValueError(f"experts in layers {places}; here all layers have them, or every second one (1, 3, 5, ...)")


def _build(model: Any, body: Any, options: dict[str, Any], weights: Any) -> EncoderDecoder:
    """An `EncoderDecoder` with the model's weights, in its dtype and mode, and on its device."""
    source, target = body.encoder.embed_tokens.weight, body.decoder.embed_tokens.weight
    output = model.lm_head.weight if hasattr(model, "lm_head") else target
    tables = {
        "width": model.config.d_model,
        "vocabulary": len(source),
        "target_vocabulary": None if len(source) == len(target) else len(target),
        "shared_embeddings": "none" if output is not target else "all" if source is target else "decoder",
    }
    ours = EncoderDecoder(**tables | options)
    state = {"embedding.weight": source, "target_embedding.weight": target, "head.weight": output}
    if ours.head.bias is not None:
        state["head.bias"] = model.final_logits_bias[0]
    state |= weights(ours, body)
    loaded = ours.load_state_dict(state, strict=False)
    new = {id(p) for m in ours.modules() if isinstance(m, LayerMemory | ModelMemory) for p in m.parameters()}
    blocks: Any = ours.stack.blocks
    for block in blocks:  # for a model-level memory
        new |= {id(p) for m in (block.slot_attention, block.memory_weights) if m is not None for p in m.parameters()}
    left = [name for name, p in ours.named_parameters() if name in loaded.missing_keys and id(p) not in new]
    if left or loaded.unexpected_keys:
        raise ValueError(
            f"options leave {', '.join([*left, *loaded.unexpected_keys][:4])} without a counterpart in "
            f"{type(model).__name__}; memory, attention and dropout may differ from the original, not its structure"
        )
    first = next(model.parameters())
    return ours.to(first.device, first.dtype).train(model.training)


def _layer_weights(name: str, block: Any, layer: nn.Module, paths: dict[str, str]) -> dict[str, Tensor]:
    """The weights of a block by their names in the model."""
    state = {}
    for ours, theirs in paths.items():
        if ours.startswith("cross_") and not hasattr(block, "cross_attention"):
            continue
        modules = [layer.get_submodule(path) for path in theirs.split()]
        for weight, _ in block.get_submodule(ours).named_parameters():
            state[f"{name}.{ours}.{weight}"] = torch.cat([module.get_parameter(weight) for module in modules])
    return state


def _bart_weights(ours: Any, theirs: Any) -> dict[str, Tensor]:
    state = {}
    for stack, blocks, part in (
        ("stack.blocks", ours.stack.blocks, theirs.encoder),
        ("decoder.blocks", ours.decoder.blocks, theirs.decoder),
    ):
        place = "" if part is theirs.encoder else "decoder."
        state[f"{place}positions.weight"] = part.embed_positions.weight[getattr(part.embed_positions, "offset", 0) :]
        if hasattr(part, "layernorm_embedding"):
            norm = part.layernorm_embedding
            state |= {f"{place}embedding_norm.{name}": weight for name, weight in norm.named_parameters()}
        for index, (block, layer) in enumerate(zip(blocks, part.layers, strict=True)):
            state |= _layer_weights(f"{stack}.{index}", block, layer, BART_LAYER)
    return state


def _t5_weights(ours: Any, theirs: Any) -> dict[str, Tensor]:
    state = {"stack.norm.weight": theirs.encoder.final_layer_norm.weight}
    state["decoder.norm.weight"] = theirs.decoder.final_layer_norm.weight
    for stack, blocks, part, positions in (
        ("stack.blocks", ours.stack.blocks, theirs.encoder, "stack.blocks.0.attention.positions.table"),
        ("decoder.blocks", ours.decoder.blocks, theirs.decoder, "decoder.positions.table"),
    ):
        state[positions] = part.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        for index, (block, layer) in enumerate(zip(blocks, part.block, strict=True)):
            name, last = f"{stack}.{index}", f"layer.{len(layer.layer) - 1}"
            network, kind = layer.layer[-1], "mlp" if hasattr(layer.layer[-1], "mlp") else "DenseReluDense"
            paths = {"feed_forward.norm": f"{last}.layer_norm"}
            inner = getattr(network, kind)
            if hasattr(inner, "experts"):
                experts = list(inner.experts.values())
                state[f"{name}.feed_forward.router_ED"] = inner.router.classifier.weight
                state[f"{name}.feed_forward.enter_EDF"] = torch.stack([expert.wi.weight.T for expert in experts])
                state[f"{name}.feed_forward.leave_EFD"] = torch.stack([expert.wo.weight.T for expert in experts])
            else:
                enter = ("wi_0", "wi_1") if hasattr(inner, "wi_0") else ("wi",)
                paths["feed_forward.enter"] = " ".join(f"{last}.{kind}.{part}" for part in enter)
                paths["feed_forward.leave"] = f"{last}.{kind}.wo"
            state |= _layer_weights(name, block, layer, T5_LAYER | paths)
    return state
