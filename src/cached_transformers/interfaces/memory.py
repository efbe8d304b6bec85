"""What a memory is: the two protocols, and the records that pass between a memory, a layer and a stack.

A *layer memory* lives in one layer, a *model memory* spans layers; both may be present. Every method has an identity
default, so that a paper's file overrides only what the paper changes. What a memory asks of the place where it stands,
it says in `needs`, in the words of `fit.py`. Four places cover the literature:

* "tokens_round": the model memory puts tokens round the segment (`enter`, `exit`);
* "context": `Context`, extra keys and values for the attention core, from `read` or `Entry.contexts`;
* "head": `read` returns a second per-head result, which `combine` mixes with the core's before the output projection;
  "in_front": likewise, but it is asked before there are queries, keys and values, and what `combine` mixes with its
  result is the layer's input, head by head, of which these are made then;
* "slots": the model memory offers slots, over which blocks run a cross-attention (`slot_attention`) behind their own;
  "slots_in_front": likewise, in front of themselves.

Legend: B rows, N tokens, M slots, L = M + N, H heads, E head width, V value width, D = H * E model width, P position
channels.
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

    With `frozen` these receive no gradient; the hidden states do. With `normed` the states went through the layer's
    norm already. Layers of others, in which several heads of queries share keys, give those once: fewer heads.
    """

    def __call__(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]: ...


Linear = Callable[[Tensor], Tensor]
"""An output projection, (B, N, D) -> (B, N, D)."""


Attend = Callable[[Tensor, Tensor | None], Tensor]
"""(B, H, N, E) of queries (B, H, N, E) and what is added to their logits (B, H, N, M)."""


class Context(NamedTuple):
    """Keys and values that a memory offers to attention. Keys are unrotated: the layer applies their positions.

    Attributes:
        consecutive: a promise that the slots, oldest first, stand at the positions right before the segment's first
            token, one each; relative positions are then cheaper.
        visible_BHNM: (B or 1, 1, N, M), the slots that each token sees: bool, or shares from 0 to 1 (float32 or wider),
            by which weights are multiplied before they are made to sum to 1; None for all.
        gather: makes (B, H, N, E) of the core's result where values are wider than a head. The values of the segment
            and of other contexts then stand in the last E channels.
        clean: a promise that what stands in empty slots is finite, so that hiding them is enough.
        attend: softmax attention over these slots alone, which costs less than a core that is given keys and values.
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


class Projections(Protocol):
    """What a memory may use of a layer: its norm and its keys and values."""

    @property
    def norm(self) -> nn.Module: ...

    @property
    def project_kv(self) -> ProjectKV: ...


Offer = Context | Callable[[ProjectKV], Context]
"""A context, or what makes one inside the layer that attends it, with that layer's projections."""


class Query(NamedTuple):
    """What a memory may look at when it is read.

    `x_BND` is the input of the attention (after the block's norm). `padding_BN` marks padding with True. `size` is the
    (height, width) of the token map, when there is one. Queries, keys and values are those of the segment, without
    positions; layers that others wrote give them to memories that need "head" alone, or none at all. `segment` says
    where the segment's tokens begin, and how many there are, where tokens of a memory stand round them.
    """

    x_BND: Tensor
    q_BHNE: Tensor | None = None
    positions_BNP: Tensor | None = None
    padding_BN: Tensor | None = None
    size: tuple[int, int] | None = None
    k_BHNE: Tensor | None = None
    v_BHNE: Tensor | None = None
    segment: tuple[int, int] | None = None

    def narrow(self, start: int, length: int) -> Query:
        """The query of some neighbouring tokens."""

        def cut(t: Tensor | None, dim: int) -> Tensor | None:
            return None if t is None else t.narrow(dim, start, length)

        q, k, v = (cut(t, 2) for t in (self.q_BHNE, self.k_BHNE, self.v_BHNE))
        x_BND = self.x_BND.narrow(1, start, length)
        return Query(x_BND, q, cut(self.positions_BNP, 1), cut(self.padding_BN, 1), self.size, k, v)


class Reading(NamedTuple):
    """What a memory answers: a context, a per-head result, and what it wants to see again in `combine` and `write`.

    `lse_BHN` is filled in by the layer, for a memory that needs "lse": the log-sum-exp of the core's logits. `any_B`
    marks the rows in which there was something to read; the others are as they would be without the memory. None says
    nothing of it.
    """

    context: Context | None = None
    output_BHNE: Tensor | None = None
    carry: Any = None
    lse_BHN: Tensor | None = None
    any_B: Tensor | None = None


