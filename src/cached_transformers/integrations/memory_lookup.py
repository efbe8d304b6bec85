"""Find the memory that a layer has at the moment, and its weights; refuse to train a model around one that is frozen.

accelerate, which offloads weights, loads those of a module when its forward is called. The weights of a memory are used
by its other methods.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, Memory, ModelMemory

Result = TypeVar("Result")
WAY_OUT = (
    "with PEFT, give the adapter's config modules_to_save=['memory'], or add_memory the PeftModel; otherwise set "
    "requires_grad of its parameters, or load trained weights first"
)


def memory_of(holder: Any) -> LayerMemory | ModelMemory:
    """The memory that a layer, or a decoder, has now; of the copies that PEFT keeps, the active one (ValueError: the
    call gives PEFT another adapter for each row)."""
    memory = holder.memory
    if isinstance(memory, Memory):
        return memory  # type: ignore[return-value]
    if any("adapter_names" in getattr(hook, "keywords", {}) for hook in memory._forward_pre_hooks.values()):
        raise ValueError("adapter_names: rows share the active adapter's memory; call the model once for each adapter")
    active: LayerMemory | ModelMemory = memory.init_state.__self__  # a wrapper passes such names on
    return active


def holders(model: nn.Module) -> list[Any]:
    """The layers and decoders of a model that were given a memory."""
    return [m for m in model.modules() if "uninstall_memory" in vars(m) and "memory" in m._modules]


class FreshMemory:
    """Marks a memory of a model, whose weights are as initialised until it trains or is loaded."""

    def __init__(self, model: nn.Module, memory: nn.Module) -> None:
        self.model, self.fresh = model, True
        linear = {n: m for n, m in memory.named_modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
        self.maps = tuple(f"{name}." for name in linear)

    def __deepcopy__(self, memo: dict[int, Any]) -> FreshMemory:
        """A copy of only the memory still belongs to the same model."""
        copied = copy.copy(self)
        copied.model = memo.get(id(self.model), self.model)
        return copied


def mark_fresh(model: nn.Module) -> None:
    """Mark all memories that a model was just given."""
    for holder in holders(model):
        if not hasattr(holder.memory, "weight"):
            holder.memory.weight = None  # PEFT, merging, copies the weight of each module that it saves
        if next(holder.memory.parameters(), None) is not None:
            holder.memory.fresh_memory = FreshMemory(model, holder.memory)
            holder.memory.register_load_state_dict_pre_hook(_loaded)


def _loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if any(name.startswith(prefix) for name in state_dict):
        module.fresh_memory.fresh = False  # type: ignore[union-attr]


def refuse_frozen(memory: nn.Module, given: Tensor | None) -> None:
    """Refuse to train a model around memories that would remain as initialised: that neither trained nor were loaded.

    One memory of the model must train, and each linear map of a memory that trains, by itself or by an adapter. A model
    trains if a parameter of it does, or if its input `given` needs a gradient, as with prompt tuning.

    Raises:
        ValueError: the model trains, and its new memories do not.
    """
    mark: FreshMemory | None = vars(memory).get("fresh_memory")
    if mark is None or not memory.training or not torch.is_grad_enabled():
        return
    if not (torch.compiler.is_compiling() or mark.fresh):  # `fresh` changes, and would have code compiled again
        return
    trained = [name for name, parameter in memory.named_parameters() if parameter.requires_grad]
    if trained:
        frozen = [m for m in mark.maps if not any(name.startswith(m) for name in trained)]
        if frozen and mark.fresh:
            raise ValueError(
                f"memory {type(memory).__name__} was just added; its {trained[0]} is trained, but "
                f"{', '.join(m[:-1] for m in frozen)} are frozen (requires_grad=False) as initialised; {WAY_OUT}"
            )
        mark.fresh = False
        return
    trained = [name for name, parameter in mark.model.named_parameters() if parameter.requires_grad]
    trains = trained or (given is not None and given.requires_grad)
    if trains and mark.fresh and not any(".memory." in f".{name}" for name in trained):
        names = [name or "the model" for name, m in mark.model.named_modules() if m in holders(mark.model)]
        raise ValueError(
            f"memory {type(memory).__name__} was just added to {', '.join(names)}, and all its parameters are frozen "
            f"(requires_grad=False), so that it would remain as initialised; {WAY_OUT}"
        )


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
    """The call's result, with the memory's weights loaded during the call (ValueError: adapters around its norms)."""
    if torch.compiler.is_compiling():
        return call(*args)
    try:
        return _with_loaded(memory, call, *args)
    except AttributeError as error:
        for name, module in memory.named_modules():
            if hasattr(module, "get_base_layer") and not isinstance(module.get_base_layer(), nn.Linear):
                way_out = "leave it out of the adapter's target_modules, or give modules_to_save=['memory']"
                raise ValueError(f"{name}: the memory cannot read a {type(module).__name__}; {way_out}") from error
        raise


def _with_loaded(memory: nn.Module, call: Callable[..., Result], *args: Any) -> Result:
    # By attributes, since this runs twice a layer at each token: `modules()` and `hasattr` are slower.
    inside: list[nn.Module] = [memory]
    for module in inside:
        inside += [child for child in module._modules.values() if child is not None]
    if not any("_hf_hook" in module.__dict__ for module in inside):
        return call(*args)
    hooks: list[tuple[Any, Any]] = [(m, vars(m)["_hf_hook"]) for m in memory.modules() if "_hf_hook" in vars(m)]
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
