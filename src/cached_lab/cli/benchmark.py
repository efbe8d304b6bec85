"""`cached benchmark NAME`: run a script of the source tree's `benchmarks` folder, which no wheel contains."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from cached_transformers.registry import unknown_name

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
BENCHMARKS = {
    "grc": "GRC in image models, against timm's plain models and the structure of the released code",
    "vision": "cached ViT, PVT, Swin and PVTv2 against the plain models: images a second, peak memory, FLOPs",
    "attentions": "every attention mechanism against length, with exact attention and published implementations",
    "memories": "every stream memory as a language model, with published implementations",
    "generation": "tokens a second of language models, against GPT-2 of transformers and x-transformers",
    "context": "a written token after contexts of many lengths, against KV caches of the whole text",
    "prefill": "reading a long text in segments, against reading it at once",
    "record": "ten ratios of time, to be repeated by `make bench-check`",
    "diagonal": "layers on different segments at once, against one segment at a time",
    "compiled": "torch.compile against eager execution: training, reading, compile time, graphs at other lengths",
    "documents": "documents packed into rows, against padded rows and rows without document borders",
}


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    listed = "\n".join(f"  {name:<12} {summary}" for name, summary in BENCHMARKS.items())
    parser = subparsers.add_parser(
        "benchmark",
        help="measure speed, kept activations and state, against the plain models and others",
        description="Run `python benchmarks/NAME.py` of the source tree. It measures in turn, in one process, and "
        "prints a Markdown table; ratios are medians with quartiles.",
        epilog=f"benchmarks (`cached benchmark NAME --help` lists the options of one):\n{listed}\n\n"
        "example: cached benchmark grc --rounds 11 --threads 1 --output results/grc.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", nargs="?", default="grc", metavar="name", help="a name below (default: grc)")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the benchmark")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the script."""
    if arguments.benchmark not in BENCHMARKS:
        raise ValueError(unknown_name("benchmark", arguments.benchmark, list(BENCHMARKS)))
    if not (FOLDER / "command.py").is_file():
        raise ValueError(
            "benchmarks are scripts of the source tree, which this installation lacks; clone the repository, install "
            f"it by `pip install -e .`, and run `python benchmarks/{arguments.benchmark}.py`"
        )
    if str(FOLDER.parent) not in sys.path:
        sys.path.insert(0, str(FOLDER.parent))
    command = importlib.import_module("benchmarks.command")
    status: int = command.main(importlib.import_module(f"benchmarks.{arguments.benchmark}"), arguments.options)
    return status
