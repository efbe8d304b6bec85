"""What is done when another library is imported, whoever imports it and in whatever order."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Finds one module as Python would, and has something done before and behind its code.

    Asking whether the module is installed (`importlib.util.find_spec`) does nothing yet.
    """

    def __init__(self, name: str, before: Callable[[], object] | None, after: Callable[[], object] | None) -> None:
        self.name, self.before, self.after = name, before, after
        self.asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for every other module, which is then looked for as ever."""
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
    """Have `before` and `after` called round the import of a module; `after` at once where it is imported already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, ImportHook(name, before, after))
    elif after is not None:
        after()
