"""What is probed, from the words of a command: memories, tasks, and options of them and of the probed model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cached_lab.registries import PROBES
from cached_lab.yaml_tree import apply_override
from cached_transformers.registry import MEMORIES, unknown_name

from .settings import stream_memories
from .trials import MODEL

FILES = ("babi", "books")
"""Options of tasks that read files: bAbI's, and books."""
SIZES = ("width", "depth", "heads", "feed_forward", "batch_size", "learning_rate", "check_every", "rows")
"""Those of `Sizes` that may be set."""


def chosen_memories(text: str) -> list[str]:
    """Memories from names with commas between them, or "all"."""
    able = stream_memories()
    names = able if text == "all" else text.split(",")
    for name in names:
        MEMORIES.entry(name)
        if name not in able:
            raise ValueError(
                f"memory {name!r} keeps nothing for each row of a stream, so there is nothing to probe; "
                f"take one of {', '.join(able)}"
            )
    return names


def chosen_tasks(text: str, files: Mapping[str, str], overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Tasks from names with commas between them, or "all", and the options of each.

    Args:
        files: "babi" and "books", for the tasks that have such options; "all" are those that need no more.
        overrides: options as `task.option=value`.

    Raises:
        ValueError: an unknown task or option, a value of another type, an option of a task that is not among them, or
            a task without its files.
    """
    missing = {
        entry.name: {key for key in FILES if (o := entry.options.get(key)) is not None and o.default is o.empty}
        for entry in PROBES
    }
    names = PROBES.names() if text == "all" else text.split(",")
    if text == "all":
        names = [name for name in names if missing[name] <= set(files)]
    tasks = {name: {key: files[key] for key in FILES if key in files and key in _options(name)} for name in names}
    for override in overrides:
        task = override.partition("=")[0].partition(".")[0]
        if task not in tasks:
            raise ValueError(
                f"{override!r} sets an option of {task!r}, which is neither among the memories nor among the tasks "
                f"{', '.join(tasks)}; write NAME.option=value, and give a task with --tasks"
            )
        apply_override(tasks, override)
    for name, options in tasks.items():
        if not isinstance(options, dict):
            raise ValueError(f"{name}={options!r} sets no option; write {name}.option=value")
        PROBES.check(name, options, name)
        if not missing[name] <= set(options):
            raise ValueError(f"the task {name!r} reads files: give --babi ARCHIVE_OR_FOLDER and --books FOLDER")
    return tasks


def options_of_memories(memories: Sequence[str], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options of memories that are set by `memory.option=value`.

    Raises:
        ValueError: an unknown option or preset, or a value of another type.
    """
    found: dict[str, Any] = {name: {} for name in memories}
    for override in overrides:
        apply_override(found, override)
    for name, options in found.items():
        if not isinstance(options, dict):
            raise ValueError(f"{name}={options!r} sets no option; write {name}.option=value")
        found[name] = MEMORIES.with_preset(name, options)
        MEMORIES.check(name, found[name], name)
    return {name: options for name, options in found.items() if options}


def options_of_models(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sizes of the models that are set by `model.option=value`.

    Raises:
        ValueError: an unknown size, or one that is not a number above 0.
    """
    found: dict[str, Any] = {MODEL: {}}
    for override in overrides:
        apply_override(found, override)
    sizes = found[MODEL] if isinstance(found[MODEL], dict) else {MODEL: found[MODEL]}
    for name, value in sizes.items():
        if name not in SIZES:
            raise ValueError(unknown_name("size of the probed model", name, list(SIZES)))
        kinds = (int, float) if name == "learning_rate" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise ValueError(f"{MODEL}.{name}={value!r} must be a number above 0")
    return {MODEL: sizes} if sizes else {}


def _options(task: str) -> Mapping[str, Any]:
    if task not in PROBES:
        raise ValueError(unknown_name("probe task", task, PROBES.names()))
    return PROBES.entry(task).options
