"""Initial weights of the models."""

from __future__ import annotations

import math

from torch import nn

from cached_transformers.interfaces.memory import LayerMemory, ModelMemory
from cached_transformers.positions import RelativePositions

from .adaptive import AdaptiveEmbedding, AdaptiveSoftmax


def initialise(model: nn.Module, std: float | None = None, projection_std: float = 0.01) -> None:
    """Xavier-uniform linear maps with zero biases, embeddings of 0.02; memories and convolutions keep their own.

    With `std` the initial weights of Transformer-XL instead (github.com/kimiyoung/transformer-xl): N(0, std) linear
    maps, embeddings and relative biases, N(1, std) norms, N(0, projection_std) projections of adaptive embeddings.
    """
    for name, deviation in {"initial_std": std, "projection_std": projection_std}.items():
        if deviation is not None and not 0 <= deviation < math.inf:
            raise ValueError(f"{name}={deviation} is the deviation of initial weights: it must not be negative")
    skip = {
        id(m) for memory in model.modules() if isinstance(memory, LayerMemory | ModelMemory) for m in memory.modules()
    }
    for module in model.modules():
        if id(module) in skip:
            continue
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight) if std is None else nn.init.normal_(module.weight, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.02) if std is None else nn.init.normal_(module.weight, std=std)
        elif isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax):
            module.reset_parameters(std, projection_std)
        elif isinstance(module, nn.LayerNorm) and std is not None:
            nn.init.normal_(module.weight, 1.0, std)
        elif isinstance(module, RelativePositions) and std is not None:
            nn.init.normal_(module.content_bias, std=std)
            nn.init.normal_(module.position_bias, std=std)
