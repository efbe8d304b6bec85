"""The stack of blocks of every model of this package.

It passes each layer memory its part of the state, lets the model memory run a segment through the blocks, and seals the
new state.

Legend: B rows, N tokens, D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.capabilities import CORE_WORDS, refuse_misfit
from cached_transformers.interfaces.incremental import asked
from cached_transformers.interfaces.memory import Entry, LayerMemory, ModelMemory, Tokens, Trace
from cached_transformers.memories.parts.composite import recipe_of
from cached_transformers.memories.parts.late_gradients import late_gradients
from cached_transformers.memories.parts.recurrent import shown
from cached_transformers.state import State, kind_of, seal, used_again

from .block import Block
from .bottleneck import BottleneckBlock
from .context_attention import ContextAttention
from .initial_state import initial_state_of
from .reversible import reversible
from .short_convolution import begun


class StackState(NamedTuple):
    """State of a model: tokens read by each row, states of the model and layer memories, and their `state.kind_of`."""

    clock_B: Tensor
    model: State
    layers: State
    kind_B0F: State = ()


class ModelOutput(NamedTuple):
    """Output of every model: outputs, state after the segment, and the sum of auxiliary losses (a scalar)."""

    outputs: Tensor
    state: Any
    auxiliary_loss: Tensor


class StackBlockRunner:
    """Run one segment through the blocks of a stack; see `interfaces.memory.BlockRunner`.

    Attributes:
        layers: projections of every layer.
        states: of the layer memories, after the last call that writes.
        losses: auxiliary losses of the calls that write. calls: their number.
    """

    def __init__(self, stack: Stack, states: Sequence[State], size: tuple[int, int] | None) -> None:
        self.stack, self.states, self.size = stack, list(states), size
        self.layers: list[Any] = [block.attention for block in stack.blocks]
        self.losses: list[Tensor] = []
        self.calls = 0

    def __call__(self, entry: Entry, *, write: bool = True) -> tuple[Tensor, list[Trace]]:
        """Output of the last block and traces of all blocks."""
        tokens, blocks = entry.tokens, self.stack.blocks
        options = {
            "padding_BN": tokens.padding_BN,
            "visible_NN": entry.visible_NN,
            "consecutive": tokens.consecutive,
            "size": self.size,
        }
        if self.stack.reversible:
            branches = [
                branch
                for block, state in zip(blocks, self.states, strict=True)
                for branch in block.sublayers(tokens.positions_BNP, state=state, **options)  # type: ignore[operator]
            ]
            x_BND, loss = reversible(branches, tokens.x_BND)
            return self._keep(x_BND, self.states, [], [loss], write)
        options.update(slots=entry.slots, segment=entry.segment)
        x_BND, states, traces, losses = tokens.x_BND, [], [], []
        contexts = entry.contexts if entry.contexts is not None else [None] * len(blocks)
        for block, state, context in zip(blocks, self.states, contexts, strict=True):
            more = {"state": state, "context": context, **options}
            with nullcontext() if write else used_again():
                x_BND, state, trace, loss = self.stack.run(block, x_BND, tokens.positions_BNP, **more)
            states.append(state)
            traces.append(trace)
            if loss is not None:
                losses.append(loss)
        return self._keep(x_BND, states, traces, losses, write)

    def _keep(
        self, x_BND: Tensor, states: list[State], traces: list[Trace], losses: list[Tensor], write: bool
    ) -> tuple[Tensor, list[Trace]]:
        if write:
            self.states, self.calls = states, self.calls + 1
            self.losses += losses
        return x_BND, traces

    def auxiliary_loss(self, last: Tensor | None, zero: Tensor) -> Tensor:
        """Sum of the layers' losses, as a mean over the calls, and the loss `last` of the model memory."""
        losses = [loss / self.calls for loss in self.losses] if self.calls > 1 else self.losses
        return torch.stack([zero, *losses, *([] if last is None else [last])]).sum()


