"""The transformer block and the stack of blocks that every model of this package is made of.

The stack threads the state: it hands each layer memory its own part, lets the model memory open and close the segment,
and seals what leaves.

Legend: B rows, N tokens, M slots, D model width, P position channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cached_transformers.seam.memory import Entry, LayerMemory, ModelMemory, Trace
from cached_transformers.state import State, seal

from .attention import OwnProjections, SelfAttention
from .feed_forward import DropPath, run_feed_forward
from .reversible import Sublayer, reversible


class StackState(NamedTuple):
    """State of a whole model: tokens seen by each row, the model memory's state, each layer memory's state."""

    clock_B: Tensor
    model: State
    layers: State


class ModelOutput(NamedTuple):
    """What every model returns: outputs, the state after the segment, and the sum of auxiliary losses (a scalar)."""

    outputs: Tensor
    state: Any
    auxiliary_loss: Tensor


class SlotAttention(nn.Module):
    """Residual cross-attention of the tokens over the slots of a model memory ("sublayer" insertion)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BND: Tensor, slots_BMD: Tensor, valid_BM: Tensor | None = None) -> Tensor:
        """What the tokens read from the valid slots (all when None); zeros for a row that has none."""
        mask = None
        if valid_BM is not None:
            slots_BMD = torch.where(valid_BM[..., None], slots_BMD, 0)  # a NaN would survive a mask on the logits
            mask = valid_BM[:, None, None]
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.query(self.norm(x_BND)), *self.key_value(slots_BMD).chunk(2, -1))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y_BND = self.output(out.transpose(1, 2).flatten(2))
        return y_BND if valid_BM is None else torch.where(valid_BM.any(1)[:, None, None], y_BND, 0)


