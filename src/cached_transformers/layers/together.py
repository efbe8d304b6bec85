"""Blocks of several layers run at once: their weights stand side by side, so that linear maps become grouped products.

    y_l, state_l' = block_l(x_l, state_l)  for the layers l of a group  =  vmap(block)(weights, x, states)

Only blocks that differ in nothing but their weights can be run so (`alike.py`). What memory and attention do in between
goes along under `torch.vmap`, whatever it is, as long as no Python decides by the value of a tensor.

Legend: G layers of a group, B rows, N tokens, D model width, P position channels; query, key, value, mask: of
`scaled_dot_product_attention`, with G in front.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from cached_transformers.interfaces.memory import Tokens
from cached_transformers.state import State, map_state

from .stack import Stack


class Passed(NamedTuple):
    """What a block makes of the tokens that it reads: output, state of the layer, sum of auxiliary losses or None."""

    x_BND: Tensor
    state: State
    loss: Tensor | None


class AlikeBlocks:
    """Layers whose blocks are alike, with their weights stacked.

    The weights are those that the blocks have when this is made. Gradients reach them through the stack.

    Args:
        stack: whose blocks they are. layers: their numbers, ascending.
    """

    def __init__(self, stack: Stack, layers: Sequence[int]) -> None:
        self.stack, self.layers = stack, list(layers)
        self.blocks = [stack.blocks[layer] for layer in layers]
        self.weights = _stacked(self.blocks) if len(layers) > 1 else {}
        self.buffers = [name for name, _ in self.blocks[0].named_buffers()]

    def run(self, first: int, tokens: Sequence[Tokens], states: Sequence[State]) -> list[Passed]:
        """Run neighbouring layers of the group, each on tokens of its own; a single one is run as it is.

        Args:
            first: place of the first of them in the group.
            tokens: what each layer reads, all of one shape. states: of each layer, before them.

        Raises:
            ValueError: something in the blocks cannot be run for several layers at once, or writes a buffer.
        """
        if len(tokens) == 1:
            return [_passed(self.stack.run(self.blocks[first], *_call(tokens[0]), **_options(tokens[0], states[0])))]
        whole = len(tokens) == len(self.layers)  # a slice costs the backward as many zeros as there are weights
        weights = self.weights if whole else {name: t[first : first + len(tokens)] for name, t in self.weights.items()}
        versions = self._versions()
        try:
            x_GBND, state, losses = self.stack.run(self._at_once, weights, tokens, states)
        except RuntimeError as error:
            if "vmap" not in str(error) and "atching rule" not in str(error):
                raise
            raise self._refused(str(error).splitlines()[0]) from error
        for name, before in versions.items():
            if self.weights[name]._version != before:
                raise self._refused(f"buffer {name} is written")
        return [
            Passed(x_BND, map_state(lambda t, i=i: t[i], state), losses[0][i] if losses else None)
            for i, x_BND in enumerate(x_GBND.unbind(0))
        ]

    def _at_once(
        self, weights: dict[str, Tensor], tokens: Sequence[Tokens], states: Sequence[State]
    ) -> tuple[Tensor, State, list[Tensor]]:
        """As `Passed`, with a dimension of G in front; auxiliary losses are in a list, which is empty without any."""
        block, like = self.blocks[0], tokens[0]

        def one(weights: dict[str, Tensor], x: Tensor, places: Tensor, padding: Tensor | None, state: State) -> Any:
            given, call = dict(weights), like._replace(x_BND=x, positions_BNP=places, padding_BN=padding)
            with _attention_of_a_group():
                passed = _passed(functional_call(block, weights, _call(call), _options(call, state)))
            for name in self.buffers:
                if weights[name] is not given[name]:
                    raise self._refused(f"buffer {name} is exchanged")
            return passed.x_BND, passed.state, [] if passed.loss is None else [passed.loss]

        x, places = torch.stack([t.x_BND for t in tokens]), torch.stack([t.positions_BNP for t in tokens])
        padding = None if like.padding_BN is None else torch.stack([t.padding_BN for t in tokens])  # type: ignore[misc]
        state = map_state(lambda *parts: torch.stack(parts), *states)
        dims = (0, 0, 0, None if padding is None else 0, 0)
        result: tuple[Tensor, State, list[Tensor]] = torch.vmap(one, in_dims=dims, randomness="different")(
            weights, x, places, padding, state
        )
        return result

    def _versions(self) -> dict[str, int]:
        """How often each of the stacked buffers was written to. Compiled code does not know that, and may have none in
        training but constants, which are not saved."""
        if not torch.compiler.is_compiling():
            return {name: self.weights[name]._version for name in self.buffers}
        for module in self.blocks[0].modules() if self.blocks[0].training else ():
            for name in module._buffers:
                if name not in module._non_persistent_buffers_set:
                    raise self._refused(f"compiled code does not see whether buffer {name} is written")
        return {}

    def _refused(self, why: str) -> ValueError:
        block: Any = self.blocks[0]
        memory, core = (type(part).__name__ for part in (block.attention.memory, block.attention.core))
        return ValueError(
            f"schedule='diagonal' cannot run layers {self.layers} at once, with memory {memory} and attention {core}: "
            f"{why}; take schedule='segments'"
        )


def _call(tokens: Tokens) -> tuple[Tensor, Tensor]:
    return tokens.x_BND, tokens.positions_BNP


def _options(tokens: Tokens, state: State) -> dict[str, Any]:
    return {"state": state, "padding_BN": tokens.padding_BN, "consecutive": tokens.consecutive}


def _passed(result: tuple[Tensor, State, Any, Tensor | None]) -> Passed:
    x_BND, state, _, loss = result
    return Passed(x_BND, state, loss)


def _stacked(blocks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers of alike modules by name, with a first dimension of G.

    `torch.func.stack_module_state` would cut them from the parameters of the modules.
    """

    def stack(held: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([tensors[name] for tensors in held]) for name in held[0]}

    with torch.inference_mode(False), torch.no_grad():  # ordinary tensors, which tell when they are written
        buffers = stack([dict(block.named_buffers()) for block in blocks])
    return {**stack([dict(block.named_parameters()) for block in blocks]), **buffers}


