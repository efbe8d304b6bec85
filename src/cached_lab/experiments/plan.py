"""Memory of a training, planned from its recipe without data or a GPU: does it fit, and in which pieces?

Weights, gradients and their copies follow from the parameters. The optimiser's state, activations and temporaries are
those of one rehearsed step: the code that trains, on tensors without values (PyTorch's `FakeTensorMode`), whose
storages are counted while they are alive. A forward that depends on values cannot be rehearsed. Uncounted are CUDA's
context, workspaces of its libraries and fragments of its allocator (the reserve), and what `training.compile` saves.

Legend: B rows, N tokens of all segments, K classes.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cached_lab.experiments.build import memory_name, without_checkpoint
from cached_lab.experiments.costs.flops import count_parameters
from cached_lab.experiments.costs.live_bytes import LiveBytes
from cached_lab.registries import DATASETS
from cached_lab.tasks.documents.loop import DocumentLoop
from cached_lab.tasks.recipes import LEARNED_FROM_DATA, MEMORY_LEARNS_FROM_DATA, fill_from_data
from cached_lab.training.buffers import remember_buffers
from cached_lab.training.config import RunConfig
from cached_lab.training.optim import build_optimizer
from cached_lab.training.reconstruction_loss import ReconstructionLoss
from cached_lab.training.trainer import enable_activation_checkpointing
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories import memory_specs
from cached_transformers.memories.grc import equations
from cached_transformers.registry import MEMORIES, MODELS

GIB = 2**30
KNOWN: dict[str, dict[str, int]] = {
    "wikitext103": {"vocabulary": 267_735},
    "wikitext2": {"vocabulary": 33_278},
    "ptb": {"vocabulary": 10_000},
    "enwik8": {"vocabulary": 256},
    "imagenet": {"classes": 1000, "channels": 3},
    "tiny_imagenet": {"classes": 200, "channels": 3, "image_size": 64},
    "cifar10": {"classes": 10, "channels": 3, "image_size": 32},
    "digits": {"classes": 10, "channels": 1, "image_size": 8},
    "listops_tsv": {"classes": 10, "vocabulary": 16, "max_length": 2000},
}
"""Published data sets in their usual form."""
SENTENCE = 32
"""Assumed tokens of a pair's longer side with `training.batch_tokens`."""


class RowShape(NamedTuple):
    """Shape of a row: its task, tokens over all segments (0 for images) and segments, or (channels, height, width)."""

    task: str
    tokens: int = 0
    segments: int = 1
    image: tuple[int, int, int] | None = None
    padded: bool = False


class TrainingPlan(NamedTuple):
    """Result of a plan.

    Attributes:
        rows, micro_batch, accumulate: rows of a step, rows of a piece on one GPU, and pieces of a step.
        parts: bytes of a GPU by kind.
        assumed: sizes taken from `KNOWN`.
    """

    parameters: int
    rows: int
    micro_batch: int
    accumulate: int
    fits: bool
    parts: dict[str, int]
    assumed: dict[str, int]


