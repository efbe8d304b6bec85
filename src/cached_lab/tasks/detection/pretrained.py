"""Weights of a trained classifier for a backbone, matched name by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from cached_lab.training.checkpoint import Checkpoints, read_checkpoint
from cached_lab.training.stored_weights import file_weights, head_names
from cached_transformers.models.pvt import PyramidVisionTransformer, published_weights

_CACHE = ".cache_MC"  # the end of the name of a shared cache
_NESTED = ("state_dict", "model", "state_dict_ema", "model_ema")


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
        weights = read_checkpoint(Checkpoints(source / "checkpoints").named("best")).weights
    else:
        weights = file_weights(source, str(source), _NESTED)
        if not isinstance(weights, dict) or not weights or not all(isinstance(t, Tensor) for t in weights.values()):
            raise ValueError(f"{source} holds no state dict, also not below {', '.join(_NESTED)}")
    for prefix in ("module.", "model."):
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def load_backbone(body: Any, source: Path) -> None:
    """Load the weights of a classifier into a timm model without head, in place; its shared caches stay empty.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: names or shapes differ, apart from head and caches; the message lists them.
    """
    heads = head_names(body)
    stored = {k: v for k, v in read_weights(source).items() if not k.startswith(heads)}
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
