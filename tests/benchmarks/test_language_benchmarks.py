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

from benchmarks import compiled, context, diagonal, documents, generation, grc, memories, record
from benchmarks.attention_peers import PEERS as ATTENTION_PEERS
from benchmarks.generation import GPT2, NO_MEMORY, GenerationPeer, GenerationSetting
from benchmarks.memory_peers import PEERS, ModelSizes, Peer, lacking
from cached_lab.cli.main import main
from cached_lab.experiments.costs.timing import Ratio
from cached_transformers.state import named_tensors

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


@pytest.mark.slow
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


SMALL = ["--vocabulary", "16", "--width", "8", "--depth", "1", "--heads", "1", "--segments", "4"]
GENERATION = [*SMALL, "--prompt", "2", "--tokens", "6", "--memories", "rmt"]


def test_generation(tmp_path: Path) -> None:
    library("transformers")
    found = measured("generation", tmp_path, *GENERATION, "--rows", "1,2")
    rows = found["rows"]
    text = (tmp_path / "generation.md").read_text()
    missing = "Left out: x-transformers is not installed." in text
    theirs = [GPT2] if missing else [GPT2, "x-transformers"]
    models = (*theirs, f"{GPT2}, rmt", NO_MEMORY, "rmt")
    assert [(r["rows"], r["model"]) for r in rows] == list(itertools.product((1, 2), models))
    assert all(r["speed"] == pytest.approx(r["rows"] * 6 / r["time"]["seconds"]) for r in rows)
    assert f"time, {GPT2} = 1" in text and f"| 1 | 4 | {GPT2} |" in text


def test_context(tmp_path: Path) -> None:
    """Caches of all tokens grow with the context, a state of one size does not; too large a cache is left out."""
    library("transformers")
    sizes = ["--vocabulary", "16", "--width", "8", "--depth", "1", "--heads", "1", "--segment", "4", "--rows", "1,2"]
    given = ["--contexts", "32,8", "--memories", "rmt,block_retrieval", "--gib", "2e-5"]
    picture = tmp_path / "context.svg"
    rows = measured("context", tmp_path, *sizes, *given, "--figure", str(picture))["rows"]
    found = {(r["rows"], r["context"], r["model"]): r["mebibytes"] * 2**20 for r in rows}
    for count, name in itertools.product((1, 2), ("DynamicCache", "StaticCache")):
        assert found[count, 32, f"gpt2, {name}"] - found[count, 8, f"gpt2, {name}"] == count * 2 * 24 * 8 * 4
        assert found[count, 8, f"llama, {name}"] >= count * 2 * 12 * 8 * 4
    for count, name in itertools.product((1, 2), (NO_MEMORY, "rmt")):
        assert found[count, 8, name] == found[count, 32, name] > 0
    assert (1, 8, "block_retrieval") in found and (2, 32, "block_retrieval") not in found
    assert all(0 < low <= median <= high for median, low, high in (row["milliseconds"] for row in rows))
    text = (tmp_path / "context.md").read_text()
    assert "Left out: block_retrieval, 2 x 32 tokens: 4.3e-06 GiB, of --gib 2e-05." in text
    assert "tokens of context" in picture.read_text() and "gpt2, StaticCache" in picture.read_text()


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_cached_writer_writes_the_same_again(name: str, kind: str) -> None:
    library("transformers")
    model: Any = memories.host(name, TINY, 16)
    torch.manual_seed(1)
    write = context.cached_writer(model.model.eval(), kind, GenerationSetting(2, 4, 1, 6), 10)
    first: list[torch.Tensor] = []
    again: list[torch.Tensor] = []
    write(first.append)
    write(again.append)
    assert len(first) == 6 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["rmt", "block_retrieval"])
