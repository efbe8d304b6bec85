"""YAML text to nested dictionaries, dotted overrides on them, and the same trees flattened to dotted keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads `1e-3` as a number (YAML 1.1 does not) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """The value that a YAML text holds; `source` names it in error messages.

    Raises:
        ValueError: not YAML; the message gives line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in nested mappings; the value is YAML (`3`, `1e-4`, `true`, `null`, `[1, 2]`).

    A part given by its bare name opens up: `model.memory.ratio=1` turns `memory: grc` into `{name: grc, ratio: 1}`.

    Raises:
        ValueError: no `=`, an empty key, or a path that leads through a value that is not a section.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"{override!r} is not of the form key=value, for example training.steps=100")
    node = tree
    for depth, part in enumerate(parts[:-1], 1):
        child = node.setdefault(part, {})
        if isinstance(child, str):
            child = node[part] = {"name": child}
        if not isinstance(child, dict):
            path = ".".join(parts[:depth])
            raise ValueError(f"{override!r}: {path} is {child!r}, which has no options; set {path} (or its name) first")
        node = child
    node[parts[-1]] = parse_yaml(text, f"the value of {key.strip()}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one dictionary with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
