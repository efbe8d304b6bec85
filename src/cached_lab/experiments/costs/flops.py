"""Cost of a model: floating-point operations, parameters, and bytes that autograd keeps for the backward pass.

Operations are counted on a real forward pass by `torch.utils.flop_counter`, one multiply-add as two. Matrix products
and convolutions count (attention products over the full matrix, even if causal); element-wise operations,
normalisation, softmax and look-ups do not.
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


def _product_flops(total: torch.Size, a: torch.Size, b: torch.Size, *, out_shape: torch.Size, **_: Any) -> int:
    return 2 * out_shape.numel() * a[-1]


IN_PLACE = {torch.ops.aten.addmm_: _product_flops, torch.ops.aten.baddbmm_: _product_flops}
"""In-place products, which the counter lacks."""


def count_flops(model: nn.Module, *inputs: Any, mode: str = "eval", shapes_only: bool = False, **kwargs: Any) -> int:
    """Count the floating-point operations of one forward pass `model(*inputs, **kwargs)`.

    The model keeps its training flags, buffers and plain attributes, and torch its random state.

    Args:
        mode: "eval" counts a forward without gradient in eval mode; "train" counts one in train mode, on a deep copy.
        shapes_only: for "train", use fake tensors without values, which is fast for any batch. The forward must not
            depend on values.

    Raises:
        ValueError: mode is neither "eval" nor "train", or "eval" with shapes only.
    """
    if shapes_only and mode != "train":
        raise ValueError(f'shapes_only=True counts on a copy, so it needs mode="train", not mode={mode!r}')
    return _count(model, mode, inputs, kwargs, shapes_only).get_total_flops()


def flops_of(call: Callable[[], object]) -> int:
    """Count the operations of `call`, backward passes included; compiled code and foreign kernels are not counted."""
    with _countable_kernels(), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        call()
    return counter.get_total_flops()


def flops_by_operator(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, int]:
    """Count the operations of the forward pass by torch operator: "addmm", "convolution", "bmm" (attention), ..."""
    counts = _count(model, "eval", inputs, kwargs).get_flop_counts().get("Global", {})
    return {str(operator).removeprefix("aten."): flops for operator, flops in counts.items()}


def count_parameters(model: nn.Module) -> int:
    """Count parameters (shared ones once); caches and other buffers are not parameters."""
    return sum(p.numel() for p in model.parameters())


def saved_activation_bytes(fn: Callable[[], Any], *excluded: nn.Module | Tensor) -> int:
    """Count the bytes that autograd holds for the backward pass when `fn` returns, each storage once.

    Args:
        fn: runs the forward pass and returns the loss or outputs, which keep its graph alive.
        excluded: modules (their parameters and buffers) and tensors that do not count, such as the inputs.

    Returns:
        bytes of whole storages, also for saved slices. Activations that backward recomputes do not count.
    """
    parts = ([item] if isinstance(item, Tensor) else [*item.parameters(), *item.buffers()] for item in excluded)
    left_out = {_storage_id(t) for tensors in parts for t in tensors}
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
    """Handle that the graph holds instead of a tensor: it dies with the graph, so dead branches are not counted."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an operation that saves its own result would otherwise keep itself alive


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


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
            # Real tensors (weights, buffers) count as fake ones of the same shape.
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
    """Switch off the fused kernels that the counter has no formula for."""
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
    """Restore every module afterwards: attributes (pending cache updates too), containers, buffer values."""
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
