"""YAML recipes as nested dictionaries, with dotted overrides.

Recipes contain the types of JSON only: dates stay text, and other tags are refused, so that everything can be written
again. (OmegaConf would interpolate `${...}` in text, and would be one more dependency.)
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from cached_transformers.annotations import is_plain, shown

LONGEST = 1_000_000
"""Largest number of characters; recipes have up to 4,000."""
DEEPEST = 50
"""Deepest nesting of an override."""


class _Loader(yaml.SafeLoader):
    """Safe loader that reads `1e-3` as a number, unlike YAML 1.1, and refuses duplicate keys and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _refused("aliases are not read; repeat the value", self.peek_event())
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            raise _refused(f"tag {node.tag!r} is not supported; give text, a number or a list", node)
        try:
            value = super().construct_object(node, deep)
        except (KeyError, ValueError, IndexError, OverflowError, TypeError):  # `!!bool x`, `!!int x`, 5,000 digits
            raise _refused(f"{shown(node.value)} is no {node.tag.rpartition(':')[2]}", node) from None
        if isinstance(value, str) and not is_plain(value):
            raise _refused(f"{shown(value)} has a null character or a lone surrogate; remove it", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise _refused(f"{shown(node.value)} is no mapping", node)
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise _refused(f"{shown(key)} cannot be a key; give a name", key_node)
            if key in seen:
                raise _refused(f"key {shown(key)} is given twice", node)
            seen.add(key)
        return super().construct_mapping(node, deep)


_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text; `source` names it in messages.

    Raises:
        ValueError: not YAML, with line and column; or too large or too deep.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{source} has {len(text):,} characters, at most {LONGEST:,} are read; is it a recipe?")
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{source} nests lists or mappings too deeply; write it flatter") from None


def read_yaml(path: Any) -> Any:
    """Return the value of a YAML file (ValueError: see `parse_yaml`, or it is not UTF-8)."""
    size = path.stat().st_size
    if size > 4 * LONGEST:  # at most 4 bytes per character
        raise ValueError(f"{path} has {size:,} bytes, at most {LONGEST:,} characters are read; is it a recipe?")
    content = path.read_bytes()
    try:
        return parse_yaml(content.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        found = "UTF-16, not UTF-8" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else f"not UTF-8 (byte {error.start})"
        raise ValueError(f"{path} is {found}; convert it") from None


def _refused(why: str, node: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, why, node.start_mark)


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value` in nested mappings; the value is YAML (`3`, `1e-4`, `true`, `null`, `[1, 2]`).

    A bare name becomes a section: `model.memory.ratio=1` turns `memory: grc` into `{name: grc, ratio: 1}`.

    Raises:
        ValueError: no `=`, an empty key, or a path through a value that is not a section.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or not is_plain(key):
        raise ValueError(f"{shown(override)} is not of the form key=value, for example training.steps=100")
    if len(parts) > DEEPEST:
        raise ValueError(f"{shown(override)} has {len(parts)} nested keys; no option is so deep")
    node = tree
    for depth, part in enumerate(parts[:-1], 1):
        child = node.setdefault(part, {})
        if isinstance(child, str):
            child = node[part] = {"name": child}
        if not isinstance(child, dict):
            path = ".".join(parts[:depth])
            raise ValueError(
                f"{shown(override)}: {path} is {shown(child)}, which has no options; set {path} (or its name) first"
            )
        node = child
    node[parts[-1]] = parse_yaml(text, f"the value of {shown(key.strip())[1:-1]}")


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one dictionary with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