def plan_training(
    config: RunConfig,
    *,
    gpus: int = 1,
    parallel: str = "ddp",
    memory_gib: float = 80.0,
    reserve_gib: float = 4.0,
    length: int | None = None,
) -> TrainingPlan:
    """Plan a recipe, with more pieces than its `training.accumulate` if it does not fit otherwise.

    Args:
        gpus: number of processes, one GPU each.
        parallel: "ddp", or "fsdp" (weights, gradients and optimiser are sharded).
        memory_gib, reserve_gib: memory of a GPU, and the part left free for uncounted memory.
        length: tokens of a row, for data with rows of any length.

    Raises:
        ValueError: rows that do not divide over the GPUs, an unknown size, or a model that depends on values.
    """
    if gpus < 1 or not 0 <= reserve_gib < memory_gib:
        raise ValueError(
            f"gpus={gpus}, memory_gib={memory_gib}, reserve_gib={reserve_gib}: gpus >= 1, memory > reserve"
        )
    config, shape, rows, assumed = sized(config, length)
    if config.training.batch_tokens is None and rows % gpus:
        raise ValueError(f"training.batch_size={rows}: must divide evenly over gpus={gpus}; change one of them")
    mine, own = -(-rows // gpus), config.training.accumulate
    room, ways = (memory_gib - reserve_gib) * GIB, [own, *(n for n in range(own + 1, mine + 1) if mine % n == 0)]
    step = RehearsedStep(config, shape, gpus=gpus, parallel=parallel)
    for pieces in ways:
        micro, most = -(-mine // pieces), math.inf if pieces == ways[-1] else room
        with contextlib.suppress(NoRoom):
            parts = step.parts(micro, pieces, most)
            if fits := sum(parts.values()) <= room:
                break
    return TrainingPlan(count_parameters(step.model), rows, micro, pieces, fits, parts, assumed)


def sized(config: RunConfig, length: int | None = None) -> tuple[RunConfig, RowShape, int, dict[str, int]]:
    """Complete a recipe without its data: the recipe, the shape of a row, rows of a step, and sizes from `KNOWN`.

    Raises:
        ValueError: a size is unknown.
    """
    name, settings, entry = config.data["name"], config.training, DATASETS.entry(config.data["name"])
    task = getattr(entry.factory, "task", "classification")
    if task == "detection":
        raise ValueError(f"data.name={name}: images with objects cannot be planned; train with training.steps=10")
    data = {key: p.default for key, p in entry.options.items() if p.default is not p.empty} | config.data
    known = dict(KNOWN.get(name, {}))
    if config.data.get("tokenizer", "word") != "word":
        known.pop("vocabulary", None)
    said = {key: data[key] for key in LEARNED_FROM_DATA if data.get(key) is not None}
    said |= {"vocabulary": data["vocabulary_size"]} if data.get("vocabulary_size") else {}
    said |= {"vocabulary": 256} if data.get("tokenizer") == "byte" else {}
    if task == "documents" or length:
        said["max_length"] = data["segment_length"] if task == "documents" else length
    if hasattr(entry.factory, "foretell"):
        said |= entry.factory.foretell(**{key: value for key, value in config.data.items() if key != "name"})
    options = MODELS.entry(config.model["name"]).options
    wanted = [key for key in LEARNED_FROM_DATA if key in options and key not in config.model and key not in said]
    for key in wanted:
        if key not in known and (key == "classes" or options[key].default is options[key].empty):
            raise ValueError(f"data.name={name}: {key} is unknown without the data; set model.{key}=N")
    assumed = {key: known[key] for key in wanted if key in known}
    ends = {key: [1] for part, _ in memory_specs(config.model.get("memory")) for key in MEMORIES.entry(part).options}
    config = fill_from_data(config, said | assumed | {key: ends[key] for key in MEMORY_LEARNS_FROM_DATA if key in ends})
    rows, sizes, segments = settings.batch_size, {**known, **said, **config.model}, 1
    if task == "language":
        return config, RowShape(task, settings.segment_length * settings.segments), rows, assumed
    if "vocabulary" not in options:
        side = sizes.get("image_size")
        if side is None:
            raise ValueError(f"data.name={name}: image_size is unknown without the data; set data.image_size=N")
        return config, RowShape(task, image=(sizes.get("channels") or 3, side, side)), rows, assumed
    if task == "documents":
        segments = -(-length // data["segment_length"]) if length else data["segments"]
        tokens = segments * data["segment_length"]
    elif settings.batch_tokens is not None:
        tokens = length or SENTENCE
        rows = max(1, settings.batch_tokens // tokens)
    else:
        tokens = length or sizes["max_length"]
    return config, RowShape(task, tokens, segments, padded=name != "planted_documents"), rows, assumed


class NoRoom(Exception):
    """The peak of a `Rehearsed` exceeds its limit."""


class Rehearsed(LiveBytes):
    """Count bytes over tensors without values; an optimiser that reads its step number gets 1."""

    updating, limit = False, math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most calls
            return func(*args)
        if func is torch.ops.aten._local_scalar_dense.default and self.updating:
            return 1.0
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > self.limit:
            raise NoRoom
        return out

    def restart(self, limit: float = math.inf) -> None:
        """Reset the peak, and limit it."""
        self.peak, self.limit = self.now, limit


class GpuForms(TorchFunctionMode):
    """Let a CPU compute as a GPU: GRC in one block, and `scaled_dot_product_attention` without dropout.

    GPU kernels store only the seed of dropout; a CPU would store whole attention matrices.
    """

    def __enter__(self) -> Any:
        self._large, equations.LARGE = equations.LARGE, sys.maxsize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        equations.LARGE = self._large
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4] + (0.0,) * (len(args) > 4) + args[5:], {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


class RehearsedStep:
    """Bytes of one process by kind, in a step of micro-batches.

    Args:
        config: with the options that data fill in.
        gpu: use the GPU forms of optimiser, attention and memory.
    """

    def __init__(self, config: RunConfig, shape: RowShape, gpus: int = 1, parallel: str = "ddp", gpu: bool = True):
        self.config, self.shape, self.gpu, self.ddp = config, shape, gpu, parallel == "ddp" and gpus > 1
        self.shards = gpus if parallel == "fsdp" else 1
        self.model = bare_model(config)
        self.states, self.update = optimizer_bytes(self.model, config, gpu)

    def parts(self, rows: int, pieces: int = 1, room: float = math.inf) -> dict[str, int]:
        """Count the bytes with `pieces` micro-batches of `rows` rows.

        Raises:
            NoRoom: forward or backward takes more than `room` bytes.
            ValueError: the model depends on values of tensors.
        """
        held = pieces > 1 or self.shards > 1
        bare = bare_model(self.config)  # a forward leaves tables in it, which the next one would not count
        with FakeTensorMode(allow_non_fake_inputs=True), _explained(self.config):
            model = without_values(bare)
            step, inputs = training_step(self.config, self.shape, model, rows)
            trained = [p for p in model.parameters() if p.requires_grad]
            with GpuForms() if self.gpu else contextlib.nullcontext(), Rehearsed() as live:
                _keep = remember_buffers(model)
                copies = live.now
                for parameter in trained if held else ():
                    parameter.grad = torch.empty_like(parameter)
                before = live.now
                live.restart(before + room)
                loss, carried = step()
                forward, activations = live.peak - before, live.now - before
                live.restart(before + room)
                loss.backward()
                backward = live.peak - before
        state = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_leaves(carried)}
        buffers = sum(b.nbytes for b in model.buffers())
        weights, gradients = sum(p.nbytes for p in model.parameters()), sum(p.nbytes for p in trained)
        update = self.update + sum(state.values()) + (0 if held else gradients)
        average = 0 if self.config.training.ema_decay is None else weights + buffers
        return {
            "weights": weights // self.shards,
            "optimiser": self.states // self.shards,
            "average of the weights": average // self.shards,
            "buffers, and copies of them": buffers + copies,
            "gradients of earlier pieces" if self.shards == 1 else "gradients": gradients // self.shards if held else 0,
            "buckets of DDP": gradients if self.ddp else 0,
            # One layer is computed while the next is gathered.
            "gathered by FSDP": 2 * _largest_unit(model) if self.shards > 1 else 0,
            "states of the rows": sum(state.values()) * (2 * pieces - 1),
            "inputs": sum(t.nbytes for t in inputs),
            "activations": activations,
            "gradients and temporaries at the peak": max(forward, backward, update // self.shards) - activations,
        }


def optimizer_bytes(model: nn.Module, config: RunConfig, gpu: bool) -> tuple[int, int]:
    """Return the bytes of the optimiser's state for a model on the meta device, and of an update's temporaries."""
    optimizer = build_optimizer(model, config.optimizer)
    for group in optimizer.param_groups if gpu else ():
        group["foreach"] = True  # all parameters at once, with temporaries as large as they are
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    with Rehearsed() as live:
        live.updating = True
        limit = math.inf if config.training.clip_norm is None else config.training.clip_norm
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        clipped = live.peak
        live.restart()
        optimizer.step()  # creates the state before its temporaries
    kept = sum(t.nbytes for t in tree_leaves(dict(optimizer.state)) if isinstance(t, Tensor))
    fused = isinstance(optimizer, torch.optim.AdamW)  # off the meta device, without temporaries
    return kept, clipped if fused else max(clipped, live.peak - live.now)


def bare_model(config: RunConfig) -> nn.Module:
    """Return the model of a recipe in training mode on the meta device, without reading published weights."""
    options = without_checkpoint(config).model
    if options.get("pretrained"):
        options = {**options, "pretrained": False}
    with torch.device("meta"):
        model: nn.Module = MODELS.create(**options)
    if config.training.activation_checkpointing:
        enable_activation_checkpointing(model)
    return model.train()


def without_values(model: nn.Module) -> nn.Module:
    """Replace the model's parameters and buffers by tensors of the caller's `FakeTensorMode`; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="cpu")
                    trained = tensor.requires_grad
                    made[id(tensor)] = nn.Parameter(empty, trained) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = None if tensor is None else made[id(tensor)]  # type: ignore[assignment]
    return model


def training_step(
    config: RunConfig, shape: RowShape, model: nn.Module, rows: int
) -> tuple[Callable[[], tuple[Tensor, Any]], list[Tensor]]:
    """Return a function for loss and state of a micro-batch, as the recipe's task computes them, and the inputs."""
    settings, task = config.training, shape.task
    tokens = torch.zeros(3, rows, shape.tokens, dtype=torch.int64).unbind()
    padding = torch.zeros(rows, shape.tokens, dtype=torch.bool) if shape.padded else None
    inputs = [torch.empty(rows, *shape.image) if shape.image else tokens[0]]
    if task == "language":
        scoring = ReconstructionLoss(settings.recall) if settings.recall else None
        sizes, window = (settings.segment_length, settings.bptt, settings.passes), settings.bptt_window
        loop: Any = SegmentLoop(model, *sizes, scoring=scoring, bptt_window=window)  # type: ignore[arg-type]
        given: tuple[Any, ...] = (tokens[1], model.init_state(rows), torch.zeros(rows, 1, dtype=torch.bool), None)  # type: ignore[operator]
        inputs += [tokens[1]]
    elif task == "documents":
        loop = DocumentLoop(model, shape.tokens // shape.segments, shape.segments, settings.passes, settings.replay)
        given = (padding,)
    elif task == "translation":
        loop = partial(model, padding=padding, targets=tokens[2], label_smoothing=settings.label_smoothing)
        given = (tokens[1],)
        inputs += tokens[1:]
    else:
        loop, given = partial(model, **({} if padding is None else {"padding": padding})), ()

    def step() -> tuple[Tensor, Any]:
        with settings.autocast(torch.device("cpu")):
            output = loop(inputs[0], *given)
            if task == "language":
                return output[0] * 1.0, output[1]
            if task == "documents":
                values, auxiliary = output
            else:
                values, auxiliary = getattr(output, "outputs", output), getattr(output, "auxiliary_loss", None)
        if task == "translation":
            loss = values.sum() * 1.0
        else:
            mixed = settings.mixup or settings.cutmix
            targets = torch.empty_like(values) if mixed else torch.zeros(rows, dtype=torch.int64)
            loss = F.cross_entropy(values.float(), targets, label_smoothing=settings.label_smoothing)
        return loss if auxiliary is None else loss + auxiliary, ()

    return step, inputs if padding is None else [*inputs, padding]


def _largest_unit(model: nn.Module) -> int:
    """Return the bytes of the largest part that FSDP gathers: a layer of a list, or everything outside of layers."""
    layers = [m for owner in model.modules() if isinstance(owner, nn.ModuleList) for m in owner]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    rest = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    return max([rest, *(sum(p.nbytes for p in layer.parameters()) for layer in layers)])


@contextlib.contextmanager
def _explained(config: RunConfig) -> Iterator[None]:
    """Name the model that cannot be rehearsed in the error."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"model {config.model['name']!r} with memory {memory_name(config)!r} depends on values of tensors "
            f"({error.func}), which a plan does not have; plan it with model.memory=null or model.cutoffs=null"
        ) from None
    except RuntimeError as error:  # of torch, e.g. a kernel larger than its input
        raise ValueError(f"model {config.model['name']!r}: {error}; change its sizes, or those of the data") from None