def _attention_of_a_group() -> contextlib.AbstractContextManager[Any]:
    """How `scaled_dot_product_attention` goes under `vmap`, for whose layers a CPU has no kernel, and whose fused
    kernels do not see that a mask needs a gradient."""
    # Compilers do not follow the mode, and make kernels of the plain form themselves.
    return sdpa_kernel(SDPBackend.MATH) if torch.compiler.is_compiling() else _FoldedAttention()


class _FoldedAttention(TorchFunctionMode):
    """Attention has no weights, so that layers may as well be more rows of one."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _LayersAsRows.apply(*_arguments(*args, **(kwargs or {})))


def _arguments(
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


class _LayersAsRows(torch.autograd.Function):
    """`scaled_dot_product_attention`, whose rule for `vmap` is made of operations with gradients of their own."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        raise NotImplementedError("attention in which nothing differs from layer to layer is no case for vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # without it, torch takes forward for one with a ctx
        raise NotImplementedError("vmap has a rule of its own below, so that forward leaves nothing for a backward")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensor, int]:
        query, key, value, mask, dropout, causal, scale, grouped = arguments
        layers = info.batch_size

        def in_front(t: Tensor, dim: int | None) -> Tensor:
            return t.expand(layers, *t.shape) if dim is None else t.movedim(dim, 0)

        query, key, value = (in_front(t, dim) for t, dim in zip((query, key, value), in_dims, strict=False))
        rows = max(t.shape[1] for t in (query, key, value))

        def folded(t: Tensor) -> Tensor:
            return t.expand(-1, rows, *t.shape[2:]).flatten(0, 1)

        if mask is not None and (in_dims[3] is not None or (mask.dim() == query.dim() - 1 and mask.shape[0] > 1)):
            mask = in_front(mask, in_dims[3])
            mask = folded(mask.reshape(layers, *[1] * (query.dim() - mask.dim()), *mask.shape[1:]))
        query, key, value = (folded(t) for t in (query, key, value))
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
        return y.unflatten(0, (layers, rows)), 0
