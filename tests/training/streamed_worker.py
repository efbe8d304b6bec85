"""One of two processes of `test_streamed_text`: trains on a stream, once without and once with a stop in the middle.

Called by torchrun as: streamed_worker.py FOLDER TEXT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from data import streaming_library
from sharding_worker import fitted
from test_streamed_text import ALIKE, streamed

from cached_lab.training.distributed import World, in_world


def work(world: World) -> None:
    folder, text = Path(sys.argv[1]), Path(sys.argv[2])
    options = streamed(text, *ALIKE)
    fitted(folder / "whole", folder, world, *options)
    fitted(folder / "killed", folder, world, *options, "training.steps=6")
    fitted(folder / "killed", folder, world, *options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.modules["datasets"] = ModuleType("datasets")
    sys.modules["datasets"].load_dataset = streaming_library.load_dataset  # type: ignore[attr-defined]
    in_world("cpu", work)
