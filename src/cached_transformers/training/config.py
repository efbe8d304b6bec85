"""Configuration of a run: YAML in and out, dotted overrides, and checks that name the value, the rule and the way out.

`RunConfig` has six sections. `training`, `optimizer`, `schedule` and `evaluation` are frozen dataclasses that live next
to what they configure; `data` and `model` are `{name: ..., **options}`, checked against the signature of the registered
factory before anything is built.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from cached_transformers.registry import ATTENTIONS, DATASETS, MEMORIES, MODELS, Registry, unknown_name
from cached_transformers.yaml_tree import apply_override, flatten, parse_yaml

from .optim import OptimizerConfig, ScheduleConfig
from .settings import EvaluationConfig, TrainingConfig

D = TypeVar("D")

LEARNED_FROM_DATA = ("image_size", "channels", "classes", "vocabulary", "target_vocabulary", "max_length")
"""Options of a model that are filled in from `dataset.describe()` when a recipe leaves them out."""
MEMORY_LEARNS_FROM_DATA = ("sentence_ends", "paragraph_ends")
"""The same for options of a memory."""

MAY_DIFFER = (
    "name",
    "description",
    "training.steps",
    "training.log_every",
    "training.save_every",
    "training.keep",
    "training.tensorboard",
    "training.workers",
    "training.device",
)
"""Keys that may change when a run is resumed: they alter how long, where and how loudly it runs."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines one run."""

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
            raise ValueError(f"name={self.name!r} becomes a folder: use letters, digits and the characters _ . + = -")
        if self.schedule.warmup_steps >= self.training.steps and self.schedule.name == "cosine":
            raise ValueError(
                f"schedule.warmup_steps={self.schedule.warmup_steps} must be below training.steps={self.training.steps}"
                " with the cosine schedule; shorten the warm-up or train for longer"
            )


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a recipe (a path, or a name from `cached list recipes`) and apply `key=value` overrides.

    Raises:
        ValueError: no such recipe, not YAML, or a key or value that is not allowed.
    """
    path = find_recipe(source)
    tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a mapping with the keys data, model, training, ...")
    tree.setdefault("name", path.stem)
    for override in overrides:
        apply_override(tree, override)
    return config_from_dict(tree)


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe given as a path or as a name in the recipes folder."""
    from cached_transformers.resources import recipes_folder

    path = Path(source)
    if path.is_file():
        return path
    folder = recipes_folder()
    named = folder / path.with_suffix(".yaml").name
    if named.is_file() and path.parent == Path("."):
        return named
    raise ValueError(unknown_name("recipe", str(source), [p.stem for p in folder.glob("*.yaml")]))


def config_from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """A checked `RunConfig` from nested mappings.

    Raises:
        ValueError: unknown key, wrong type, missing section, or values that contradict one another.
    """
    for section in ("data", "model"):
        if section not in tree:
            raise ValueError(f"section {section!r} is missing; give it as {section}: {{name: ...}}")
    config = _build(RunConfig, tree, "")
    check_sections(config)
    return config


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested plain dictionaries, ready for YAML or JSON."""
    order = ("name", "description", "data", "model", "training", "optimizer", "schedule", "evaluation")
    tree = json.loads(json.dumps(dataclasses.asdict(config)))  # tuples become lists, as they do in a file
    return {key: tree[key] for key in order}


def config_to_yaml(config: RunConfig) -> str:
    """YAML text that `load_config` reads back to the same configuration."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


