"""Weights of a trained classifier for a backbone: read, matched name by name, and refused by name where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cached_lab.training.checkpoint import Checkpoints, read_checkpoint
from cached_lab.training.stored_weights import file_weights
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights

CACHE = "cache_MC"
"""Last part of the name of a shared cache in a state dict."""
_NESTED = ("state_dict", "model", "state_dict_ema", "model_ema")
_SHOWN = 6


def read_weights(source: Path) -> dict[str, Tensor]:
    """State dict of a run folder (its best checkpoint), or of a .safetensors or PyTorch file.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no weights.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; give a run folder, or a .safetensors or PyTorch file")
    if source.is_dir():
        folder = Checkpoints(source / "checkpoints").named("best") if (source / "checkpoints").is_dir() else source
        return _without_prefix(read_checkpoint(folder).weights)
    stored = file_weights(source, str(source), _NESTED)
    if not isinstance(stored, dict) or not stored or not all(isinstance(t, Tensor) for t in stored.values()):
        raise ValueError(
            f"{source} holds no state dict: a mapping of names to tensors, also below {', '.join(_NESTED)}"
        )
    return _without_prefix(stored)


def load_backbone(body: Any, source: Path, caches: bool) -> None:
    """Load the weights of a classifier into a timm model without head, in place.

    Args:
        body: the model, with its memory. caches: whether to load caches, too; else those of the checkpoint are ignored,
            whatever their size, and those of the model stay as they are.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: names or shapes differ, apart from the classifier's head; the message gives them.
    """
    heads = classifier_names(body)
    stored = {k: v for k, v in read_weights(source).items() if k.split(".")[0] not in heads}
    if isinstance(body, PyramidVisionTransformer):  # without class token, whose position goes, too
        stored = published_weights(stored, body)
    ours = body.state_dict()
    if not caches:
        stored = {k: v for k, v in stored.items() if k.rpartition(".")[2] != CACHE}
        ours = {k: v for k, v in ours.items() if k.rpartition(".")[2] != CACHE}
    problems = [
        _listed("missing from it", [k for k in ours if k not in stored]),
        _listed("not in the model", [k for k in stored if k not in ours]),
        _listed("of another shape", _misshapen(stored, ours)),
    ]
    if any(problems):
        listed = "\n  ".join(filter(None, problems))
        advice = ""
        if any(".memory." in key for key in set(stored) ^ set(ours)):
            advice = "; the two differ in their memory: give both the same model.memory (null for none)"
        raise ValueError(f"{source} does not fit backbone {type(body).__name__}{advice}\n  {listed}")
    body.load_state_dict(stored, strict=caches)


def classifier_names(model: nn.Module) -> set[str]:
    """Names of the modules that make up the classifier of a timm model."""
    told = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    names = told.get("classifier") or "head"
    return {name.split(".")[0] for name in ([names] if isinstance(names, str) else names)}


def _misshapen(stored: dict[str, Tensor], ours: dict[str, Tensor]) -> list[str]:
    both = [key for key in ours if key in stored and stored[key].shape != ours[key].shape]
    return [f"{key} {tuple(stored[key].shape)}, here {tuple(ours[key].shape)}" for key in both]


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"


def _without_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names as in the timm model: `model.` (of our models) and `module.` (of DDP) in front of all are taken away."""
    for prefix in ("module.", "model."):
        if weights and all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights
