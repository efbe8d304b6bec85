"""Weights sharded over two processes learn the same as one process, and resume with any number of processes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import launch
import pairs
import pytest
import safetensors.torch
import sharded_runs as runs
import torch
import yaml
from common import TORCH, refuses
from contract.contract_cases import STREAMS
from same_run import assert_same_run, assert_same_tree, final, in_two_processes
from small_language import recipe
from torch import Tensor, nn

from cached_lab.cli.main import main
from cached_lab.training.checkpoint import SHARDS, Checkpoints, read_checkpoint
from cached_lab.training.distributed import World
from cached_lab.training.metrics import read_metrics
from cached_lab.training.settings import TrainingConfig
from cached_lab.training.sharding import blocks

ALONE = World(torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which two processes trained and stored their results."""
    if TORCH < (2, 7):
        pytest.skip("FSDP2 needs torch 2.7")
    folder = tmp_path_factory.mktemp("sharding")
    in_two_processes(runs.train_all, folder)
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def close(found: dict[str, Tensor], expected: dict[str, Tensor], most: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=most, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("memory", runs.MEMORIES)
def test_two_processes_learn_what_one_learns(memory: str, folder: Path, tmp_path: Path) -> None:
    runs.fitted(tmp_path, folder / "text", ALONE, *runs.of_memory(memory))
    curves = [read_metrics(run / "metrics.jsonl") for run in (tmp_path, folder / memory)]
    assert len(curves[0]) == len(curves[1]) == 4
    for alone, together in zip(*curves, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        assert together.get("gradient_norm") == pytest.approx(alone.get("gradient_norm"), abs=1e-6)
    assert curves[0][0]["gradient_norm"] > 0.1  # gradients were clipped
    alone, together = (Checkpoints(run / "checkpoints").newest_valid()[0] for run in (tmp_path, folder / memory))
    close(together.weights, alone.weights)
    for name, value in together.training["optimizer"]["state"].items():
        close(value, alone.training["optimizer"]["state"][name])


@pytest.mark.parametrize("loop", runs.LOOPS)
def test_every_loop_gives_the_gradient_of_one_process(loop: str, seen: list[dict[str, Any]]) -> None:
    alone = runs.stream_gradients(runs.STREAM, runs.LOOPS[loop], None)
    for rank in range(2):
        close(seen[rank][loop], alone)


def test_caches_shares_and_failing_saves_of_processes(seen: list[dict[str, Any]]) -> None:
    """Rows that attend their own cache train as in one process; with the mean over a process' rows, as in DDP."""
    alone = runs.vision(None, attend="sample")
    assert max(t.abs().max() for name, t in alone.items() if name.endswith("cache_MC")) > 0
    for rank in range(2):
        close(seen[rank]["sample"], alone)
        close(seen[rank]["mean"], seen[rank]["replicated"])
    assert all(found["cut"] for found in seen)
    assert seen[0]["share"] + seen[1]["share"] == seen[0]["all"]
    assert seen[0]["share"] < 0.6 * seen[0]["all"]
    for rank in range(2):
        said = seen[rank]["failing"][0]
        assert "step_00000009 could not be written (No space left on device)" in said and "untouched" in said
    assert ".partial" not in seen[0]["failing"] and "step_00000008" in seen[0]["failing"]


@pytest.mark.slow
def test_every_stream_memory_has_the_gradient_of_one_process(tmp_path: Path) -> None:
    found = launch.world(runs.all_gradients, tmp_path)[0]
    assert [str(case) for case in STREAMS if isinstance(found[str(case)], str)] == [], "none is refused"
    for case in STREAMS:
        close(found[str(case)], runs.stream_gradients(case, runs.LOOPS["blocks"], None))


def test_two_processes_go_on_alike_and_where_one_stopped(folder: Path, seen: list[dict[str, Any]]) -> None:
    """Saved at once, or in the background."""
    assert_same_run(folder / "whole", folder / "parts", 8)
    shares = [final(folder / name).path / SHARDS for name in ("whole", "parts")]
    for file in sorted(shares[0].iterdir()):
        assert file.read_bytes() == (shares[1] / file.name).read_bytes()
    saved = read_checkpoint(folder / "begun_by_one" / "checkpoints" / "step_00000004")
    trainer = runs.make(folder / "begun_by_one", folder / "text", ALONE, *runs.CARRIED, "training.steps=4")
    trainer.resume(str(saved.path))
    for rank in range(2):
        assert_same_tree(seen[rank]["begun by one"], runs.stored(trainer))


def test_one_process_goes_on_where_two_stopped(folder: Path, tmp_path: Path) -> None:
    options = (*runs.CARRIED, "training.precision=bfloat16", "model.memory.length=6", "training.steps=8")
    run = Path(shutil.copytree(folder / "whole", tmp_path / "run"))  # other tests look at where it stopped
    saved, _ = Checkpoints(run / "checkpoints").newest_valid()
    assert saved is not None and (saved.path / SHARDS).is_dir() and isinstance(saved.weights, dict)
    trainer = runs.make(run, folder / "text", ALONE, *options)
    trainer.resume("auto")
    found = runs.stored(trainer)
    live, averaged = saved.training["live_weights"], saved.weights
    assert_same_tree({n: found[f"live/{n}"] for n in live}, live)
    assert_same_tree({n: found[f"average/{n}"] for n in averaged}, averaged)
    assert_same_tree(trainer.optimizer.state_dict(), saved.training["optimizer"])
    assert any(not torch.equal(live[n], averaged[n]) for n in live)
    assert_same_tree(trainer.task.state_dict(), saved.training["carried"])
    again = runs.make(run, folder / "text", ALONE, *options[:-1], "training.steps=9")
    again.resume("auto")
    again.fit()
    assert math.isfinite(again.latest["loss"])


def test_a_changed_byte_in_a_share_is_found(folder: Path) -> None:
    path = folder / "parts" / "checkpoints" / "step_00000006"
    for file in sorted((path / SHARDS).iterdir()):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        for whole in (True, False):
            refuses(rf"is damaged: shards/{file.name} does not match its checksum", read_checkpoint, path, whole)
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    (path / SHARDS / "00001.safetensors").rename(path / "away")
    refuses(r"00001.safetensors is missing or cannot be read", read_checkpoint, path)
    (path / "away").rename(path / SHARDS / "00001.safetensors")
    assert read_checkpoint(path).step == 6


@pytest.mark.parametrize("option", [{"precision": "float16"}, {"compile": True}])
def test_what_does_not_go_with_it_is_refused(option: dict[str, Any]) -> None:
    refuses(r"training\.parallel='fsdp'", TrainingConfig, parallel="fsdp", **option)


def test_blocks_are_what_lists_hold() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.ModuleList([inner, nn.Linear(2, 2), nn.ReLU()])})
    assert blocks(model) == [inner, model["body"][1]]  # type: ignore[index]


