"""Trainings and gradients with sharded weights, for processes of torchrun and for one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import small_language
import torch
from contract.contract_cases import CASES, SEGMENT, STREAMS, Case
from contract.distributed_worker import ROWS, half
from small_language import write_text
from torch import Tensor, nn

from cached_lab.training import checkpoint
from cached_lab.training.distributed import World
from cached_lab.training.sharding import Shards, full_tensor, is_sharded
from cached_lab.training.trainer import Trainer
from cached_transformers.files import NotWritten
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.grc.shared_cache import caches, commit_caches

MEMORIES = ("rmt", "grc_stream", "delta_mem")
ALIKE = ("model.dropout=0.0", "training.evaluate_every=3", "training.log_every=1", "training.accumulate=2")
SGD = (*ALIKE, "training.steps=3", "training.bptt=2", "optimizer.name=sgd", "training.clip_norm=0.1")
"""Adam divides gradients that ought to be 0 by their own size, and so shows the last digit of them in the first."""
CARRIED = ("training.save_every=2", "training.log_every=2", "training.ema_decay=0.9", "training.bptt=2")
"""Dropout, averaged weights, a state that is carried: what a run that goes on must have again."""
VISION = next(c for c in CASES if c.shared and c.memory == "grc" and c.model == "vision_transformer")
LOOPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "blocks": lambda model: SegmentLoop(model, SEGMENT, 2),
    "replay": lambda model: ReplayLoop(model, SEGMENT, 2),
    "sliding": lambda model: SegmentLoop(model, SEGMENT, 2, bptt_window="sliding"),
    "diagonal": lambda model: SegmentLoop(model, SEGMENT, 2, schedule="diagonal"),
    "checkpointing": lambda model: SegmentLoop(model.set_activation_checkpointing() or model, SEGMENT, 2),
}
STREAM = next(c for c in STREAMS if c.memory == "transformer_xl" and c.attention == "softmax")


def make(folder: Path, text: Path, world: World, *overrides: str) -> Trainer:
    return small_language.make(folder, text, *overrides, world=world)


def fitted(folder: Path, text: Path, world: World, *overrides: str) -> Trainer:
    return small_language.fitted(folder, text, *overrides, world=world)


def of_memory(name: str) -> tuple[str, ...]:
    return (*SGD, f"model.memory={{name: {name}}}")


def stream_gradients(case: Case, make_loop: Callable[[nn.Module], nn.Module], world: World | None) -> dict[str, Tensor]:
    """Return gradients of a backward over four segments, of all rows or of this process' rows with sharded weights."""
    model, rank, size = case.build(), 0, 1
    loop = make_loop(model)
    if world is not None:
        loop, rank, size = Shards(model, world).wrap(loop), world.rank, world.size
    tokens = half(torch.cat(case.segments(5, rows=ROWS), 1), rank, size)
    loss, _ = loop(tokens[:, : 4 * SEGMENT], tokens[:, 1 : 4 * SEGMENT + 1])
    loss.backward()
    return {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def vision(world: World | None, replicated: bool = False, **options: str) -> dict[str, Tensor]:
    """Weights and caches of an image model after three steps, with sync="mean"."""
    model = VISION.build(options={"sync": "mean", **options})
    called: nn.Module = model
    if world is not None:
        called = nn.parallel.DistributedDataParallel(model) if replicated else Shards(model, world).wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3):
        images = VISION.segments(1, rows=ROWS, seed=step)[0]
        called(images if world is None else half(images, world.rank, world.size)).outputs.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    commit_caches(model)
    assert list(caches(model))
    return {name: full_tensor(t).clone() for name, t in model.state_dict().items()}


def stored(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, averaged weights and optimiser of a trainer, whole."""
    found = {f"live/{name}": full_tensor(t) for name, t in trainer.model.state_dict().items()}
    if trainer.average is not None:
        found |= {f"average/{name}": full_tensor(t) for name, t in trainer.average.module.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        found |= {f"{name}/{field}": full_tensor(t) for field, t in trainer.optimizer.state[parameter].items()}
    return {name: t.clone() for name, t in found.items()}


def failing_save(trainer: Trainer, folder: Path, world: World) -> list[str]:
    """Save while the second process cannot write; return the error and the remaining checkpoints."""
    before = [path.name for path in trainer.checkpoints.paths()]
    if world.rank == 1:
        original, checkpoint.write_shards = checkpoint.write_shards, _unwritable
    trainer.step, trainer._metrics = trainer.step + 1, None  # it is closed when training is over
    try:
        trainer.save()
        trainer.writer.wait()
        said = "nothing"
    except NotWritten as error:
        said = str(error)
    if world.rank == 1:
        checkpoint.write_shards = original
    world.barrier()
    assert [path.name for path in trainer.checkpoints.paths()] == before
    return [said, *(path.name for path in folder.iterdir())]


def _unwritable(folder: Path, tensors: Any, world: World) -> None:
    raise OSError(28, "No space left on device")


def all_gradients(world: World, folder: Path) -> dict[str, Any]:
    """Return the gradients of all stream memories, or the reasons for which they are refused."""
    seen: dict[str, Any] = {}
    for case in STREAMS:
        try:
            seen[str(case)] = stream_gradients(case, LOOPS["blocks"], world)
        except ValueError as error:
            seen[str(case)] = str(error)
    return seen


def train_all(world: World, folder: Path) -> dict[str, Any]:
    """Train all cases of `test_sharding` in one of two processes."""
    text = folder / "text"
    if world.main:
        write_text(text)
    world.barrier()
    seen: dict[str, Any] = {}
    for name in MEMORIES:
        fitted(folder / name, text, world, *of_memory(name), "training.parallel=fsdp")
    for name, loop in LOOPS.items():
        seen[name] = stream_gradients(STREAM, loop, world)
    seen["sample"] = vision(world, attend="sample")
    seen["mean"], seen["replicated"] = vision(world, attend="mean"), vision(world, replicated=True, attend="mean")
    options = (*CARRIED, "training.precision=bfloat16", "training.parallel=fsdp", "model.memory.length=6")
    fitted(folder / "whole", text, world, *options, "training.steps=8")
    later = (*options, "training.save=async")
    fitted(folder / "parts", text, world, *later, "training.steps=4")
    trainer = fitted(folder / "parts", text, world, *later, "training.steps=8")
    seen["cut"] = all(is_sharded(p) for p in trainer.model.parameters())
    seen["share"] = sum(p.to_local().numel() for p in trainer.model.parameters())  # type: ignore[operator]
    seen["all"] = sum(p.numel() for p in trainer.model.parameters())
    seen["failing"] = failing_save(trainer, folder / "parts" / "checkpoints", world)
    plain = World(torch.device("cpu"))
    if world.main:  # one process begins, two resume
        fitted(folder / "begun_by_one", text, plain, *CARRIED, "training.steps=4")
    world.barrier()
    taken = make(folder / "begun_by_one", text, world, *CARRIED, "training.parallel=fsdp", "training.steps=6")
    taken.resume("auto")
    seen["begun by one"] = stored(taken)
    return seen
