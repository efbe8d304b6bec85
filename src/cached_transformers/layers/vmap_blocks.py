"""Run the blocks of several layers in one call, with stacked weights.

    y_l, state_l' = block_l(x_l, state_l)  for the layers l of a group  =  vmap(block)(weights, x, states)

The blocks of a group differ only in their weights (`group_equal`). Memory and attention run under `torch.vmap`, so no
Python branch may depend on the value of a tensor.

Legend: G layers of a group, B rows, N tokens, D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from cached_transformers.interfaces.memory import Tokens
from cached_transformers.linear_maps import call_with
from cached_transformers.state import State, map_state

from .stack import Stack


def group_equal(modules: Sequence[nn.Module]) -> list[list[int]]:
    """Group the indices of modules that differ only in the values of their weights."""
    groups: list[list[int]] = []
    for index, module in enumerate(modules):
        for group in groups:
            if difference(modules[group[0]], module) is None:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def difference(first: nn.Module, second: nn.Module) -> str | None:
    """Name the first attribute in which two modules differ, apart from the values of their weights; None if equal.

    Hooks count as a difference, except hooks on the state dict. A module with `tallies` equals no other.
    """
    modules, others = dict(first.named_modules()), dict(second.named_modules())
    for name in {**modules, **others}:
        mine, other = modules.get(name), others.get(name)
        if type(mine) is not type(other) or hasattr(mine, "tallies"):
            return name
        for key in {**vars(mine), **vars(other)}:
            if "_state_dict" in key:
                continue
            a, b = vars(mine).get(key), vars(other).get(key)
            same_shapes = key in ("_parameters", "_buffers", "_modules")
            if not (_shapes(a) == _shapes(b) if same_shapes else _equal(a, b)):
                return f"{name}.{key}" if name else key
    return None


def _shapes(held: Any) -> dict[str, Any]:
    return {
        name: (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value is None
        for name, value in held.items()
    }


def _equal(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return (first == second) is True  # arrays compare elementwise


class BlockOutput(NamedTuple):
    """Output of a block, state of its layer, and the sum of auxiliary losses or None."""

    x_BND: Tensor
    state: State
    loss: Tensor | None


class VmapBlocks:
    """Equal blocks of a stack with stacked weights, through which gradients reach the blocks' parameters.

    Args:
        stack: holds the blocks. layers: their indices, ascending.
    """

    def __init__(self, stack: Stack, layers: Sequence[int]) -> None:
        self.stack, self.layers = stack, list(layers)
        self.blocks = [stack.blocks[layer] for layer in layers]
        self.weights = _stack_weights(self.blocks) if len(layers) > 1 else {}
        self.buffers = [name for name, _ in self.blocks[0].named_buffers()]

    def run(self, first: int, tokens: Sequence[Tokens], states: Sequence[State]) -> list[BlockOutput]:
        """Run neighbouring layers of the group, each on its own tokens.

        Args:
            first: index of the first of these layers in the group.
            tokens: inputs of each layer, of equal shapes. states: of each layer before them.

        Raises:
            ValueError: the blocks cannot run under vmap, or write a buffer.
        """
        if len(tokens) == 1:
            return [_run_block(self.stack.run, self.blocks[first], tokens[0], states[0])]
        whole = len(tokens) == len(self.layers)  # the backward of a slice would fill zeros for all weights
        weights = self.weights if whole else {name: t[first : first + len(tokens)] for name, t in self.weights.items()}
        versions = self._versions()
        try:
            x_GBND, state, losses = self.stack.run(self._run_group, weights, tokens, states)
        except RuntimeError as error:
            if "vmap" not in str(error) and "atching rule" not in str(error):
                raise
            raise self._refusal(str(error).splitlines()[0]) from error
        for name, before in versions.items():
            if self.weights[name]._version != before:
                raise self._refusal(f"buffer {name} is written")
        return [
            BlockOutput(x_BND, map_state(lambda t, i=i: t[i], state), losses[0][i] if losses else None)
            for i, x_BND in enumerate(x_GBND.unbind(0))
        ]

    def _run_group(
        self, weights: dict[str, Tensor], tokens: Sequence[Tokens], states: Sequence[State]
    ) -> tuple[Tensor, State, list[Tensor]]:
        """Outputs, states and auxiliary losses (an empty list for none) with a leading dimension of G."""
        block, like = self.blocks[0], tokens[0]

        def one(weights: dict[str, Tensor], x: Tensor, positions: Tensor, padding: Tensor | None, state: State) -> Any:
            given = dict(weights)
            call = like._replace(x_BND=x, positions_BNP=positions, padding_BN=padding)
            # A CPU has no kernel with a layer dimension, and fused kernels ignore that a mask needs a gradient.
            # Compilers do not follow the torch function mode and fuse the plain form.
            with sdpa_kernel(SDPBackend.MATH) if torch.compiler.is_compiling() else _FoldedAttention():
                out = _run_block(lambda b, *a, **k: call_with(b, weights, *a, **k), block, call, state)
            for name in self.buffers:
                if weights[name] is not given[name]:
                    raise self._refusal(f"buffer {name} is exchanged")
            return out.x_BND, out.state, [] if out.loss is None else [out.loss]

        x, positions = torch.stack([t.x_BND for t in tokens]), torch.stack([t.positions_BNP for t in tokens])
        padding = None if like.padding_BN is None else torch.stack([t.padding_BN for t in tokens])  # type: ignore[misc]
        state = map_state(lambda *parts: torch.stack(parts), *states)
        dims = (0, 0, 0, None if padding is None else 0, 0)
        mapped = torch.vmap(one, in_dims=dims, randomness="different")
        return mapped(weights, x, positions, padding, state)  # type: ignore[no-any-return]

    def _versions(self) -> dict[str, int]:
        """Version counters of the stacked buffers. Compiled code has none, so in training it refuses saved buffers."""
        if not torch.compiler.is_compiling():
            return {name: self.weights[name]._version for name in self.buffers}
        for module in self.blocks[0].modules() if self.blocks[0].training else ():
            for name in module._buffers:
                if name not in module._non_persistent_buffers_set:
                    raise self._refusal(f"compiled code does not see whether buffer {name} is written")
        return {}

    def _refusal(self, why: str) -> ValueError:
        block: Any = self.blocks[0]
        memory, core = (type(part).__name__ for part in (block.attention.memory, block.attention.core))
        return ValueError(
            f"schedule='diagonal' cannot run layers {self.layers} at once, with memory {memory} and attention {core}: "
            f"{why}; take schedule='segments'"
        )


def _run_block(run: Any, block: nn.Module, tokens: Tokens, state: State) -> BlockOutput:
    options = {"state": state, "padding_BN": tokens.padding_BN, "consecutive": tokens.consecutive}
    x_BND, state, _, loss = run(block, tokens.x_BND, tokens.positions_BNP, **options)
    return BlockOutput(x_BND, state, loss)


def _stack_weights(blocks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of equal modules by name, stacked along a leading dimension of G.

    `torch.func.stack_module_state` would detach them from the parameters of the modules.
    """

    def stack(held: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([tensors[name] for tensors in held]) for name in held[0]}

    with torch.inference_mode(False), torch.no_grad():  # ordinary tensors count their versions
        buffers = stack([dict(block.named_buffers()) for block in blocks])
    return {**stack([dict(block.named_parameters()) for block in blocks]), **buffers}