class MemoryWeights(nn.Module):
    """What the tokens of a model memory have in place of a block's weights: a copy of them, trained on its own."""

    def __init__(self, attention: SelfAttention, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = OwnProjections(attention), copy.deepcopy(feed_forward)

    def copy_from(self, block: Block) -> None:
        """Take over the block's weights, as they are to be after the block was trained without a memory."""
        for mine, theirs in ((self.attention, block.attention), (self.feed_forward, block.feed_forward)):
            mine.load_state_dict({k: v for k, v in theirs.state_dict().items() if k in mine.state_dict()})


class Block(nn.Module):
    """Transformer block: attention with a memory, then feed-forward, each with a residual connection.

    Args:
        attention: the attention sublayer; its norm is that of a pre-norm block. feed_forward: likewise;
            what `run_feed_forward` can call.
        slot_attention: cross-attention over a model memory's slots, where the model memory offers any.
        memory_weights: for the tokens of a model memory that has weights of its own.
        drop_path: rate of stochastic depth.
        norms: norms after the two residual sums, in that order (a post-norm block, arXiv:1706.03762).

    Raises:
        ValueError: `memory_weights` for an attention with a reduction.
    """

    def __init__(
        self,
        attention: SelfAttention,
        feed_forward: nn.Module,
        *,
        slot_attention: nn.Module | None = None,
        memory_weights: MemoryWeights | None = None,
        drop_path: float = 0.0,
        norms: tuple[nn.Module, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.slot_attention, self.memory_weights = slot_attention, memory_weights
        if memory_weights is not None and attention.reduction is not None:
            raise ValueError(
                "a layer with a reduction cannot have memory_weights: memory tokens have no place in its map"
            )
        self.drop_path = DropPath(drop_path)
        self.attention_norm, self.feed_forward_norm = norms if norms is not None else (nn.Identity(), nn.Identity())

    def forward(
        self,
        x_BND: Tensor,
        positions_BNP: Tensor | None = None,
        *,
        state: State = (),
        slots_BMD: Tensor | None = None,
        slots_valid_BM: Tensor | None = None,
        slots_places_BM: Tensor | None = None,
        own: tuple[int, int] | None = None,
        **attention: Any,
    ) -> tuple[Tensor, State, Trace, Tensor | None]:
        """Output tokens, the layer memory's new state, the trace, and the sum of auxiliary losses or None.

        Args:
            own: (start, length) of the segment's own tokens, which a memory may store; None for all.
            attention: what `SelfAttention.forward` takes beside tokens, positions and state.
        """
        if self.memory_weights is not None and own is not None:
            attention |= {"own": own, "weights": self.memory_weights.attention}
        attended = self.attention(x_BND, positions_BNP, state=state, **attention)
        y_BND = self.attention_norm(x_BND + self.drop_path(attended.y_BND))
        if self.slot_attention is not None and slots_BMD is not None:
            places = () if slots_places_BM is None else (slots_places_BM,)
            y_BND = y_BND + self.drop_path(self.slot_attention(y_BND, slots_BMD, slots_valid_BM, *places))
        fed_BND, fed_losses = self._feed_forward(y_BND, attention.get("padding_BN"), own)
        y_BND = self.feed_forward_norm(y_BND + self.drop_path(fed_BND))
        read = (attended.query, attended.reading, attended.usage_BL)
        trace = Trace(x_BND, attended.k_BHNE, attended.v_BHNE, y_BND, *read)
        if own is not None:
            trace = trace.narrow(*own)
        state, loss = self.attention.memory.write(state, trace)
        losses = [part for part in (attended.auxiliary_loss, *fed_losses, loss) if part is not None]
        return y_BND, state, trace, sum(losses) if losses else None  # type: ignore[return-value]

    def _feed_forward(
        self, x_BND: Tensor, padding_BN: Tensor | None, own: tuple[int, int] | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The feed-forward's result, and the auxiliary losses of all that it consists of."""
        if self.memory_weights is None or own is None:
            y_BND, loss = run_feed_forward(self.feed_forward, x_BND, padding_BN)
            return y_BND, [loss]
        start, length = own
        sizes = [start, length, x_BND.shape[1] - start - length]
        memory = self.memory_weights.feed_forward
        paddings = [None] * 3 if padding_BN is None else padding_BN.split(sizes, 1)
        parts = zip((memory, self.feed_forward, memory), x_BND.split(sizes, 1), paddings, strict=True)
        y, losses = zip(*(run_feed_forward(*part) for part in parts), strict=True)
        return torch.cat(y, 1), list(losses)

    def sublayers(self, positions_BNP: Tensor | None = None, **attention: Any) -> tuple[Sublayer, Sublayer]:
        """Its two residual branches, for a reversible stack; the memory is one that writes nothing."""

        def attend(x_BND: Tensor) -> tuple[Tensor, Tensor]:
            attended = self.attention(x_BND, positions_BNP, **attention)
            loss = attended.auxiliary_loss
            return self.drop_path(attended.y_BND), x_BND.new_zeros(()) if loss is None else loss

        def feed_forward(x_BND: Tensor) -> tuple[Tensor, Tensor]:
            y_BND, loss = run_feed_forward(self.feed_forward, x_BND, attention.get("padding_BN"))
            return self.drop_path(y_BND), x_BND.new_zeros(()) if loss is None else loss

        own = (list(module.parameters()) for module in (self.attention, self.feed_forward))
        return Sublayer(attend, next(own)), Sublayer(feed_forward, next(own))

    def cannot_reverse(self) -> str | None:
        """Why the block has no place in a reversible stack, or None."""
        memory = type(self.attention.memory)
        if memory.write is not LayerMemory.write or memory.init_state is not LayerMemory.init_state:
            return (
                f"memory {memory.__name__} carries a state from segment to segment, which would have to be undone, too"
            )
        if not isinstance(self.attention_norm, nn.Identity):
            return "norm='post' changes what is added to; take norm='pre'"
        return None


class Stack(nn.Module):
    """Blocks, an optional model memory round them, and a final norm.

    Args:
        blocks: one factory call a layer; `make_block(index)` returns a `Block`.
        depth: number of layers.
        model_memory: a memory that spans the layers.
        width: D, for a LayerNorm behind the last block; None for none, or for `norm`.
        norm_eps: what the final norm adds to the variance.
        norm: another final norm than that.
        reversible: two streams that add to each other by turns (`layers.reversible`): in training activations are
            computed again from the result, whatever the depth. For memories that carry no state: none, or a shared
            cache.

    Raises:
        ValueError: there is no layer; the blocks cannot take what the model memory offers, or cannot be reversed.
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
        if depth < 1:
            raise ValueError(f"depth={depth} must be at least 1 layer")
        self.blocks = nn.ModuleList(make_block(i) for i in range(depth))
        self.model_memory = model_memory if model_memory is not None else ModelMemory()
        self.norm = norm if norm is not None else nn.LayerNorm(width, norm_eps) if width is not None else nn.Identity()
        self.activation_checkpointing = False
        self.reversible = reversible
        _check_blocks(self.model_memory, list(self.blocks))
        if reversible:
            _check_reversible(self.model_memory, list(self.blocks))

    def layer_memories(self) -> list[LayerMemory]:
        """The memory of each layer, from the first to the last."""
        return [block.attention.memory for block in self.blocks]  # type: ignore[union-attr, misc]

    def init_state(self, batch_size: int, like: Tensor | None = None) -> StackState:
        """State of `batch_size` rows that have seen nothing; device and dtype are those of `like` (or the weights)."""
        like = like if like is not None else next(self.parameters())
        clock = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        layers = tuple(memory.init_state(batch_size, like) for memory in self.layer_memories())
        return seal(StackState(clock, self.model_memory.init_state(batch_size, like), layers))

    @staticmethod
    def clock_positions(state: StackState, length: int, padding_BN: Tensor | None = None) -> Tensor:
        """(B, length, 1): positions of the next tokens, from where each row's clock stands; padding is not counted."""
        if padding_BN is None:
            steps = torch.arange(length, device=state.clock_B.device)
        else:
            steps = ((~padding_BN).cumsum(1) - 1).clamp(min=0)
        return (state.clock_B[:, None] + steps)[..., None]

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
            state: what `init_state` or the last segment gave; None for rows that have seen nothing.
            positions_BNP: positions of the tokens; by default they continue where each row's clock stands.
            padding_BN: bool, True = padding.
            inputs: the model's raw inputs, for model memories that look at them.
            size: (height, width) of the token map.
        """
        if state is None:
            state = self.init_state(x_BND.shape[0], x_BND)
        memory = self.model_memory
        state = state._replace(model=memory.open(state.model, [block.attention for block in self.blocks]))  # type: ignore[misc]
        out = self._steps(x_BND, state, positions_BNP, padding_BN, inputs, size)
        return out._replace(state=seal(out.state._replace(model=memory.close(out.state.model))))

    def _steps(
        self,
        x_BND: Tensor,
        state: StackState,
        positions_BNP: Tensor | None,
        padding_BN: Tensor | None,
        inputs: Tensor | None,
        size: tuple[int, int] | None,
    ) -> ModelOutput:
        """A segment, in the steps in which the model memory reads."""
        step = self.model_memory.step
        if step is None or x_BND.shape[1] <= step:
            return self._segment(x_BND, state, positions_BNP, padding_BN, inputs, size)
        parts = [None if t is None else t.split(step, 1) for t in (x_BND, positions_BNP, padding_BN, inputs)]
        outs = []
        for index in range(len(parts[0])):  # type: ignore[arg-type]
            x, positions, padding, own_inputs = (None if part is None else part[index] for part in parts)
            outs.append(self._segment(x, state, positions, padding, own_inputs, size))  # type: ignore[arg-type]
            state = outs[-1].state
        # Mean, as over the segments of a batch: an auxiliary loss does not depend on how a text is cut.
        loss = torch.stack([out.auxiliary_loss for out in outs]).mean()
        return ModelOutput(torch.cat([out.outputs for out in outs], 1), state, loss)

    def _segment(
        self,
        x_BND: Tensor,
        state: StackState,
        positions_BNP: Tensor | None,
        padding_BN: Tensor | None,
        inputs: Tensor | None,
        size: tuple[int, int] | None,
    ) -> ModelOutput:
        """Tokens that the model memory reads at once."""
        n = x_BND.shape[1]
        clocked = self.clock_positions(state, n, padding_BN) if positions_BNP is None else positions_BNP
        entry = self.model_memory.enter(state.model, x_BND, clocked, padding_BN, inputs)
        run = positions_BNP is None and padding_BN is None
        while entry.then is not None:
            entry = entry.then(self._through(entry, state, run and entry.positions_BNP is clocked, size)[0])
        x, layers, traces, losses = self._through(entry, state, run and entry.positions_BNP is clocked, size)
        before = state.model if entry.state is None else entry.state
        x, model_state, loss = self.model_memory.exit(before, x, traces)
        losses = [x_BND.new_zeros(()), *losses, *([] if loss is None else [loss])]
        seen = n if padding_BN is None else (~padding_BN).sum(1)
        after = StackState(state.clock_B + seen, model_state, tuple(layers))
        return ModelOutput(self.norm(x), after, torch.stack(losses).sum())

    def _through(
        self, entry: Entry, state: StackState, consecutive: bool, size: tuple[int, int] | None
    ) -> tuple[Tensor, list[State], list[Trace], list[Tensor]]:
        """All blocks over an entry: tokens, states of the layers, traces, auxiliary losses."""
        options = {
            "padding_BN": entry.padding_BN,
            "visible_NN": entry.visible_NN,
            "sees_context_N": entry.sees_context_N,
            "consecutive": consecutive,
            "size": size,
        }
        slots = {
            "slots_BMD": entry.slots_BMD,
            "slots_valid_BM": entry.slots_valid_BM,
            "slots_places_BM": entry.slots_places_BM,
            "own": entry.own,
        }
        if self.reversible:
            branches = [
                part
                for block, own_state in zip(self.blocks, state.layers, strict=True)
                for part in block.sublayers(entry.positions_BNP, state=own_state, **options)  # type: ignore[operator]
            ]
            x, loss = reversible(branches, entry.x_BND)
            return x, list(state.layers), [], [loss]
        x, layers, traces, losses = entry.x_BND, [], [], []
        recalled = entry.recalled if entry.recalled is not None else [None] * len(self.blocks)
        contexts = entry.contexts if entry.contexts is not None else [entry.context] * len(self.blocks)
        for block, own_state, hidden, context in zip(self.blocks, state.layers, recalled, contexts, strict=True):
            own = {"state": own_state, "recalled": hidden, "context": context}
            x, own_state, trace, loss = self._run(block, x, entry.positions_BNP, **own, **slots, **options)
            layers.append(own_state)
            traces.append(trace)
            if loss is not None:
                losses.append(loss)
        return x, layers, traces, losses

    def _run(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.activation_checkpointing and torch.is_grad_enabled():
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
    for block in blocks:
        core = block.attention.core
        if memory.insertion == "kv" and "context" not in core.can:
            raise ValueError(
                f"memory {type(memory).__name__} offers keys and values, which attention {type(core).__name__} cannot "
                "take (it lacks context)"
            )
        if memory.masks and "bias" not in core.can:
            raise ValueError(
                f"memory {type(memory).__name__} chooses which tokens see each other, which attention "
                f"{type(core).__name__} cannot take (it lacks bias); `cached list attentions` shows which can"
            )
        if memory.own_weights and block.memory_weights is None:
            raise ValueError(
                f"memory {type(memory).__name__} has weights of its own, which no block holds; "
                "give every Block memory_weights"
            )
        if memory.own_keys != block.attention.own_keys:
            raise ValueError(
                f"memory {type(memory).__name__} has own_keys={memory.own_keys}, a layer has own_keys="
                f"{block.attention.own_keys}; make every SelfAttention with that of the memory"
            )
    if memory.insertion == "sublayer" and all(block.slot_attention is None for block in blocks):
        raise ValueError(
            f"memory {type(memory).__name__} offers slots, which nothing would read; give every Block a slot_attention"
        )
