"""Configuration of a run: sections with checked types, and their YAML.

`training`, `optimizer`, `schedule` and `evaluation` are frozen dataclasses; `data` and `model` are
`{name: ..., **options}`, which `tasks.recipes` checks against the registries.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from cached_lab.yaml_tree import flatten
from cached_transformers.annotations import check_type, shown
from cached_transformers.registry import unknown_name

from .optim import OptimizerConfig, ScheduleConfig
from .settings import EvaluationConfig, TrainingConfig

D = TypeVar("D")

_FREE = ("steps", "log_every", "save", "save_every", "keep", "tensorboard", "workers", "device", "parallel")
MAY_DIFFER = ("name", "description", *(f"training.{option}" for option in _FREE))
"""Keys that may change when a run is resumed: they do not change what is learned by a step."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    data: dict[str, Any]
    model: dict[str, Any]
    name: str = "run"
    description: str = ""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.+=-]+", self.name):
            raise ValueError(
                f"name={shown(self.name)} becomes a folder: use letters, digits and the characters _ . + = -"
            )


def build_config(tree: Mapping[str, Any]) -> RunConfig:
    """Build a `RunConfig` from nested mappings; `tasks.recipes` checks the names and options of parts.

    Raises:
        ValueError: unknown key, wrong type, missing section, or values that contradict one another.
    """
    for section in ("data", "model"):
        if section not in tree:
            raise ValueError(f"section {section!r} is missing; give it as {section}: {{name: ...}}")
    return _build(RunConfig, tree, "")


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Return nested plain dictionaries for YAML or JSON."""
    order = ("name", "description", "data", "model", "training", "optimizer", "schedule", "evaluation")
    tree = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists, as they do in a file
    return {key: tree[key] for key in order}


def config_to_yaml(config: RunConfig) -> str:
    """Return YAML text that `tasks.recipes.load_config` reads back."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def config_hash(config: RunConfig) -> str:
    """Return the SHA-256 of the configuration without the keys in `MAY_DIFFER`."""
    kept = {k: v for k, v in flatten(config_to_dict(config)).items() if k not in MAY_DIFFER}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Add options that a stored configuration lacks, at their defaults; return it unchanged if it cannot be read."""
    try:
        return config_to_dict(build_config(tree))
    except ValueError:
        return tree


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` for every key that differs and may not."""
    left, right = flatten(old), flatten(new)
    keys = [k for k in {**left, **right} if left.get(k) != right.get(k) and k not in MAY_DIFFER]
    return [f"{k}: {left.get(k, '(absent)')!r} -> {right.get(k, '(absent)')!r}" for k in keys]


def _build(cls: type[D], tree: Any, path: str) -> D:
    """Build a dataclass from a mapping; `path` is the dotted prefix for messages."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path.rstrip('.') or 'the configuration'}={shown(tree)} must be a mapping of options")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            known = [f"{path}{name}" for name in hints]
            inner = {own: f"{name}.{own}" for name in hints for own in getattr(hints[name], "__annotations__", ())}
            near = "".join(f"; is it {inner[own]}?" for own in difflib.get_close_matches(str(key), inner, 1))
            raise ValueError(unknown_name("key", f"{path}{key}", known) + near)
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(typing.cast(type, hints[key]), value, f"{path}{key}.")
        else:
            values[key] = check_type(f"{path}{key}", value, hints[key])
    return cls(**values)
