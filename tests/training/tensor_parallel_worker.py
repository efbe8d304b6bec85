"""One of two processes of `test_tensor_parallel`: has half of the heads, and stores losses, gradients and weights.

Called by torchrun as: tensor_parallel_worker.py FOLDER, for FOLDER/0.pt and FOLDER/1.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from contract.contract_cases import CASES, SEGMENT, Case

from cached_lab.training.distributed import World, in_world
from cached_lab.training.sharding import is_cut
from cached_lab.training.tensor_parallel import tensor_parallel, whole, whole_weights
from cached_transformers.loops.segments import SegmentLoop

ROWS = 3
ALL = [case for case in CASES if case.attention == "softmax" and case.language]
PLAIN = {
    "decoder": {"model": "language_model"},
    "two heads share keys": {"model": "language_model", "heads": 4, "kv_heads": 2},
    "gated, norms behind": {"model": "language_model", "activation": "gated_silu", "heads": 4, "norm": "post"},
    "encoder": {"model": "sequence_classifier"},
    "without biases": {"model": "sequence_classifier", "bias": False},
    "images": {"model": "vision_transformer"},
}
"""Models without a memory, and with more than the contract's models have."""
WITHOUT_A_SCHEME = {"transformer_xl": {"relative": False}}
"""Memories of the contract whose own position scheme works on heads."""


def plain(name: str) -> Case:
    return Case("none", "softmax", PLAIN[name]["model"])  # type: ignore[arg-type]


def build(case: Case, **options: Any) -> nn.Module:
    """The model; of tokens with positions that do to every head the same."""
    own = {key: value for key, value in options.items() if key != "model"}
    if case.model == "vision_transformer":
        return case.build(**own)
    return case.build(options=WITHOUT_A_SCHEME.get(case.memory), **{"positions": "rotary", **own})


def loss_of(case: Case, model: nn.Module, step: int = 5) -> Tensor:
    """Of four segments in windows of two, or of one batch; padding in the first row."""
    if not case.language:
        out = model(case.segments(1, rows=ROWS, seed=step)[0])
        return F.cross_entropy(out.outputs, torch.arange(ROWS) % 3) + out.auxiliary_loss
    tokens = torch.cat(case.segments(5, rows=ROWS, seed=step), 1)
    padding = torch.zeros(ROWS, 4 * SEGMENT, dtype=torch.bool)
    padding[0, -2:] = True
    loop = SegmentLoop(model, SEGMENT, bptt=2)
    return loop(tokens[:, : 4 * SEGMENT], tokens[:, 1 : 4 * SEGMENT + 1], padding=padding)[0]


def gradients(case: Case, mesh: Any = None, **options: Any) -> dict[str, Tensor]:
    """The loss, and what every parameter learns of it."""
    model = build(case, **options)
    if mesh is not None:
        tensor_parallel(model, mesh)
    loss = loss_of(case, model)
    loss.backward()
    found = {name: whole(model, name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def trained(case: Case, mesh: Any = None) -> dict[str, Tensor]:
    """Weights after three steps of AdamW."""
    model = build(case)
    if mesh is not None:
        tensor_parallel(model, mesh)
    cut = [p for p in model.parameters() if is_cut(p)]
    others = [p for p in model.parameters() if not is_cut(p)]
    optimizer = torch.optim.AdamW([{"params": part} for part in (cut, others) if part], 0.01, eps=1e-3)
    for step in range(3):
        loss_of(case, model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model) if mesh is not None else model.state_dict()


def train_all(world: World) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world.size,))
    seen: dict[str, Any] = {}
    for name, options in PLAIN.items():
        seen[name] = gradients(plain(name), mesh, **options)
    for case in ALL:
        try:
            seen[str(case)] = gradients(case, mesh)
        except ValueError as error:
            seen[str(case)] = str(error)
    seen["trained"] = trained(plain("decoder"), mesh)
    model = tensor_parallel(build(plain("decoder")), mesh)
    seen["whole"] = whole_weights(model)
    local = [p.to_local() if is_cut(p) else p for p in model.parameters()]  # type: ignore[operator]
    seen["numbers"] = sum(p.numel() for p in local)
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank: list[int] = []

    def work(world: World) -> dict[str, Any]:
        rank.append(world.rank)
        return train_all(world)

    found = in_world("cpu", work)
    torch.save(found, Path(sys.argv[1]) / f"{rank[0]}.pt")
