"""`examples/stability.py` tells bounded states from growing and broken ones; `examples/glimpses.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from common import refuses, stirred

from examples import glimpses
from examples.stability import CASES, PLACES, StabilityCase, _titans, main, measure


def named(**options: object) -> StabilityCase:
    return StabilityCase("titans", options, _titans)


def test_limits_hold_a_large_rate_and_shares_grow_where_nothing_decays() -> None:
    held = measure(named(rate=1000.0), 1024, 1, torch.float32)
    assert len(held) == len(PLACES) + 1 and all(math.isfinite(size) for size in held) and max(held) == held[-1]
    broken = measure(named(rate=1000.0, limit=1e30), 1024, 1, torch.float32)
    assert broken[-1] == math.inf, "without the limit the same rate diverges, and that is said"
    # A reflection keeps the norm of a state, so that its updates add up like a random walk.
    cases = {bool(case.options.get("negative_eigenvalues")): case for case in CASES if case.name == "gated_delta"}
    grown, kept = (measure(cases[negative], 4096, 1, torch.float32) for negative in (True, False))
    assert grown[3] > 1.5 * grown[1] and kept[3] < 1.5 * kept[1]


def test_the_table_has_a_row_for_each_and_bad_numbers_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.stability.CASES", CASES[-1:])
    main(["--tokens", "512", "--seeds", "1"])
    out = capsys.readouterr().out
    assert "| `delta_net` | float32 |" in out and "| `delta_net` | bfloat16 |" in out and "after 512 tokens" in out
    refuses("--tokens 100", main, ["--tokens", "100"])


def test_frames_show_quarters_and_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    images = torch.rand(50, 1, 8, 8) + 0.1
    videos = glimpses.glimpses(images, torch.Generator().manual_seed(0))
    assert videos.shape == (50, 4, 1, 8, 8)
    assert torch.equal(videos.sum(1), images)
    seen = (videos[:, :, 0] > 0).unflatten(2, (2, 4)).unflatten(4, (2, 4)).any(5).any(3)  # rows, frames, quarters
    assert (seen.flatten(2).sum(2) == 1).all()
    assert len({tuple(row) for row in seen.flatten(2).int().argmax(2).tolist()}) > 10, "orders differ"
    rowwise = ["--task", "camera", "--with", "grc,grc_stream"]
    wrong = (
        (["--with", "grcs"], "did you mean 'grc'"),
        (["--seeds", "0"], "at least 1"),
        (rowwise, "--with grc_stream:"),
    )
    for arguments, message in wrong:
        with pytest.raises(SystemExit):
            glimpses.main(arguments)
        assert message in capsys.readouterr().err


def test_the_command_keeps_what_is_trained_with_other_seeds_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path), "--with", "grc_stream:length=4"]
    said = []
    for seeds, steps in ("11", "21", "12", "21"):
        assert glimpses.main([*command, "--seeds", seeds, "--steps", steps]) == 0
        said.append(capsys.readouterr().out)
    assert "| grc_stream:length=4 |" in said[0] and said[1].count("seed 1") == 3 and "seed 0" not in said[1]
    assert "seed" not in said[3], "nothing is trained again"
    found = json.loads((tmp_path / "glimpses.json").read_text())["results"]
    assert list(found) == ["none", "grc_stream:length=4", "the whole digit"]
    assert [(run["seed"], run["steps"]) for run in found["none"]] == [(0, 1), (1, 1), (0, 2)]


def test_a_memory_tells_the_last_frame_what_the_others_showed() -> None:
    images = torch.rand(3, 1, 8, 8)
    torch.manual_seed(0)
    model = glimpses.create_model("vision_transformer", **glimpses.SIZES, memory="grc_stream").eval()
    stirred(model, 0.1)
    changed = images.clone()
    changed[:, :, :4, :4] += 1  # one quarter, which only some rows have in their last frame
    order = [torch.Generator().manual_seed(1) for _ in range(4)]
    asked = [
        glimpses.answer(model, x, arm, g)
        for (x, arm), g in zip(
            [(images, "grc_stream"), (changed, "grc_stream"), (images, "none"), (changed, "none")], order, strict=True
        )
    ]
    last = glimpses.glimpses(images, torch.Generator().manual_seed(1))[:, -1, 0, :4, :4].flatten(1).any(1)
    assert not last.all()
    assert ((asked[0] - asked[1]).abs().amax(1) > 1e-6).all(), "with a memory every frame counts"
    assert torch.equal((asked[2] - asked[3]).abs().amax(1) > 0, last), "without one only the last"


def test_a_camera_adds_one_pattern_to_its_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = torch.rand(5, 1, 8, 8)
    seen, mean = (glimpses.seen_by_camera(images, arm, torch.Generator()) for arm in ("grc", glimpses.MEAN))
    pattern = (seen[:, :1] - images)[0]
    assert pattern.std() > 0.5 and torch.allclose(seen[:, :1] - images, pattern.expand_as(images), atol=1e-6)
    assert not seen[:, 1].any() and torch.allclose(mean[:, 1], (images + pattern).mean(0).expand(5, 1, 8, 8)[:, 0])
    assert glimpses.main(["--task", "camera", "--seeds", "1", "--steps", "1", "--out", str(tmp_path)]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    sizes = {row[0].removeprefix("| "): int(row[-1].strip(" |").replace(",", "")) for row in rows[2:]}
    assert list(sizes)[1:3] == ["grc", "grc" + glimpses.UPDATED] and len(sizes) == 6
    assert abs(sizes[glimpses.WIDER + "grc"] / sizes["grc"] - 1) < 0.005 < sizes["grc"] / sizes["none"] - 1


@torch.no_grad()
def test_an_updated_cache_tells_rows_of_each_other_and_a_constant_one_does_not() -> None:
    model = stirred(glimpses.build("grc", "camera").eval(), 0.5)
    images = torch.randn(3, 2, 8, 8)
    others = torch.cat([images[:1], torch.randn(2, 2, 8, 8)])
    assert torch.equal(model(images).outputs[0], model(others).outputs[0])
    for memory in glimpses.shared_memories(model):
        memory.train()
    assert (model(images).outputs[0] - model(others).outputs[0]).abs().max() > 1e-4
