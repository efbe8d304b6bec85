"""The two protocols of memories, and the records passed between a memory, a layer and a stack.

A *layer memory* lives in one layer, a *model memory* spans layers; a model may have both. Every method has an identity
default, so that a paper's file overrides only the methods that the paper changes. A memory acts at these places, and
lists its requirements in `needs` (words of `capabilities.py`):

* "tokens_round": the model memory adds tokens before and after the segment (`enter`, `exit`);
* "context": `Context`, extra keys and values for the attention, from `read` or `Entry.contexts`;
* "head": `read` returns a second result per head, which `combine` mixes with the attention's before the output
  projection;
* "queries": `read` returns a term for the queries, before their norm and positions. A host's memory is then read with
  the layer's input only: queries, keys and values are not made yet;
* "slots": the model memory offers slots; blocks run a cross-attention over them (`slot_attention`) after their own.

Three rules for `read` and `write`:

* `Query.x_BND` is the attention's input, after the block's norm; `Trace.x_BND` is the block's input, before the norm.
* No caller removes padding. A memory ignores tokens where `padding_BN` is True, and keeps the state of a row that is
  all padding.
* A row with an empty memory computes the same as without the memory. `read` and `combine` ensure this themselves;
  `Reading.any_B` is an optional promise that rows marked False are such rows, so that generation skips the memory.

Legend: B rows, N tokens, W queries, M slots, L = M + N, H heads, G heads of keys, E head width, V value width,
D = H * E model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cached_transformers.linear_maps import Weights
from cached_transformers.positions import Positions
from cached_transformers.state import State


class ProjectKV(Protocol):
    """Maps hidden states (B, M, D) to unrotated keys and values (B, H, M, E) with the layer's own norm and projections.

    With `frozen` norm and projections receive no gradient; the hidden states do. With `normed` the states are already
    normalised. A host layer with grouped queries returns its fewer heads of keys.
    """

    def __call__(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]: ...


Linear = Callable[[Tensor], Tensor]
"""An output projection, (B, N, D) -> (B, N, D)."""


Attend = Callable[[Tensor, Tensor | None], Tensor]
"""(B, H, N, E) of queries (B, H, N, E) and a bias on their logits (B, H, N, M)."""


class Context(NamedTuple):
    """Keys and values that a memory offers to attention. Keys are unrotated: the layer applies their positions.

    Attributes:
        consecutive: the slots, oldest first, are at the positions right before the segment's first token, one each;
            relative positions are then cheaper.
        visible_BHNM: (B or 1, 1, N, M), the slots that each token sees: bool, or shares from 0 to 1 (float32 or wider)
            that multiply the weights before normalisation; None for all.
        gather: computes (B, H, N, E) from the attention's result if values are wider than a head. The values of the
            segment and of other contexts are then in the last E channels.
        clean: empty slots hold finite values, so that masking them is enough.
        attend: softmax attention over these slots, at less cost than an attention given keys and values.
        bias_BHM: added to the logits of each slot, of each head of keys, 0 in empty slots; None for 0. It needs "bias".
    """

    k_BHME: Tensor
    v_BHME: Tensor
    positions_BMP: Tensor
    valid_BM: Tensor
    consecutive: bool = False
    visible_BHNM: Tensor | None = None
    gather: Callable[[Tensor], Tensor] | None = None
    clean: bool = False
    attend: Attend | None = None
    bias_BHM: Tensor | None = None


class Projections(Protocol):
    """The parts of a layer that a memory may use: its norm and its keys and values."""

    @property
    def norm(self) -> nn.Module: ...

    @property
    def project_kv(self) -> ProjectKV: ...


Offer = Context | Callable[[ProjectKV], Context]
"""A context, or a function that makes one in the attending layer, with that layer's projections."""


class Query(NamedTuple):
    """Inputs of `read`.

    Attributes:
        x_BND: input of the attention, after the block's norm.
        q_BHNE, k_BHNE, v_BHNE: queries, keys and values of the segment, without positions. A host layer gives them only
            to memories that need them.
        padding_BN: bool, True = padding.
        size: (height, width) of the token map, if there is one.
        turn: for memories that need "turn": (keys (B, G, M, E), positions (B, M, P)) -> keys with these positions, as
            the layer compares them; it serves the first rows as well.
        segment: (start, length) of the segment's tokens among memory tokens; None without memory tokens.
    """

    x_BND: Tensor
    q_BHNE: Tensor | None = None
    positions_BNP: Tensor | None = None
    padding_BN: Tensor | None = None
    size: tuple[int, int] | None = None
    k_BHNE: Tensor | None = None
    v_BHNE: Tensor | None = None
    turn: Callable[[Tensor, Tensor], Tensor] | None = None
    segment: tuple[int, int] | None = None

    @property
    def real_BN(self) -> Tensor:
        """bool, tokens that are no padding."""
        return torch.ones_like(self.x_BND[..., 0], dtype=torch.bool) if self.padding_BN is None else ~self.padding_BN

    def narrow(self, start: int, length: int) -> Query:
        """Return the query of the tokens start .. start + length."""
        parts = (t.narrow(_token_dim(t), start, length) if isinstance(t, Tensor) else t for t in self[:-1])
        return Query(*parts)  # type: ignore[arg-type]

    def last(self, count: int | None) -> Tensor | None:
        """Columns (B or 1, W) of the segment's last `count` tokens, the newest last, padding before real ones; all its
        tokens without a count. None if these are the columns as they are."""
        total, device = self.x_BND.shape[1], self.x_BND.device
        start, length = self.segment or (0, total)
        asked = length if count is None else min(count, length)
        if self.padding_BN is None:
            return None if asked == total else torch.arange(start + length - asked, start + length, device=device)[None]
        real_BN = ~self.padding_BN.narrow(1, start, length)
        return real_BN.long().argsort(dim=1, stable=True)[:, length - asked :] + start


