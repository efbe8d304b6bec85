"""Follow a host's submodule by its path, so that a module that is swapped in later (PEFT, quantisation) is found."""

from __future__ import annotations

from typing import Any

from torch import nn

from cached_transformers.interfaces.memory import Weights
from cached_transformers.linear_maps import weights_of

from .hosts import Site


class TrackedModule:
    """A module of a host, known by its path: `follow` moves the hooks to the module that is there now.

    Args:
        root: the innermost module that holds both the module and the layer that calls it. path: from the root.
        on_input: gets the arguments of each call, and may return other ones, (args, kwargs).
        on_output: gets the output of each call, and may return another one.
        forward: replaces the module's forward, which it calls by `original`.
    """

    def __init__(
        self, root: nn.Module, path: str, *, on_input: Any = None, on_output: Any = None, forward: Any = None
    ) -> None:
        self.root, self.path, self.names = root, path, path.split(".")
        self.on_input, self.on_output, self.replacement = on_input, on_output, forward
        self.module: Any = None
        self.own: Any = None

    def follow(self) -> None:
        """Go to the module that is at the path now."""
        module: Any = self.root
        for name in self.names:
            module = module._modules.get(name) or getattr(module, name)  # `getattr` alone is slower
        if module is not self.module:
            self.uninstall()
            self.module = module
            self._install()

    def _install(self) -> None:
        self._remove_hooks()  # quantisation takes them along
        if self.on_output is not None:
            self.module.register_forward_hook(self._output_hook)
        if self.on_input is not None:
            self.module.register_forward_pre_hook(self._input_hook, with_kwargs=True)
        if self.replacement is not None:
            for inner in self.module.modules():  # a wrapper's copies of the module that was here
                if inner is not self.module and isinstance(_owner(inner), TrackedModule):
                    del inner.forward
            self.own = None if _owner(self.module) is self else vars(self.module).get("forward")
            self.module.forward = self._forward

    def uninstall(self) -> None:
        """Take the hooks and the forward out of the module."""
        if self.module is None:
            return
        self._remove_hooks()
        if _owner(self.module) is self:
            del self.module.forward
            if self.own is not None:
                self.module.forward = self.own

    def _remove_hooks(self) -> None:
        for hooks, ours in (
            (self.module._forward_hooks, self._output_hook),
            (self.module._forward_pre_hooks, self._input_hook),
        ):
            for key in [key for key, hook in hooks.items() if hook == ours]:
                del hooks[key]
                self.module._forward_pre_hooks_with_kwargs.pop(key, None)

    def _output_hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.on_output(output)

    def _input_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.on_input(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.replacement(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward without the replacement."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def weights(self) -> Weights:
        """Weight and bias of a plain linear map; None where another forward replaces its own."""
        return None if self.own is not None else weights_of(self.module)


def _owner(module: nn.Module) -> Any:
    """The object whose method replaces the module's forward."""
    return getattr(vars(module).get("forward"), "__self__", None)


def track(site: Site, module: nn.Module, **functions: Any) -> TrackedModule:
    """Track a module that a layer calls, or that is around it.

    Args:
        functions: `on_input`, `on_output`, `forward` of `TrackedModule`.

    Raises:
        ValueError: the model does not hold the module.
    """
    for levels in range(site.name.count(".") + 2):
        root = site.parent(levels) if levels else site.layer
        for path, found in root.named_modules(remove_duplicate=False):
            if found is module and path:
                return TrackedModule(root, path, **functions)
    raise ValueError(
        f"{site.name or type(site.layer).__name__}: its adapter names a {type(module).__name__} that is no part of the "
        "model; give Host the module that the layer calls, as `layer.out`"
    )
