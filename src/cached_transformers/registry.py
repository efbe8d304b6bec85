"""Names for parts: one `Registry` per kind, filled by decorators, listed with wildcards.

A part is registered where it is defined (one file, one decorator), and the contract tests run over everything that is
registered. A registry imports nothing by itself: importing `cached_transformers.memories` fills `MEMORIES`, and so on.
What is said of a part beside its docstring (`info`) is said here once: the command line, the README and the pages of
the documentation read it.
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .annotations import check_type, hints_of, shown
from .docstrings import meanings, spelt_out

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

STATED_BY_CLASS = ("needs", "can")
"""Facts that a part's class states, for all that use it, and not its registration for readers alone."""


@dataclass(frozen=True)
class Registration(Generic[T]):
    """One registered part.

    Attributes:
        info: facts in words, which `cached list`, `cached explain` and the documentation show.
        probe: how the part is probed, where its file says so (`seam.probing.Probing` of a memory); nobody shows it.
        given: parameters of the factory that are no user's to set; see `Registry`.
        presets: options that go together, by a name that says what for; `preset=NAME` sets them all.
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

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """Named parameters of the factory; parameters of `**kwargs` are not among them."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {n: p for n, p in inspect.signature(self.factory).parameters.items() if p.kind in kinds}

    @property
    def open_ended(self) -> bool:
        """Whether the factory passes unknown keywords on (`**kwargs`) instead of refusing them."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.factory).parameters.values())

    def facts(self) -> dict[str, Any]:
        """All that `cached list` and `cached explain` say, of values that JSON has.

        Returns:
            "name", "summary", "paper", "info" (of the registration), "stated" (`STATED_BY_CLASS`, those that there
            are), "options" that users set as lines `name: annotation = default`, "meanings" of options by name,
            "presets", and "open_ended".
        """
        settable = {name: option for name, option in self.options.items() if name not in self.given}
        stated = {key: getattr(self.factory, key, None) for key in STATED_BY_CLASS}
        return {
            "name": self.name,
            "summary": self.summary,
            "paper": self.paper,
            "info": dict(self.info),
            "stated": {
                key: sorted(value) if isinstance(value, (set, frozenset)) else value
                for key, value in stated.items()
                if value is not None
            },
            "options": [_option_line(option, self.factory) for option in settable.values()],
            "meanings": meanings(self.factory, settable),
            "presets": {name: dict(options) for name, options in self.presets.items()},
            "open_ended": self.open_ended,
        }


class Registry(Generic[T]):
    """Maps names to factories of one kind of part.

    Args:
        kind: the word used in messages, e.g. "memory".
        given: parameters that the model gives to every part of the kind, and no user sets.
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
        """Decorator that registers a class or function under `name`, with what an `Registration` says about it.

        Raises:
            ValueError: the name is taken.
        """

        def add(factory: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered already, by {self._entries[name].factory!r}")
            self._entries[name] = Registration(name, factory, paper, info, probe, self.given, presets or {})
            return factory

        return add

    def entry(self, name: str) -> Registration[T]:
        """The entry called `name`.

        Raises:
            ValueError: there is none; the message suggests the nearest name and lists all.
        """
        if not isinstance(name, str) or name not in self._entries:
            raise ValueError(unknown_name(self.kind, name, self.names()))
        return self._entries[name]

    def with_preset(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, with those of the preset that they name, which they override.

        Raises:
            ValueError: the part has no such preset.
        """
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
        """Refuse what a user may not set of the part called `name`, before it is built.

        Args:
            path: where options stand that a file or a command line gave, for messages; their values are then checked
                against the annotations of the factory.

        Raises:
            ValueError: an option that the factory does not take (with a suggestion) or that the model gives, or a value
                of another type.
        """
        entry = self.entry(name)
        known = [option for option in entry.options if option not in self.given]
        hints = {} if path is None else hints_of(entry.factory)
        for key, value in options.items():
            where = f"{path}.{key}" if path else str(key) if path is not None else f"{self.kind} {name!r}: {key}"
            if key in self.given:
                raise ValueError(f"{where}={shown(value)} is what the model says; leave it out")
            if not isinstance(key, str) or (key not in entry.options and not entry.open_ended):
                raise ValueError(unknown_name(f"option of {self.kind} {name!r}", key, known))
            check_type(where, value, hints.get(key, Any))

    def create(self, name: str, *args: Any, **kwargs: Any) -> T:
        """Build the part called `name`; what is unknown is refused with a suggestion, and what is missing named."""
        self.check(name, kwargs)
        factory = self.entry(name).factory
        try:
            inspect.signature(factory).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{self.kind} {name!r} cannot be made of these options: {error}") from None
        return factory(*args, **kwargs)

    def import_files(self, package: str, path: Iterable[str]) -> dict[str, Callable[..., T]]:
        """Import every file and folder of a package, and give what they registered, by the names of the classes."""
        for file in pkgutil.iter_modules(path):
            importlib.import_module(f"{package}.{file.name}")
        defined = [e.factory for e in self if e.factory.__module__.startswith(f"{package}.")]
        return {factory.__name__: factory for factory in defined}

    def names(self, pattern: str = "*") -> list[str]:
        """Sorted names that match a wildcard pattern."""
        return sorted(n for n in self._entries if fnmatch.fnmatchcase(n, pattern))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Registration[T]]:
        return iter(self._entries[n] for n in self.names())

    def __len__(self) -> int:
        return len(self._entries)


def _option_line(option: inspect.Parameter, factory: Callable[..., Any]) -> str:
    """Name, annotation and default of one option."""
    annotation = option.annotation
    if not isinstance(annotation, str):
        annotation = getattr(annotation, "__name__", str(annotation))
    kind = "" if option.annotation is option.empty else f": {spelt_out(annotation, factory)}"
    default = "   (required, or given by the model)" if option.default is option.empty else f" = {option.default!r}"
    return f"{option.name}{kind}{default}"


def unknown_name(kind: str, name: object, known: list[str]) -> str:
    """Message for a name that does not exist: the nearest one, and all of them."""
    near = difflib.get_close_matches(str(name)[:100], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {shown(name)}{hint} (known: {', '.join(sorted(known)) or 'none'})"


MEMORIES: Registry[Any] = Registry("memory", given=("width", "heads", "depth", "index", "causal", "norm", "facts"))
ATTENTIONS: Registry[Any] = Registry("attention", given=("width", "heads", "depth", "index", "causal"))
MODELS: Registry[Any] = Registry("model")
