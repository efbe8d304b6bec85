"""One of several processes of `test_pipeline`: reads its segments of every row, and stores what came of it.

Called by torchrun as: pipeline_worker.py FOLDER [few | streams | mesh], for FOLDER/RANK.pt.
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from contract.contract_cases import SEGMENT, STREAMS, VOCABULARY, Case

from cached_lab.training.distributed import World, in_world
from cached_lab.training.segment_pipeline import SegmentPipeline
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.state import detach, map_state, named_tensors

ROWS = 4


class Setting(NamedTuple):
    """How a batch is read: segments of it, the window of the gradient, micro-batches, the order of the layers, and
    whether rows hold documents."""

    segments: int = 5
    bptt: int = 5
    micro_batches: int = 2
    schedule: str = "segments"
    packed: bool = False


SETTINGS = {
    "plain": Setting(4, 2, 1),  # the cut is where the processes part
    "through": Setting(5, 4, 2),
    "short": Setting(1, 1, 2),  # the second process has nothing to read
}
PACKED = {"packed": Setting(4, 4, 2, packed=True)}
WAVEFRONTS = {
    "wavefront": Setting(5, 5, 1, "wavefront"),
    "wavefront, cut": Setting(6, 2, 2, "wavefront"),
}
FEW = [
    case
    for case in STREAMS
    if (case.memory, case.attention)
    in [(name, "softmax") for name in ("transformer_xl", "rmt/causal", "infini", "compressive")]
]

MESH = [case for case in FEW if case.memory != "compressive"]
"""Without an auxiliary loss, which several data-parallel processes weigh by tokens, and one process by segments."""


def settings_of(case: Case) -> dict[str, Setting]:
    # An auxiliary loss of documents depends on which of them are read at once.
    packed = PACKED if case in FEW and case.memory != "compressive" else {}
    return {**SETTINGS, **packed, **(WAVEFRONTS if case.in_layers else {})}


def batch(segments: int, rows: int = ROWS) -> tuple[Any, ...]:
    """A short last segment where there are several, padding in the middle and at the end, rows that begin anew."""
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
    """Two rows of several documents, which begin inside segments and at one, and a row that is all one."""
    ids = torch.zeros_like(inputs)
    ids[0, 2:] = ids[1, SEGMENT:] = ids[1, SEGMENT + 4 :] = 1
    ids[0, SEGMENT + 3 :] = ids[1, SEGMENT + 5 :] = 2
    return ids


def seen(case: Case, setting: Setting, world: World | None, mesh: Any = None) -> dict[str, Tensor]:
    """Loss, auxiliary loss, gradients and state after the second of two batches, the state carried from the first.

    Of the pipeline with what is divided by the processes averaged over them, or of one `SegmentLoop`.
    """
    model = case.build().double()
    loop: nn.Module = SegmentLoop(model, SEGMENT, setting.bptt)
    called, parts = loop, [slice(None)]
    if world is not None:
        group = None if mesh is None else mesh.get_group("pipeline")
        options: dict[str, Any] = {"micro_batches": setting.micro_batches, "schedule": setting.schedule}
        loop = SegmentPipeline(model, SEGMENT, setting.bptt, **options, group=group)
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


def seen_in_parts(case: Case, setting: Setting) -> dict[str, Tensor]:
    """What one process sees that reads one micro-batch after the other: for auxiliary losses, which may be means over
    those rows alone that have something to do with them."""
    model = case.build().double()
    loop = SegmentLoop(model, SEGMENT, setting.bptt)
    states: list[Any] = [None] * setting.micro_batches
    for segments in (2, setting.segments):
        model.zero_grad()
        whole = batch(segments)
        total, auxiliary = torch.zeros(2, dtype=torch.float64)
        for number, rows in enumerate(torch.arange(ROWS).tensor_split(setting.micro_batches)):
            inputs, targets, reset, padding = (t[rows] for t in whole)
            outs = list(loop.read(inputs, targets, states[number], reset, padding))
            total = total + sum(out.outputs.sum() for out in outs)
            auxiliary = auxiliary + sum(out.auxiliary_loss for out in outs) * (len(rows) / ROWS / len(outs))
            states[number] = detach(outs[-1].state)
        loss = total / (~whole[3]).sum() + auxiliary
        loss.backward()
    found = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    state = map_state(lambda *parts: torch.cat(parts), *states)
    scalars = {"loss": loss.detach(), "auxiliary": auxiliary.detach()}
    return found | scalars | {f"state {n}": t for n, t in named_tensors(state)}


def everything(world: World) -> dict[str, Any]:
    which = sys.argv[2] if len(sys.argv) > 2 else "few"
    if which == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
        return {f"{case} {name}": seen(case, s, world, mesh) for case in MESH for name, s in settings_of(case).items()}
    cases = FEW if which == "few" else STREAMS
    result: dict[str, Any] = {}
    for case in cases:
        for name, setting in settings_of(case).items():
            result[f"{case} {name}"] = seen(case, setting, world)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(500 if len(sys.argv) > 2 and sys.argv[2] != "few" else 100, exit=True)
    rank: list[int] = []

    def work(world: World) -> dict[str, Any]:
        rank.append(int(world.rank))
        return everything(world)

    found = in_world("cpu", work)
    torch.save(found, Path(sys.argv[1]) / f"{rank[0]}.pt")
