"""Recipes: YAML files and dotted overrides, checked against the registries, and completed from the data.

Parts are checked against their factory's signature before anything is built. Importing this module registers them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cached_transformers.integrations.models  # noqa: F401  (registers models of timm and transformers)
from cached_lab.registries import DATASETS
from cached_lab.resources import recipes_folder
from cached_lab.training.config import RunConfig, build_config
from cached_lab.yaml_tree import apply_override, read_yaml
from cached_transformers.annotations import shown
from cached_transformers.memories import memory_specs
from cached_transformers.registry import ATTENTIONS, MEMORIES, MODELS, Registry, unknown_name

LEARNED_FROM_DATA = ("image_size", "channels", "classes", "vocabulary", "target_vocabulary", "max_length")
"""Options of a model that are filled in from `dataset.describe()` when a recipe leaves them out."""
MUST_EQUAL = ("image_size", "channels")
MUST_HOLD = ("classes", "vocabulary", "target_vocabulary")
"""Those that must equal the data's, and those that may be larger."""
MEMORY_LEARNS_FROM_DATA = ("sentence_ends", "paragraph_ends")
"""The same for options of a memory."""


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a recipe (a path, or a name from `cached list recipes`) and apply `key=value` overrides.

    Raises:
        ValueError: no such recipe, not YAML, or a key or value that is not allowed.
    """
    path = find_recipe(source)
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold a mapping with the keys data, model, training, ...")
    tree.setdefault("name", path.stem)
    for override in overrides:
        apply_override(tree, override)
    return config_from_dict(tree)


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe, from its path or its name in the recipes folder."""
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
    config = build_config(tree)
    check_sections(config)
    return config


def check_sections(config: RunConfig) -> None:
    """Check `data` and `model` (and the memory and attention inside) against the registered factories; build nothing.

    Raises:
        ValueError: unknown name, unknown or missing option, or an option of the wrong type.
    """
    if "split" in config.data:
        raise ValueError(f"data.split={shown(config.data['split'])} cannot be set: training and evaluation choose")
    _check_part("data", config.data, DATASETS, given=("split",))
    _check_part("model", config.model, MODELS, given=LEARNED_FROM_DATA)
    for key, registry in (("memory", MEMORIES), ("attention", ATTENTIONS)):
        part = config.model.get(key)
        if key == "memory" and isinstance(part, list):
            for number, one in enumerate(part):
                _check_part(f"model.memory[{number}]", _section(one), registry, given=None)
            memory_specs(part)
        elif part is not None:
            _check_part(f"model.{key}", _section(part), registry, given=None)


def _section(part: Any) -> Any:
    """A memory or an attention as a mapping; it may be given as a name."""
    return {"name": part} if isinstance(part, str) else part


def _check_part(path: str, section: Any, registry: Registry[Any], given: tuple[str, ...] | None) -> None:
    """Check one `{name, **options}`; the caller sets the options in `given`, or, for None, any missing option."""
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise ValueError(
            f"{path}={shown(section)} must name a {registry.kind}: {{name: ...}} with one of {registry.names()}"
        )
    entry = registry.entry(section["name"])
    options = registry.with_preset(entry.name, {key: value for key, value in section.items() if key != "name"})
    registry.check(entry.name, options, path)
    required = [n for n, p in entry.options.items() if p.default is p.empty and n not in options]
    missing = [] if given is None else [n for n in required if n not in given]
    if missing:
        raise ValueError(f"{path} {entry.name!r} needs {', '.join(missing)}; set {path}.{missing[0]}=...")


def fill_from_data(config: RunConfig, description: Mapping[str, Any]) -> RunConfig:
    """The configuration with absent options of model and memory filled in from `dataset.describe()`."""
    entry = MODELS.entry(config.model["name"])
    wanted = [k for k in LEARNED_FROM_DATA if k in entry.options and k not in config.model and k in description]
    learned = {key: description[key] for key in wanted}
    missing = [n for n, p in entry.options.items() if p.default is p.empty and n not in {**config.model, **learned}]
    if missing:
        raise ValueError(
            f"model {entry.name!r} needs {', '.join(missing)}, which data {config.data['name']!r} does not give; "
            f"set model.{missing[0]}=... or choose data of another kind"
        )
    model = {**config.model, **learned}
    for key in (*MUST_EQUAL, *MUST_HOLD):
        if (ours := model.get(key)) is None or key not in description or key not in entry.options:
            continue
        theirs = description[key]
        if ours != theirs if key in MUST_EQUAL else ours < theirs:
            rule = "equal it" if key in MUST_EQUAL else "not be below it"
            raise ValueError(
                f"model.{key}={ours}, but data {config.data['name']!r} has {key}={theirs}: the model's must {rule}; "
                f"leave model.{key} out to take it from the data"
            )
    memory = model.get("memory")
    if isinstance(memory, list):
        model["memory"] = [_fill_memory(one, description) for one in memory]
    elif memory is not None:
        model["memory"] = _fill_memory(memory, description)
    return dataclasses.replace(config, model=model)


def _fill_memory(memory: Any, description: Mapping[str, Any]) -> Any:
    """One memory with absent options filled in from the data."""
    section = _section(memory)
    options = MEMORIES.entry(section["name"]).options
    given = {key: list(description[key]) for key in MEMORY_LEARNS_FROM_DATA if key in options and key in description}
    return {**given, **section} if given else memory
