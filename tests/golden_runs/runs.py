"""Short trainings whose every loss and final weight must stay, bit for bit, when the code is rebuilt.

    python tests/golden_runs/runs.py record     writes runs.json beside this file
    python tests/golden_runs/runs.py check      trains again and lists what differs

Everything goes through the command line, so that nothing here depends on where the code lies. Weights are compared
whatever their names: the checksum is that of the sorted checksums of all tensors. Bits depend on the processor, on
torch and on the number of threads, which stand in the file; on others the runs must be recorded anew, before a change.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

RECORD = Path(__file__).with_suffix(".json")
STEPS = 30
COMMON = [
    f"training.steps={STEPS}",
    "training.log_every=1",
    f"training.evaluate_every={STEPS}",
    "schedule.warmup_steps=3",
]

_IMAGES = ["table1_small", "data.path={shared}/cifar10", "model.depth=2", "training.test=none"]
_TEXT = [
    *("demo_text", "data.path={text}", "model.width=32", "model.feed_forward=64", "training.batch_size=4"),
    *("training.segment_length=24", "training.bptt=2", "training.evaluation_batch_size=8"),
]
_PAIRS = [
    *("multi30k_en_de_grc", "data.path={shared}/multi30k", "data.vocabulary_size=1000", "model.width=32"),
    *("model.depth=2", "model.feed_forward=64", "training.batch_tokens=512", "training.metric=loss"),
    "training.test=none",
]
_LISTOPS = ["demo_listops", "model.depth=2", "training.batch_size=8", "training.evaluation_batch_size=100"]
_DETECTION = [
    *("data.path={shared}/coco-mini", "data.image_ids=[572, 605]", "training.batch_size=2"),
    *("model.cache_image_size=[128, 128]", "model.min_size=128", "model.max_size=160", "training.test=none"),
]


def _memory(name: str, **options: Any) -> list[str]:
    return [*_TEXT, "model.memory=" + json.dumps({"name": name, **options})]


RUNS: dict[str, list[str]] = {
    "image_grc_paper": [*_IMAGES, "model.memory.variant=algorithm1"],
    "image_grc_released": _IMAGES,
    "image_attention_cache": [*_IMAGES, 'model.memory={"name": "attention_cache"}'],
    "image_pvt_v2": ["table1_small_pvt_v2", "data.path={shared}/cifar10", "training.test=none"],
    "listops_grc": _LISTOPS,
    "listops_longformer": [*_LISTOPS, 'model.attention={"name": "longformer", "window": 8}'],
    "text_plain": [*_TEXT, "model.memory=null"],
    "text_transformer_xl": _memory("transformer_xl", length=32),
    "text_rmt": _memory("rmt", length=3),
    "text_rmt_cache": _memory("rmt", length=3, cache=8, read_cache=True, mask="causal"),
    "text_crtn": _memory("crtn", segment=24, regions=3, topk=2, rescale=True),
    "text_crtn_token": _memory(
        **{"name": "crtn", "segment": 24, "regions": 2, "topk": 1, "query": "compute_first", "scope": "token"},
        **{"summary": "mean", "short_memory": 1, "renormalise": "softmax", "rescale": True, "scale": True},
    ),
    "text_feedback": [*_memory("feedback", length=24), "training.segment_length=12", "training.steps=10"],
    "text_feedback_kv": [
        *_memory("feedback", length=12, keep="kv", shared_kv=False, positions="relative"),
        *("training.segment_length=12", "training.steps=10"),
    ],
    "text_grc_stream": _memory("grc_stream", length=8),
    "text_compressive": _memory("compressive", length=16, compressed=8, rate=4),
    "text_compressive_used": _memory("compressive", length=16, compressed=8, rate=4, function="most_used"),
    "text_ernie_doc": _memory("ernie_doc", length=16),
    "text_segatron": _memory("segatron", length=16, sentence_ends=[46], paragraph_ends=[10], widths=[12, 12, 8]),
    "text_memformer": _memory("memformer", length=3),
    "text_memorizing": _memory("memorizing", length=64, k=4),
    "text_memorizing_joint": _memory("memorizing", length=64, k=4, joint=True),
    "text_memory_transformer": _memory("memory_transformer", length=3, cache=8),
    "text_infinity_former": _memory("infinity_former", length=8, chunk=8, basis=8, widths=[0.1, 0.2]),
    "text_read_twice": _memory("read_twice", slots=8),
    "text_delta_net": [*_TEXT, "model.memory=null", "model.attention=delta_net"],
    "text_dropout": [*_memory("transformer_xl", length=32), "model.dropout=0.1", "model.attention_dropout=0.1"],
    "translation_grc": _PAIRS,
    "translation_plain": [*_PAIRS, "model.memory=null"],
    "detection_retinanet": ["coco_overfit_retinanet", *_DETECTION],
    "detection_mask_rcnn": ["coco_overfit_mask_rcnn", *_DETECTION],
}


def run(name: str, shared: Path, folder: Path) -> dict[str, Any]:
    """Train one of `RUNS` with the interpreter's own `cached`; its losses, validation scores and checksum."""
    places = {"shared": str(shared / "data"), "text": str(folder / "text.txt")}
    _write_text(folder / "text.txt")
    recipe, *overrides = RUNS[name]
    command = [sys.executable, "-m", "cached_lab.cli.main", "train", recipe, *COMMON]
    command += [word.replace("{shared}", places["shared"]).replace("{text}", places["text"]) for word in overrides]
    out = folder / name
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "training.tensorboard=false", "--out", str(out)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [
        [value for key, value in line.items() if "loss" in key or "bits" in key or "gradient" in key] for line in lines
    ]
    checkpoints = out / "checkpoints"
    weights = load_file(checkpoints / (checkpoints / "last").read_text().strip() / "model.safetensors")
    parts = sorted(hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in weights.values())
    finite = all(math.isfinite(v) for line in losses for v in line if isinstance(v, float))
    return {"losses": losses, "weights": hashlib.sha256("".join(parts).encode()).hexdigest(), "finite": finite}


def _write_text(path: Path) -> None:
    """Words and line ends drawn by a generator of Python's own, the same everywhere."""
    if path.exists():
        return
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(1, 6))) for _ in range(200)]
    text = "".join(chance.choice(words) + chance.choice("   .\n") for _ in range(6000))
    path.write_text(text)


def machine() -> dict[str, str]:
    """What the bits depend on beside the code."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def main() -> int:
    mode, names = sys.argv[1], sys.argv[2:] or list(RUNS)
    shared = Path(os.environ.get("CACHED_TRANSFORMERS_SHARED") or Path(__file__).resolve().parents[3] / "shared")
    with tempfile.TemporaryDirectory() as folder:
        _write_text(Path(folder) / "text.txt")
        with ThreadPoolExecutor(2) as pool:
            found = dict(zip(names, pool.map(lambda name: run(name, shared, Path(folder)), names), strict=True))
    if mode == "record":
        before = json.loads(RECORD.read_text())["runs"] if RECORD.exists() else {}
        RECORD.write_text(json.dumps({"machine": machine(), "runs": before | found}, indent=None) + "\n")
    known = json.loads(RECORD.read_text())["runs"]
    wrong = 0
    for name in names:
        bad = found[name].get("failed")
        same = found[name] == known[name]
        wrong += bool(bad) or not same
        print(f"{name:28} {'FAILED ' + bad if bad else 'same' if same else 'DIFFERS'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
