"""Where a module of a host stands, and perhaps another one tomorrow.

Others treat a model as theirs: adapters wrap a module, quantisation exchanges it, somebody sets an attribute. What we
put into one would go with it. So we know it by its place in the host, look there at each call, and follow to the
outermost module that stands there now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from cached_transformers.interfaces.memory import Weights
from cached_transformers.linear_maps import weights_of

from .hosts import Site


class Spot:
    """The place of a module in a host.

    Args:
        root: the innermost module that holds both the place and what comes by there. path: from the root.
    """

    def __init__(self, root: nn.Module, path: str) -> None:
        self.root, self.path = root, path
        self.module: Any = None

    def follow(self) -> None:
        """Go to the module that stands here now."""
        module = self.root.get_submodule(self.path)
        if module is not self.module:
            self.leave()
            self.module = module
            self.enter()

    def enter(self) -> None:
        """Put in what belongs here."""
        raise NotImplementedError("abstract: a spot says what it does with its module")

    def leave(self) -> None:
        """Take it out of the module, and of what was made of the module since."""
        raise NotImplementedError("abstract: a spot says how it leaves its module")


class StandIn(Spot):
    """A function in the place of a module's forward, which it calls by `original`."""

    def __init__(self, root: nn.Module, path: str, function: Callable[..., Any]) -> None:
        super().__init__(root, path)
        self.function = function
        self.own: Any = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward now."""
        return self.function(*args, **kwargs)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward as others have left it."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def weights(self) -> Weights:
        """Weight and bias of a plain linear map; hooks see it called as ever."""
        return None if self.own is not None else weights_of(self.module)

    def enter(self) -> None:
        for inner in self.module.modules():  # a wrapper's copies of the module that stood here are ours no more
            if inner is not self.module and isinstance(_owner(inner), StandIn):
                del inner.forward
        self.own = None if _owner(self.module) is self else vars(self.module).get("forward")
        self.module.forward = self.call

    def leave(self) -> None:
        if self.module is None or _owner(self.module) is not self:
            return
        del self.module.forward
        if self.own is not None:
            self.module.forward = self.own


class Place(Spot):
    """A module that is called where it stands, and nothing more."""

    def enter(self) -> None:
        pass

    def leave(self) -> None:
        pass


class Listener(Spot):
    """A function that hears each output of a module, and perhaps one that hears what it is called with, and may give
    other arguments, (args, kwargs), for it."""

    def __init__(
        self,
        root: nn.Module,
        path: str,
        function: Callable[..., None],
        before: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(root, path)
        self.function, self.before = function, before

    def hear(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the module."""
        self.function(output)

    def hear_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the module."""
        assert self.before is not None
        return self.before(*args, **kwargs)

    def enter(self) -> None:
        self.leave()  # quantisation takes the hooks along
        self.module.register_forward_hook(self.hear)
        if self.before is not None:
            self.module.register_forward_pre_hook(self.hear_call, with_kwargs=True)

    def leave(self) -> None:
        if self.module is None:
            return
        for hooks, ours in (
            (self.module._forward_hooks, self.hear),
            (self.module._forward_pre_hooks, self.hear_call),
        ):
            for key in [key for key, hook in hooks.items() if hook == ours]:
                del hooks[key]
                self.module._forward_pre_hooks_with_kwargs.pop(key, None)


def _owner(module: nn.Module) -> Any:
    """Whose method stands in the place of the module's forward."""
    return getattr(vars(module).get("forward"), "__self__", None)


def root_of(site: Site, module: nn.Module) -> tuple[nn.Module, str]:
    """The innermost module that holds both a layer and another module, and the latter's path in it.

    Raises:
        ValueError: the model does not hold it.
    """
    for levels in range(site.name.count(".") + 2):
        root = site.parent(levels) if levels else site.layer
        for path, found in root.named_modules(remove_duplicate=False):
            if found is module and path:
                return root, path
    raise ValueError(
        f"{site.name or type(site.layer).__name__}: its adapter names a {type(module).__name__} that is no part of the "
        "model; give Host the module that the layer calls, as `layer.out`"
    )
