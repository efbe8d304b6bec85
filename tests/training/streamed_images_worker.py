"""One of two processes of `test_streamed_images`: trains on shards, once without and once with a stop in the middle.

Called by torchrun as: streamed_images_worker.py FOLDER SHARDS.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from test_streamed_images import config, fitted

from cached_lab.training.distributed import World, in_world


def work(world: World) -> None:
    folder, shards = Path(sys.argv[1]), Path(sys.argv[2])
    options = {"parts": 2}
    fitted(config(shards, options, mixup=0.0), folder / "whole", world)
    fitted(config(shards, options, mixup=0.0, steps=6), folder / "killed", world)
    fitted(config(shards, options, mixup=0.0), folder / "killed", world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    in_world("cpu", work)
