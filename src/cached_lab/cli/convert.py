"""`cached convert`: the weights of a run as one .safetensors file, also from a sharded checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_command, add_run


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(subparsers, "convert", run, "weights of a run as one .safetensors file")
    add_run(parser)
    parser.add_argument("--checkpoint", default="best", help="best, last, or the path of a step folder")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a .safetensors file (default: RUN/model.safetensors)")


def run(arguments: argparse.Namespace) -> int:
    """Read a checkpoint, gather its weights, and write them."""
    import safetensors.torch

    from cached_lab.training.checkpoint import WEIGHTS, Checkpoints, read_checkpoint
    from cached_transformers.files import write_whole

    out = arguments.out or arguments.folder / WEIGHTS
    if out.suffix != ".safetensors":
        raise ValueError(f"--out {out} must end in .safetensors, the format of the file")
    chosen = arguments.checkpoint
    checkpoints = Checkpoints(arguments.folder / "checkpoints")
    stored = read_checkpoint(checkpoints.named(chosen) if chosen in ("best", "last") else Path(chosen))
    tensors = {name: tensor.contiguous() for name, tensor in stored.weights.items()}
    write_whole(out, safetensors.torch.save(tensors, {"format": "pt"}))
    print(f"{out}: {len(tensors)} tensors of step {stored.step}")
    return 0
