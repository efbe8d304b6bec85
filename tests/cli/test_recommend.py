"""Advice names memories that a host takes, in the bytes that were given, and results that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from docs.pages import PROJECT
from integrations.hosts import library

from cached_lab.cli.main import main
from cached_lab.cli.recommend import ARGUMENTS, parse_bytes
from cached_lab.experiments.hosts import OURS, tiny
from cached_lab.experiments.recommend import ADVICE, RESULTS, TASKS, recommend
from cached_transformers import add_memory
from cached_transformers.state import nbytes

BUDGET = 2 << 20


def host() -> Any:
    config = library("transformers").AutoConfig.for_model("gpt2")
    return library("transformers").AutoModel.from_config(config)


@pytest.mark.parametrize("task", TASKS)
def test_the_state_fits_the_budget_and_one_more_slot_does_not(task: str) -> None:
    for row in recommend(task, "gpt2", BUDGET):
        if row.reason:
            continue
        assert row.state_bytes is not None and row.state_bytes <= BUDGET
        if row.memory != row.advice.memory:
            with torch.device("meta"):
                larger = {**row.memory, "length": row.memory["length"] + 1}
                model = add_memory(host(), larger, segment_length=None).eval()
            assert nbytes(model.init_memory_state(1)) > BUDGET


def test_each_task_has_advice_for_a_decoder_or_images() -> None:
    for task in TASKS:
        assert not next(recommend(task, "vit" if task == "images" else "llama")).reason
    for kind in OURS:
        assert all(row.state_bytes is None for row in recommend("state", kind))


def test_a_state_that_cannot_fit_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = {row.memory["name"]: row.reason for row in recommend("recall", "llama", 4096)}
    assert "grows" in found["block_retrieval"] and "length=1024" in found["memorizing"]
    assert all("no option" in row.reason for row in recommend("pairs", "gpt2", 4096))
    assert main(["recommend", "--task", "pairs", "--host", "gpt2", "--bytes", "4k"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main(["recommend", "--task", "state", "--host", "gpt2", "--bytes", "64k"]) == 0
    assert capsys.readouterr().out.startswith("one thing for ever, in the fewest bytes: rmt")


def test_results_have_the_sections_that_advice_names() -> None:
    for row in ADVICE:
        page, _, section = row.proof.partition("#")
        text = (PROJECT / RESULTS / page).read_text(encoding="utf-8")
        heads = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"(?m)^#+ (.*)$", text)]
        assert section in heads, row.proof
    assert dict((name.split()[0], text) for name, _, text in ARGUMENTS)["--task"].replace(" or ", ", ") == ", ".join(
        TASKS
    )


@pytest.mark.parametrize(("text", "size"), [("65536", 65536), ("64k", 65536), ("2MB", 2 << 20), ("1G", 1 << 30)])
def test_bytes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_bad_words_are_refused(tmp_path: Path) -> None:
    model = library("transformers").LlamaForCausalLM(tiny("llama").config)
    add_memory(model, "rmt", segment_length=8).save_pretrained(tmp_path)
    refuses("has a memory already", lambda: next(recommend("text", str(tmp_path))))
    for wrong in ("0", "-1", "64q", "1.5k", ""):
        refuses("--bytes", parse_bytes, wrong)
    refuses("task='poetry'", lambda: next(recommend("poetry", "gpt2")))
    refuses("elsewhere", lambda: next(recommend("text", "elsewhere/nothing")))
