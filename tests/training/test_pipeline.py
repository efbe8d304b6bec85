"""Segments of a row shared by several processes: loss, state and gradients equal one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launch
import pytest
import torch
import yaml
from common import refuses
from contract.contract_cases import CASES, STREAMS, Case
from pipeline_cases import FEW, MESH, everything, seen, settings_of
from same_run import in_two_processes
from small_language import make, recipe, write_text

from cached_lab.cli.main import main
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.metrics import read_metrics
from cached_lab.training.segment_pipeline import SegmentPipeline, share
from cached_lab.training.settings import TrainingConfig

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return in_two_processes(everything, tmp_path_factory.mktemp("pipeline"), "few")


def compare(case: Case, found: Seen, lanes: int = 1) -> None:
    """Compare with one process; a weight that nothing uses has no gradient there, and may have zeros here."""
    for name, setting in settings_of(case).items():
        alone = seen(case, setting, None)
        for rank, of_rank in enumerate(found):
            lane, place = divmod(rank, len(found) // lanes)
            here = of_rank[f"{case} {name}"]
            for key in alone.keys() | here.keys():
                if key not in here and key.startswith("state"):
                    assert place > 0 and setting.segments == 1, key  # this process read no segment
                elif key not in here and key == "auxiliary":
                    assert lanes > 1
                elif key not in alone or key not in here:
                    assert key.startswith("gradient") and not (alone | here)[key].any(), (name, key)
                else:
                    want = alone[key].chunk(lanes)[lane] if key.startswith("state") else alone[key]
                    text = f"{name}, process {rank}, {key}"
                    torch.testing.assert_close(here[key], want, rtol=0, atol=1e-9, msg=lambda m, t=text: f"{t}: {m}")


@pytest.mark.parametrize("case", FEW, ids=str)
def test_two_processes_learn_what_one_learns(case: Case, two: Seen) -> None:
    compare(case, two)


@pytest.mark.slow
def test_every_stream_memory_learns_what_it_learns_in_one_process(tmp_path: Path) -> None:
    found = launch.world(everything, tmp_path, "streams")
    for case in STREAMS:
        compare(case, found)


@pytest.mark.slow
def test_two_pipelines_of_two_processes_read_other_rows(tmp_path: Path) -> None:
    found = launch.world(everything, tmp_path, "mesh", processes=4)
    for case in MESH:
        compare(case, found, lanes=2)


@pytest.mark.slow
def test_a_recipe_trains_in_a_pipeline_as_in_one_process(tmp_path: Path) -> None:
    """Streams that are carried on over steps, accumulated pieces, a checkpoint, and steps with fewer segments."""
    text = write_text(tmp_path / "text")
    options = [
        *("model.dropout=0.0", "training.segments=3", "training.bptt=3", "training.accumulate=2", "training.steps=16"),
        *("training.evaluate_every=16", "training.log_every=1", "training.batch_size=8", "data.reset=document"),
        *("optimizer.name=sgd", "training.clip_norm=0.1"),
    ]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe(text, *options)), encoding="utf-8")
    train = ["train", str(tmp_path / "recipe.yaml"), "--out"]
    launch.python("-m", "cached_lab.cli.main", *train, tmp_path / "two", "training.pipeline=2", processes=2)
    assert main([*train, str(tmp_path / "alone")]) == 0
    curves = [read_metrics(tmp_path / run / "metrics.jsonl") for run in ("alone", "two")]
    assert len(curves[0]) == len(curves[1]) == 16 + 1
    for alone, here in zip(*curves, strict=True):
        assert here["loss"] == pytest.approx(alone["loss"], abs=1e-5)
        assert here.get("gradient_norm", 0) == pytest.approx(alone.get("gradient_norm", 0), rel=1e-4)
    saved = [Checkpoints(tmp_path / run / "checkpoints").newest_valid()[0] for run in ("alone", "two")]
    assert saved[0] is not None and saved[1] is not None
    carried = [point.training["carried"] for point in saved]
    assert carried[0].keys() == carried[1].keys() and carried[0]
    for name, t in carried[0].items():
        torch.testing.assert_close(carried[1][name], t, rtol=0, atol=1e-4)
    # One process resumes a run of two.
    assert main([*train, str(tmp_path / "two"), "training.steps=17"]) == 0
    assert read_metrics(tmp_path / "two" / "metrics.jsonl")[-1]["step"] == 17


@pytest.mark.parametrize(
    "options", [{"parallel": "fsdp"}, {"passes": 2}, {"compile": True}, {"bptt_window": "sliding", "bptt": 2}]
)
def test_what_does_not_go_with_a_pipeline_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"training\.pipeline=2 does not go with training\.\w+=.*pipeline=1"):
        TrainingConfig(pipeline=2, segments=2, **options)


def test_a_pipeline_needs_segments_processes_and_caches_of_rows(tmp_path: Path) -> None:
    refuses(r"pipeline=3.*training\.segments=2", TrainingConfig, pipeline=3, segments=2)
    text = write_text(tmp_path / "text")
    refuses("pipeline=2", make, tmp_path, text, "training.pipeline=2")
    shared = next(case for case in CASES if case.shared).build()
    refuses("cache shared by all rows", SegmentPipeline, shared, 4)


@pytest.mark.parametrize(("segments", "processes"), [(1, 4), (5, 2), (7, 3), (8, 8), (0, 2)])
def test_every_segment_belongs_to_one_process(segments: int, processes: int) -> None:
    shares = [share(segments, rank, processes) for rank in range(processes)]
    assert [number for own in shares for number in own] == list(range(segments))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
