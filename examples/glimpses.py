"""Memory over video frames: recognise a digit when every frame shows only a quarter of it.

    python examples/glimpses.py --with grc_stream,grc_stream:preset=long --seeds 5

A video has four frames. Each shows one quarter of a handwritten digit at its place, in a random order. After the last
frame a small vision transformer classifies the digit. Without a memory it has seen a quarter; with a memory it may use
all four. The reference is the same model with the whole digit in one frame. `grc_stream` has a cache per row, so it can
hold the quarters of its own video; the cache of `grc` is shared by all rows.

Legend: B rows, T frames, C channels, S side.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from cached_lab.experiments.environment import environment, machine
from cached_lab.experiments.reports.markdown import table
from cached_lab.experiments.statistics import mean_interval
from cached_lab.experiments.variants import parse_variant
from cached_lab.registries import DATASETS
from cached_transformers.files import json_text, write_whole
from cached_transformers.integrations.models import create_model

FRAMES = 4
NO_MEMORY, WHOLE = "none", "the whole digit"
SIZES: dict[str, Any] = {
    **{"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10},
    **{"width": 32, "depth": 2, "heads": 2, "feed_forward": 64},
}
RATE, DECAY, WARM, BATCH = 2e-3, 0.05, 50, 64


def glimpses(images_BCSS: Tensor, generator: Generator) -> Tensor:
    """Return videos (B, T, C, S, S): each frame has one quarter of the image, in a random order, and 0 elsewhere."""
    rows, _, side, _ = images_BCSS.shape
    order_BT = torch.rand(rows, FRAMES, generator=generator).argsort(1)
    half_S = torch.arange(side) >= side // 2
    quarter_SS = 2 * half_S[:, None].long() + half_S
    shown_BTSS = quarter_SS == order_BT[..., None, None]
    return torch.where(shown_BTSS[:, :, None], images_BCSS[:, None], 0.0)


def answer(model: nn.Module, images_BCSS: Tensor, arm: Any, generator: Generator) -> Tensor:
    """Return logits (B, classes) after the last frame, or after the whole digit."""
    if arm == WHOLE:
        return model(images_BCSS).outputs  # type: ignore[no-any-return]
    frames = glimpses(images_BCSS, generator).unbind(1)
    if arm == NO_MEMORY:
        return model(frames[-1]).outputs  # type: ignore[no-any-return]
    state = None
    for frame in frames:
        out = model(frame, state)
        state = out.state
    return out.outputs  # type: ignore[no-any-return]


def trained_accuracy(arm: str, seed: int, steps: int) -> dict[str, float]:
    """Train one arm (a variant for `parse_variant`, NO_MEMORY or WHOLE); return its test accuracy and sizes."""
    train, test = (DATASETS.create("digits", split=split) for split in ("train", "test"))
    torch.manual_seed(seed)
    memory = None if arm in (NO_MEMORY, WHOLE) else parse_variant(arm)
    model = create_model("vision_transformer", **SIZES, memory=memory)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARM) * (1 - step / steps)
        rows = torch.randint(0, len(train), (BATCH,), generator=generator).tolist()
        images, labels = _batch(train, rows)
        optimizer.zero_grad()
        F.cross_entropy(answer(model, images, arm, generator), labels).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    images, labels = _batch(test, range(len(test)))
    with torch.no_grad():
        right = answer(model, images, arm, torch.Generator().manual_seed(0)).argmax(1) == labels
    return {
        "accuracy": right.double().mean().item(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "rows": len(test),
    }


def _batch(dataset: Any, rows: Sequence[int] | range) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(dataset[row] for row in rows), strict=True)
    return torch.stack(images), torch.tensor(labels)


def page(results: Mapping[str, list[dict[str, float]]]) -> str:
    """Write the table in Markdown: accuracy in per cent with its interval over seeds."""
    rows = []
    for arm, runs in results.items():
        mean, low, high = mean_interval([100 * run["accuracy"] for run in runs])
        spread = "" if low is None else f" [{low:.1f}, {high:.1f}]"
        rows.append([arm, f"{mean:.1f}{spread}", f"{runs[0]['parameters']:,}"])
    return table(["memory", "accuracy, %", "parameters"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train missing runs, print the table, and write glimpses.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--with", dest="memories", default="grc_stream", help="variants NAME:option=value, separated by commas"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("runs/glimpses"))
    given = parser.parse_args(arguments)
    if given.seeds < 1 or given.steps < 1:
        parser.error(f"--seeds {given.seeds} and --steps {given.steps} must be at least 1")
    path = given.out / "glimpses.json"
    arms = [NO_MEMORY, *given.memories.split(","), WHOLE]
    try:
        for arm in arms[1:-1]:
            create_model("vision_transformer", **SIZES, memory=parse_variant(arm))
    except ValueError as error:
        parser.error(f"--with {given.memories}: {error}")
    kept: dict[str, list[dict[str, float]]] = {}
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))["results"]
    results: dict[str, list[dict[str, float]]] = {}
    for arm in arms:
        done = {run["seed"]: run for run in kept.setdefault(arm, []) if run["steps"] == given.steps}
        for seed in sorted(set(range(given.seeds)) - done.keys()):
            done[seed] = {**trained_accuracy(arm, seed, given.steps), "seed": seed, "steps": given.steps}
            kept[arm].append(done[seed])
            print(f"{arm}, seed {seed}: {100 * done[seed]['accuracy']:.1f} % right", flush=True)
            record = {"command": shlex.join(sys.argv), "machine": machine(), "environment": environment("cpu")}
            given.out.mkdir(parents=True, exist_ok=True)
            write_whole(path, json_text({**record, "results": kept}))
        results[arm] = [done[seed] for seed in range(given.seeds)]
    print(page(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