def test_a_context_is_read_in_parts_as_at_once(name: str) -> None:
    model = generation.build(name, TINY, GenerationSetting(2, 4)).double()
    ids_BN = torch.randint(0, 16, (2, 16), generator=torch.Generator().manual_seed(0))
    half = memories.read(model, ids_BN[:, :8], 4)
    before = {key: t.clone() for key, t in named_tensors(half)}
    whole, rest = memories.read(model, ids_BN, 4), memories.read(model, ids_BN[:, 8:], 4, half)
    for (_, a), (_, b) in zip(named_tensors(whole), named_tensors(rest), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(t, before[key]) for key, t in named_tensors(half)), "the given state is not changed"


def test_prefill(tmp_path: Path) -> None:
    library("transformers")
    sizes = ["--vocabulary", "16", "--width", "8", "--depth", "1", "--heads", "1", "--tokens", "24"]
    given = ["--segments", "4,6", "--models", "ours,gpt2", "--memories", "rmt,transformer_xl"]
    rows = measured("prefill", tmp_path, *sizes, *given)["rows"]
    ours = [("whole text", 24), *itertools.product(("rmt", "transformer_xl"), (4, 6))]
    assert [(r["memory"], r["segment"]) for r in rows] == [*ours, *ours[:3]]
    assert all(r["speed"] == pytest.approx(24 / r["time"]["seconds"]) for r in rows)
    for model, memory in {(r["model"], r["memory"]) for r in rows}:
        speeds = {r["speed"]: r["best"] for r in rows if (r["model"], r["memory"]) == (model, memory)}
        assert [speed for speed, best in speeds.items() if best] == [max(speeds)][memory == "whole text" :]
    assert "Left out: transformer_xl in gpt2, memory 'transformer_xl' needs" in (tmp_path / "prefill.md").read_text()


def test_a_record_that_has_moved_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Times are set by the test: the check compares, measures twice, and names a slower and a faster ratio."""
    slower = {"rmt": 1.0}
    built: list[str] = []

    def cases(device: str) -> Any:
        built.append(device)
        return {"training": {"plain": 1.0, "rmt": 1.2 * slower["rmt"], "titans": 2.0}}

    def compare(cases: dict[str, float], reference: str, rounds: int) -> dict[str, Ratio]:
        wobble = 1 + 0.001 * (len(built) % 3)
        return {name: Ratio(*[wobble * seconds / cases[reference]] * 5) for name, seconds in cases.items()}

    monkeypatch.setattr(record, "FOLDER", tmp_path)
    monkeypatch.setattr(record, "cases_of", cases)
    monkeypatch.setattr(record, "compare", compare)
    check = ["benchmark", "record", "--device", "cpu", "--blocks", "6", "--check"]
    assert main(check) == 2 and "no record" in capsys.readouterr().err
    rows = measured("record", tmp_path, "--blocks", "6")["rows"]
    assert [row["ratio"] for row in rows] == ["training, rmt", "training, titans"]
    assert all(row["low"] < row["mean"] < row["high"] for row in rows)
    assert main(check) == 0 and "0 of 2 ratios have moved" in capsys.readouterr().out
    for factor, moved in ((1.1, True), (1.01, False), (0.9, True)):
        slower["rmt"], before = factor, len(built)
        assert main(check) == int(moved)
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
        assert len(built) - before == (12 if moved else 6), "what has moved is measured again"
        assert [line.split(":")[0] for line in lines] == (["- training, rmt"] if moved else [])
    monkeypatch.setattr(record, "machine", lambda: "one abacus")
    assert main(check) == 1 and "this is one abacus" in capsys.readouterr().out


def test_the_ten_ratios_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library("timm")
    monkeypatch.setattr(record, "SIZES", ModelSizes(**{**vars(TINY), "heads": 2}))
    monkeypatch.setattr(record, "IMAGES", ("vit_tiny_patch16_224", 32))
    rows = measured("record", tmp_path, "--blocks", "2")["rows"]
    names = [f"training, {name}" for name in record.TRAINED] + [f"writing, {name}" for name in record.WRITTEN]
    assert [row["ratio"] for row in rows] == [*names, "ViT, GRC"] and all(row["mean"] > 0 for row in rows)


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
