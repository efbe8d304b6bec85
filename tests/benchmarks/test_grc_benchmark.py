"""`cached benchmark grc`: its cases, and the floor of `--roofline`, on a model small enough to be timed in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import library

from cached_lab.cli.main import main
from cached_lab.experiments.benchmarks import grc, grc_roofline
from cached_lab.experiments.benchmarks.grc_pieces import WITHIN, Shape, moved_bytes, pieces
from cached_lab.experiments.benchmarks.vision import fold
from cached_lab.experiments.costs.flops import count_flops, flops_of

SIDE = 64


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    library("timm")
    monkeypatch.setattr(grc, "MODELS", {"ViT": "vit_tiny_patch16_224", "PVT": "pvt_v2_b0"})


@pytest.mark.parametrize("architecture", ["vit_tiny_patch16_224", "pvt_v2_b0"])
def test_pieces_are_the_operations_that_grc_adds(architecture: str) -> None:
    """Products and attention of the pieces are what the model with a cache counts more than the plain one."""
    models = grc.build(architecture, SIDE, ("plain", "GRC"))
    images = torch.randn(2, 3, SIDE, SIDE)
    shapes = grc_roofline.shapes_of(models["GRC"], images)
    for training in (True, False):
        for model in models.values():
            fold(model)
        mode = "train" if training else "eval"
        plain, cached = (count_flops(model, images, mode=mode) for model in models.values())
        work = pieces(shapes, "cpu", training=training)
        counted = {piece: flops_of(call) for piece, call in work.items()}
        assert all((counted[piece] > 0) == (piece in PRODUCTS) for piece in counted)
        added = sum(flops for piece, flops in counted.items() if piece not in WITHIN)
        # Whole steps, of which a third is the forward pass.
        assert added == pytest.approx((3 if training else 1) * (cached - plain))


PRODUCTS = {"queries", "gates", "keys and values", "attention", "of which products"}


def test_bytes_are_those_of_one_layer_written_out() -> None:
    s = Shape(rows=2, tokens=5, slots=3, keys=3, cache=4, heads=2, width=8, reduced=1)
    y, o, gates = 2 * 5 * 8, 2 * 5 * 4, 2 * 3 * 4
    inference = (y + o) + y
    training = inference + (y + y + o) + (y + o) + 2 * 3 * gates + 3 * o
    assert moved_bytes({s: 2}, training=False) == 2 * 4 * inference
    assert moved_bytes({s: 2}, training=True) == 2 * 4 * training


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grc, "MODELS", {"ViT": "vit_tiny_patch16_224"})
    path = tmp_path / "grc.json"
    command = ["benchmark", "grc", "--roofline", "--batch", "1", "--rounds", "1", "--image-size", str(SIDE)]
    assert main([*command, "--device", "cpu", "--output", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    by_piece = {row["piece"]: row for row in found["rows"]}
    assert found["environment"]["image_size"] == SIDE and PRODUCTS | {"AdamW", "bytes", "GRC"} <= set(by_piece)
    assert by_piece["gates"]["inference"]["seconds"] == by_piece["AdamW"]["inference"]["seconds"] == 0
    rows = [row for row in found["rows"] if row["piece"] not in ("GRC", *WITHIN)]
    table = capsys.readouterr().out
    for mode in ("train", "inference"):
        assert f"{sum(row[mode]['median'] for row in rows):.3f}x" in table
    assert "| ViT | floor, attention as its parts |" in table


def test_table_has_a_row_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grc, "MODELS", {"ViT": "vit_tiny_patch16_224"})
    monkeypatch.setattr(grc, "SIDE", SIDE)
    monkeypatch.setattr(grc, "CASES", {case: grc.CASES[case] for case in list(grc.CASES)[:3]})
    rows = grc.run(1, 1, "cpu")
    plain, cached, fewer = rows
    assert plain.train.median == plain.inference.fastest == 1
    assert 1 < fewer.train_flops_ratio < cached.train_flops_ratio
    assert 1 < fewer.inference_flops_ratio < cached.inference_flops_ratio
    assert 1 < fewer.activations_ratio < cached.activations_ratio and 0 < fewer.cache_kib < cached.cache_kib
    table = grc.as_markdown(rows).splitlines()
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1
    assert f"| {fewer.train} | {fewer.train.fastest:.3f}x |" in table[-1]


def test_cases_begin_with_the_same_weights_and_differ_in_slots() -> None:
    models = grc.build("vit_tiny_patch16_224", SIDE, list(grc.CASES)[:3])
    plain = models["plain"].state_dict()
    for model in models.values():
        assert all(torch.equal(model.state_dict()[key], value) for key, value in plain.items())
    slots = [{cache.length for cache in grc.caches(model)} for model in models.values()]
    assert slots == [set(), {4 * 4 + 1}, {2 * 2 + 1}]
