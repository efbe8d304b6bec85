"""Find the weights of a memory that accelerate offloads or FSDP shards.

accelerate loads a module's weights when its forward is called. The weights of a memory are used by its other methods.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")


def like_weights(module: nn.Module, place: nn.Module | None = None) -> Tensor:
    """A plain tensor of the dtype that a module computes with, on the device of `place`, as a template for states.

    The weights themselves may be sharded (a DTensor, which the state must not be) or on "meta".

    Args:
        place: the module that gives the device, if it has parameters (packed weights are none); None for the same one.
    """
    weight = next((place or module).parameters(), None)
    if weight is None:
        place, weight = None, next(module.parameters())
    device: Any = weight.device
    if device.type == "meta":
        hook = next((m._hf_hook for m in (place or module).modules() if hasattr(m, "_hf_hook")), None)
        device = getattr(hook, "execution_device", None)
        device = weight.device if device is None else device
    return torch.empty(0, dtype=next(module.parameters()).dtype, device=device)


def with_weights(memory: nn.Module, call: Callable[..., Result], *args: Any) -> Result:
    """The call's result, with the memory's weights loaded during the call."""
    if torch.compiler.is_compiling():
        return call(*args)
    hooks: list[tuple[Any, Any]] = [(m, m._hf_hook) for m in memory.modules() if hasattr(m, "_hf_hook")]
    if not hooks:
        return call(*args)
    idle = importlib.import_module("accelerate.hooks").ModelHook  # there, since the hooks are its own
    for module, hook in hooks:
        hook.pre_forward(module)
        module._hf_hook = idle()  # does nothing: a forward within the call would offload the weights again
    try:
        return call(*args)
    finally:
        for module, hook in hooks:
            module._hf_hook = hook
            hook.post_forward(module, None)
