"""`cached plan`: what is planned is what a real training takes, by the allocator's account; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.measured_step import measured

from cached_transformers.cli.main import main
from cached_transformers.cli.plan import markdown
from cached_transformers.experiments.costs.flops import count_flops
from cached_transformers.experiments.plan.plan import CARDS, GIB, Machine, make_plan, parts_of
from cached_transformers.experiments.plan.rehearsal import Shape, bare_model, rehearse, step_flops, zipf
from cached_transformers.experiments.plan.sizes import Given, Sized, sized
from cached_transformers.registry import MODELS
from cached_transformers.tasks.recipes import load_config

CLOSE = 0.03
"""Largest difference between plan and measurement, as a share; one in a hundred and less is usual."""
WORDS = "the quick brown fox jumps over the lazy dog while it rains\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(WORDS * 2000)
    lines = [f"{' '.join(WORDS.split()[: 4 + row % 7])} {row % 50}\n" for row in range(400)]
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.en").write_text("".join(lines))
        (tmp_path / f"{split}.de").write_text("".join(line.upper() for line in lines))
    return tmp_path


TEXT, PAIRS = ["data.path={folder}/text.txt"], ["data.path={folder}", "data.vocabulary_size=300", "data.max_length=64"]
TRANSLATOR = [*PAIRS, "data.name=translation", "data.source=en", "data.target=de"]
RUNS: dict[str, tuple[str, list[str], dict[str, int]]] = {
    "transformer_xl": ("demo_text", TEXT, {}),
    "rmt": (
        "demo_text",
        [*TEXT, "model.memory={{name: rmt, length: 10}}", "training.segments=4", "training.bptt=2"],
        {},
    ),
    "grc_vision": ("digits_vit_grc", [], {}),
    "translation": ("multi30k_en_de_grc", [*TRANSLATOR, "training.batch_tokens=null"], {}),
    "listops": ("demo_listops", [], {}),
}
"""Of a name: recipe, changes, sizes that only the data tell."""
MORE: dict[str, tuple[str, list[str], dict[str, int]]] = {
    "accumulated": ("demo_text", [*TEXT, "training.accumulate=4"], {}),
    "adaptive": ("demo_text", [*TEXT, "model.cutoffs=[20,60]"], {}),
    "average": ("digits_vit_grc", ["model.width=256", "training.batch_size=8", "training.ema_decay=0.99"], {}),
    "bfloat16": ("demo_listops", ["training.precision=bfloat16"], {}),
    "checkpointed": ("digits_vit_grc", ["training.activation_checkpointing=true"], {}),
    "documents": ("rmt_documents", ["training.curriculum=null", "training.solved=null", "training.batch_size=8"], {}),
    "momentum": ("digits_vit_plain", ["optimizer.name=sgd", "model.width=256", "training.batch_size=4"], {}),
    "plain": ("demo_text", [*TEXT, "model.memory=null", "model.width=256", "training.batch_size=2"], {}),
    "wide": ("demo_text", [*TEXT, "model.feed_forward=4096", "training.batch_size=2"], {}),
}


def planned(name: str, overrides: list[str], given: dict[str, int]) -> int:
    """Bytes of a plan, in the form that the optimiser has on a CPU."""
    recipe = sized(load_config(name, overrides), Given(**given))
    pieces = recipe.config.training.accumulate
    counted = rehearse(recipe.config, recipe.shape, recipe.rows // pieces, gradients_held=pieces > 1, gpu=False)
    return sum(parts_of(counted, pieces).values())


@pytest.mark.parametrize(
    "run", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_the_plan_is_what_a_training_takes(run: str, folder: Path) -> None:
    name, changes, given = {**RUNS, **MORE}[run]
    overrides = [change.format(folder=folder) for change in changes]
    peak, longest = measured(name, overrides, folder / "run")
    if run in ("translation", "listops", "bfloat16"):
        given = {**given, "length": longest}
    ratio = planned(name, overrides, given) / peak
    print(f"{run}: measured {peak / 2**20:.2f} MiB, planned / measured {ratio:.4f}")
    assert abs(ratio - 1) < CLOSE
