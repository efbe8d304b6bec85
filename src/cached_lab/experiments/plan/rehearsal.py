"""Rehearsal of a training step: the real code of model, loss, backward and optimiser, on tensors without values.

Under PyTorch's `FakeTensorMode` every operator makes tensors of the right shape, type and lifetime without computing,
so that storages are counted as autograd, autocast, checkpointing and the segment loop really hold them. A forward that
depends on values cannot be rehearsed, except the adaptive softmax, whose targets are taken to follow Zipf's law.

Legend: B rows, N tokens of all segments, T target tokens, K classes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cached_lab.experiments.build import memory_name, without_checkpoint
from cached_lab.experiments.costs.flops import flops_of
from cached_lab.experiments.costs.live_bytes import LiveBytes
from cached_lab.tasks.documents.loop import DocumentLoop
from cached_lab.training.buffers import remember_buffers
from cached_lab.training.config import RunConfig
from cached_lab.training.optim import build_optimizer
from cached_lab.training.reconstruction_loss import ReconstructionLoss
from cached_lab.training.trainer import enable_activation_checkpointing
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.adaptive import AdaptiveSoftmax
from cached_transformers.registry import MODELS

SLACK = 0.002
"""Relative error of peaks, so that storages are not checked at every operator."""


@dataclass(frozen=True)
class RowShape:
    """Shape of a row of the batch.

    Attributes:
        task: language, documents, classification or translation.
        tokens: tokens of a row in one step, over all segments, padding included; 0 for images.
        classes: classes of a classifier's targets.
        segment_length, segments: of documents.
        image: (channels, height, width), or None for tokens.
        padded: the model gets a padding mask.
    """

    task: str
    tokens: int = 0
    classes: int = 0
    segment_length: int = 0
    segments: int = 1
    image: tuple[int, int, int] | None = None
    padded: bool = False


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one process in a rehearsed step of one micro-batch.

    Attributes:
        average: the moving average of the weights, with its buffers. copies: copies of buffers, to undo a bad step.
        state: state carried to the next step. activations: alive between forward and backward.
        forward, backward, update: most bytes alive in each phase, beyond those alive before the step.
    """

    weights: int
    buffers: int
    gradients: int
    optimizer: int
    average: int
    copies: int
    state: int
    inputs: int
    activations: int
    forward: int
    backward: int
    update: int


class Rehearsed(LiveBytes):
    """Count bytes over fake tensors, and answer the few questions of a step about values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(SLACK)
        self.shares = [share for m in model.modules() if isinstance(m, AdaptiveSoftmax) for share in zipf(m.bounds)]
        self.updating = False
        self._found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self.updating:
            return 1.0  # the step number, which an optimiser stores as a tensor
        if func is torch.ops.aten.nonzero.default and self.shares:
            share = self.shares[self._found % len(self.shares)]  # one call per cluster after the first, in order
            self._found += 1
            return super().__torch_dispatch__(
                torch.ops.aten.new_empty.default,
                types,
                (args[0], [math.ceil(share * args[0].numel()), args[0].dim()]),
                {"dtype": torch.int64},
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    def restart(self) -> None:
        """Reset the peak."""
        self.peak = self.now()


class FusedDropout(TorchFunctionMode):
    """Leave dropout out of `scaled_dot_product_attention`, whose GPU kernels store only its seed.

    With dropout, torch on a CPU would use the form that stores whole attention matrices.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            args, kwargs = args[:4] + (0.0,) * (len(args) > 4) + args[5:], {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def zipf(bounds: list[int]) -> list[float]:
    """Return the shares of targets in the clusters after the first, if word r has frequency 1 / r."""

    def harmonic(n: int) -> float:
        return math.log(n) + 0.5772156649 + 1 / (2 * n)

    return [(harmonic(high) - harmonic(low)) / harmonic(bounds[-1]) for low, high in pairwise(bounds[1:])]


def rehearse(config: RunConfig, shape: RowShape, rows: int, *, gradients_held: bool, gpu: bool = True) -> StepBytes:
    """Count the bytes of one step of a micro-batch.

    Args:
        config: with the options that data fill in.
        rows: rows of the micro-batch.
        gradients_held: gradients of an earlier piece of the batch exist already.
        gpu: use the GPU forms of optimiser and attention.

    Raises:
        ValueError: the model depends on values of tensors.
    """
    bare = bare_model(config)
    with FakeTensorMode(allow_non_fake_inputs=True), _explained(config):
        model = without_values(bare)
        step, inputs = training_step(config, shape, model, rows)
        optimizer = build_optimizer(model, config.optimizer)
        for group in optimizer.param_groups if gpu else ():
            group["foreach"] = True  # all parameters at once, with temporaries as large as they are
        trained = [p for p in model.parameters() if p.requires_grad]
        live = Rehearsed(model)
        with FusedDropout() if gpu else contextlib.nullcontext(), live:
            live.updating = True
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()  # creates the optimiser state
            live.updating = False
            optimizer.zero_grad(set_to_none=True)
            states = live.now()
            keep = remember_buffers(model)
            copies = live.now() - states
            if gradients_held:
                for parameter in trained:
                    parameter.grad = torch.empty_like(parameter)
            before = live.now()
            live.restart()
            loss, carried = step()
            forward, activations = live.peak - before, live.now() - before
            live.restart()
            loss.backward()
            del loss
            backward = live.peak - before
            live.restart()
            live.updating = True
            limit = math.inf if config.training.clip_norm is None else config.training.clip_norm
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            update = live.peak - before
        del keep
        kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_leaves(carried)}
        buffers = sum(b.nbytes for b in model.buffers())
        weights = sum(p.nbytes for p in model.parameters())
    return StepBytes(
        weights=weights,
        buffers=buffers,
        gradients=sum(p.nbytes for p in trained),
        optimizer=states,
        average=0 if config.training.ema_decay is None else weights + buffers,
        copies=copies,
        state=sum(kept.values()),
        inputs=sum(t.nbytes for t in inputs),
        activations=activations,
        forward=forward,
        backward=backward,
        update=update,
    )


