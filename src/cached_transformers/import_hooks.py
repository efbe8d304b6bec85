"""Hooks that run before and after the import of another library."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Finder that wraps the loader of one module; `importlib.util.find_spec` alone runs no hook."""

    def __init__(self, name: str, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        self.name, self.before, self.after = name, before, after
        self.asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the wrapped spec of the module; None for other modules."""
        if name != self.name or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if self.before is not None:
                self.before()
            execute(module)
            if self.after is not None:
                self.after()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def on_import(
    name: str, *, before: Callable[[], object] | None = None, after: Callable[[], object] | None = None
) -> None:
    """Call `before` and `after` around the import of a module; call `after` now if it is imported already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, ImportHook(name, before, after))
    elif after is not None:
        after()
