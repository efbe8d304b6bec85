"""`cached benchmark NAME`: measure speed and memory on this machine."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from .arguments import refuse_below_one

BENCHMARKS = {
    "grc": "GRC in image models, beside timm's plain models and the structure that its authors released",
    "vision": "cached ViT, PVT, Swin and PVTv2 beside the plain models: images a second, peak memory, counted FLOPs",
    "loading": "images a second from the data loader, by workers, beside what models consume",
    "attentions": "every attention mechanism against length, beside exact attention and published implementations",
    "translation": "encoder-decoder, plain and with GRC, beside transformers' BART and Marian: training, beam search",
    "memories": "every stream memory as a language model, beside published implementations where installed",
    "memorizing": "a large store: memory, reading and writing beside its products alone, and a long text",
    "all": "a bit of all on one card, in minutes: eager and compiled, two precisions, of the card's measured peaks",
    "generation": "tokens a second that language models write, beside GPT-2 of transformers and x-transformers",
    "diagonal": "layers on different segments at once, beside one segment after the other",
    "saves": "how long training stands still for checkpoints, written at once and in the background",
    "documents": "documents packed into rows, beside padded rows of their own, and beside rows read on over their ends",
}


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "benchmark",
        help="measure speed, kept activations and state, beside the plain models and others",
        description="Measures in turn, in one process, and prints a Markdown table; ratios are medians with quartiles. "
        + "; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items())
        + ".",
        epilog="example: cached benchmark grc --rounds 11 --threads 1 --output results/grc.json",
    )
    parser.add_argument("name", nargs="?", choices=list(BENCHMARKS), default="grc", help="what to measure")
    parser.add_argument("--batch", type=int, default=8, help="grc, vision, loading: images in a batch (default: 8)")
    parser.add_argument("--rounds", type=int, default=11, help="counted rounds of training steps (default: 11)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1, the least noisy)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--compile", action="store_true", help="grc, vision: time all through torch.compile")
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="grc: each piece of what GRC adds, alone, and their sum beside what is measured",
    )
    parser.add_argument("--models", help="vision: names, separated by commas (default: ViT-S,PVT-Tiny,Swin-T,PVTv2-B2)")
    parser.add_argument(
        "--image-size", type=int, default=224, help="vision, --roofline: side of the images (default: 224)"
    )
    parser.add_argument("--channels-last", action="store_true", help="vision: weights and images in channels_last")
    parser.add_argument("--released", action="store_true", help="vision: the released variant of GRC, too")
    parser.add_argument(
        "--workers", type=_numbers, default=(0, 1, 2), help="loading: numbers of processes (default: 0,1,2)"
    )
    parser.add_argument("--path", help="loading: an image folder or archive (default: made images of 500 x 375 pixels)")
    parser.add_argument(
        "--memories",
        help="memories, generation, diagonal, documents: names, separated by commas, or all "
        "(default: all; transformer_xl,grc_stream,rmt; transformer_xl,grc_stream; none,transformer_xl,rmt,infini)",
    )
    parser.add_argument("--attentions", default="all", help="attentions: names, separated by commas (default: all)")
    parser.add_argument(
        "--lengths",
        type=_numbers,
        help="attentions, diagonal: numbers of tokens, separated by commas; documents: mean ones; memorizing: of keys",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="generation: of weights; attentions: of inputs; others: bfloat16 is autocast (default: float32)",
    )
    for name, value in {"vocabulary": 256, "width": 256, "depth": 4, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"generation: of all models (default: {value})")
    parser.add_argument("--rows", type=_numbers, default=(1, 8), help="generation: texts at once (default: 1,8)")
    parser.add_argument("--segments", type=_numbers, default=(128, 512), help="generation: tokens in a segment of ours")
    parser.add_argument("--prompt", type=int, default=16, help="generation: tokens that are given (default: 16)")
    parser.add_argument(
        "--tokens",
        type=int,
        help="generation: new ones of each row (default: 384); memorizing: of the text (default: 5,000,000)",
    )
    parser.add_argument(
        "--profile", metavar="MEMORY", help="memories, generation: where the time of one goes, by operators; or of none"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="all: after which nothing is begun (default: 8)")
    parser.add_argument("--quick", action="store_true", help="all: tiny sizes, as a test of the command")
    parser.add_argument(
        *("--output", "--out"),
        type=Path,
        metavar="FILE.json",
        help="also write the numbers with the environment, and the table as FILE.md; of all after each part",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the table."""
    from cached_lab.experiments.benchmarks.named import Options, measure

    counts = ("batch", "rounds", "threads", "image_size", "vocabulary", "width", "depth", "heads", "prompt", "tokens")
    refuse_below_one(arguments, *counts)
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}
    figure = None
    for measured in measure(arguments.name, Options(**given)):
        if arguments.output is not None:
            figure = measured.write(arguments.output)
    print(measured.text)
    if figure is not None:
        print(f"drawn: {figure}")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
