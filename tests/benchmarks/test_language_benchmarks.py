"""Benchmarks of language models on tiny sizes: a row for each case, and equal work of the cases."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_rows import measured
from integrations.hosts import library

from benchmarks import compiled, diagonal, documents, generation, grc, memories
from benchmarks.attention_peers import PEERS as ATTENTION_PEERS
from benchmarks.generation import GPT2, NO_MEMORY, GenerationPeer, GenerationSetting
from benchmarks.memory_peers import PEERS, ModelSizes, Peer, lacking

TINY = ModelSizes(vocabulary=16, width=8, depth=1, heads=1, segment=4, segments=2, rows=1, memory=4, tokens=2)


def test_diagonal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonal, "BASE", ModelSizes(vocabulary=16, heads=1, segments=2, rows=1))
    monkeypatch.setattr(diagonal, "DEPTHS", (2,))
    monkeypatch.setattr(diagonal, "WIDTHS", (4, 8))
    rows = measured("diagonal", tmp_path, "--memories", "grc_stream", "--lengths", "4")["rows"]
    found = [(r["memory"], r["depth"], r["width"], r["segment"]) for r in rows]
    assert found == [("grc_stream", 2, width, 4) for width in (4, 8)]
    assert all(r["step"]["median"] > 0 and r["forward"]["median"] > 0 for r in rows)


def test_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ModelSizes(vocabulary=16, width=8, depth=1, heads=1, segment=8, segments=2, rows=2, memory=4, tokens=2)
    monkeypatch.setattr(documents, "BASE", small)
    rows = measured("documents", tmp_path, "--memories", "none,rmt", "--lengths", "3,20")["rows"]
    assert [(r["memory"], r["length"]) for r in rows] == list(itertools.product(("none", "rmt"), (3, 20)))
    assert all(r["packed"]["median"] > 0 and r["padded"]["median"] > 0 for r in rows)
    assert all(r["packed_tokens"] >= 1 and r["padded_tokens"] >= 1 for r in rows)
    assert rows[0]["documents"] > rows[1]["documents"]
    ids_BN = documents.documents_of(small, 3)
    assert ids_BN.shape == (2, 16) and (ids_BN[:, 0] == 0).all()
    assert set(ids_BN.diff().unique().tolist()) == {0, 1}
    assert torch.equal(ids_BN, documents.documents_of(small, 3))


def test_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of another length needs graphs of its own; an image model is compiled in the same table."""
    monkeypatch.setattr(compiled, "ModelSizes", lambda: TINY)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    images = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 1000))
    monkeypatch.setattr(grc, "build", lambda *given: {"GRC": images})
    monkeypatch.setattr(grc, "SIDE", 4)
    cases = ["rmt", compiled.VIT]
    found = measured("compiled", tmp_path, "--cases", ",".join(cases), "--depth", "1", "--lengths", "8,3")["rows"]
    assert [row["case"] for row in found] == cases
    assert all(row["graphs"] >= 1 and row["train"]["median"] > 0 and row["read"]["median"] > 0 for row in found)
    assert [len(row["others"]) for row in found] == [1, 0] and found[0]["others"][0][0] >= 1


