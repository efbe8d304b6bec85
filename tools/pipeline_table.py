"""The table of docs/plan.md about segment pipelines: what the model of `cached plan --pipeline` says of each memory.

    python tools/pipeline_table.py                  # some minutes: each memory's step is rehearsed
    python tools/pipeline_table.py infini titans    # of these memories

A language model of 12 layers, width 768, 12 heads and 32,000 tokens reads 8 rows of a million tokens in segments of
512, in bfloat16 on H100; gradients cross all segments. Memories have their default options, or those below. What cannot
be rehearsed, is said on stderr.
"""

from __future__ import annotations

import sys

from cached_lab.experiments.plan.pipeline import Link, Work, best, link_of, reached, stops_at, ways, work_of
from cached_lab.experiments.plan.plan import Machine
from cached_lab.experiments.plan.sizes import Given, sized
from cached_lab.tasks.recipes import load_config

GPUS = (8, 64, 256, 1024)
ROWS, SEGMENT, SEGMENTS = 8, 512, 2048
LATENCY_US = 10.0
NAMES = (
    *("transformer_xl", "compressive", "infini", "grc_stream", "block_recurrent", "ernie_doc", "expire_span"),
    *("infinity_former", "streaming_llm", "tova", "h2o", "memory_caching", "lact", "titans", "ttt"),
    *("memformer", "rmt", "armt", "segatron", "read_twice", "memory_transformer"),
)
OPTIONS: dict[str, dict[str, object]] = {
    "rmt": {"length": 16},
    "armt": {"length": 16},
    "memformer": {"length": 64},
    "transformer_xl": {"length": 512},
    "compressive": {"length": 512},
}
"""Sizes of memories in the table, where their defaults are for shorter segments."""

LINEAR = ("infini",)
"""Memories whose state is a sum over segments, with their default options."""


def overrides(memory: str) -> list[str]:
    spec = str({"name": memory, **OPTIONS.get(memory, {})}).replace("'", "")
    return [
        *("model.width=768", "model.depth=12", "model.heads=12", "model.feed_forward=3072", f"model.memory={spec}"),
        *(f"training.segment_length={SEGMENT}", f"training.segments={SEGMENTS}", f"training.bptt={SEGMENTS}"),
        *(f"training.batch_size={ROWS}", "training.precision=bfloat16"),
    ]


def rows(memory: str) -> list[str]:
    """One line: the fastest way at each number of GPUs; and one of a scan, where the state would allow it."""
    recipe = sized(load_config("demo_text", overrides(memory)), Given(vocabulary=32_000))
    machine = Machine(card="h100")
    work, link = work_of(recipe.config, recipe.shape), link_of(machine, LATENCY_US)
    peak = reached(machine, recipe.config.training.precision)
    lines = [(ways(work)[-1], ways(work)), *([("scan, not built", ["scan"])] if memory in LINEAR else [])]
    return [_line(memory, title, among, work, peak, link) for title, among in lines]


def _line(memory: str, title: str, among: list[str], work: Work, peak: float, link: Link) -> str:
    cells = []
    for gpus in GPUS:
        timed = min((best(work, peak, link, gpus, way) for way in among), key=lambda t: t.seconds)
        cells.append(f"{timed.faster:,.1f} ({timed.pipelines} x {timed.processes}, {timed.micro_batches})")
    most = stops_at(work, peak, link, 1, ROWS, among[-1])
    return f"| `{memory}` | {title} | {work.state / 2**10:,.0f} | {' | '.join(cells)} | {most:,} |"


def main() -> None:
    heads = [f"{gpus:,} GPUs" for gpus in GPUS]
    print(f"| memory | way | KiB of a row's state | {' | '.join(heads)} | half idle beyond |")
    print(f"| --- | --- |{' ---: |' * (len(GPUS) + 2)}")
    for memory in sys.argv[1:] or NAMES:
        try:
            print("\n".join(rows(memory)), flush=True)
        except (ValueError, TypeError) as error:
            print(f"{memory}: {str(error)[:200]}", file=sys.stderr)


if __name__ == "__main__":
    main()