class _FoldedAttention(TorchFunctionMode):
    """Fold layers into the batch dimension of attention, which has no weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _FoldedAttentionRule.apply(*_attention_arguments(*args, **(kwargs or {})))


def _attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...]:
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


class _FoldedAttentionRule(torch.autograd.Function):
    """`scaled_dot_product_attention` with a rule for vmap made of differentiable operations."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        raise NotImplementedError("no argument of this attention differs between layers")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # without it, torch passes a ctx to forward
        raise NotImplementedError("the vmap rule runs instead of forward")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        query, key, value, mask, dropout, causal, scale, grouped = arguments
        layers = info.batch_size

        def layers_first(t: Tensor, dim: int | None) -> Tensor:
            return t.expand(layers, *t.shape) if dim is None else t.movedim(dim, 0)

        query, key, value = (layers_first(t, dim) for t, dim in zip((query, key, value), in_dims, strict=False))
        rows = max(t.shape[1] for t in (query, key, value))

        def folded(t: Tensor) -> Tensor:
            return t.expand(-1, rows, *t.shape[2:]).flatten(0, 1)

        if mask is not None and (in_dims[3] is not None or (mask.dim() == query.dim() - 1 and mask.shape[0] > 1)):
            mask = layers_first(mask, in_dims[3])
            mask = folded(mask.reshape(layers, *[1] * (query.dim() - mask.dim()), *mask.shape[1:]))
        query, key, value = (folded(t) for t in (query, key, value))
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
        return y.unflatten(0, (layers, rows)), 0