@pytest.mark.parametrize(
    ("missing", "said"), [("memformer", "memformer"), ("einops_exts", "einops_exts, which memformer needs,")]
)
def test_a_missing_peer_is_left_out_by_name(missing: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(sizes: ModelSizes) -> Any:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setitem(PEERS, "memformer", PEERS["memformer"]._replace(build=build))
    row = memories.measure_memory("memformer", TINY, 1)
    assert row["peer"] is None and row["peer_name"] == f"{said} is not installed"
    assert memories.as_markdown([row]).splitlines()[-1].endswith(f"| {said} is not installed |")


def test_the_reference_of_flash_linear_attention_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    peer = ATTENTION_PEERS["gated_delta"]
    with pytest.raises(ModuleNotFoundError) as missing:
        peer.build(64, 2, 8, "cpu")
    assert lacking(peer.distribution, missing.value) == "fla-core is not installed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_reaches_ours_and_the_peer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

        def forward(self, inputs_BN: torch.Tensor, memory: Any) -> Any:
            logits = self.head(self.embedding(inputs_BN))
            seen.append(logits.dtype)
            return logits, memory

    def peer(sizes: ModelSizes) -> Peer:
        module = Theirs()
        return Peer(module, module)

    def watched(*given: Any, **options: Any) -> Any:
        model: Any = build(*given, **options)
        model.head.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
        return model

    build = memories.build
    monkeypatch.setitem(PEERS, "rmt", PEERS["rmt"]._replace(build=peer))
    monkeypatch.setattr(memories, "build", watched)
    row = memories.measure_memory("rmt", TINY, 1, "cpu", dtype)
    assert row["peer"] is not None and row["overhead"] == pytest.approx(row["plain"].median / row["flops"])
    # Kept activations are counted in float32, to be comparable with other tables.
    assert {*seen[: -TINY.segments]} == {dtype} and len(seen) > 10


@pytest.mark.parametrize("name", [NO_MEMORY, *generation.STANDARD])
@pytest.mark.parametrize("prompt", [3, 10])
def test_generation_without_a_cache_writes_the_tokens_of_generate(name: str, prompt: int) -> None:
    setting = GenerationSetting(rows=2, segment=4, prompt=prompt, tokens=11)
    model = generation.build(name, TINY, setting).double()
    prompt_BN = setting.prompt_BN(16, "cpu")
    tokens = generation.without_cache(model, prompt_BN, setting)
    assert torch.equal(tokens, generation.our_writer(model, TINY, setting, "cpu")()) and tokens.shape == (2, 11)


SMALL = ["--vocabulary", "16", "--width", "8", "--depth", "1", "--heads", "1", "--segments", "4"]
GENERATION = [*SMALL, "--prompt", "2", "--tokens", "6", "--memories", "rmt"]


def test_generation(tmp_path: Path) -> None:
    library("transformers")
    found = measured("generation", tmp_path, *GENERATION, "--rows", "1,2")
    rows = found["rows"]
    text = (tmp_path / "generation.md").read_text()
    missing = "Left out: x-transformers is not installed." in text
    theirs = [GPT2] if missing else [GPT2, "x-transformers"]
    assert [(r["rows"], r["model"]) for r in rows] == [(n, m) for n in (1, 2) for m in (*theirs, NO_MEMORY, "rmt")]
    assert all(r["speed"] == pytest.approx(r["rows"] * 6 / r["time"]["seconds"]) for r in rows)
    assert [r["uncached"] is None for r in rows] == [r["model"] in theirs for r in rows]
    assert f"time, {GPT2} = 1" in text and f"| 1 | 4 | {GPT2} |" in text


def test_gpt2_has_the_size_of_ours() -> None:
    library("transformers")
    sizes = ModelSizes(vocabulary=16, width=8, depth=2, heads=2)
    model, write = generation.gpt2(sizes, 9)
    assert write(torch.zeros(3, 2, dtype=torch.long), 5).shape == (3, 5)
    count = sum(p.numel() for p in model.parameters())
    ours = sum(p.numel() for p in generation.build(NO_MEMORY, sizes, GenerationSetting(1, 4)).parameters())
    assert count - 9 * sizes.width == ours  # its positions are learned


def test_a_peer_that_writes_less_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(sizes: ModelSizes, length: int) -> Any:
        return torch.nn.Linear(1, 1), lambda prompt_BN, tokens: prompt_BN

    monkeypatch.setattr(generation, "PEERS", {GPT2: GenerationPeer("transformers", build)})
    setting = GenerationSetting(1, 4, 2, 6)
    with pytest.raises(ValueError, match=r"\(1, 2\).*\(1, 6\)"):
        generation.measure_setting(setting, ["rmt"], TINY, 1, "cpu", torch.float32, {})