class Trace(NamedTuple):
    """What a block leaves for `write` and `exit`: its input, its output, what was asked and what was read.

    `weights_BHNL` is for memories that need "weights": the attention weight of each key of context and segment, without
    gradient; not a number where a token does not see the key.
    """

    x_BND: Tensor
    y_BND: Tensor
    query: Query
    reading: Reading
    weights_BHNL: Tensor | None = None

    def narrow(self, start: int, length: int) -> Trace:
        """The trace of some neighbouring tokens."""
        weights = self.weights_BHNL
        if weights is not None:
            slots = weights.shape[-1] - self.x_BND.shape[1]
            weights = torch.cat([weights[..., :slots], weights.narrow(-1, slots + start, length)], -1)
            weights = weights.narrow(2, start, length)
        x_BND, y_BND = (t.narrow(1, start, length) for t in (self.x_BND, self.y_BND))
        return Trace(x_BND, y_BND, self.query.narrow(start, length), self.reading, weights)


class LayerMemory(nn.Module):
    """A memory of one layer. The defaults remember nothing.

    Attributes:
        needs: words of `fit.py`; of the class, those of its default options, of an instance, its own.
        shared: what it remembers is one for all rows and steps, kept in buffers of the module.
    """

    needs: frozenset[str] = frozenset()
    shared: bool = False

    def position_scheme(self) -> Positions | None:
        """Position scheme of its own for the layer it lives in; None for the model's."""
        return None

    def window(self) -> int | None:
        """Number of tokens that a token of a causal layer sees, itself included; None for no limit."""
        return None

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """State before the first segment, on the device and in the dtype of `like`."""
        return ()

    def open(self, state: State, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Any:
        """What reading needs of the state, made once a segment: `read` gets it in the place of the state.

        A memory that writes this method promises that what a token reads depends on that and on the token alone. Texts
        can then be generated token by token; other memories are shown the open segment again for each token.

        Args:
            first_B1P: position of the segment's first token, where the layer knows positions.
            project_kv: there where the memory needs it.
        """
        return state

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        """Look into the memory before the layer attends.

        Args:
            opened: what `open` made; the state itself for a memory that does not write it.
            project_kv: there where the memory needs it.
        """
        return Reading()

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        """Mix the core's per-head result with what was read, before the output projection."""
        return y_BHNE

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        """`combine`, merge the heads, and apply the output projection, (B, N, D).

        A memory overrides this to change the attention's result behind the projection, or to save work; `weights` are
        the projection's weight and bias where it is a plain linear map, None where only calling `linear` is right.
        """
        return linear(self.combine(y_BHNE, query, reading).transpose(1, 2).flatten(2))

    def write(self, state: State, trace: Trace) -> tuple[State, Tensor | None]:
        """State after the segment, of the same structure, and an auxiliary loss or None."""
        return state, None

    def close_gate(self) -> None:
        """Set the parameters so that the layer computes what it would compute without this memory.

        Raises:
            ValueError: the memory has no gate that could be closed.
        """
        raise ValueError(f"{type(self).__name__} has no gate to close; remove the memory instead")


class Tokens(NamedTuple):
    """Embedded tokens on their way through the blocks.

    Attributes:
        positions_BNP: of all tokens. padding_BN: bool, True = padding; None for none.
        inputs_BN: the model's raw inputs (token ids), where a model gives them.
        consecutive: the positions are those of neighbours, one each, which makes relative positions cheaper.
    """

    x_BND: Tensor
    positions_BNP: Tensor
    padding_BN: Tensor | None = None
    inputs_BN: Tensor | None = None
    consecutive: bool = False

    def split(self, size: int) -> list[Tokens]:
        """Pieces of `size` tokens, the last one perhaps shorter."""
        pieces = range(-(-self.x_BND.shape[1] // size))
        x, positions, padding, inputs = ([None] * len(pieces) if t is None else t.split(size, 1) for t in self[:4])
        return [Tokens(x[i], positions[i], padding[i], inputs[i], self.consecutive) for i in pieces]  # type: ignore[arg-type]


class Entry(NamedTuple):
    """What a model memory hands to the blocks.

    Attributes:
        tokens: those of the segment, with those of the memory round them.
        contexts: what each layer attends beside the segment; None for nothing.
        slots: arguments of every block's `slot_attention` behind its tokens; None where nothing is to be read.
        segment: (start, length) of the segment's tokens, which alone reach the layer memories' `write`; None for all.
        visible_NN: bool, token i sees token j; replaces the causal mask. Every token sees itself.
    """

    tokens: Tokens
    contexts: Sequence[Offer | None] | None = None
    slots: tuple[Any, ...] | None = None
    segment: tuple[int, int] | None = None
    visible_NN: Tensor | None = None


class Through(Protocol):
    """The way through the blocks of a stack, for one segment: an entry in; the last block's output and all traces out.

    The states of the layer memories go on from call to call. With `write=False` the call is a preview, of which nothing
    is kept.

    Attributes:
        layers: the projections of keys and values of every layer, from the first to the last.
    """

    @property
    def layers(self) -> Sequence[Projections]: ...

    def __call__(self, entry: Entry, *, write: bool = True) -> tuple[Tensor, list[Trace]]: ...


class ModelMemory(nn.Module):
    """A memory that spans the layers of a model. The defaults remember nothing.

    Attributes:
        needs: words of `fit.py`; of the class, those of its default options, of an instance, its own.
        extra_tokens: tokens that it puts round a segment, by which attention sees longer ones.
        rereads: another pass over the same segments, begun with what `next_pass` returns, shows no token what stands
            behind it. The states after a pass have seen the whole text, so that a memory must see to it and say so;
            a next-token loss over several passes needs it.
        in_one_piece: why, with these options, a token cannot be read alone whatever `open` promises; None where it can.
    """

    needs: frozenset[str] = frozenset()
    extra_tokens: int = 0
    rereads: bool = False
    in_one_piece: str | None = None

    def layer_memory(self, index: int) -> LayerMemory:
        """Memory for the layer `index`, beside this one; called once a layer."""
        return LayerMemory()

    def position_scheme(self) -> Positions | None:
        """Position scheme for a layer, made anew at every call; None for the model's."""
        return None

    def slot_attention(self, index: int) -> nn.Module | None:
        """Cross-attention over the slots for the layer `index`, made anew at every call; None for a layer without.

        It is called with the tokens (B, N, D) and `Entry.slots`, and gives what is added to the tokens behind the
        layer's attention ("slots"); with an attribute `in_front = True`, what the block gets in the place of its tokens
        ("slots_in_front").
        """
        return None

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """State before the first segment, on the device and in the dtype of `like`."""
        return ()

    def open(self, state: State, tokens: Tokens, layers: Sequence[Projections]) -> Any:
        """What `enter` needs of the state, made once a segment.

        A memory that writes this method promises that what it hands to the blocks for a token depends on that, on what
        `go_on` makes of it, and on the token alone, but for memory tokens in front, which are the same for all. Texts
        can then be generated token by token; other memories are shown the open segment again for each token.

        Args:
            tokens: the segment's first tokens. layers: of the stack, from the first to the last.
        """
        return state

    def enter(self, opened: Any, tokens: Tokens) -> Entry:
        """Called before the first block, with what `open` made; the state for a memory that does not write it."""
        return Entry(tokens)

    def go_on(self, opened: Any, x_BND: Tensor, traces: Sequence[Trace]) -> Any:
        """What `enter` needs for the tokens behind these, which came out of the last block, of the same segment."""
        return opened

    def exit(self, state: State, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, State, Tensor | None]:
        """Called after the last block: outputs of the segment's own tokens, new state, auxiliary loss or None.

        Args:
            x_BND, traces: of all tokens, those of the memory among them.
        """
        return x_BND, state, None

    def run(self, state: State, tokens: Tokens, through: Through) -> tuple[list[Tensor], State, Tensor | None]:
        """One segment: `enter`, all blocks, `exit`; the outputs are those of each step, in their order.

        A memory overrides this to go through the blocks in another way: in several steps, or twice.
        """
        x_BND, state, loss = self.exit(state, *through(begin(self, state, tokens, through.layers)))
        return [x_BND], state, loss

    def next_pass(self, before: Any, after: Sequence[Any]) -> Any:
        """State of the model with which another pass over the same segments begins.

        Args:
            before: the model's state with which the last pass began. after: the states after each of its segments.
        """
        return after[-1]


def look(memory: LayerMemory, state: State, query: Query, project_kv: ProjectKV | None) -> Reading:
    """`open` and `read`: what the tokens of a whole segment read."""
    first_B1P = None if query.positions_BNP is None else query.positions_BNP[:, :1]
    return memory.read(memory.open(state, first_B1P, project_kv), query, project_kv)


def begin(memory: ModelMemory, state: State, tokens: Tokens, layers: Sequence[Projections]) -> Entry:
    """`open` and `enter`: what a whole segment begins with."""
    return memory.enter(memory.open(state, tokens, layers), tokens)
