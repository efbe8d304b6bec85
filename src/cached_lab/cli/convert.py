"""`cached convert`: weights of a run as one .safetensors file, also from a sharded checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

ARGUMENTS = (
    ("folder RUN", Path, "a run folder"),
    ("--checkpoint NAME", "best", "best, last, or the path of a step folder"),
    ("--out FILE", Path, "a .safetensors file (default: RUN/model.safetensors)"),
)


def run(arguments: argparse.Namespace) -> int:
    """Read a checkpoint, gather its weights, and write them."""
    import safetensors.torch

    from cached_lab.training.checkpoint import WEIGHTS, Checkpoints, read_checkpoint
    from cached_transformers.files import write_whole

    out, chosen = arguments.out or arguments.folder / WEIGHTS, arguments.checkpoint
    checkpoints = Checkpoints(arguments.folder / "checkpoints")
    stored = read_checkpoint(checkpoints.named(chosen) if chosen in ("best", "last") else Path(chosen))
    tensors = {name: tensor.contiguous() for name, tensor in stored.weights.items()}
    write_whole(out, safetensors.torch.save(tensors, {"format": "pt"}))
    print(f"{out}: {len(tensors)} tensors of step {stored.step}")
    return 0
