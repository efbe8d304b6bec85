"""Benchmarks of image models, on models small enough to be timed in a moment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmark_rows import measured
from integrations.hosts import library

from benchmarks import grc
from cached_lab.experiments.costs import throughput
from cached_lab.experiments.costs.flops import count_flops, count_parameters
from cached_transformers.memories.grc.shared_cache import caches

SIDE = 64


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    library("timm")
    monkeypatch.setattr(grc, "MODELS", {"ViT": "vit_tiny_patch16_224"})
    monkeypatch.setattr(throughput, "MODELS", {"small": "pvt_v2_b0"})


def test_grc_has_a_row_for_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grc, "SIDE", SIDE)
    monkeypatch.setattr(grc, "CASES", {case: grc.CASES[case] for case in list(grc.CASES)[:3]})
    rows = measured("grc", tmp_path, "--batch", "1")["rows"]
    plain, cached, fewer = rows
    assert plain["train"]["median"] == plain["inference"]["fastest"] == 1
    for count in ("train_flops_ratio", "inference_flops_ratio", "activations_ratio"):
        assert 1 < fewer[count] < cached[count]
    table = (tmp_path / "grc.md").read_text().split("\n\n")[0].splitlines()
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1


@pytest.mark.parametrize("architecture", ["vit_tiny_patch16_224", "pvt_tiny"])
def test_cases_begin_with_the_same_weights_and_differ_in_slots(architecture: str) -> None:
    if architecture == "pvt_tiny":
        models = throughput.build_backbones(architecture, 32)
    else:
        models = grc.build(architecture, SIDE, list(grc.CASES)[:3])
        slots = [{cache.length for cache in caches(model)} for model in models.values()]
        assert slots == [set(), {4 * 4 + 1}, {2 * 2 + 1}]
    plain = models["plain"].state_dict()
    for model in models.values():
        assert all(torch.equal(model.state_dict()[key], value) for key, value in plain.items())


def test_vision(tmp_path: Path) -> None:
    """Counts are those of the models, and speeds are images over seconds."""
    found = measured("vision", tmp_path, "--models", "small", "--batch", "2", "--image-size", "32")
    rows, images = found["rows"], torch.randn(2, 3, 32, 32)
    assert found["environment"]["image_size"] == 32
    models = throughput.build_backbones("pvt_v2_b0", 32)
    for row, (case, model) in zip(rows, models.items(), strict=True):
        assert (row["model"], row["case"], row["parameters"]) == ("small", case, count_parameters(model))
        forward = count_flops(model, images, mode="train") / count_flops(models["plain"], images, mode="train")
        assert row["train_flops_ratio"] == forward
        for work in ("train", "inference"):
            assert row[f"{work}_images"] == pytest.approx(2 / row[work]["seconds"])
        weights = 4 * row["parameters"] / 2**20
        assert row["train_peak_mib"] > weights > row["inference_peak_mib"] > 0  # gradients at least; activations only
    plain, cached, released = rows
    assert plain["train"]["median"] == plain["inference"]["fastest"] == plain["train_flops_ratio"] == 1
    for count in ("train_flops_ratio", "inference_flops_ratio"):
        assert 1 < cached[count] < released[count]
    table = (tmp_path / "vision.md").read_text().split("\n\n")[0].splitlines()
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1
