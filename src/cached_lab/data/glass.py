"""The weights and the tokenizer of the package glassllm (github.com/Oseiasdfarias/glassllm) as a Llama of transformers.

Its decoder is a Llama with matrices stored (in, out) and a rotary position encoding that turns neighbouring channels of
a head; Llama turns channel i with channel i + E/2, so that the rows of query and key projections change their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cached_transformers.extras import require

_TABLES = {
    "norm1.gamma": "input_layernorm",
    "norm2.gamma": "post_attention_layernorm",
    "attn.W_Q": "self_attn.q_proj",
    "attn.W_K": "self_attn.k_proj",
    "attn.W_V": "self_attn.v_proj",
    "attn.W_O": "self_attn.o_proj",
    "ffn.W1": "mlp.gate_proj",
    "ffn.W3": "mlp.up_proj",
    "ffn.W2": "mlp.down_proj",
}
"""Names of a layer's arrays, and of Llama's modules."""
SPECIAL = ("<pad>", "<unk>", "<bos>", "<eos>")
"""The first ids. The model was trained without the last two, which are therefore not declared as begin and end."""


def half_order(weight_OI: np.ndarray, width: int) -> np.ndarray:
    """Order the rows of each head of `width` channels: the even channels first, then the odd ones."""
    order_E = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])
    return weight_OI.reshape(-1, width, weight_OI.shape[1])[:, order_E].reshape(weight_OI.shape)


def llama_weights(arrays: Mapping[str, np.ndarray], head_width: int) -> dict[str, torch.Tensor]:
    """Name and order the arrays of a glassllm file as Llama's, in float32 (KeyError: an unknown array)."""
    found = {"model.embed_tokens.weight": arrays["E"], "lm_head.weight": arrays["E"]}
    found["model.norm.weight"] = arrays["norm_f.gamma"]
    for name in arrays:
        if name.startswith("blocks."):
            _, layer, inner = name.split(".", 2)
            rotated = inner in ("attn.W_Q", "attn.W_K")
            weight = half_order(arrays[name].T, head_width) if rotated else arrays[name].T
            found[f"model.layers.{layer}.{_TABLES[inner]}.weight"] = weight
    return {name: torch.tensor(np.ascontiguousarray(a, dtype=np.float32)) for name, a in found.items()}


def load_glass(weights: Path, vocabulary: Path) -> tuple[Any, Any]:
    """Return the model, in evaluation mode and float32, and the tokenizer of two files of glassllm."""
    transformers = require("transformers", extra="language")
    with np.load(weights) as file:
        sizes: dict[str, Any] = json.loads(str(file["__config__"]))
        arrays = {name: file[name] for name in file.files if name != "__config__"}
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocab_size"],
        hidden_size=sizes["d_model"],
        intermediate_size=arrays["blocks.0.ffn.W1"].shape[1],
        num_hidden_layers=sizes["n_layers"],
        num_attention_heads=sizes["n_heads"],
        num_key_value_heads=sizes["n_kv_heads"],
        max_position_embeddings=sizes["max_len"],
        rms_norm_eps=sizes["eps"],
        rope_theta=sizes["rope_base"],
        tie_word_embeddings=True,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.load_state_dict(llama_weights(arrays, sizes["d_model"] // sizes["n_heads"]))
    return model, _tokenizer(vocabulary)


def _tokenizer(path: Path) -> Any:
    """Build the tokenizer: pairs of characters merged inside words that begin with the mark of a blank."""
    tokenizers = require("tokenizers", extra="language")
    told = json.loads(path.read_text(encoding="utf-8"))
    pairs = [(first, second) for first, second in told["merges"]]
    words = [*SPECIAL, *told["alphabet"], *(first + second for first, second in pairs)]
    ids = {word: number for number, word in enumerate(words)}
    built = tokenizers.Tokenizer(tokenizers.models.BPE(ids, pairs, unk_token="<unk>"))
    blank = tokenizers.normalizers.Replace(" ", "\u2581")
    built.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC(), blank])
    pattern = tokenizers.Regex("\n|\u2581*[^\u2581\n]+|\u2581+")
    built.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    decoders = tokenizers.decoders
    built.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    kind = require("transformers", extra="language").PreTrainedTokenizerFast
    return kind(tokenizer_object=built, pad_token="<pad>", unk_token="<unk>", clean_up_tokenization_spaces=False)
