"""Tiny runs through all of `run_training`, and comparison of run folders.

    write_data(folder)                     once, in `prepare`: data of the recipes, and the cache of generated data
    recipes()[name](folder)                configuration of a recipe on these data
    train(config, run)                     one silent run, with a small page instead of a drawn report
    compare_runs(run, reference)           raise `Failure` at the first difference

| recipe         | features                                                                          |
| `language`     | a stream memory, text, tokens; scores of the best and of the last                 |
| `images`       | GRC's shared caches on images, averaged weights, maps of features                 |
| `listops`      | shared caches on tokens; the last checkpoints are averaged, and there are more    |
| `translation`  | a beam search and its file of translations                                        |
| `detection`    | a detector and its file of classes; only where timm and torchvision are installed |

All evaluate at every step; the best is neither the first nor the last one (for the detector it is the first).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import detection.made
import torch
import translation.made

from cached_lab.experiments import compare as compare_module
from cached_lab.experiments import run as run_module
from cached_lab.experiments.run import run_training
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.checkpoint import Checkpoints, read_checkpoint
from cached_lab.training.config import RunConfig
from cached_lab.training.metrics import read_metrics
from cached_transformers.extras import require
from cached_transformers.files import write_whole

from .frame import Failure

STEPS = 6
TIMES = ("seconds", "train_seconds", "seconds_per_step", "environment", "date")
"""Keys, at any depth, in which two runs that are the same may differ."""
UNCOMPARED = ("report.html", "compare.html", "compare.md", "log.txt")
"""Files that must be there in both and may differ inside: they show times."""


def write_data(folder: Path) -> None:
    """Write small data of every kind, with the cache of generated data in the same folder."""
    import_all()
    os.environ["CACHED_TRANSFORMERS_CACHE"] = str(folder / "cache")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(1, 5))) for _ in range(30)]
    (folder / "text").mkdir(parents=True)
    for name, size in {"train": 700, "valid": 40, "test": 40}.items():
        text = " ".join(chance.choices(words, k=size))
        (folder / "text" / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
    translation.made.write_corpus(folder / "pairs", (60, 6, 4))
    if _detectors():
        detection.made.folder(folder / "coco", count=2)


def import_all(shared: Path | None = None) -> None:
    """Import all modules of a run, so that forked processes have them, and use one thread."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.utils.flop_counter", "sklearn.datasets"):
        importlib.import_module(name)
    if importlib.util.find_spec("sacrebleu"):
        importlib.import_module("sacrebleu")


def recipes() -> dict[str, Callable[[Path], RunConfig]]:
    """Configurations by name, from the folder that `write_data` filled."""
    made = {"language": _language, "images": _images, "listops": _listops, "translation": _translation}
    return {**made, "detection": _detection} if _detectors() else made


def train(config: RunConfig, run: Path, resume: str = "auto") -> dict[str, Any]:
    """Train, or train on; returns the summary."""
    draw_nothing()
    return run_training(config, run, resume)


def draw_nothing() -> None:
    """Replace reports in this process by small pages, since drawing takes longer than everything else."""
    run_module.write_report = lambda folder, reporter, summary: _small_page(folder / "report.html", summary)
    compare_module.write_compare_report = lambda folder: _small_page(
        folder / "compare.html", json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    )


def compare_runs(run: Path, reference: Path) -> None:
    """Compare two run folders: files, checkpoints with training states, metrics and scores; times may differ.

    Raises:
        Failure: the first difference.
    """
    found, wanted = (Checkpoints(folder / "checkpoints") for folder in (run, reference))
    _same("checkpoints", [p.name for p in found.paths()], [p.name for p in wanted.paths()])
    for name in ("best", "last"):
        _same(name, found.named(name).name, wanted.named(name).name)
    for left, right in zip(found.paths(), wanted.paths(), strict=True):
        compare_checkpoints(left, right)
        a, b = (read_checkpoint(path).training for path in (left, right))
        _same_tree(f"{left.name}: training", a, b)
    compare_files(run, reference)


def compare_checkpoints(left: Path, right: Path) -> None:
    """Compare step, configuration and weights of two step folders (Failure: the first difference)."""
    a, b = read_checkpoint(left), read_checkpoint(right)
    _same(f"{left.name}: step and configuration", (a.step, a.config), (b.step, b.config))
    _same_tree(f"{left.name}: weights", a.weights, b.weights)


def compare_files(folder: Path, reference: Path) -> None:
    """Compare the files of two folders, times and contents of checkpoints excepted.

    Raises:
        Failure: the first difference.
    """
    _same("files", _names(folder), _names(reference))
    for name in _names(reference):
        left, right = (base / name for base in (folder, reference))
        if "checkpoints" in name.split("/") or left.name in UNCOMPARED:
            continue
        if left.suffix == ".jsonl":
            _same(name, *(timeless(read_metrics(path)) for path in (left, right)))
        elif left.suffix == ".json":
            _same(name, *(timeless(json.loads(path.read_text(encoding="utf-8"))) for path in (left, right)))
        else:
            _same(name, left.read_bytes(), right.read_bytes())


