"""Batches and results of `test_pipeline`, for processes of a pipeline and for one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from contract.contract_cases import SEGMENT, STREAMS, VOCABULARY, Case
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from cached_lab.training.distributed import World
from cached_lab.training.segment_pipeline import SegmentPipeline
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.state import named_tensors

ROWS = 4


class Setting(NamedTuple):
    """Segments of a batch, segments that a gradient crosses, and whether rows hold several documents."""

    segments: int = 5
    bptt: int = 5
    packed: bool = False


SETTINGS = {
    "plain": Setting(4, 2),  # the gradient ends between the processes
    "through": Setting(5, 4),
    "short": Setting(1, 1),  # the second process has no segment
}
PACKED = {"packed": Setting(4, 4, packed=True)}
FEW = [
    case
    for case in STREAMS
    if (case.memory, case.attention)
    in [(name, "softmax") for name in ("transformer_xl", "rmt/causal", "infini", "compressive")]
]

MESH = [case for case in FEW if case.memory != "compressive"]
"""Cases without an auxiliary loss: data-parallel processes weigh it by tokens, one process by segments."""


def settings_of(case: Case) -> dict[str, Setting]:
    # An auxiliary loss of documents depends on the documents that are read at once.
    return {**SETTINGS, **(PACKED if case in FEW and case.memory != "compressive" else {})}


def batch(segments: int, rows: int = ROWS) -> tuple[Any, ...]:
    """Return rows with a short last segment, padding inside and at the end, and resets."""
    text = torch.randint(0, VOCABULARY, (rows, segments * SEGMENT + 1), generator=torch.Generator().manual_seed(3))
    if segments > 1:
        text = text[:, :-2]
    inputs, targets = text[:, :-1], text[:, 1:]
    padding = torch.zeros_like(inputs, dtype=torch.bool)
    padding[1, -3:] = padding[2, SEGMENT - 2 : SEGMENT] = True
    padding[0, SEGMENT : 2 * SEGMENT] = True
    reset_BS = torch.zeros(rows, segments, dtype=torch.bool)
    reset_BS[0, segments // 2] = reset_BS[2, -1] = reset_BS[1, 0] = True
    return inputs, targets, reset_BS, padding


def documents(inputs: Tensor) -> Tensor:
    """Return ids of documents that begin inside segments and at their first token."""
    ids = torch.zeros_like(inputs)
    ids[0, 2:] = ids[1, SEGMENT:] = ids[1, SEGMENT + 4 :] = 1
    ids[0, SEGMENT + 3 :] = ids[1, SEGMENT + 5 :] = 2
    return ids


def seen(case: Case, setting: Setting, world: World | None, mesh: Any = None) -> dict[str, Tensor]:
    """Return loss, auxiliary loss, gradients and state after the second of two batches.

    With a world they are the averages over the processes of a pipeline; without, the values of one `SegmentLoop`.
    """
    model = case.build().double()
    loop: nn.Module = SegmentLoop(model, SEGMENT, setting.bptt)
    called, parts = loop, [slice(None)]
    if world is not None:
        group = None if mesh is None else mesh.get_group("pipeline")
        loop = SegmentPipeline(model, SEGMENT, setting.bptt, group=group)
        called = DistributedDataParallel(loop, find_unused_parameters=True)
        parts = [slice(lane * ROWS // 2, (lane + 1) * ROWS // 2) for lane in range(2)] if mesh is not None else parts
    part = parts[0 if mesh is None else mesh.get_local_rank("data")]
    state: Any = None
    for segments in (2, setting.segments):
        model.zero_grad()
        inputs, targets, reset, padding = (t[part] for t in batch(segments))
        told = documents(batch(segments)[0])[part] if setting.packed else None
        loss, state = called(inputs, targets, state, reset, padding, documents=told)
        count = int(((targets != -100) & ~padding).sum())
        whole = int((~batch(segments)[3]).sum())
        scaled = loss if mesh is None else loss * (2 * count / whole)
        scaled.backward()
    found = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    both = torch.stack([scaled.detach().double(), loop.auxiliary_loss.double()])
    if world is not None:
        both = world.sum(both) / world.size
    found |= {"loss": both[0]} | ({"auxiliary": both[1]} if mesh is None else {})
    return found | ({} if state is None else {f"state {n}": t for n, t in named_tensors(state)})


def everything(world: World, folder: Path, which: str) -> dict[str, Any]:
    """Return the results of one process for the cases "few", "streams" or "mesh"."""
    cases = {"few": FEW, "streams": STREAMS, "mesh": MESH}[which]
    mesh = None if which != "mesh" else init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    return {f"{case} {name}": seen(case, s, world, mesh) for case in cases for name, s in settings_of(case).items()}
