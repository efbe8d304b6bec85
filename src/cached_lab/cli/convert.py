"""`cached convert`: the weights of a run as one .safetensors file, whatever processes they were cut up over."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("convert", help="weights of a run, whole, as one .safetensors file")
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("--checkpoint", default="best", help="best, last, or the path of a step folder")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the file, .safetensors (default: RUN/model.safetensors)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read a checkpoint, put its weights together, and write them."""
    import safetensors.torch

    from cached_lab.training.checkpoint import WEIGHTS, Checkpoints, read_checkpoint
    from cached_transformers.files import write_whole

    out = arguments.out or arguments.folder / WEIGHTS
    if out.suffix != ".safetensors":
        raise ValueError(f"--out {out} must end in .safetensors, which is what is written")
    chosen = arguments.checkpoint
    checkpoints = Checkpoints(arguments.folder / "checkpoints")
    stored = read_checkpoint(checkpoints.named(chosen) if chosen in ("best", "last") else Path(chosen))
    tensors = {name: tensor.contiguous() for name, tensor in stored.weights.items()}
    write_whole(out, safetensors.torch.save(tensors, {"format": "pt"}))
    print(f"{out}: {len(tensors)} tensors of step {stored.step}")
    return 0
