"""Process of `test_hybrid`: two copies of a model, each sharded over two processes.

Called by torchrun as: hybrid_worker.py FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from sharding_worker import CARRIED, fitted, of_memory
from small_language import write_text

from cached_lab.training.distributed import World, in_world

HYBRID = ("training.parallel=fsdp", "training.shares=2", "training.batch_size=8")


def train_all(world: World) -> None:
    folder = Path(sys.argv[1])
    text = folder / "text"
    if world.main:
        write_text(text)
    world.barrier()
    fitted(folder / "rmt", text, world, *of_memory("rmt"), *HYBRID)
    options = (*CARRIED, *HYBRID, "training.save=async")
    fitted(folder / "whole", text, world, *options, "training.steps=6")
    fitted(folder / "parts", text, world, *options, "training.steps=4")
    trainer = fitted(folder / "parts", text, world, *options, "training.steps=6")
    share = sum(p.to_local().numel() for p in trainer.model.parameters())  # type: ignore[operator]
    everyone = world.gather((share, sum(p.numel() for p in trainer.model.parameters())))
    if world.main:
        torch.save(everyone, folder / "shares.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    in_world("cpu", train_all)
