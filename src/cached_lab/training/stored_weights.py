"""Weights from files: initial weights of a run, checked key by key, and the average of a run's last checkpoints.

Weights of a plain model fit its form with a memory, whose own weights then stay as initialised. The classifier is
loaded too, unless `training.new_head` says otherwise. Shared caches of another size stay as initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from .checkpoint import META, Checkpoints, read_checkpoint
from .sharding import shard_weights

_INNER = ("state_dict", "model", "module", "state_dict_ema", "model_ema")
_USUAL_HEADS = ("head", "fc", "classifier")


def load_initial_weights(
    model: nn.Module, path: Path, new_head: bool = False, say: Callable[[str], None] = print
) -> None:
    """Load stored weights into a model, in place.

    Args:
        path: a run folder (its best checkpoint), a step folder, or a .safetensors, .pth or .pt file.
        new_head: do not load the classifier.
        say: receives a message about tensors that were not in the file.

    Raises:
        ValueError: no such weights, a classifier with another number of classes, or weights of another model.
    """
    own, heads = model.state_dict(), head_names(model)
    bare = {name.removeprefix("module."): value for name, value in read_weights(path).items()}
    within = {f"model.{name}": value for name, value in bare.items()}  # a timm model, for our wrapper
    weights = max((bare, within), key=lambda tensors: len(tensors.keys() & own.keys()))
    other = {name for name in weights if name in own and weights[name].shape != own[name].shape}
    left = {n for n in weights if (new_head and n.startswith(heads)) or (n in other and n.endswith(".cache_MC"))}
    weights = {name: value for name, value in weights.items() if name not in left}
    other -= left
    for name in sorted(other):
        if name.startswith(heads):
            raise ValueError(
                f"{path} is of another number of classes: its {name} has {len(weights[name])} outputs, this model "
                f"{len(own[name])}; set training.new_head=true to begin with a new classifier, or train on the same "
                "classes"
            )
    fresh = sorted(set(own) - set(weights))
    allowed = heads if new_head else ()
    lacking = [n for n in fresh if not n.startswith(allowed) and ".memory." not in n and not n.endswith(".cache_MC")]
    wrong = {
        "of another shape": sorted(other),
        "unknown to this model": sorted(set(weights) - set(own)),
        "missing": lacking,
    }
    if any(wrong.values()):
        listed = "; ".join(f"{kind}: {', '.join(names[:3])} ({len(names)})" for kind, names in wrong.items() if names)
        raise ValueError(f"{path} holds weights of another model ({listed}); give the model its options")
    model.load_state_dict(shard_weights(model, {**own, **weights}))
    say(f"weights from {path}" + (f"; new: {len(fresh)} tensors ({', '.join(fresh[:3])}, ...)" if fresh else ""))


def read_weights(path: Path, option: str = "training.initial_weights") -> dict[str, Tensor]:
    """Return tensors by name from a run folder, a step folder, or a file, whose code is not run.

    Args:
        option: it names the path in messages.

    Raises:
        ValueError: there are none.
    """
    if (path / META).is_file():
        return read_checkpoint(path).weights
    if path.is_dir():
        return read_checkpoint(Checkpoints(path / "checkpoints").named("best")).weights
    if not path.is_file():
        raise ValueError(f"{option}={path}: there is no such file, run folder or step folder")
    try:
        if path.suffix == ".safetensors":
            content: Any = safetensors.torch.load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types of errors for foreign files
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{option}={path} cannot be read as weights: {reason}") from error
    for name in _INNER:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{option}={path} holds no weights by name")
    return dict(content)


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the classifier's parameters, from timm's configuration or by the usual names."""
    inner = getattr(model, "model", None)
    inside = "model." if isinstance(inner, nn.Module) and hasattr(inner, "pretrained_cfg") else ""
    told = getattr(inner if inside else model, "pretrained_cfg", None) or {}
    names = told.get("classifier") or _USUAL_HEADS
    return tuple(f"{inside}{name}." for name in ([names] if isinstance(names, str) else names))


@torch.no_grad()
def load_average(model: nn.Module, folder: Path, count: int) -> int:
    """Load the average of a run's newest scheduled checkpoints into a model; return the step of the newest.

    This is the average of translation papers (fairseq's average_checkpoints). Buffers are those of the newest: the
    gates of a step fit the cache of that step.

    Raises:
        ValueError: fewer than `count` checkpoints, one that is damaged, or one of another model.
    """
    if count < 1:
        raise ValueError(f"average={count} must be at least 1 checkpoint")
    paths = Checkpoints(folder / "checkpoints").scheduled()[-count:]
    if len(paths) < count:
        raise ValueError(
            f"{folder} has {len(paths)} scheduled checkpoints, so {count} cannot be averaged; train with "
            f"training.keep={count} or more"
        )
    buffers = {name for name, _ in model.named_buffers()}
    total: dict[str, Tensor] = {}
    for path in paths:
        newest = read_checkpoint(path)
        if total and newest.weights.keys() != total.keys():
            raise ValueError(f"{path} is of another model than {paths[0]}; average checkpoints of one run")
        for name, tensor in newest.weights.items():
            wide = tensor.double() if tensor.is_floating_point() else tensor
            total[name] = wide if name not in total or not wide.is_floating_point() else total[name] + wide
    weights: dict[str, Tensor] = {}
    for name, tensor in newest.weights.items():
        kept = not tensor.is_floating_point() or name in buffers
        weights[name] = tensor if kept else (total[name] / count).to(tensor.dtype)
    model.load_state_dict(weights)
    return newest.step