@pytest.mark.usefixtures("no_run_reports")
def test_a_run_of_two_processes_is_read_like_any_other(folder: Path, tmp_path: Path) -> None:
    """From `cached train` in two processes to `evaluate`, `generate` and `convert` of one."""
    tree = recipe(folder / "text", *runs.of_memory("rmt"), "training.metric=bits_per_byte")
    words = ["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"), "training.parallel=fsdp"]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    pairs.commands(words, tmp_path / "meeting")
    run = tmp_path / "run"
    assert (Checkpoints(run / "checkpoints").named("best") / SHARDS).is_dir()
    assert main(["train", words[1], "--out", str(tmp_path / "alone"), "training.parallel=fsdp"]) == 0
    tested = [json.loads((at / "summary.json").read_text(encoding="utf-8")) for at in (run, tmp_path / "alone")]
    assert tested[0]["test"]["loss"] == pytest.approx(tested[1]["test"]["loss"], abs=1e-6)
    assert tested[0]["parameters"] == tested[1]["parameters"] and tested[0]["flops"] == tested[1]["flops"]
    assert main(["evaluate", str(run)]) == main(["convert", str(run)]) == 0
    assert main(["generate", str(run), "--prompt", "ab", "--tokens", "3", "--device", "cpu"]) == 0
    found = safetensors.torch.load_file(run / "model.safetensors")
    close(found, read_checkpoint(Checkpoints(tmp_path / "alone" / "checkpoints").named("best")).weights)
