"""What a model costs: floating-point operations, parameters, and the bytes that autograd keeps for the backward pass.

Operations are counted on the real forward pass by `torch.utils.flop_counter`, one multiply-add as two. Matrix products
and convolutions count (attention products included, over the full matrix also when it is causal); element-wise
operations, normalisation, softmax and look-ups do not.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ROOT = "Global"  # the flop counter's own name for the whole


def _product_flops(total: torch.Size, a: torch.Size, b: torch.Size, *, out_shape: torch.Size, **_: Any) -> int:
    return 2 * out_shape.numel() * a[-1]


IN_PLACE = {torch.ops.aten.addmm_: _product_flops, torch.ops.aten.baddbmm_: _product_flops}
"""Products into a sum, which the counter knows only in the forms that are not in place."""


def count_flops(model: nn.Module, *inputs: Any, mode: str = "eval", shapes_only: bool = False, **kwargs: Any) -> int:
    """Floating-point operations of one forward pass `model(*inputs, **kwargs)` at the batch given.

    The model is left as it was: training flags, buffers, plain attributes of its modules, and torch's random state.

    Args:
        mode: "eval" counts a forward without gradient in eval mode; "train" counts one in train mode, on a deep copy.
        shapes_only: "train" only; run on tensors that have shapes and no values, so that a batch of any size is counted
            in moments. The forward must not look at values.

    Raises:
        ValueError: mode is neither "eval" nor "train", or "eval" by shapes only.
    """
    if shapes_only and mode != "train":
        raise ValueError(f'shapes_only=True counts on a copy, so it needs mode="train", not mode={mode!r}')
    return _count(model, mode, inputs, kwargs, shapes_only).get_total_flops()


def flops_of(call: Callable[[], object]) -> int:
    """Operations of whatever `call` runs, backward passes too; what is compiled, or no operator of torch, is not seen.

    The call has the effects that it has.
    """
    with _countable_kernels(), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        call()
    return counter.get_total_flops()


def flops_by_operator(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, int]:
    """Operations of the forward pass by operator of torch: "addmm", "convolution", "bmm" (attention's products), ..."""
    counts = _count(model, "eval", inputs, kwargs).get_flop_counts().get(ROOT, {})
    return {str(operator).removeprefix("aten."): flops for operator, flops in counts.items()}


def count_parameters(model: nn.Module) -> int:
    """Number of parameters (shared ones once); caches and other buffers are not parameters."""
    return sum(p.numel() for p in model.parameters())


def saved_activation_bytes(fn: Callable[[], Any], *excluded: nn.Module | Tensor) -> int:
    """Bytes that autograd still holds for the backward pass when `fn` returns, each storage counted once.

    Args:
        fn: runs the forward pass and returns what keeps its graph alive (loss or outputs).
        excluded: modules (their parameters and buffers) and tensors that are there anyway, such as the inputs.

    Returns:
        bytes of whole storages: a saved slice keeps the storage it was cut from. With activation checkpointing these
        are what stays until backward, not what backward recomputes.
    """
    left_out = {_storage_id(t) for item in excluded for t in _tensors(item)}
    alive: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        alive.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = fn()
    storages = {_storage_id(saved.tensor): saved.tensor.untyped_storage().nbytes() for saved in alive}
    del result  # held until here: with the graph gone there would be nothing to count
    return sum(size for key, size in storages.items() if key not in left_out)


class _Saved:
    """Handle that the graph holds in place of a tensor: it dies with the graph, so dead branches are not counted."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an operation that saves its own result would otherwise keep itself alive


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(item: nn.Module | Tensor) -> list[Tensor]:
    return [item] if isinstance(item, Tensor) else [*item.parameters(), *item.buffers()]


def _count(
    model: nn.Module, mode: str, inputs: tuple[Any, ...], kwargs: dict[str, Any], shapes_only: bool = False
) -> FlopCounterMode:
    if mode not in ("eval", "train"):
        raise ValueError(f'mode={mode!r} must be "eval" or "train"')
    model = getattr(model, "_orig_mod", model)  # torch.compile: compiled kernels would hide their products
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with torch.random.fork_rng(devices=devices), _countable_kernels():
        if mode == "train":
            replica = copy.deepcopy(model).train()
            # Whatever is no fake tensor (weights, buffers) counts as one of the same shape.
            fake = FakeTensorMode(allow_non_fake_inputs=True) if shapes_only else contextlib.nullcontext()
            with torch.enable_grad(), fake, counter:
                replica(*inputs, **kwargs)
        else:
            with _restored(model), torch.no_grad():
                model.eval()
                with counter:
                    model(*inputs, **kwargs)
    return counter


@contextlib.contextmanager
def _countable_kernels() -> Iterator[None]:
    """Switch off the fused kernels that the counter has no formula for: they would count as nothing."""
    fast_path, onednn = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)  # nn.TransformerEncoderLayer in eval mode
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # nn.LSTM and nn.GRU on the CPU
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mkldnn.enabled = onednn
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put every module back as it was: attributes (a pending cache update among them), containers, buffer values."""
    modules = [(module, dict(module.__dict__)) for module in model.modules()]
    held = [value for _, attributes in modules for value in attributes.values()]
    containers = [(value, value.copy()) for value in held if isinstance(value, dict | list)]
    tensors = [*model.buffers(), *(value for value in held if isinstance(value, Tensor))]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        for module, attributes in modules:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, content in containers:
            container.clear()
            container.update(content) if isinstance(container, dict) else container.extend(content)
        with torch.no_grad():
            for tensor, value in values:
                tensor.data.copy_(value)
