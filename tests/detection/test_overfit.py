"""Six photographs learned by heart: what boxes, masks, losses, memory and scores come to when they work together."""

from __future__ import annotations

import pytest

from cached_lab.experiments.run import run_training
from cached_lab.tasks.recipes import load_config


@pytest.mark.slow
@pytest.mark.parametrize("name, kinds", [("mask_rcnn", ("box", "mask")), ("retinanet", ("box",))])
def test_a_detector_learns_six_images_by_heart(name, kinds, shared, tmp_path):
    data = shared / "data" / "coco-mini"
    overrides = [f"data.path={data}", "training.tensorboard=false", "training.device=cpu"]
    summary = run_training(load_config(f"coco_overfit_{name}", overrides), tmp_path / "run")
    assert all(summary["final"][f"{kind}_ap"] >= 0.8 for kind in kinds), summary["final"]