class Stack(nn.Module):
    """Blocks, an optional model memory, and a final norm.

    Args:
        make_block: makes the `Block` of a layer from its index. depth: number of layers.
        model_memory: a memory that spans the layers.
        width: D, for a final LayerNorm; None for none. norm_eps: added to its variance. norm: another final norm.
        reversible: recompute activations in the backward (`layers.reversible`), for memories without state.

    Raises:
        ValueError: no layer; blocks without an ability that the model memory needs, or blocks that cannot be reversed.
    """

    def __init__(
        self,
        make_block: Callable[[int], Block],
        depth: int,
        *,
        model_memory: ModelMemory | None = None,
        width: int | None = None,
        norm_eps: float = 1e-5,
        norm: nn.Module | None = None,
        reversible: bool = False,
    ) -> None:
        super().__init__()
        at_least_one(" layer", depth=depth)
        self.blocks = nn.ModuleList(make_block(i) for i in range(depth))
        self.model_memory = model_memory if model_memory is not None else ModelMemory()
        self.norm = norm if norm is not None else nn.LayerNorm(width, norm_eps) if width is not None else nn.Identity()
        self.activation_checkpointing, self.reversible = False, reversible
        _check_blocks(self.model_memory, list(self.blocks))
        cores: list[Any] = [b.attention.core for b in self.blocks if b.attention.core.carry]  # type: ignore[union-attr]
        self.recipe = recipe_of([self.model_memory, *self.layer_memories(), *cores])
        self.kind = kind_of(self.recipe)
        if reversible:
            _check_reversible(self.model_memory, list(self.blocks))

    def layer_memories(self) -> list[LayerMemory]:
        """The memory of each layer, from the first to the last."""
        return [block.attention.memory for block in self.blocks]  # type: ignore[union-attr, misc]

    def init_state(self, batch_size: int, like: Tensor | None = None) -> StackState:
        """Initial state of `batch_size` rows, with the device and dtype of `like` (or the weights)."""
        tuned = initial_state_of(self)
        if tuned is not None:
            return tuned(batch_size)
        like = like if like is not None else self.like()
        clock = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        # A wrapper around a block may expose only its attention.
        makers = (getattr(block, "init_state", None) or block.attention.init_state for block in self.blocks)  # type: ignore[union-attr]
        layers = tuple(make(batch_size, like) for make in makers)  # type: ignore[operator]
        kind_B0F = clock.new_empty(batch_size, 0, self.kind)
        return seal(StackState(clock, self.model_memory.init_state(batch_size, like), layers, kind_B0F))

    def like(self) -> Tensor:
        """A tensor with the device and dtype of the weights: the first one, or its local shard."""
        first = next(self.parameters())
        return first.to_local() if hasattr(first, "to_local") else first  # type: ignore[no-any-return]

    @staticmethod
    def clock_positions(state: StackState, length: int, padding_BN: Tensor | None = None) -> Tensor:
        """(B, length, 1): positions of the next tokens from each row's clock on, without padding."""
        if padding_BN is None:
            steps = torch.arange(length, device=state.clock_B.device)
        else:
            steps = ((~padding_BN).cumsum(1) - 1).clamp(min=0)
        return (state.clock_B[:, None] + steps)[..., None]

    @staticmethod
    def clock_after(state: StackState, tokens: Tokens) -> Tensor:
        """(B,): each row's clock after the tokens."""
        return state.clock_B + (tokens.x_BND.shape[1] if tokens.padding_BN is None else (~tokens.padding_BN).sum(1))

    def placed(
        self,
        state: StackState,
        x_BND: Tensor,
        *,
        positions_BNP: Tensor | None = None,
        padding_BN: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> Tokens:
        """Embedded tokens with their positions, and zeros at padding, whatever it holds; arguments as in `forward`."""
        consecutive = positions_BNP is None and padding_BN is None
        x_BND = shown(x_BND, padding_BN)
        if positions_BNP is None:
            positions_BNP = self.clock_positions(state, x_BND.shape[1], padding_BN)
        return Tokens(x_BND, positions_BNP, padding_BN, inputs, consecutive)

    def forward(
        self,
        x_BND: Tensor,
        state: StackState | None = None,
        *,
        positions_BNP: Tensor | None = None,
        padding_BN: Tensor | None = None,
        inputs: Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> ModelOutput:
        """Run one segment.

        Args:
            x_BND: embedded tokens.
            state: from `init_state` or the last segment; None for the initial state.
            positions_BNP: positions of the tokens; by default they continue each row's clock.
            padding_BN: bool, True = padding.
            inputs: the model's raw inputs, for model memories that read them.
            size: (height, width) of the token map.
        """
        if state is None:
            state = self.init_state(x_BND.shape[0], x_BND)
        tokens = self.placed(state, x_BND, positions_BNP=positions_BNP, padding_BN=padding_BN, inputs=inputs)
        runner = StackBlockRunner(self, begun(state.layers, state.clock_B), size)
        steps, model_state, loss = self.model_memory.run(state.model, tokens, runner)
        after = state._replace(clock_B=self.clock_after(state, tokens), model=model_state, layers=tuple(runner.states))
        outputs = [self.norm(x) for x in steps]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return ModelOutput(out, seal(after), runner.auxiliary_loss(loss, x_BND.new_zeros(())))

    def ask(self, x_BND: Tensor, state: StackState, *, padding_BN: Tensor | None, inputs: Tensor) -> StackState:
        """Return the state with the choice of a prompt; see `interfaces.incremental`."""
        tokens = self.placed(state, x_BND, padding_BN=padding_BN, inputs=inputs)
        runner = StackBlockRunner(self, begun(state.layers, state.clock_B), None)
        return state._replace(model=asked(self.model_memory, state.model, tokens, runner))

    def run(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block, or several at once, with activation checkpointing if it is enabled."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            with late_gradients(False):  # the recomputation runs inside the backward
                return checkpoint(block, *args, use_reentrant=False, **kwargs)
        return block(*args, **kwargs)


def _check_reversible(memory: ModelMemory, blocks: list[Any]) -> None:
    if type(memory) is not ModelMemory:
        reason: str | None = f"memory {type(memory).__name__} spans the layers"
    else:
        reason = next(filter(None, (block.cannot_reverse() for block in blocks)), None)
    if reason is not None:
        raise ValueError(
            f"reversible=True: {reason}; leave it out, or use set_activation_checkpointing() to save memory"
        )


def _check_blocks(memory: ModelMemory, blocks: list[Any]) -> None:
    name = f"memory {type(memory).__name__}"
    for index, block in enumerate(blocks):
        core = block.attention.core
        needs = {word: name for word in memory.needs if word in CORE_WORDS}
        refuse_misfit(needs, core.can, core.title, "`cached list attentions` shows which can")
        if "own_weights" in memory.needs and block.memory_weights is None:
            raise ValueError(f"{name} has its own weights, which no block holds; give every Block memory_weights")
        if "memory_first" in memory.needs and not isinstance(block, BottleneckBlock):
            raise ValueError(f"{name} updates its tokens first; make layer {index} a BottleneckBlock")
        if "context_alone" in memory.needs and not isinstance(block.attention, ContextAttention):
            raise ValueError(f"{name} lets tokens attend only the memory; make layer {index} a ContextAttention")
    if memory.needs & {"slots", "slots_in_front"} and all(block.slot_attention is None for block in blocks):
        raise ValueError(f"{name} offers slots, but no block reads them; give every Block a slot_attention")
