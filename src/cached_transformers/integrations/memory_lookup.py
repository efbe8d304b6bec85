"""Which memory a layer has at this moment, and whether it may be frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cached_transformers.interfaces.memory import LayerMemory, ModelMemory


def memory_of(holder: Any) -> LayerMemory | ModelMemory:
    """The memory that a layer, or a decoder, has now: of the copies that PEFT keeps, the active one.

    Raises:
        ValueError: PEFT was told to take another adapter for each row.
    """
    memory = holder.memory
    if isinstance(memory, LayerMemory | ModelMemory):
        return memory
    if any("adapter_names" in getattr(hook, "keywords", {}) for hook in memory._forward_pre_hooks.values()):
        raise ValueError(
            "adapter_names: the rows of one call share a memory, which is that of the active adapter; call the model "
            "once for each adapter, behind set_adapter"
        )
    active: LayerMemory | ModelMemory = memory.init_state.__self__  # a wrapper hands such names on
    return active


def holders(model: nn.Module) -> list[Any]:
    """The layers and decoders of a model that were given a memory."""
    return [m for m in model.modules() if "memory_detach" in vars(m) and "memory" in m._modules]


class Drawn:
    """Notes that a memory's weights are as they were drawn, until it trains or is loaded.

    Args:
        model: that the memory is part of. silent: where its maps stand that are zero as drawn (`silent_maps`).
    """

    def __init__(self, model: nn.Module, silent: tuple[str, ...] = ()) -> None:
        self.model, self.silent, self.fresh = model, silent, True

    def __deepcopy__(self, memo: dict[int, Any]) -> Drawn:
        """A copy of the memory alone is still part of the same model."""
        copied = Drawn(memo.get(id(self.model), self.model), self.silent)
        copied.fresh = self.fresh
        return copied


def silent_maps(memory: nn.Module) -> tuple[str, ...]:
    """How the names of parameters begin that stand beside a matrix of zeros, or in adapters round it: as long as it is
    that, what the memory holds shows nowhere."""
    zeros = [name for name, p in memory.named_parameters() if p.dim() > 1 and not p.is_meta and not p.any()]
    return tuple(name.rpartition(".")[0] + "." if "." in name else name for name in zeros)


def mark_drawn(model: nn.Module) -> None:
    """Note of all memories that a model was just given that they are new."""
    for holder in holders(model):
        if next(holder.memory.parameters(), None) is not None:
            holder.memory.drawn = Drawn(model, silent_maps(holder.memory))
            holder.memory.register_load_state_dict_pre_hook(_loaded)


def _loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if any(name.startswith(prefix) for name in state_dict):
        module.drawn.fresh = False  # type: ignore[union-attr]


def refuse_frozen(memory: nn.Module) -> None:
    """Refuse to train a model round a memory that would stay as it was drawn.

    Raises:
        ValueError: the model trains, and of a memory that never trained and was not loaded, nothing does, or none of
            the maps that are zero.
    """
    drawn: Drawn | None = vars(memory).get("drawn")
    if drawn is None or not memory.training or not torch.is_grad_enabled():
        return
    trained = [name for name, parameter in memory.named_parameters() if parameter.requires_grad]
    if trained:
        # What is asked last changes, and would have code compiled again.
        if drawn.silent and not any(name.startswith(drawn.silent) for name in trained) and drawn.fresh:
            zero = drawn.silent[0].rstrip(".")
            raise ValueError(
                f"memory {type(memory).__name__} was just added, and of it {trained[0]} is trained, but not {zero}, "
                "whose matrix is zero and frozen (requires_grad=False), so that nothing would be read; with PEFT, give "
                "the adapter's config modules_to_save=['memory'], or target_modules that name both; else set "
                "requires_grad of all its parameters, or load trained weights first"
            )
        drawn.fresh = False
    elif drawn.fresh and any(parameter.requires_grad for parameter in drawn.model.parameters()):
        raise ValueError(
            f"memory {type(memory).__name__} was just added, and its parameters are frozen (requires_grad=False), so "
            "that it would stay as it was drawn; with PEFT, give the adapter's config modules_to_save=['memory'], or "
            "add_memory the PeftModel; else set requires_grad of its parameters, or load trained weights first"
        )
