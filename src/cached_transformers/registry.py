"""Registries of parts by name, one per kind, filled by decorators.

A part is registered in its own file: importing `cached_transformers.memories` fills `MEMORIES`. Contract tests run over
all parts, and the command line and the documentation read the facts of a part (`info`) from its registration.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from .annotations import check_argument, check_type, checked, hints_of, shown
from .docstrings import meanings, spelt_out

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

STATED_BY_CLASS = ("needs", "can")
"""Facts that are attributes of the part's class."""
UNTOLD = ("dropout", "index", "facts", "store", "folder")
"""Options that leave the meaning of a state as it is."""


@dataclass(frozen=True)
class Registration(Generic[T]):
    """A registered part.

    Attributes:
        info: facts for `cached list`, `cached explain` and the documentation.
        probe: settings for probes (`interfaces.probing.Probing` of a memory), not shown.
        given: parameters that the model sets; see `Registry`.
        presets: named sets of options; `preset=NAME` sets them all.
    """

    name: str
    factory: Callable[..., T]
    paper: str | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    probe: Any = None
    given: tuple[str, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """First line of the factory's docstring."""
        return (inspect.getdoc(self.factory) or "").partition("\n")[0]

    @cached_property
    def options(self) -> dict[str, inspect.Parameter]:
        """Named parameters of the factory, without those in `**kwargs`."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {n: p for n, p in inspect.signature(self.factory).parameters.items() if p.kind in kinds}

    @cached_property
    def open_ended(self) -> bool:
        """True if the factory accepts unknown keywords (`**kwargs`)."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.factory).parameters.values())

    def build(self, *sizes: int, **chosen: Any) -> T:
        """Build a part with its `recipe`: name and options not at their defaults, which give its states a meaning."""
        made: Any = self.factory(*sizes, **chosen)
        given = {**dict(zip(self.options, sizes, strict=False)), **chosen}
        differ = {
            k: v for k, v in given.items() if k not in UNTOLD and v != getattr(self.options.get(k), "default", None)
        }
        told = json.dumps(differ, sort_keys=True, default=lambda v: getattr(v, "__qualname__", type(v).__name__))
        made.recipe = f"{self.name} {told}"
        return made

    def facts(self) -> dict[str, Any]:
        """Return the facts of `cached list` and `cached explain`, in JSON types.

        Returns:
            "name", "summary", "paper", "info", "stated" (attributes in `STATED_BY_CLASS`), "options" as lines
            `name: annotation = default`, "meanings" of options by name, "presets", and "open_ended".
        """
        settable = {name: option for name, option in self.options.items() if name not in self.given}
        stated = {key: getattr(self.factory, key, None) for key in STATED_BY_CLASS}
        in_order = {key: sorted(v) if isinstance(v, (set, frozenset)) else v for key, v in stated.items()}
        return {
            "name": self.name,
            "summary": self.summary,
            "paper": self.paper,
            "info": dict(self.info),
            "stated": {key: value for key, value in in_order.items() if value is not None},
            "options": [_option_line(option, self.factory) for option in settable.values()],
            "meanings": meanings(self.factory, settable),
            "presets": {name: dict(options) for name, options in self.presets.items()},
            "open_ended": self.open_ended,
        }


class Registry(Generic[T]):
    """Factories of one kind of part, by name.

    Args:
        kind: word for messages, e.g. "memory".
        given: parameters that the model sets, and users may not.
    """

    def __init__(self, kind: str, given: tuple[str, ...] = ()) -> None:
        self.kind, self.given = kind, given
        self._entries: dict[str, Registration[T]] = {}

    def register(
        self,
        name: str,
        *,
        paper: str | None = None,
        probe: Any = None,
        presets: Mapping[str, Mapping[str, Any]] | None = None,
        **info: Any,
    ) -> Callable[[F], F]:
        """Register a class or function under `name`, as a decorator; see `Registration` for the arguments.

        Calls of it are `checked`.

        Raises:
            ValueError: the name is taken.
        """

        def add(factory: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already, by {self._entries[name].factory!r}")
            factory = checked(factory)
            self._entries[name] = Registration(name, factory, paper, info, probe, self.given, presets or {})
            return factory

        return add

    def entry(self, name: str) -> Registration[T]:
        """Return the entry of a name (ValueError: unknown; the message suggests the nearest name)."""
        if not isinstance(name, str) or name not in self._entries:
            raise ValueError(unknown_name(self.kind, name, self.names()))
        return self._entries[name]

    def with_preset(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with their preset expanded (ValueError: there is no such preset)."""
        entry = self.entry(name)
        if "preset" not in options or "preset" in entry.options:
            return dict(options)
        chosen, presets = options["preset"], entry.presets
        if not presets:
            raise ValueError(f"{self.kind} {name!r} has no presets; leave out preset={shown(chosen)}")
        if chosen not in presets:
            raise ValueError(unknown_name(f"preset of {self.kind} {name!r}", chosen, list(presets)))
        return {**presets[chosen], **{key: value for key, value in options.items() if key != "preset"}}

    def check(self, name: str, options: Mapping[str, Any], path: str | None = None) -> None:
        """Check options of a part before it is built.

        Args:
            path: path of the options in a file or on a command line, for messages. If it is given, options that can
                only be set in code are refused.

        Raises:
            ValueError: an unknown option (with a suggestion), one that the model sets, or a value of another type.
        """
        entry = self.entry(name)
        known = [option for option in entry.options if option not in self.given]
        check, hints = check_argument if path is None else check_type, hints_of(entry.factory)
        for key, value in options.items():
            where = f"{path}.{key}" if path else str(key) if path is not None else f"{self.kind} {name!r}: {key}"
            if key in self.given:
                raise ValueError(f"{where}={shown(value)} is set by the model; leave it out")
            if not isinstance(key, str) or (key not in entry.options and not entry.open_ended):
                raise ValueError(unknown_name(f"option of {self.kind} {name!r}", key, known))
            check(where, value, hints.get(key, Any))

    def create(self, name: str, *args: Any, **kwargs: Any) -> T:
        """Build a part (ValueError: unknown name or option, or a missing option)."""
        self.check(name, kwargs)
        factory = self.entry(name).factory
        try:
            inspect.signature(factory).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{self.kind} {name!r} cannot be built from these options: {error}") from None
        return factory(*args, **kwargs)

    def import_files(self, package: str, path: Iterable[str]) -> dict[str, Callable[..., T]]:
        """Import every module of a package, and return the factories they registered, by class name."""
        for file in pkgutil.iter_modules(path):
            importlib.import_module(f"{package}.{file.name}")
        defined = [e.factory for e in self if e.factory.__module__.startswith(f"{package}.")]
        return {factory.__name__: factory for factory in defined}

    def names(self) -> list[str]:
        """Return the sorted names."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Registration[T]]:
        return iter(self._entries[n] for n in self.names())

    def __len__(self) -> int:
        return len(self._entries)


def _option_line(option: inspect.Parameter, factory: Callable[..., Any]) -> str:
    """Return name, annotation and default of an option as one line."""
    annotation = option.annotation
    if not isinstance(annotation, str):
        annotation = getattr(annotation, "__name__", str(annotation))
    kind = "" if option.annotation is option.empty else f": {spelt_out(annotation, factory)}"
    default = "   (required, or given by the model)" if option.default is option.empty else f" = {option.default!r}"
    return f"{option.name}{kind}{default}"


def unknown_name(kind: str, name: object, known: list[str]) -> str:
    """Return the message for an unknown name, with the nearest and all known names."""
    near = difflib.get_close_matches(str(name)[:100], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {shown(name)}{hint} (known: {', '.join(sorted(known)) or 'none'})"


MEMORIES: Registry[Any] = Registry("memory", given=("width", "heads", "depth", "index", "causal", "norm", "facts"))
ATTENTIONS: Registry[Any] = Registry("attention", given=("width", "heads", "depth", "index", "causal"))
MODELS: Registry[Any] = Registry("model")
