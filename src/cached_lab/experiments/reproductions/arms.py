"""Tables of the paper as comparisons: rows as variants of equal size or cost, on the same data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cached_lab.experiments.build import build_dataset
from cached_lab.experiments.compare import VariantComparison
from cached_lab.experiments.variants import Variant, equal_operations, equal_parameters
from cached_lab.tasks.kinds import baselines, task_name
from cached_lab.tasks.recipes import check_sections, fill_from_data, load_config
from cached_lab.training.config import RunConfig

from .base import Reproduction, TableRow, pairs


def comparison(
    table: Reproduction,
    name: str,
    scale: str,
    *,
    chosen: str = "paper",
    overrides: Sequence[str] = (),
    data: str | None = None,
    seeds: Sequence[int] = (0,),
    folder: Path | None = None,
) -> VariantComparison:
    """Build the comparison of a table.

    Args:
        name: of the table. chosen: rows, as for `Reproduction.rows`.
        overrides: changes to the recipe, for all rows. data: folder of the table's files at this scale.
        folder: of the results; None for runs/NAME_SCALE.

    Raises:
        ValueError: a missing or superfluous data folder, unknown rows, or rows that cannot be made equal.
    """
    files = table.files.get(scale)
    if files is not None and data is None:
        raise ValueError(f"{name} at scale {scale} reads {files}; give --data FOLDER")
    if files is None and data is not None:
        raise ValueError(f"{name} generates its data; drop --data {data}")
    rows = table.rows(scale, chosen)
    recipe = load_config(table.recipes[scale], overrides)
    if files is not None:
        recipe = dataclasses.replace(recipe, data={**recipe.data, "path": data})
    recipes = row_recipes(rows, recipe, overrides)
    for row in rows:  # before the data are read, which may take long
        check_sections(row.config(recipes.get(row.recipe, recipe)))
    train = build_dataset(recipe, "train")
    scored = build_dataset(recipe, "validation" if recipe.training.test == "none" else "test")
    variants = arms(table, scale, rows, recipe, train, recipes)
    recipe = dataclasses.replace(recipe, name=f"{name}_{scale}")
    return VariantComparison(
        recipe,
        variants,
        list(seeds),
        folder or Path("runs") / recipe.name,
        baselines(recipe, train, scored),
        pairs=pairs(rows),
        rows=len(scored) if task_name(scored) == "classification" else None,
        cache_use=table.cache_use,
    )


def row_recipes(rows: Sequence[TableRow], recipe: RunConfig, overrides: Sequence[str]) -> dict[str | None, RunConfig]:
    """Return the own recipes of rows by name, with the table's overrides and data.

    Raises:
        ValueError: one with other scoring than the table's.
    """
    found: dict[str | None, RunConfig] = {}
    for name in dict.fromkeys(row.recipe for row in rows if row.recipe is not None):
        config = load_config(name, overrides)
        scored = [(each.training.metric, each.training.test) for each in (config, recipe)]
        if scored[0] != scored[1]:
            raise ValueError(
                f"recipe {name} is scored by {scored[0]} (training.metric, training.test), {recipe.name} by "
                f"{scored[1]}; rows of a table are scored alike, so set both"
            )
        found[name] = dataclasses.replace(config, data=recipe.data)
    return found


def arms(
    table: Reproduction,
    scale: str,
    rows: Sequence[TableRow],
    recipe: RunConfig,
    train: Any,
    recipes: Mapping[str | None, RunConfig] | None = None,
) -> list[Variant]:
    """Return the rows as variants of equal size or cost.

    The rows of the paper determine it, so that additional rows leave finished runs valid.

    Args:
        train: the training data, which describe themselves to the model.
        recipes: of `row_recipes`.
    """
    paper, all_rows = table.paper(scale), {row.name: row for row in table.rows(scale, "all")}
    needed = {row.name: row for row in rows}
    needed |= {row.matched: all_rows[row.matched] for row in rows if row.matched is not None}
    every = [*paper, *(row for name, row in needed.items() if name not in {other.name for other in paper})]
    by_name = recipes or {}
    variants = [
        Variant(row.name, fill_from_data(row.config(by_name.get(row.recipe, recipe)), train.describe()))
        for row in every
        if table.equal == "parameters" or row.name in needed
    ]
    if table.equal == "parameters":
        equal = equal_parameters(variants, deciding=len(paper))
    else:
        matched = {row.name: row.matched for row in every if row.matched is not None and row.name in needed}
        equal = equal_operations(variants, matched, train)
    found = {variant.name: variant for variant in equal}
    for row in rows:
        facts = found[row.name].facts
        facts["protocol"] = table.protocol(found[row.name].config)
        if row.backbone is not None:
            facts["backbone"] = row.backbone
    return [found[row.name] for row in rows]
