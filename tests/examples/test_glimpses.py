"""`examples/glimpses.py`: its frames, and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples import glimpses


def test_every_frame_shows_one_quarter_and_all_of_them_the_digit() -> None:
    images = torch.rand(50, 1, 8, 8) + 0.1
    videos = glimpses.glimpses(images, torch.Generator().manual_seed(0))
    assert videos.shape == (50, 4, 1, 8, 8)
    assert torch.equal(videos.sum(1), images)
    seen = (videos[:, :, 0] > 0).unflatten(2, (2, 4)).unflatten(4, (2, 4)).any(5).any(3)  # rows, frames, quarters
    assert (seen.flatten(2).sum(2) == 1).all()
    assert len({tuple(row) for row in seen.flatten(2).int().argmax(2).tolist()}) > 10, "orders differ"


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
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
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


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--with", "grcs"], "did you mean 'grc'"), (["--seeds", "0"], "at least 1")):
        with pytest.raises(SystemExit):
            glimpses.main(arguments)
        assert message in capsys.readouterr().err
