"""Process of `test_other_trainers`: losses of Trainer under FSDP2, and of a sharded loop.

Called by torchrun or without it as: other_trainers_worker.py FOLDER, for FOLDER/PROCESSES.pt.

accelerate supports FSDP on accelerators only, so it is told that two gloo processes are accelerators.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from docs.pages import blocks

from cached_transformers import add_memory
from cached_transformers.extras import require

SHARDED = "RANK" in os.environ
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
BLOCKS = [block.text for block in blocks("python") if block.page == "docs/training-elsewhere.md"]


def losses_of(memory: str, policy: str, folder: Path) -> tuple[list[float], str]:
    transformers = require("transformers", extra="language")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = transformers.LlamaConfig(**sizes, vocab_size=256)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    add_memory(model, memory, segment_length=16, length=4)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (8, 64))]
    found: dict[str, Any] = {}
    exec(next(text for text in BLOCKS if text.startswith("sharded")), found)
    options = found["sharded"] if SHARDED else {}
    if SHARDED and policy != "NO_WRAP":
        options["fsdp_config"] |= {"auto_wrap_policy": policy, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    options |= dict(max_steps=3, learning_rate=1e-3, per_device_train_batch_size=8 // PROCESSES, use_cpu=True)
    options |= dict(logging_steps=1, disable_tqdm=True, save_strategy="no", report_to="none")
    options |= dict(train_sampling_strategy="sequential")
    arguments = transformers.TrainingArguments(str(folder / memory), **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    seen = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return seen, trainer.accelerator.distributed_type.name


def main(folder: Path) -> None:
    found: dict[str, Any] = {"__name__": "page"}
    text = next(text for text in BLOCKS if "def train_sharded" in text)
    if SHARDED:
        accelerate = require("accelerate", extra="trainers")
        torch.distributed.init_process_group("gloo")
        kind = accelerate.utils.DistributedType.MULTI_GPU
        accelerate.PartialState._prepare_backend = lambda self, *a, **k: ("gloo", kind)
        accelerate.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
        text = text.replace('in_group(train_sharded, "gloo", **alone)', "train_sharded()")
    losses, kinds = {}, {}
    for memory in ("rmt", "transformer_xl"):
        for policy in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
            losses[f"{memory} {policy}"], kinds[f"{memory} {policy}"] = losses_of(memory, policy, folder)
    exec(text, found)
    mine = torch.tensor(found["losses"])
    if SHARDED:
        torch.distributed.all_reduce(mine)
    losses["by hand"] = (mine / PROCESSES).tolist()
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({"losses": losses, "kinds": kinds}, folder / f"{PROCESSES}.pt")
    if SHARDED:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
