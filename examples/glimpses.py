"""Memory over images that share something: the frames of a video, or all images of a batch.

    python examples/glimpses.py --with grc_stream,grc_stream:preset=long --seeds 5
    python examples/glimpses.py --task camera --with grc,grc:variant=released --seeds 5

quarters: a video has four frames. Each shows one quarter of a handwritten digit at its place, in a random order. After
the last frame a small vision transformer classifies the digit. Without a memory it has seen a quarter; with a memory it
may use all four. The reference is the same model with the whole digit in one frame. `grc_stream` has a cache per row,
so it can hold the quarters of its own video; the cache of `grc` is shared by all rows.

camera: each batch is of one camera, which adds its own fixed pattern to all its images. One image cannot tell pattern
from digit; a batch can. Memories are those that all rows share. Each is scored twice: with its cache constant, as
evaluation has it, and updated by the batch that it scores. Controls: as many parameters as the largest of them without
a memory, and the batch's mean image as a second channel.

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

from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.environment import environment, machine
from cached_lab.experiments.reports.markdown import table
from cached_lab.experiments.statistics import mean_interval
from cached_lab.experiments.variants import parse_variant
from cached_lab.registries import DATASETS
from cached_transformers.files import json_text, write_whole
from cached_transformers.integrations.models import create_model
from cached_transformers.memories.grc.shared_cache_memory import SharedCacheMemory

FRAMES = 4
NO_MEMORY, WHOLE = "none", "the whole digit"
WIDER, MEAN, CLEAN = "none, as many parameters as ", "none, and the batch's mean image", "none, without patterns"
UPDATED = ", updated by the scored batch"
PATTERN = 1.0
"""Deviation of a camera's pattern, as that of the data set's pixels."""
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


def seen_by_camera(images_BCSS: Tensor, arm: str, generator: Generator) -> Tensor:
    """Add one pattern to all images of a batch; a second channel has their mean for `MEAN`, and 0 for other arms."""
    pattern_CSS = PATTERN * torch.randn(images_BCSS.shape[1:], generator=generator)
    seen_BCSS = images_BCSS if arm == CLEAN else images_BCSS + pattern_CSS
    mean_CSS = seen_BCSS.mean(0) if arm == MEAN else torch.zeros_like(pattern_CSS)
    return torch.cat([seen_BCSS, mean_CSS.expand_as(seen_BCSS)], 1)


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


def answer_to_camera(model: nn.Module, images_BCSS: Tensor, arm: str, generator: Generator) -> Tensor:
    """Return logits (B, classes) of a batch of one camera."""
    return model(seen_by_camera(images_BCSS, arm, generator)).outputs  # type: ignore[no-any-return]


TASKS = {"quarters": answer, "camera": answer_to_camera}


def build(arm: str, task: str) -> nn.Module:
    """Build the model of an arm: a variant for `parse_variant`, or a control."""
    sizes = SIZES | {"channels": 1 if task == "quarters" else 2}
    if arm.startswith(WIDER):
        missing = count_parameters(build(arm.removeprefix(WIDER), task)) - count_parameters(build(NO_MEMORY, task))
        sizes["feed_forward"] += round(missing / (SIZES["depth"] * (2 * SIZES["width"] + 1)))
        arm = NO_MEMORY
    memory = None if arm in (NO_MEMORY, WHOLE, MEAN, CLEAN) else parse_variant(arm)
    return create_model("vision_transformer", **sizes, memory=memory)


def shared_memories(model: nn.Module) -> list[SharedCacheMemory]:
    """Return the memories of all layers whose cache all rows share."""
    return [module for module in model.modules() if isinstance(module, SharedCacheMemory)]


def trained_accuracy(arm: str, task: str, seed: int, steps: int) -> dict[str, float]:
    """Train one arm of a task; return its test accuracy and size, and the accuracy with the cache updated."""
    train, test = (DATASETS.create("digits", split=split) for split in ("train", "test"))
    torch.manual_seed(seed)
    model, ask = build(arm, task), TASKS[task]
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / WARM) * (1 - step / steps)
        rows = torch.randint(0, len(train), (BATCH,), generator=generator).tolist()
        images, labels = _batch(train, rows)
        optimizer.zero_grad()
        F.cross_entropy(ask(model, images, arm, generator), labels).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    found = {"parameters": count_parameters(model), "rows": len(test), "accuracy": _accuracy(model, test, arm, task)}
    if task == "camera" and (memories := shared_memories(model)):
        for memory in memories:
            memory.train()
        found["updated"] = _accuracy(model, test, arm, task)
    return found


@torch.no_grad()
def _accuracy(model: nn.Module, test: Any, arm: str, task: str) -> float:
    """Return the share of right answers, in batches as in training: each is of one camera."""
    generator, right = torch.Generator().manual_seed(0), 0
    for first in range(0, len(test), BATCH):
        images, labels = _batch(test, range(first, min(first + BATCH, len(test))))
        right += int((TASKS[task](model, images, arm, generator).argmax(1) == labels).sum())
    return right / len(test)


def _batch(dataset: Any, rows: Sequence[int] | range) -> tuple[Tensor, Tensor]:
    images, labels = zip(*(dataset[row] for row in rows), strict=True)
    return torch.stack(images), torch.tensor(labels)


def page(results: Mapping[str, list[dict[str, float]]]) -> str:
    """Write the table in Markdown: accuracy in per cent and its gain over `WIDER`, with intervals over seeds."""
    wider = next((arm for arm in results if arm.startswith(WIDER)), "")
    bar = [100 * run["accuracy"] for run in results.get(wider, ())]
    rows = []
    for arm, runs in results.items():
        for key, name in (("accuracy", arm), ("updated", arm + UPDATED)):
            if key in runs[0]:
                scores = [100 * run[key] for run in runs]
                gains = [a - b for a, b in zip(scores, bar, strict=True)] if bar and arm != wider else []
                cells = [_interval(values, sign) for values, sign in ((scores, ""), (gains, "+")) if bar or not sign]
                rows.append([name, *cells, f"{runs[0]['parameters']:,}"])
    return table(["memory", "accuracy, %", *(["against as many parameters"] if bar else []), "parameters"], rows)


def _interval(values: list[float], sign: str) -> str:
    if not values:
        return ""
    mean, low, high = mean_interval(values)
    return f"{mean:{sign}.1f}" + ("" if low is None else f" [{low:{sign}.1f}, {high:{sign}.1f}]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train missing runs, print the table, and write glimpses.json or camera.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--with", dest="memories", default="", help="variants NAME:option=value, separated by commas")
    parser.add_argument("--task", choices=[*TASKS], default="quarters")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("runs/glimpses"))
    given = parser.parse_args(arguments)
    if given.seeds < 1 or given.steps < 1:
        parser.error(f"--seeds {given.seeds} and --steps {given.steps} must be at least 1")
    frames = given.task == "quarters"
    memories = (given.memories or ("grc_stream" if frames else "grc")).split(",")
    try:
        models = {arm: build(arm, given.task) for arm in memories}
    except ValueError as error:
        parser.error(f"--with {given.memories}: {error}")
    if own := [arm for arm, model in models.items() if not (frames or shared_memories(model))]:
        parser.error(f"--with {','.join(own)}: --task camera is for memories that all rows share, e.g. grc")
    largest = max(memories, key=lambda arm: count_parameters(models[arm]))
    arms = [NO_MEMORY, *memories, *([WHOLE] if frames else [WIDER + largest, MEAN, CLEAN])]
    path = given.out / ("glimpses.json" if frames else "camera.json")
    kept: dict[str, list[dict[str, float]]] = {}
    if path.is_file():
        kept = json.loads(path.read_text(encoding="utf-8"))["results"]
    results: dict[str, list[dict[str, float]]] = {}
    for arm in arms:
        done = {run["seed"]: run for run in kept.setdefault(arm, []) if run["steps"] == given.steps}
        for seed in sorted(set(range(given.seeds)) - done.keys()):
            scores = trained_accuracy(arm, given.task, seed, given.steps)
            done[seed] = {**scores, "seed": seed, "steps": given.steps}
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
