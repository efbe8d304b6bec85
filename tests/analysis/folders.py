"""Run and comparison folders with made-up, seeded, plausible contents, in the format that training writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ENVIRONMENT = {"torch": "2.9.0", "python": "3.12.1", "threads": 2, "device": "cpu", "date": "2026-01-05"}
VALUES = {
    "plain": [0.9212, 0.9266, 0.9148, 0.9239, 0.9201],
    "grc": [0.9381, 0.9402, 0.9341, 0.9377, 0.9380],
    "convolution": [0.9290, 0.9262, 0.9222, 0.9251, 0.9230],
}
COST = {"plain": (203_146, 27_525_120, 0.021), "grc": (251_338, 31_064_064, 0.027)}
COST |= {"convolution": (205_002, 27_934_720, 0.023)}


def make_run(
    folder: Path, variant: str = "grc", seed: int = 0, accuracy: float = 0.938, gated: bool | None = None
) -> Path:
    """One finished run; a gated variant has gates.json too."""
    generator = np.random.default_rng([seed, sum(map(ord, variant))])
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(50, 1001, 50):
        loss = 0.12 + 2.3 * math.exp(-step / 220) + 0.05 * float(generator.normal())
        lines.append({"step": step, "split": "train", "loss": loss, "learning_rate": 1e-3})
        reached = accuracy * (1 - math.exp(-step / 180))
        lines.append({"step": step, "split": "validation", "loss": loss + 0.08, "accuracy": reached})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parameters, flops, seconds = COST[variant if variant in COST else "plain"]
    result = {"step": 1000, "accuracy": lines[-1]["accuracy"], "loss": lines[-1]["loss"]}
    summary = {"name": "digits_vit", "task": "digits", "variant": variant, "seed": seed, "steps": 1000}
    summary |= {"parameters": parameters, "flops": flops, "seconds_per_step": seconds, "train_seconds": 1000 * seconds}
    summary |= {"best": result, "final": result, "test": {"accuracy": accuracy, "loss": 0.3}}
    summary |= {"environment": ENVIRONMENT, "baselines": {"majority class": 0.1014}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_text(f"name: digits_vit\nmodel:\n  name: vision_transformer\n  memory: {variant}\n")
    if gated if gated is not None else variant == "grc":  # gates that open towards the late layers
        centres = np.linspace(-1.6, 0.9, 4)[:, None] + 0.5 * generator.normal(size=(4, 4))
        (folder / "gates.json").write_text(json.dumps({"layers": (1 / (1 + np.exp(-centres))).tolist()}))
    return folder


def make_comparison(
    folder: Path, values: Mapping[str, Sequence[float]] = VALUES, recipe: str = "digits_vit", **changes: Any
) -> Path:
    """A comparison of `values` (by variant, over seeds), with a folder for every run."""
    variants = []
    for name, scores in values.items():
        runs = [f"{name}/seed_{seed}" for seed in range(len(scores))]
        for seed, score in enumerate(scores):
            make_run(folder / runs[seed], name, seed, score)
        parameters, flops, seconds = COST[name if name in COST else "plain"]
        cost = {"parameters": parameters, "flops": flops, "seconds_per_step": seconds}
        variants.append({"name": name, **cost, "values": list(scores), "runs": runs})
    data = {"recipe": recipe, "seeds": [0, 1], "metric": "accuracy", "split": "test", "reference": "plain"}
    data |= {"date": "2026-01-05", "command": f"cached compare {recipe} --with {','.join(values)}"}
    data |= {"environment": ENVIRONMENT, "baselines": {"majority class": 0.1014}, "variants": variants, **changes}
    (folder / "compare.json").write_text(json.dumps(data))
    return folder
