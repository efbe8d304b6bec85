"""The benchmark of generation: all write as many tokens, and reading again gives the tokens of `generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import library

from cached_lab.cli.main import main
from cached_lab.experiments.benchmarks import generation, generation_peers
from cached_lab.experiments.benchmarks.generation import GPT2, NO_MEMORY, Text, as_markdown
from cached_lab.experiments.benchmarks.peers import Sizes

TINY = Sizes(vocabulary=16, width=8, depth=1, heads=1, memory=4, tokens=2)


@pytest.mark.parametrize("name", [NO_MEMORY, *generation.STANDARD])
@pytest.mark.parametrize("prompt", [3, 10])
def test_reading_again_writes_what_generate_writes(name: str, prompt: int) -> None:
    text = Text(rows=2, segment=4, prompt=prompt, tokens=11)
    model = generation.build(name, TINY, text).double()
    prompt_BN = torch.randint(0, 16, (2, prompt))
    again = generation.read_again(model, prompt_BN, text)
    assert torch.equal(again, generation.our_writer(model, prompt_BN, text)()) and again.shape == (2, 11)


def test_every_model_writes_in_every_setting() -> None:
    library("transformers")
    rows, missing = generation.run(1, "cpu", only="rmt", sizes=TINY, batches=(1, 2), segments=(4,), prompt=2, tokens=6)
    theirs = [GPT2] if missing else [GPT2, "x-transformers"]
    assert [(r.rows, r.model) for r in rows] == [(n, name) for n in (1, 2) for name in (*theirs, NO_MEMORY, "rmt")]
    assert all(r.speed == pytest.approx(r.rows * 6 / r.time.seconds) and r.reference == GPT2 for r in rows)
    assert [r.again is None for r in rows] == [r.model in theirs for r in rows]
    written = as_markdown(rows, missing)
    assert f"time, {GPT2} = 1" in written and f"| 1 | 4 | {GPT2} |" in written
    assert not missing or written.endswith("Left out: x-transformers is not installed.")


def test_gpt2_has_the_size_of_ours() -> None:
    library("transformers")
    sizes = Sizes(vocabulary=16, width=8, depth=2, heads=2)
    model, write = generation_peers.gpt2(sizes, 9)
    assert write(torch.zeros(3, 2, dtype=torch.long), 5).shape == (3, 5)
    count = sum(p.numel() for p in model.parameters())
    ours = sum(p.numel() for p in generation.build(NO_MEMORY, sizes, Text(1, 4)).parameters())
    assert count - 9 * sizes.width == ours  # its places are learned


def test_who_writes_less_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(sizes: Sizes, length: int) -> Any:
        return torch.nn.Linear(1, 1), lambda prompt_BN, tokens: prompt_BN

    monkeypatch.setattr(generation, "PEERS", {GPT2: generation_peers.Published("transformers", build)})
    with pytest.raises(ValueError, match=r"tokens of shape \(1, 2\) were written, not \(1, 6\)"):
        generation.run(1, "cpu", only="rmt", sizes=TINY, batches=(1,), segments=(4,), prompt=2, tokens=6)


def test_the_command_without_a_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(sizes: Sizes, length: int) -> Any:
        raise ImportError("no", name="transformers")

    monkeypatch.setattr(generation, "PEERS", {GPT2: generation_peers.Published("transformers", build)})
    path = tmp_path / "generation.json"
    small = ["--width", "8", "--depth", "1", "--heads", "1", "--rows", "1", "--segments", "4", "--tokens", "5"]
    command = ["benchmark", "generation", "--device", "cpu", "--prompt", "2", "--rounds", "1", *small]
    assert main([*command, "--memories", "rmt", "--dtype", "bfloat16", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Left out: transformers is not installed." in out and f"| 1 | 4 | {NO_MEMORY} |" in out
    found = json.loads(path.read_text())
    assert [r["model"] for r in found["rows"]] == [NO_MEMORY, "rmt"] and found["environment"]["dtype"] == "bfloat16"
    assert main([*command, "--profile", "rmt"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rmt, 5 tokens for 1 rows by segments of 4")
    assert "| operator | calls | ms | share |" in out and "| aten::" in out


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "generation", "--memories", "rmtt"]) == 2
    assert "unknown memory of a causal language model 'rmtt'; did you mean 'rmt'" in capsys.readouterr().err
    assert main(["benchmark", "generation", "--segments", "0"]) == 2
    assert "segments [0] must be numbers from 1 on" in capsys.readouterr().err
    assert main(["benchmark", "generation", "--tokens", "0"]) == 2
    assert "--tokens 0 must be at least 1" in capsys.readouterr().err