def config_hash(config: RunConfig) -> str:
    """SHA-256 of the configuration without the keys in `MAY_DIFFER`."""
    kept = {k: v for k, v in flatten(config_to_dict(config)).items() if k not in MAY_DIFFER}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """A stored configuration with the options that it is older than, at their defaults; as it is when not readable."""
    try:
        return config_to_dict(config_from_dict(tree))
    except ValueError:
        return tree


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` for every key that differs between two configurations and may not."""
    left, right = flatten(old), flatten(new)
    keys = [k for k in {**left, **right} if left.get(k) != right.get(k) and k not in MAY_DIFFER]
    return [f"{k}: {left.get(k, '(absent)')!r} -> {right.get(k, '(absent)')!r}" for k in keys]


def _build(cls: type[D], tree: Any, path: str) -> D:
    """A dataclass from a mapping, with every key and type checked; `path` is the dotted prefix for messages."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path.rstrip('.')}={tree!r} must be a mapping of options")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in hints:
            raise ValueError(_unknown_key(f"{path}{key}", [f"{path}{name}" for name in hints]))
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(typing.cast(type, hints[key]), value, f"{path}{key}.")
        else:
            values[key] = check_type(f"{path}{key}", value, hints[key])
    return cls(**values)


def _unknown_key(path: str, known: list[str]) -> str:
    leaf = path.rpartition(".")[2]
    elsewhere = [key for key in _all_keys() if key.rpartition(".")[2] == leaf]
    if elsewhere:
        return f"unknown key {path!r}; did you mean {elsewhere[0]!r}? (known here: {', '.join(sorted(known))})"
    return unknown_name("key", path, known)


def _all_keys() -> list[str]:
    sections: dict[str, Any] = {"training": TrainingConfig, "optimizer": OptimizerConfig, "schedule": ScheduleConfig}
    sections["evaluation"] = EvaluationConfig
    return [f"{name}.{f.name}" for name, cls in sections.items() for f in dataclasses.fields(cls)]


def check_type(path: str, value: Any, expected: Any) -> Any:
    """`value` if it fits the annotation (an int is a fine float); annotations that YAML cannot express pass.

    Raises:
        ValueError: it does not fit; the message gives path, value and what was expected.
    """
    if not _fits(value, expected):
        raise ValueError(f"{path}={value!r} must be {_describe(expected)}, not {type(value).__name__}")
    return float(value) if expected is float else value


def _fits(value: Any, expected: Any) -> bool:
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(expected))
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(expected))
    if expected in (None, type(None)):
        return value is None
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if expected in (str, bool):
        return isinstance(value, expected)
    if expected is dict or origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if origin in (list, tuple):
        items = [a for a in get_args(expected) if a is not Ellipsis]
        return isinstance(value, (list, tuple)) and all(any(_fits(v, a) for a in items) for v in value)
    return True


def _describe(expected: Any) -> str:
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(option) for option in get_args(expected))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, get_args(expected)))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(
        expected, "a list" if origin in (list, tuple) else "a mapping" if origin is dict else str(expected)
    )


def check_sections(config: RunConfig) -> None:
    """Check `data` and `model` (and the memory and attention inside) against the registered factories; build nothing.

    Raises:
        ValueError: unknown name, unknown or missing option, or an option of the wrong type.
    """
    # Importing the packages fills the registries.
    from cached_transformers import attentions, data, memories, models  # noqa: F401

    if "split" in config.data:
        raise ValueError(f"data.split={config.data['split']!r} cannot be set: training and evaluation choose")
    _check_part("data", config.data, DATASETS, given=("split",))
    _check_part("model", config.model, MODELS, given=LEARNED_FROM_DATA)
    for key, registry in (("memory", MEMORIES), ("attention", ATTENTIONS)):
        part = config.model.get(key)
        if part is not None:
            section = {"name": part} if isinstance(part, str) else part
            _check_part(f"model.{key}", section, registry, given=None)


def _check_part(path: str, section: Any, registry: Registry[Any], given: tuple[str, ...] | None) -> None:
    """Check one `{name, **options}`; options in `given` come from elsewhere, and None means that most of them do."""
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ValueError(
            f"{path}={section!r} must name a {registry.kind}: {{name: ...}} with one of {registry.names()}"
        )
    options = {key: value for key, value in section.items() if key != "name"}
    entry = registry.entry(section["name"])
    registry.check(entry.name, options)
    hints = _hints(entry.factory)
    for key, value in options.items():
        check_type(f"{path}.{key}", value, hints.get(key, Any))
    required = [n for n, p in entry.options.items() if p.default is p.empty and n not in options]
    missing = [] if given is None else [n for n in required if n not in given]
    if missing:
        raise ValueError(f"{path} {entry.name!r} needs {', '.join(missing)}; set {path}.{missing[0]}=...")


def _hints(factory: Any) -> dict[str, Any]:
    if inspect.isclass(factory) and not dataclasses.is_dataclass(factory):
        factory = factory.__init__  # type: ignore[misc]
    try:  # of a dataclass its fields, each in the names of the module that has it
        return typing.get_type_hints(factory)
    except NameError:  # annotations imported for type checking only cannot be resolved at run time
        return {}


def fill_from_data(config: RunConfig, description: Mapping[str, Any]) -> RunConfig:
    """The configuration with what model and memory need of `dataset.describe()`, where it is absent."""
    entry = MODELS.entry(config.model["name"])
    wanted = [k for k in LEARNED_FROM_DATA if k in entry.options and k not in config.model and k in description]
    learned = {key: description[key] for key in wanted}
    missing = [n for n, p in entry.options.items() if p.default is p.empty and n not in {**config.model, **learned}]
    if missing:
        raise ValueError(
            f"model {entry.name!r} needs {', '.join(missing)}, which data {config.data['name']!r} does not tell; "
            f"set model.{missing[0]}=... or choose data of another kind"
        )
    model = {**config.model, **learned}
    memory = model.get("memory")
    if memory is not None:
        section = {"name": memory} if isinstance(memory, str) else memory
        options = MEMORIES.entry(section["name"]).options
        told = {key: list(description[key]) for key in MEMORY_LEARNS_FROM_DATA if key in options and key in description}
        if told:
            model["memory"] = {**told, **section}
    return dataclasses.replace(config, model=model)
