"""Add memories to models with adapters of PEFT. Imports nothing of PEFT.

An adapter freezes its model, and saves only its own weights and the modules that its config names in `modules_to_save`.
A memory that is added later becomes one of these.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from .memory_lookup import holders, memory_of

NAME = "memory"
"""Name of a memory among the children of its layer, and in `modules_to_save`."""


def host_of(model: nn.Module) -> nn.Module:
    """The model that is to get the memory: `model`, or the one inside of a PeftModel.

    Raises:
        ValueError: its layers hold adapters that would not save the memory.
    """
    if _is(model, "peft.peft_model", "PeftModel"):
        peft_model: Any = model
        for name, config in peft_model.peft_config.items():
            if not hasattr(config, "modules_to_save"):
                raise ValueError(
                    f"the adapter {name!r} is a {type(config).__name__}, which has no modules_to_save and would not "
                    "save a memory; call add_memory before PEFT, and save its weights yourself"
                )
        host: nn.Module = peft_model.get_base_model()
        return host
    if names := adapters_of(model):
        raise ValueError(
            f"{type(model).__name__} holds adapters of PEFT ({names[0]} is a "
            f"{type(model.get_submodule(names[0])).__name__}), which would not save a memory added later; give "
            "add_memory the PeftModel, or add the memory before the adapters, with modules_to_save=['memory'] in their "
            "config"
        )
    return model


def adapters_of(model: nn.Module) -> list[str]:
    """Return the names of modules that adapters of PEFT have replaced, of any kind."""
    found = model.named_modules()
    return [name for name, module in found if _is(module, "peft.tuners.tuners_utils", "BaseTunerLayer")]


def give_to_adapters(peft_model: Any, host: nn.Module) -> None:
    """Let each adapter of a model train and save its memories, in PEFT's way: a copy for each adapter, and the memory
    itself while none is active."""
    wrapper_class = importlib.import_module("peft.utils").ModulesToSaveWrapper
    names, active = list(peft_model.peft_config), peft_model.active_adapters[0]
    for holder in holders(host):
        wrapper = wrapper_class(holder.memory, names[0])
        for name in names[1:]:
            wrapper.update(name)
        wrapper.set_adapter(active)
        if peft_model.peft_config[active].inference_mode:
            wrapper.requires_grad_(False)
        holder.memory = wrapper
    for config in peft_model.peft_config.values():
        config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or ()), NAME]))


def inside_of(model: Any) -> nn.Module:
    """The model inside of a PeftModel; any other as it is."""
    inner: nn.Module = model.get_base_model() if _is(model, "peft.peft_model", "PeftModel") else model
    return inner


def take_from_adapters(model: Any) -> None:
    """Undo `give_to_adapters` in the adapters' configs."""
    for config in getattr(model, "peft_config", {}).values():
        names = [name for name in getattr(config, "modules_to_save", None) or () if name != NAME]
        config.modules_to_save = names or None


def refuse_unsaved(model: Any, adapted: bool) -> None:
    """Refuse (ValueError) to save a host without its trained memory: if the memory is one of a PeftModel's copies, or,
    for an `adapted` host (by transformers' `add_adapter`), beside its adapters."""
    if adapted:
        saved = {t.data_ptr() for t in model.get_adapter_state_dict().values()}
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and ".memory." in f".{name}"]
        lost = [name for name, parameter in trained if parameter.data_ptr() not in saved]
        way_out = "give the adapter's config modules_to_save=['memory'], or save model.state_dict()"
    else:
        lost = [type(h.memory).__name__ for h in holders(model) if memory_of(h) is not h.memory]
        way_out = "save the PeftModel, or merge first by a method that takes its adapters out of the model"
    if lost:
        raise ValueError(f"save_pretrained would not save the memory that trained ({lost[0]}); {way_out}")


def load_with_memory(load: Callable[..., Any]) -> Callable[..., Any]:
    """A class's `load_adapter`, with a ValueError where the model lacks the memory that the adapter saved."""

    @functools.wraps(load)
    def load_adapter(self: Any, *args: Any, **options: Any) -> Any:
        result, names = load(self, *args, **options), {name.rpartition(".")[2] for name, _ in self.named_modules()}
        for config in self.peft_config.values():
            if NAME in (getattr(config, "modules_to_save", None) or ()) and NAME not in names:
                raise ValueError(
                    f"modules_to_save={config.modules_to_save}: the adapter has a memory, {type(self).__name__} none; "
                    "load the base by load_pretrained, or by from_pretrained and add_memory with the same options, "
                    "then call PeftModel.from_pretrained(base, folder)"
                )
        return result

    return load_adapter


def patch_adapters() -> None:
    """Let PEFT load no adapter without the memory that it saved."""
    kind = importlib.import_module("peft.peft_model").PeftModel
    kind.load_adapter = load_with_memory(kind.load_adapter)


def _is(module: nn.Module, where: str, name: str) -> bool:
    """Return True for a module of this class of PEFT, which may not be installed."""
    return any(kind.__module__ == where and kind.__qualname__ == name for kind in type(module).__mro__)
