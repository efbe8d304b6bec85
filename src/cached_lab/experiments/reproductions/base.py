"""What a reproduction is: a recipe for each scale, and rows, each of which is the recipe with another model.

Everything else, the data and the seeds among it, is the recipe's. What makes rows comparable, equally many parameters
or equal operations in training, is set by `experiments.variants`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cached_lab.training.config import RunConfig
from cached_transformers.registry import unknown_name


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: in the table, and of the folder of its runs.
        model: the model section of the row, from the recipe.
        against: names of the rows that it is compared with.
        matched: name of the row whose operations in training this one gets, by a wider feed-forward.
        backbone: what the row is a form of, for figures that join the forms of one; None for a table of one backbone.
        recipe: its own recipe at this scale, where backbones are trained differently; None takes the table's.
    """

    name: str
    model: Callable[[RunConfig], dict[str, Any]]
    against: tuple[str, ...] = ()
    matched: str | None = None
    backbone: str | None = None
    recipe: str | None = None

    def config(self, recipe: RunConfig) -> RunConfig:
        """The recipe with the model of this row."""
        return dataclasses.replace(recipe, model=self.model(recipe))


@dataclass(frozen=True)
class Reproduction:
    """One table.

    Attributes:
        summary: what it compares, in a line.
        recipes: recipe by scale.
        files: what the data folder must hold, by scale; empty where the data are generated.
        paper: rows of the paper's table, and the controls that it lacks, by scale. The first is the reference.
        others: rows that may be added, by scale.
        equal: what rows have in common: "parameters", as many as the largest row of the paper; or "operations", those
            of `Row.matched` where a row names one.
        protocol: how a row is scored or what it is made of, in a line.
        cache_use: whether trained rows with a cache are also scored with it emptied, shuffled, exchanged, and updated
            by the batch at hand.
    """

    summary: str
    recipes: Mapping[str, str]
    files: Mapping[str, str]
    paper: Callable[[str], Sequence[Row]]
    protocol: Callable[[RunConfig], str]
    equal: Literal["parameters", "operations"] = "operations"
    others: Callable[[str], Sequence[Row]] = lambda scale: []
    cache_use: bool = False

    def rows(self, scale: str, chosen: str = "paper") -> list[Row]:
        """Rows of the table, chosen as `chosen_rows` has it."""
        by_name = {row.name: row for row in [*self.paper(scale), *self.others(scale)]}
        paper = [row.name for row in self.paper(scale)]
        return [by_name[name] for name in chosen_rows(chosen, paper, list(by_name), list(by_name))]


def chosen_rows(chosen: str, paper: Sequence[str], every: Sequence[str], examples: Sequence[str]) -> list[str]:
    """Names of rows by `--rows`: "paper", "all", or names with commas between them.

    Args:
        examples: some names, for the message.

    Raises:
        ValueError: an unknown name, or one twice.
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


def pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The pairs of rows that are compared; none where all are compared with the first, which is then the reference."""
    names = [row.name for row in rows]
    found = [(row.name, other) for row in rows for other in row.against if other in names]
    return [] if found == [(name, names[0]) for name in names[1:]] else found
