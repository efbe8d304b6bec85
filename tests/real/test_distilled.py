"""Memories that learn beside a trained, frozen model what the whole text tells its teacher: rows of one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_weights import glass_folder

from cached_lab.cli.main import main

BOOK = Path(__file__).parents[2] / "examples/moby_dick.txt"
UNTAUGHT = "streaming_llm:length=28:sinks=4"
"""What AHN computes before its training."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))


def teach(out: Path, *more: str) -> dict[str, Any]:
    """Train by the recipe; return the validation losses by step."""
    places = [f"data.path={BOOK}", f"data.tokenizer={glass_folder()}", f"model.pretrained={glass_folder()}"]
    given = [*places, "training.device=cpu", "training.tensorboard=false", *more, "--out", str(out)]
    assert main(["train", "distil_glass_ahn", *given]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["split"] == "validation"}


def test_the_loss_of_held_out_text_falls_below_that_of_the_window(tmp_path: Path) -> None:
    short = ["data.validation_fraction=0.03", "training.batch_size=4", "training.test=none", "schedule.warmup_steps=1"]
    short += ["training.steps=24", "training.evaluate_every=24", "optimizer.learning_rate=0.01"]
    untaught = teach(tmp_path / "untaught", *short, "training.steps=1", "optimizer.learning_rate=1e-9")
    taught = teach(tmp_path / "taught", *short)
    assert taught[24] < untaught[1] - 0.004


ROWS = {
    "ahn": (),
    "lora": ("model.memory=null", "model.lora=8"),
    "ahn_lora": ("model.lora=8",),
    "infini_lora": ("model.memory=infini", "model.lora=8"),
    "rmt_lora": ("model.memory=rmt", "model.lora=8"),
}


@pytest.mark.slow
def test_each_row_of_the_table_and_its_controls(tmp_path: Path) -> None:
    for name, more in ROWS.items():
        teach(tmp_path / name, *more)
    arms = ["none", "whole", UNTAUGHT, *(str(tmp_path / name) for name in ROWS)]
    held = tmp_path / "held.txt"  # the tenth of the book that is the test split
    held.write_text(BOOK.read_text(encoding="utf-8")[-12_000:], encoding="utf-8")
    words = ["read", str(glass_folder()), str(held), "--with", ",".join(arms), "--tokens", "2048", "--out"]
    words += [
        str(tmp_path / "read"),
        "--segment-length",
        "32",
        "--facts",
        "1024",
        "--trials",
        "5",
        "--control",
        "window",
    ]
    assert main(words) == 0
    content = json.loads((tmp_path / "read/read.json").read_text(encoding="utf-8"))
    last = {row["arm"]: row["bins"][-1][1] for row in content["perplexity"]}
    assert last["ahn"] < last[UNTAUGHT] < last["no memory"]
    assert last["ahn_lora"] < min(last["lora"], last["ahn"], last["window of ahn"])
    assert {row["arm"] for row in content["facts"]} >= {*ROWS}