def timeless(value: Any) -> Any:
    """A tree of JSON without what differs between two runs that are the same."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def _names(folder: Path) -> list[str]:
    """Return all file names except tensorboard's and locks; a killed run may leave a free lock."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if not path.startswith("tensorboard/") and not path.endswith(".lock"))


def _same(what: str, found: Any, wanted: Any) -> None:
    if repr(found) != repr(wanted):  # not a number equals itself here
        raise Failure(f"{what}: {_short(found)}, but the uninterrupted run has {_short(wanted)}")


def _same_tree(what: str, found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        if not isinstance(found, torch.Tensor) or found.dtype != wanted.dtype or not _equal(found, wanted):
            raise Failure(f"{what}: the tensor differs from that of the uninterrupted run")
    elif isinstance(wanted, dict):
        _same(what, sorted(found, key=str), sorted(wanted, key=str))
        for key in wanted:
            if "seconds" not in str(key):
                _same_tree(f"{what}/{key}", found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        _same(what, len(found), len(wanted))
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            _same_tree(f"{what}/{number}", *pair)
    else:
        _same(what, found, wanted)


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and found.numpy().tobytes() == wanted.numpy().tobytes()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 1500 else f"{text[:1500]}..."


def _small_page(page: Path, content: Any) -> Path:
    write_whole(page, f"<p>{json.dumps(timeless(content))}</p>\n".encode())
    return page


def _detectors() -> bool:
    return all(importlib.util.find_spec(name) for name in ("timm", "torchvision", "pycocotools"))


def _settings(**own: Any) -> dict[str, Any]:
    common = {"steps": STEPS, "batch_size": 4, "evaluate_every": 1, "log_every": 1, "tensorboard": False}
    common |= {"evaluation_batch_size": 64}
    return {**common, "device": "cpu", **own}


def _config(name: str, data: dict[str, Any], model: dict[str, Any], rate: float, **training: Any) -> RunConfig:
    return config_from_dict(
        {
            "name": name,
            "data": data,
            "model": model,
            "training": _settings(**training),
            "optimizer": {"learning_rate": rate},
            "schedule": {"name": "constant"},
            "evaluation": {"beams": 2, "tokens": 6},
        }
    )


_SMALL = {"width": 8, "depth": 1, "heads": 2, "feed_forward": 8, "dropout": 0.1}


def _language(data: Path) -> RunConfig:
    text = {"name": "text", "path": str(data / "text"), "tokenizer": "byte"}
    model = {"name": "language_model", **_SMALL, "memory": {"name": "transformer_xl", "length": 4}}
    return _config("language", text, model, 0.3, segment_length=8, segments=2, metric="bits_per_byte", test="both")


def _images(data: Path) -> RunConfig:
    digits = {"name": "digits", "validation_fraction": 0.03, "test_fraction": 0.03}
    model = {"name": "vision_transformer", **_SMALL, "patch_size": 4, "memory": {"name": "grc", "ratio": 0.5}}
    return _config("images", digits, model, 0.05, ema_decay=0.5, metric="loss")


def _listops(data: Path) -> RunConfig:
    bounds = {"max_depth": 3, "max_args": 3, "min_length": 6, "max_length": 24}
    made = {"name": "listops", **bounds, "train_size": 64, "validation_size": 40, "test_size": 20}
    model = {"name": "sequence_classifier", **_SMALL, "memory": {"name": "grc", "ratio": 0.5}}
    return _config("listops", made, model, 0.2, average_last=2, keep=3, metric="loss")


def _translation(data: Path) -> RunConfig:
    pairs = {"name": "translation", "source": "de", "target": "en", "path": str(data / "pairs")}
    model = {"name": "encoder_decoder", **_SMALL, "memory": {"name": "grc", "ratio": 0.5}}
    settings = {"batch_tokens": 200, "metric": "loss"}
    return _config("translation", {**pairs, "vocabulary_size": 270, "max_length": 32}, model, 0.3, **settings)


def _detection(data: Path) -> RunConfig:
    for name in ("timm", "torchvision.models.detection", "pycocotools.cocoeval"):
        require(name, extra="vision")
    model: dict[str, Any] = {"name": "retinanet", "backbone": "pvt_v2_b0", "min_size": 32, "max_size": 48}
    model |= {"fpn_channels": 8, "memory": {"name": "grc", "ratio": 0.5}, "cache_image_size": [32, 32]}
    model |= {"anchor_sizes": [8, 16, 32, 64, 128]}
    coco = {"name": "coco", "path": str(data / "coco")}
    return _config(
        "detection", coco, model, 1e-3, steps=2, batch_size=2, evaluation_batch_size=2, metric="box_ap", test="none"
    )
