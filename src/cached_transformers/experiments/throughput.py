"""`cached reproduce table9`: measure, print the table, and write it with its circumstances."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path

from cached_transformers.training.metrics import jsonable

from .reproductions.table9 import Throughput, beside_the_paper

NOT_OURS = {"data": "--data", "seeds": "--seeds", "jobs": "--jobs"}


def reproduce(table: Throughput, arguments: argparse.Namespace) -> int:
    """Measure what the arguments of `cached reproduce` choose; writes throughput.json and throughput.md.

    Raises:
        ValueError: an option of trained tables, an unknown model or setting.
        ImportError: timm is not installed.
    """
    name, scale = arguments.reproduction, arguments.scale
    for key, option in NOT_OURS.items():
        if getattr(arguments, key) is not None:
            raise ValueError(f"{name} trains nothing and reads no data; drop {option}")
    import torch

    from .benchmarks import vision
    from .environment import environment
    from .reports.page import environment_text

    settings = table.options(scale, arguments.overrides)
    models = table.chosen(scale, arguments.rows, list(vision.MODELS))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = environment(device) | settings
    rows = vision.run(
        settings["batch"],
        settings["rounds"],
        device,
        models=models,
        image_size=settings["image_size"],
        released=True,
    )
    text = "\n\n".join([vision.as_markdown(rows), *beside_the_paper(rows), environment_text(facts)])
    print(text)
    folder = arguments.out or Path("runs") / f"{name}_{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["cached", *sys.argv[1:]])
    content = {"command": command, "environment": facts, "rows": [dataclasses.asdict(row) for row in rows]}
    (folder / "throughput.json").write_text(json.dumps(jsonable(content), indent=1), encoding="utf-8")
    (folder / "throughput.md").write_text(f"# {name}\n\n```bash\n{command}\n```\n\n{text}\n", encoding="utf-8")
    print(f"written: {folder / 'throughput.md'}")
    return 0
