"""Reproductions: a recipe for each scale, and rows, each the recipe with another model.

Data, seeds and everything else come from the recipe. `experiments.variants` makes rows comparable, by equally many
parameters or equal operations in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cached_lab.training.config import RunConfig
from cached_transformers.registry import unknown_name


@dataclass(frozen=True)
class TableRow:
    """One line of a table.

    Attributes:
        name: in the table, and of the folder of its runs.
        model: returns the model section of the row from the recipe.
        against: names of the rows to compare with.
        matched: name of the row whose operations in training this row gets by a wider feed-forward.
        backbone: groups the rows of one backbone in figures; None for a table of one backbone.
        recipe: its own recipe at this scale, if backbones are trained differently; None for the table's.
    """

    name: str
    model: Callable[[RunConfig], dict[str, Any]]
    against: tuple[str, ...] = ()
    matched: str | None = None
    backbone: str | None = None
    recipe: str | None = None

    def config(self, recipe: RunConfig) -> RunConfig:
        """Return the recipe with the model of this row."""
        return dataclasses.replace(recipe, model=self.model(recipe))


@dataclass(frozen=True)
class Reproduction:
    """One table.

    Attributes:
        summary: its comparison in a line.
        recipes: recipe by scale.
        files: required content of the data folder, by scale; empty for generated data.
        paper: rows of the paper's table with additional controls, by scale. The first is the reference.
        others: optional rows, by scale.
        equal: "parameters", as many as the largest row of the paper; or "operations", those of `TableRow.matched`.
        protocol: describes the scoring or the model of a row in a line.
        cache_use: also score rows with a cache in the modes of `cache_use.py`.
    """

    summary: str
    recipes: Mapping[str, str]
    files: Mapping[str, str]
    paper: Callable[[str], Sequence[TableRow]]
    protocol: Callable[[RunConfig], str]
    equal: Literal["parameters", "operations"] = "operations"
    others: Callable[[str], Sequence[TableRow]] = lambda scale: []
    cache_use: bool = False

    def rows(self, scale: str, chosen: str = "paper") -> list[TableRow]:
        """Return the rows of the table that `chosen_rows` names."""
        by_name = {row.name: row for row in [*self.paper(scale), *self.others(scale)]}
        paper = [row.name for row in self.paper(scale)]
        return [by_name[name] for name in chosen_rows(chosen, paper, list(by_name), list(by_name))]


def chosen_rows(chosen: str, paper: Sequence[str], every: Sequence[str], examples: Sequence[str]) -> list[str]:
    """Parse `--rows`: "paper", "all", or names separated by commas.

    Args:
        examples: names for the message.

    Raises:
        ValueError: an unknown or repeated name.
    """
    if chosen in ("paper", "all"):
        return list(paper if chosen == "paper" else every)
    names = [name for name in chosen.split(",") if name]
    for name in names:
        if name not in every:
            raise ValueError(unknown_name("row", name, ["paper", "all", *every]))
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--rows {chosen!r} must be paper, all, or different names such as {','.join(examples)}")
    return names


def pairs(rows: Sequence[TableRow]) -> list[tuple[str, str]]:
    """Return the compared pairs of rows; none if all are compared with the first, which then is the reference."""
    names = [row.name for row in rows]
    found = [(row.name, other) for row in rows for other in row.against if other in names]
    return [] if found == [(name, names[0]) for name in names[1:]] else found
