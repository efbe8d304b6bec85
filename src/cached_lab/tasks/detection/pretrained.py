"""Weights of a trained classifier for a backbone, matched name by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cached_lab.training.stored_weights import head_names, read_weights
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights

_CACHE = ".cache_MC"  # the end of the name of a shared cache


def load_backbone(body: Any, source: Path) -> None:
    """Load the weights of a classifier into a timm model without head, in place; its shared caches stay empty.

    Raises:
        ValueError: there are no weights, or names or shapes differ, apart from head and caches; the message lists them.
    """
    heads = head_names(body)
    weights = read_weights(source, "model.checkpoint")
    for prefix in ("module.", "model."):  # of DDP, and of this library
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    stored = {k: v for k, v in weights.items() if not k.startswith(heads)}
    if isinstance(body, PyramidVisionTransformer):  # without class token, whose position is dropped, too
        stored = published_weights(stored, body)
    own = {k: v for k, v in body.state_dict().items() if k.endswith(_CACHE)}
    stored = {k: v for k, v in stored.items() if not k.endswith(_CACHE)} | own
    try:
        body.load_state_dict(stored)
    except RuntimeError as error:
        listed = str(error)
        advice = "; give both the same model.memory (null for none)" if ".memory." in listed else ""
        raise ValueError(f"{source} does not fit backbone {type(body).__name__}{advice}: {listed[:1500]}") from None
