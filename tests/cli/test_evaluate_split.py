"""`cached evaluate` of a run whose data have no test split."""

from __future__ import annotations

from pathlib import Path

import pytest

from cached_lab.experiments.evaluate import Evaluation
from cached_lab.tasks.recipes import config_from_dict


def test_a_split_that_is_not_there_is_refused_with_the_one_that_is(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "images" / split / "a").mkdir(parents=True)
    tree = {
        "name": "run",
        "data": {"name": "image_folder", "path": str(tmp_path / "images"), "image_size": 8},
        "model": {"name": "vision_transformer", "patch_size": 4, "width": 8, "depth": 1, "heads": 1},
        "training": {"steps": 1, "batch_size": 1, "test": "none"},
    }
    evaluation = Evaluation(tmp_path, config_from_dict(tree), "best", "test", ["carry"])
    with pytest.raises(ValueError, match=r"training.test=none"):
        evaluation.score("cpu")