def _token_dim(t: Tensor) -> int:
    return 2 if t.dim() == 4 else 1


class Reading(NamedTuple):
    """Result of `read`.

    Attributes:
        context: extra keys and values for the attention.
        output_BHNE: a second result per head, for `combine`.
        carry: any value that `combine` and `write` need again.
        lse_BHN: log-sum-exp of the attention's logits; the layer fills it in for a memory that needs "lse".
        any_B: rows with an entry to read. Optional: a promise that the other rows compute the same as without the
            memory, so that generation skips a memory that is empty in all rows. None for no promise.
        query_BND: added to the projection of queries, (B, N, H * E). It needs "queries".
    """

    context: Context | None = None
    output_BHNE: Tensor | None = None
    carry: Any = None
    lse_BHN: Tensor | None = None
    any_B: Tensor | None = None
    query_BND: Tensor | None = None


class Trace(NamedTuple):
    """Record of a block's forward, for `write` and `exit`.

    Attributes:
        x_BND: input of the block, before its norm. y_BND: output of the block.
        weights_BHWL: for memories that need "weights": the attention weight of each key of context and segment, without
            gradient, of the segment's last `observe` tokens that are no padding, the newest last; NaN where a token
            does not see the key, and for padding, which comes first.
    """

    x_BND: Tensor
    y_BND: Tensor
    query: Query
    reading: Reading
    weights_BHWL: Tensor | None = None

    def narrow(self, start: int, length: int) -> Trace:
        """Return the trace of the tokens start .. start + length."""
        weights = self.weights_BHWL
        if weights is not None:
            slots = weights.shape[-1] - self.x_BND.shape[1]
            weights = torch.cat([weights[..., :slots], weights.narrow(-1, slots + start, length)], -1)
        x_BND, y_BND = (t.narrow(1, start, length) for t in (self.x_BND, self.y_BND))
        return Trace(x_BND, y_BND, self.query.narrow(start, length), self.reading, weights)

    def in_order(self, columns_BN: Tensor) -> Trace:
        """Return the trace of the tokens in these columns, without weights."""

        def moved(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            index_BN = columns_BN[:, None] if t.dim() == 4 else columns_BN
            return t.take_along_dim(index_BN if t.dim() == 2 else index_BN[..., None], _token_dim(t))

        return Trace(moved(self.x_BND), moved(self.y_BND), Query(*map(moved, self.query)), self.reading)


class Memory(nn.Module):
    """Common part of both protocols.

    Attributes:
        needs: words of `capabilities.py`: on the class for its default options, on an instance for its own.
        key_shape: number and width of the layer's heads of keys, (G, E), set by a host; None for those of the queries.
    """

    needs: frozenset[str] = frozenset()
    key_shape: tuple[int, int] | None = None

    def position_scheme(self) -> Positions | None:
        """Return a new position scheme for a layer; None for the model's."""
        return None

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """Return the state before the first segment, on the device and in the dtype of `like`."""
        return ()


class LayerMemory(Memory):
    """A memory of one layer. The defaults remember nothing.

    Attributes:
        shared: one memory for all rows and steps, in buffers of the module.
        observe: number of a segment's last queries whose weights it gets, if it needs "weights"; None for all.
        reads_heads: False if only `write` uses the layer's queries, keys and values, which next tokens then lack.
    """

    shared: bool = False
    observe: int | None = None
    reads_heads: bool = True

    def window(self) -> int | None:
        """Number of tokens that a token of a causal layer sees, itself included; None for no limit."""
        return None

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        """Look into the memory before the layer attends.

        Args:
            opened: the state; for a memory with `open` (see `incremental.py`) its result.
            project_kv: given if the memory needs "context".
        """
        return Reading()

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        """Mix the attention's per-head result with the reading, before the output projection."""
        return y_BHNE

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        """`combine`, merge the heads, and apply the output projection, (B, N, D).

        A memory overrides this to change the attention's result after the projection, or to save work; `weights` are
        the projection's weight and bias if it is a plain linear map, None if only a call of `linear` is right.
        """
        return linear(self.combine(y_BHNE, query, reading).transpose(1, 2).flatten(2))

    def write(self, state: State, trace: Trace) -> tuple[State, Tensor | None]:
        """Return the state after the segment, of the same structure, and an auxiliary loss or None."""
        return state, None

    def close_gate(self) -> None:
        """Set the parameters so that the layer computes the same as without this memory.

        Raises:
            ValueError: the memory has no gate to close.
        """
        raise ValueError(f"{type(self).__name__} has no gate to close; remove the memory instead")


class Tokens(NamedTuple):
    """Embedded tokens before and between the blocks.

    Attributes:
        positions_BNP: of all tokens. padding_BN: bool, True = padding; None for none.
        inputs_BN: the model's raw inputs (token ids), if the model gives them.
        consecutive: each position is the last one plus 1, so that relative positions are cheaper.
    """

    x_BND: Tensor
    positions_BNP: Tensor
    padding_BN: Tensor | None = None
    inputs_BN: Tensor | None = None
    consecutive: bool = False

    def split(self, size: int) -> list[Tokens]:
        """Split into pieces of `size` tokens; the last one may be shorter."""
        pieces = range(-(-self.x_BND.shape[1] // size))
        x, positions, padding, inputs = ([None] * len(pieces) if t is None else t.split(size, 1) for t in self[:4])
        return [Tokens(x[i], positions[i], padding[i], inputs[i], self.consecutive) for i in pieces]  # type: ignore[arg-type]


class Entry(NamedTuple):
    """Inputs of the blocks, from a model memory.

    Attributes:
        tokens: the segment's tokens, with memory tokens around them.
        contexts: for each layer, what it attends beside the segment; None for nothing.
        slots: arguments of every block's `slot_attention`; None to skip it.
        segment: (start, length) of the segment's tokens; layer memories write only these. None for all.
        visible_NN: bool, token i sees token j; replaces the causal mask. Every token sees itself.
    """

    tokens: Tokens
    contexts: Sequence[Offer | None] | None = None
    slots: tuple[Any, ...] | None = None
    segment: tuple[int, int] | None = None
    visible_NN: Tensor | None = None


class BlockRunner(Protocol):
    """Run one segment through the blocks of a stack: an entry in; the last block's output and all traces out.

    The states of the layer memories advance from call to call. With `write=False` the call is a preview and leaves them
    unchanged.

    Attributes:
        layers: the projections of keys and values of every layer, first to last.
    """

    @property
    def layers(self) -> Sequence[Projections]: ...

    def __call__(self, entry: Entry, *, write: bool = True) -> tuple[Tensor, list[Trace]]: ...


class ModelMemory(Memory):
    """A memory that spans the layers of a model. The defaults remember nothing.

    Attributes:
        extra_tokens: number of memory tokens around a segment, which lengthen attention.
        rereads: another pass over the same segments, begun with `next_pass`, shows no token a later one. A pass's final
            states have seen the whole text, so the memory must guarantee this; a next-token loss over several passes
            requires it.
    """

    extra_tokens: int = 0
    rereads: bool = False

    def layer_memory(self, index: int) -> LayerMemory:
        """Return the memory of layer `index` that accompanies this one; called once per layer."""
        return LayerMemory()

    def slot_attention(self, index: int) -> nn.Module | None:
        """Return a new cross-attention over the slots for layer `index`; None for a layer without.

        It is called with the tokens (B, N, D) and `Entry.slots`, and returns a term to add to the tokens after the
        layer's attention ("slots"). With an attribute `in_front = True` it runs before the block, and its result
        replaces the block's tokens ("slots_in_front").
        """
        return None

    def enter(self, opened: Any, tokens: Tokens) -> Entry:
        """Prepare the inputs of the blocks.

        Args:
            opened: the state; for a memory with `open` (see `incremental.py`) its result.
        """
        return Entry(tokens)

    def exit(self, state: State, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, State, Tensor | None]:
        """Called after the last block: return outputs of the segment's tokens, the new state, auxiliary loss or None.

        Args:
            x_BND, traces: of all tokens, including memory tokens.
        """
        return x_BND, state, None

    def run(self, state: State, tokens: Tokens, through: BlockRunner) -> tuple[list[Tensor], State, Tensor | None]:
        """Run one segment: `enter`, all blocks, `exit`; return the outputs of each step in order.

        A memory overrides this to pass through the blocks in several steps, or twice.
        """
        opened = self.open(state, tokens, through.layers) if hasattr(self, "open") else state  # type: ignore[operator]
        x_BND, state, loss = self.exit(state, *through(self.enter(opened, tokens)))
        return [x_BND], state, loss

    def next_pass(self, before: Any, after: Sequence[Any]) -> Any:
        """Return the model's state for another pass over the same segments.

        Args:
            before: the model's state before the last pass. after: the states after each of its segments.
        """
        return after[-1]
