"""Fingerprint of the weights that made a state: with other weights it is meaningless."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

WHOLE = 2**24
"""Largest number of hashed elements; a larger tensor is sampled evenly."""
ROUND = ("_orig_mod.", "module.")
"""Prefixes of torch.compile and DDP before the names of wrapped modules."""


def check_weights(made_by: str, model: nn.Module, source: str = "the state") -> None:
    """Refuse (ValueError) a state that was made with other weights, by the `fingerprint` of those that made it."""
    if made_by != fingerprint(model):
        raise ValueError(
            f"{source} was made with other weights than those of this {type(model).__name__}, to which it means "
            "nothing; load those, or read the text again"
        )


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """SHA-256 (hex) of the names, dtypes, shapes and values of a model's state dict, wherever they lie.

    A tensor with more than 16 million elements is sampled at about that many, evenly spread. An initial state that was
    tuned is a state, and not counted.

    Raises:
        ValueError: weights that are not here: on "meta" (offloaded), or cut up among processes.
    """
    digest = hashlib.sha256()
    for name, t in sorted(model.state_dict().items()):
        if "initial_state." in name or not isinstance(t, Tensor):
            continue
        for prefix in ROUND:
            name = name.removeprefix(prefix)
        if t.is_meta or hasattr(t, "full_tensor"):
            where = "offloaded" if t.is_meta else "cut up among processes"
            raise ValueError(
                f"{name} is {where}, so that the weights cannot be told from others; save and load the state without "
                "model=..., or take the model as it was before"
            )
        digest.update(f"{name} {t.dtype} {tuple(t.shape)} ".encode())
        flat = t.detach().reshape(-1)
        if flat.numel() > WHOLE:
            flat = flat[:: -(-flat.numel() // WHOLE)]
        digest.update(flat.contiguous().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()
