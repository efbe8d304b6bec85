"""Weights of a trained classifier for a backbone, matched name by name."""

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
    """Return the state dict of a run folder (its best checkpoint), or of a .safetensors or PyTorch file.

    The prefixes `model.` (of this library) and `module.` (of DDP) are removed if all names have them.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it holds no weights.
    """
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist; give a run folder, or a .safetensors or PyTorch file")
    if source.is_dir():
        folder = Checkpoints(source / "checkpoints").named("best") if (source / "checkpoints").is_dir() else source
        weights = read_checkpoint(folder).weights
    else:
        weights = file_weights(source, str(source), _NESTED)
        if not isinstance(weights, dict) or not weights or not all(isinstance(t, Tensor) for t in weights.values()):
            raise ValueError(
                f"{source} holds no state dict: a mapping of names to tensors, also below {', '.join(_NESTED)}"
            )
    for prefix in ("module.", "model."):
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def load_backbone(body: Any, source: Path, caches: bool) -> None:
    """Load the weights of a classifier into a timm model without head, in place.

    Args:
        body: the model, with its memory. caches: load caches, too; otherwise the model keeps its own.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: names or shapes differ, apart from the classifier's head; the message lists them.
    """
    heads = classifier_names(body)
    stored = {k: v for k, v in read_weights(source).items() if k.split(".")[0] not in heads}
    if isinstance(body, PyramidVisionTransformer):  # without class token, whose position is dropped, too
        stored = published_weights(stored, body)
    ours = body.state_dict()
    if not caches:
        stored, ours = ({k: v for k, v in t.items() if k.rpartition(".")[2] != CACHE} for t in (stored, ours))
    misshapen = [
        f"{key} {tuple(stored[key].shape)}, here {tuple(ours[key].shape)}"
        for key in ours
        if key in stored and stored[key].shape != ours[key].shape
    ]
    problems = {"missing from it": [k for k in ours if k not in stored]}
    problems |= {"not in the model": [k for k in stored if k not in ours], "of another shape": misshapen}
    if any(problems.values()):
        listed = "".join(f"\n  {_listed(problem, names)}" for problem, names in problems.items() if names)
        advice = ""
        if any(".memory." in key for key in set(stored) ^ set(ours)):
            advice = "; the two differ in their memory: give both the same model.memory (null for none)"
        raise ValueError(f"{source} does not fit backbone {type(body).__name__}{advice}{listed}")
    body.load_state_dict(stored, strict=caches)


def classifier_names(model: nn.Module) -> set[str]:
    """Return names of the modules of a timm model's classifier."""
    told = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    names = told.get("classifier") or "head"
    return {name.split(".")[0] for name in ([names] if isinstance(names, str) else names)}


def _listed(problem: str, names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {problem}: {', '.join(names[:_SHOWN])}{more}"
