"""Memory efficiency by hand, and windows of as many bytes as each registered memory's state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from analysis.test_report import FAR, far_content
from common import refuses
from contract.contracts import CONTRACTS

from cached_lab.experiments.efficiency import efficiencies, efficiency, window_of
from cached_lab.experiments.probes.settings import stream_memories
from cached_lab.experiments.reports.blocks import ReportTable
from cached_lab.experiments.reports.probe_page import probe_tables
from cached_lab.experiments.reports.run_page import score_table
from cached_transformers import create_model
from cached_transformers.registry import MEMORIES
from cached_transformers.state import nbytes


def test_efficiency_is_the_share_of_the_gain_of_the_whole_text() -> None:
    assert efficiency("accuracy", 0.8, without=0.2, whole=1.0) == pytest.approx(0.75)
    assert efficiency("loss", 2.5, without=3.0, whole=2.0) == pytest.approx(0.5)
    assert efficiency("test_perplexity", math.exp(2.5), math.exp(3.0), math.exp(2.0)) == pytest.approx(0.5)
    assert efficiency("bits_per_byte", 3.5, without=3.0, whole=2.0) == pytest.approx(-0.5)
    named = {"no memory": 3.0, "whole text": 2.0, "same": 2.0, "nothing": 3.0}
    assert efficiencies("loss", named) == {"no memory": 0.0, "whole text": 1.0, "same": 1.0, "nothing": 0.0}


@pytest.mark.parametrize(
    ("metric", "without", "whole"), [("accuracy", 0.5, 0.5), ("accuracy", 0.5, 0.4), ("loss", 1, 2)]
)
def test_a_whole_text_that_gains_nothing_gives_no_number(metric: str, without: float, whole: float) -> None:
    assert efficiency(metric, 0.7, without, whole) is None
    table = score_table("", [{"memory": "a", "loss": 1.0, "efficiency": None}], "memory")
    assert (*table.columns,) == ("memory", "loss (nats)", "efficiency") and table.rows[0][-1] == "\N{EN DASH}"
    assert efficiencies(metric, {"no memory": without, "a": 0.7}) == {"no memory": None, "a": None}


def test_scores_that_are_not_finite_are_refused() -> None:
    for scores, named in (((math.nan, 1, 2), "memory"), ((1, math.inf, 2), "no memory"), ((1, 2, math.nan), "whole")):
        refuses(rf"loss=(nan|inf) of {named}", efficiency, "loss", *scores)
    refuses(r"perplexity=0", efficiency, "perplexity", 0, 2, 1)


def build(memory: Any) -> torch.nn.Module:
    return create_model("language_model", vocabulary=16, width=16, depth=2, heads=2, feed_forward=16, memory=memory)


def state_bytes(memory: Any) -> int:
    return nbytes(build(memory).eval().init_state(1))  # type: ignore[operator]


@pytest.mark.parametrize("name", [name for name in stream_memories() if name in CONTRACTS])
def test_a_window_is_the_longest_that_has_no_more_bytes(name: str) -> None:
    memory = CONTRACTS[name].spec(name)
    if name == "transformer_xl":
        assert window_of(memory, build) is None, "itself a window"
        return
    one, most = state_bytes({"name": "streaming_llm", "sinks": 0, "length": 1}), state_bytes(memory)
    if most < one:
        refuses(rf"{most:,} bytes.*{one:,}", window_of, memory, build)
        return
    window = window_of(memory, build)
    assert window is not None and window["name"] == "streaming_llm" and window["sinks"] == 0
    assert state_bytes(window) <= most < state_bytes(window | {"length": window["length"] + 1})


def test_every_memory_of_a_stream_is_tried_and_one_without_a_state_is_refused() -> None:
    ours = [n for n in stream_memories() if MEMORIES.entry(n).factory.__module__.startswith("cached_transformers.")]
    assert {*ours} <= {*CONTRACTS}, "each is held to its window above"
    assert window_of({"name": "streaming_llm", "sinks": 0, "length": 9}, build) is None
    refuses("block_retrieval.*capacity", window_of, {"name": "block_retrieval"}, build)
    image = {"image_size": 8, "patch_size": 4, "width": 16, "depth": 1, "heads": 2, "classes": 2}
    for name in ("grc", "attention_cache", "convolution"):
        with pytest.raises(ValueError, match=f"memory='{name}'.*bytes"):
            window_of(name, lambda memory: create_model("vision_transformer", **image, memory=memory))


def cells(content: dict[str, Any], column: str) -> dict[str, str]:
    table = next(block for block in probe_tables(content) if isinstance(block, ReportTable))
    return {row[1]: row[list(table.columns).index(column)] for row in table.rows}


def test_a_table_by_distance_shows_the_scores_and_the_efficiency_that_follows() -> None:
    shares: dict[str, Any] = {"no memory": [0.2, 0.4], "whole text": [0.9, 0.9], "rmt": [0.9, 0.9], "h2o": [0.4, 0.2]}
    content = far_content({name: [{1: 1.0, 10: share} for share in by_seed] for name, by_seed in shares.items()})
    window = {**content["results"][-1], "memory": "rmt", "arm": "window", "far": {"10": [0.5, 0.5, 64]}}
    content = content | {"results": [*content["results"], window], "controls": ["window"]}
    assert cells(content, "right, %")["window of rmt"] == "50.0" and cells(content, "right, %")["no memory"] == "30.0"
    expected = {"no memory": "0.000", "whole text": "1.000", "rmt": "1.000", "window of rmt": "0.333", "h2o": "0.000"}
    assert cells(content, "efficiency") == expected
    assert "No window of h2o" in str(probe_tables(content)[0])


def test_a_folder_of_before_without_the_whole_text_has_no_number_and_says_why() -> None:
    content = far_content({name: FAR[name] for name in ("no memory", "rmt")})
    assert set(cells(content, "efficiency").values()) == {"\N{EN DASH}"}
    assert "--no-ceiling" in str(probe_tables(content)[0]) and "No window" not in str(probe_tables(content)[0])
