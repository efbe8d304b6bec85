"""The memories that a kind of model takes: each is tried on a tiny model with random weights."""

from __future__ import annotations

import re
from ast import literal_eval
from typing import Any, NamedTuple

from torch import nn

import cached_transformers.integrations.models
import cached_transformers.memories  # noqa: F401
from cached_transformers import add_memory, create_model
from cached_transformers.extras import require
from cached_transformers.registry import Registration

TEXT = {"vocabulary": 16, "width": 32, "depth": 2, "heads": 4}
OURS: dict[str, dict[str, Any]] = {
    "language_model": TEXT,
    "sequence_classifier": {**TEXT, "classes": 3, "max_length": 16},
    "vision_transformer": {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 4},
    "encoder_decoder": TEXT,
}
"""This package's models, with small sizes."""
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 64),
    **{"vocab_size": 64, "d_kv": 8, "head_dim": 8, "image_size": 16, "patch_size": 4},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
}
"""Sizes under the names of all configs of transformers; a config takes the names that it knows."""


def tiny(host: str) -> nn.Module:
    """A model of this kind: "torch.nn", "timm" (its ViT), or a `model_type` of transformers.

    Raises:
        ValueError: an unknown kind, or one that cannot be made small by `SMALL`.
    """
    if host == "torch.nn":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    if host == "timm":
        timm = require("timm", extra="vision")
        return timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=4)  # type: ignore[no-any-return]
    transformers = require("transformers", extra="language")
    for left_out in (None, "head_dim"):  # which a few configs compute
        sizes = {size: value for size, value in SMALL.items() if size != left_out}
        try:
            return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(host, **sizes))  # type: ignore[no-any-return]
        except Exception as error:  # each config refuses sizes in its own way
            refusal = str(error)[:99]
    known = ", ".join([*OURS, "torch.nn", "timm"])
    raise ValueError(f"host={host!r} must be {known} or a model_type of transformers ({refusal})")


class Taken(NamedTuple):
    """Options with which a host takes a memory, and the reason why it does not; "" if it does."""

    options: dict[str, Any]
    reason: str


def answer_to(host: str, entry: Registration) -> Taken:
    """The answer of a kind of model to one memory. An option that a refusal names as the way out is tried, too."""
    options: dict[str, Any] = {}
    while True:
        memory, model = {"name": entry.name, **options}, None if host in OURS else tiny(host)
        try:
            if model is None:
                create_model(host, memory=memory, **OURS[host])
            else:
                add_memory(model, memory, segment_length=None)
            return Taken(options, "")
        except ValueError as error:
            reason = str(error)
        missing = re.findall(r"needs (\w+), which this model does not know", reason)
        ways_out = re.findall(r"(?:take|'grc',|memory's) (\w+)=('\w+'|[\d.]+|True|False)", reason)
        for name, value in [*((n, "64") for n in missing), *ways_out]:
            if name in entry.options and name not in options:
                options[name] = literal_eval(value)
                break
        else:
            return Taken(options, reason)
