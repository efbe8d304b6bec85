"""Memories that can be probed, and the choice of memories, tasks and their options in a command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cached_lab.experiments.probes.tasks  # noqa: F401  (registers tasks)
import cached_transformers.memories  # noqa: F401  (registers memories)
from cached_lab.registries import PROBES
from cached_lab.yaml_tree import apply_override
from cached_transformers.interfaces.memory import ModelMemory
from cached_transformers.interfaces.probing import Probing
from cached_transformers.registry import MEMORIES, unknown_name

MODEL = "model"
"""Key of the models' sizes in options, besides the names of tasks and memories."""
SIZES = ("width", "depth", "heads", "feed_forward", "batch_size", "learning_rate", "check_every", "rows")
"""Fields of `ProbeSizes` that users set."""
FILES = ("babi", "books")
"""Options of tasks that read files."""


def setting(memory: str) -> Probing:
    """Return the setting of a registered memory, or the defaults if it has none."""
    return MEMORIES.entry(memory).probe or Probing()


def stream_memories() -> list[str]:
    """Return registered memories for causal language models, without those that share one state among all rows."""
    found = []
    for entry in MEMORIES:
        kind: Any = entry.factory
        states = issubclass(kind, ModelMemory) or "state" in kind.needs
        if "bidirectional" not in kind.needs and states:
            found.append(entry.name)
    return found


def chosen_memories(text: str) -> list[str]:
    """Return memories from comma-separated names, or "all"."""
    able = stream_memories()
    names = able if text == "all" else text.split(",")
    for name in names:
        MEMORIES.entry(name)
        if name not in able:
            raise ValueError(f"memory {name!r} has no state per row to probe; take one of {', '.join(able)}")
    return names


def chosen_tasks(text: str, files: Mapping[str, str], overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return tasks from comma-separated names, or "all", with their options.

    Args:
        files: "babi" and "books", for the tasks with these options; "all" leaves out tasks that lack files.
        overrides: options as `task.option=value`.

    Raises:
        ValueError: an unknown task or option, a value of another type, an option of a task that is not chosen, or a
            task without its files.
    """
    needed = {entry.name: {*FILES} & {*entry.options} for entry in PROBES}
    names = [name for name in PROBES.names() if needed[name] <= {*files}] if text == "all" else text.split(",")
    tasks: dict[str, dict[str, Any]] = {
        name: {key: path for key, path in files.items() if key in PROBES.entry(name).options} for name in names
    }
    for override in overrides:
        if (task := override.partition("=")[0].partition(".")[0]) not in tasks:
            raise ValueError(
                f"{override!r} sets an option of {task!r}, which is neither among the memories nor among the tasks "
                f"{', '.join(tasks)}; write NAME.option=value, and give a task with --tasks"
            )
    for name, options in _overridden(tasks, overrides).items():
        PROBES.check(name, options, name)
        if not needed[name] <= {*options}:
            raise ValueError(f"the task {name!r} reads files: give --babi ARCHIVE_OR_FOLDER and --books FOLDER")
    return tasks


def options_of_memories(memories: Iterable[str], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of memories set by `memory.option=value`.

    Raises:
        ValueError: an unknown option or preset, or a value of another type.
    """
    found = _overridden({name: {} for name in memories}, overrides)
    for name, options in found.items():
        found[name] = MEMORIES.with_preset(name, options)
        MEMORIES.check(name, found[name], name)
    return {name: options for name, options in found.items() if options}


def options_of_models(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the sizes of the models set by `model.option=value`.

    Raises:
        ValueError: an unknown size, or a value that is no number above 0.
    """
    sizes = _overridden({MODEL: {}}, overrides)[MODEL]
    for name, value in sizes.items():
        if name not in SIZES:
            raise ValueError(unknown_name("size of the probed model", name, list(SIZES)))
        kinds = (int, float) if name == "learning_rate" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise ValueError(f"{MODEL}.{name}={value!r} must be a number above 0")
    return {MODEL: sizes} if sizes else {}


def _overridden(options: dict[str, dict[str, Any]], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Set options by `name.option=value`, in place."""
    for override in overrides:
        apply_override(options, override)
    for name, chosen in options.items():
        if not isinstance(chosen, dict):
            raise ValueError(f"{name}={chosen!r} sets no option; write {name}.option=value")
    return options