def step_flops(config: RunConfig, shape: RowShape, rows: int) -> int:
    """Count operations of forward and backward of a micro-batch, recomputation included; a multiply-add is two."""

    def run() -> None:
        loss, _ = step()
        loss.backward()

    bare = bare_model(config)
    with FakeTensorMode(allow_non_fake_inputs=True), _explained(config):
        model = without_values(bare)
        step, _ = training_step(config, shape, model, rows)
        with Rehearsed(model):
            return flops_of(run)


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
    """Replace the model's parameters and buffers by tensors of the caller's `FakeTensorMode`."""
    made: dict[int, Tensor] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device="cpu")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty_like(buffer, device="cpu")
                module._buffers[name] = made[id(buffer)]
    return model


Forward: TypeAlias = Callable[[], tuple[Callable[[], Tensor], Any]]
"""Runs the model under autocast; returns a function that computes the loss outside of autocast, and the state."""


def training_step(
    config: RunConfig, shape: RowShape, model: nn.Module, rows: int
) -> tuple[Callable[[], tuple[Tensor, Any]], list[Tensor]]:
    """Return a function for loss and state of a micro-batch, as the recipe's task computes them, and the inputs."""
    kinds = {"language": _language, "documents": _documents, "translation": _pairs, "classification": _labels}
    forward, inputs = kinds[shape.task](config, shape, model, rows)

    def step() -> tuple[Tensor, Any]:
        with config.training.autocast(torch.device("cpu")):
            loss, carried = forward()
        return loss(), carried

    return step, inputs


def _language(config: RunConfig, shape: RowShape, model: nn.Module, rows: int) -> tuple[Forward, list[Tensor]]:
    settings = config.training
    sizes = (settings.segment_length, settings.bptt, settings.passes)
    scoring = ReconstructionLoss(settings.recall) if settings.recall else None
    loop = SegmentLoop(model, *sizes, scoring=scoring, bptt_window=settings.bptt_window)  # type: ignore[arg-type]
    inputs_BN, targets_BN = _tokens(rows, shape.tokens), _tokens(rows, shape.tokens)
    reset = torch.zeros(rows, 1, dtype=torch.bool)
    state = model.init_state(rows)  # type: ignore[operator]

    def forward() -> tuple[Callable[[], Tensor], Any]:
        loss, carried = loop(inputs_BN, targets_BN, state, reset, None)
        return lambda: loss * 1.0, carried

    return forward, [inputs_BN, targets_BN]


def _documents(config: RunConfig, shape: RowShape, model: nn.Module, rows: int) -> tuple[Forward, list[Tensor]]:
    settings = config.training
    loop = DocumentLoop(model, shape.segment_length, shape.segments, settings.passes, settings.replay)
    inputs_BN, padding_BN = _tokens(rows, shape.tokens), _padding(rows, shape) if shape.padded else None

    def forward() -> tuple[Callable[[], Tensor], Any]:
        logits_BK, auxiliary = loop(inputs_BN, padding_BN)
        return lambda: _cross_entropy(config, logits_BK) + auxiliary, ()

    return forward, [t for t in (inputs_BN, padding_BN) if t is not None]


def _labels(config: RunConfig, shape: RowShape, model: nn.Module, rows: int) -> tuple[Forward, list[Tensor]]:
    inputs = _tokens(rows, shape.tokens) if shape.image is None else torch.empty(rows, *shape.image)
    given = {"padding": _padding(rows, shape)} if shape.padded else {}

    def forward() -> tuple[Callable[[], Tensor], Any]:
        output = model(inputs, **given)
        logits_BK, auxiliary = (output, None) if isinstance(output, Tensor) else (output.outputs, output.auxiliary_loss)

        def loss() -> Tensor:
            value = _cross_entropy(config, logits_BK)
            return (value if auxiliary is None else value + auxiliary) / config.training.accumulate

        return loss, ()

    return forward, [inputs, *given.values()]


def _pairs(config: RunConfig, shape: RowShape, model: nn.Module, rows: int) -> tuple[Forward, list[Tensor]]:
    source, decoder, targets = (_tokens(rows, shape.tokens) for _ in range(3))
    padding, smoothing = _padding(rows, shape), config.training.label_smoothing

    def forward() -> tuple[Callable[[], Tensor], Any]:
        output = model(source, decoder, padding=padding, targets=targets, label_smoothing=smoothing)
        loss = output.outputs.sum() * 1.0
        return lambda: loss if output.auxiliary_loss is None else loss + output.auxiliary_loss, ()

    return forward, [source, decoder, targets, padding]


def _cross_entropy(config: RunConfig, logits_BK: Tensor) -> Tensor:
    mixed = config.training.mixup or config.training.cutmix
    targets = torch.empty_like(logits_BK) if mixed else _tokens(len(logits_BK))
    return F.cross_entropy(logits_BK.float(), targets, label_smoothing=config.training.label_smoothing)


def _tokens(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int64)


def _padding(rows: int, shape: RowShape) -> Tensor:
    return torch.zeros(rows, shape.tokens, dtype=torch.bool)


@contextlib.contextmanager
def _explained(config: RunConfig) -> Iterator[None]:
    """Name the model that cannot be rehearsed in the error."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"model {config.model['name']!r} with memory {memory_name(config)!r} depends on values of tensors "
            f"({error.func}), which a plan does not have; plan it without (model.memory=null), or measure a few steps: "
            "cached train ... training.steps=10"
        ) from None
