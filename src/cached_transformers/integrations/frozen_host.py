"""Freeze a host of transformers around its memory: the memory, and adapters if asked, train and are stored.

A checkpoint then has a few megabytes. It holds a digest of the host, and loads on no other.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.extras import require

from .hub import OURS

DIGEST = "host_digest"
"""Name of the digest among the tensors of a checkpoint."""
ADAPTER = ".lora_"


def is_of_memory(name: str) -> bool:
    """Return True for the name of a tensor that a memory, or a tuned initial state, added to a host."""
    return re.search(OURS, name) is not None


def host_digest(host: nn.Module) -> Tensor:
    """SHA-256, uint8 (32,), of the names, shapes and values of a host's weights without a memory and adapters.

    Values count in bfloat16, so that a host and its half-precision copy are the same host.

    Raises:
        ValueError: weights without values at hand: quantised, offloaded, or on the meta device.
    """
    digest = hashlib.sha256()
    for name, t in sorted(host.state_dict().items()):
        if is_of_memory(name) or ADAPTER in name:
            continue
        if not isinstance(t, Tensor) or t.is_meta or t.is_quantized:
            raise ValueError(
                f"{name} is quantised, or has no values here, so that this host cannot be told from others; take the "
                "host in a floating dtype, by its `pretrained` weights, on this machine"
            )
        digest.update(f"{name.replace('.base_layer.', '.')} {tuple(t.shape)} ".encode())
        flat = t.detach().to(torch.bfloat16) if t.is_floating_point() else t.detach()
        digest.update(flat.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def freeze_host(model: nn.Module, host: Any, lora: int) -> None:
    """Train only the memory inside of a host, and adapters of rank `lora`; `model` contains the host, and stores these.

    Raises:
        ValueError: a negative rank, or nothing to train. ImportError: peft is not installed, which adapters need.
    """
    at_least_one(" (or 0 for no adapters)", lora=lora or 1)
    digest = host_digest(host)
    if lora:
        peft = require("peft", extra="adapters")
        peft.inject_adapter_in_model(peft.LoraConfig(r=lora, lora_alpha=2 * lora), host)
    trained = 0
    for name, parameter in host.named_parameters():
        parameter.requires_grad_(is_of_memory(name) or ADAPTER in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # small steps vanish in half precision
            trained += 1
    if not trained:
        raise ValueError("trained='memory': the model has no memory with weights; add one, or adapters (lora=8)")
    model.register_buffer(DIGEST, digest)
    weights = model.state_dict(keep_vars=True).items()
    frozen = _FrozenWeights(
        name for name, t in weights if not (is_of_memory(name) or t.requires_grad or name == DIGEST)
    )
    model.register_state_dict_post_hook(frozen)
    model.register_load_state_dict_pre_hook(frozen.fill_in)


class _FrozenWeights:
    """Hooks of a model's state dict that leave out the frozen weights; a class, so that models can be copied."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in self.names:
            state_dict.pop(f"{prefix}{name}", None)

    def fill_in(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Take the frozen weights from the model itself (ValueError: the others are of another host)."""
        stored, own = state_dict.get(f"{prefix}{DIGEST}"), getattr(module, DIGEST)
        if stored is not None and not torch.equal(stored.cpu(), own.cpu()):
            raise ValueError(
                "the weights were trained on another host: its digest differs; build the model with the same "
                "`pretrained` weights as in training"
            )
        for named in (module.named_parameters, module.named_buffers):
            for name, t in named(remove_duplicate=False):  # tied weights are in a state dict twice
                if name in self.names:
                    state_dict.setdefault(f"{prefix}{name}", t.detach())
