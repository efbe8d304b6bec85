"""What a memory is: the two protocols, and the records that pass between a memory and a block.

A *layer memory* lives in one layer, a *model memory* spans layers; both may be present. Every method has an identity
default, so that a paper's file overrides only what the paper changes. Four insertion points cover the literature:

* input: the model memory puts tokens round the segment (`enter`, `exit`);
* kv: `read` returns a `Context`, extra keys and values for the attention core;
* head: `read` returns a second per-head result, which `combine` mixes with the core's before the output projection;
* sublayer: the model memory offers slots, over which every block runs a cross-attention of its own.

Legend: B rows, N tokens, M slots, R regions of slots, H heads, E head width, D = H * E model width,
P position channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cached_transformers.state import State

if TYPE_CHECKING:
    from cached_transformers.layers.attention import SelfAttention

    from .positions import Positions


class ProjectKV(Protocol):
    """Maps hidden states (B, M, D) to unrotated keys and values (B, H, M, E) with the layer's own norm and projections.

    With `frozen` these receive no gradient; the hidden states do.
    """

    def __call__(self, hidden_BMD: Tensor, *, frozen: bool = False) -> tuple[Tensor, Tensor]: ...


Linear = Callable[[Tensor], Tensor]
"""An output projection, (B, N, D) -> (B, N, D)."""
Weights = tuple[Tensor, Tensor | None] | None
"""Weight and bias of a plain linear map."""


class Context(NamedTuple):
    """Keys and values that a memory offers to attention. Keys are unrotated: the layer applies their positions.

    `consecutive` promises that the slots, oldest first, stand at the positions right before the segment's first token,
    one each; relative positions are then cheaper.
    """

    k_BHME: Tensor
    v_BHME: Tensor
    positions_BMP: Tensor
    valid_BM: Tensor
    consecutive: bool = False


class Recalled(NamedTuple):
    """Hidden states (inputs of the layer, before its norm) that a model memory offers one layer as a context.

    The layer makes keys and values of them; values are multiplied by `weight_BM`, where it is given.

    Where each token chooses for itself, `region_BM` says to which of R regions a slot belongs (R: to none, which all
    tokens see with weight 1), `visible_BNR` which regions a token sees, and `weight_BNR` by what it multiplies their
    values. The weights act behind the softmax, so that the keys of a region count in full.
    """

    hidden_BMD: Tensor
    positions_BMP: Tensor
    valid_BM: Tensor
    weight_BM: Tensor | None = None
    consecutive: bool = False
    region_BM: Tensor | None = None
    visible_BNR: Tensor | None = None
    weight_BNR: Tensor | None = None


class Query(NamedTuple):
    """What a memory may look at when it is read.

    `x_BND` is the input of the attention (after the block's norm). `padding_BN` marks padding with True.
    `size` is the (height, width) of the token map, when there is one.
    """

    x_BND: Tensor
    q_BHNE: Tensor | None = None
    positions_BNP: Tensor | None = None
    padding_BN: Tensor | None = None
    size: tuple[int, int] | None = None


class Reading(NamedTuple):
    """What a memory answers: a context (kv), a per-head result (head), and what it wants to see again in `write`.

    `lse_BHN` is filled in by the layer, for a memory with `wants_lse`: the log-sum-exp of the core's logits.
    """

    context: Context | None = None
    output_BHNE: Tensor | None = None
    carry: Any = None
    lse_BHN: Tensor | None = None


class Trace(NamedTuple):
    """What a block leaves for `write`: its input, its keys and values (unrotated), its output, and what was read.

    `usage_BL` is for memories with `weighs`: the mean attention weight of each key of context and segment, without
    gradient.
    """

    x_BND: Tensor
    k_BHNE: Tensor
    v_BHNE: Tensor
    y_BND: Tensor
    query: Query
    reading: Reading
    usage_BL: Tensor | None = None

    def narrow(self, start: int, length: int) -> Trace:
        """The trace of some neighbouring tokens."""
        x, q, positions, padding, size = self.query
        query = Query(
            x.narrow(1, start, length),
            None if q is None else q.narrow(2, start, length),
            None if positions is None else positions.narrow(1, start, length),
            None if padding is None else padding.narrow(1, start, length),
            size,
        )
        k, v = self.k_BHNE.narrow(2, start, length), self.v_BHNE.narrow(2, start, length)
        y, usage = self.y_BND.narrow(1, start, length), self.usage_BL
        if usage is not None:
            slots = usage.shape[1] - self.x_BND.shape[1]
            usage = torch.cat([usage[:, :slots], usage.narrow(1, slots + start, length)], 1)
        return Trace(self.x_BND.narrow(1, start, length), k, v, y, query, self.reading, usage)


class LayerMemory(nn.Module):
    """A memory of one layer. The defaults remember nothing.

    Attributes:
        insertion: "kv", "head" or "none"; only "kv" asks the attention core to accept a context.
        shared: one state for all rows and steps, kept in buffers of the module (the state tuple is then empty).
        causal: whether a causal model may use it (no output may depend on a later token).
        wants_lse: `combine` needs the log-sum-exp of the core's logits, which only some cores give.
        weighs: whether `write` needs the attention weights of the keys, which are then computed a second time.
    """

    insertion: Literal["kv", "head", "none"] = "none"
    shared: bool = False
    causal: bool = True
    wants_lse: bool = False
    weighs: bool = False

    def position_scheme(self) -> Positions | None:
        """Position scheme of its own for the layer it lives in; None for the model's."""
        return None

    def window(self) -> int | None:
        """Number of tokens that a token of a causal layer sees, itself included; None for no limit."""
        return None

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """State before the first segment, on the device and in the dtype of `like`."""
        return ()

    def read(self, state: State, query: Query, project_kv: ProjectKV | None) -> Reading:
        """Look into the memory before the layer attends. Models of others offer no `project_kv`."""
        return Reading()

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        """Mix the core's per-head result with what was read, before the output projection."""
        return y_BHNE

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        """`combine`, merge the heads, and apply the output projection, (B, N, D).

        A memory overrides this only to save work; `weights` are the projection's weight and bias where it is a plain
        linear map, None where only calling `linear` is right.
        """
        return linear(self.combine(y_BHNE, query, reading).transpose(1, 2).flatten(2))

    def finish(self, y_BND: Tensor, query: Query, reading: Reading) -> Tensor:
        """Change the attention's result after the output projection."""
        return y_BND

    def write(self, state: State, trace: Trace) -> tuple[State, Tensor | None]:
        """State after the segment, of the same structure, and an auxiliary loss or None."""
        return state, None

    def close_gate(self) -> None:
        """Set the parameters so that the layer computes what it would compute without this memory.

        Raises:
            ValueError: the memory has no gate that could be closed.
        """
        raise ValueError(f"{type(self).__name__} has no gate to close; remove the memory instead")


class Entry(NamedTuple):
    """What a model memory hands to the blocks.

    Attributes:
        x_BND: the tokens, with those of the memory round them.
        positions_BNP, padding_BN: of all these tokens.
        context: keys and values for all layers. contexts: those for each layer, instead.
        slots_BMD: slots for the cross-attention of every block.
        slots_valid_BM: bool, the slots that hold something; None when all do.
        slots_places_BM: where each slot stands, for a memory whose own slot attention asks for it.
        recalled: hidden states for each layer.
        own: (start, length) of the segment's own tokens, which alone reach the layer memories' `write` and the traces;
            None for all.
        visible_NN: bool, token i sees token j; replaces the causal mask. Every token sees itself.
        sees_context_N: bool, the tokens that see a context; None when all do. Only beside `visible_NN`.
        then: makes this a preview: the blocks run over it, nothing of that run is written, and the function turns the
            last block's output (B, N, D) into the entry that follows.
        state: what `exit` gets in the place of the state, for what has been computed already; None for the state.
    """

    x_BND: Tensor
    positions_BNP: Tensor
    padding_BN: Tensor | None
    context: Context | None = None
    slots_BMD: Tensor | None = None
    slots_valid_BM: Tensor | None = None
    recalled: Sequence[Recalled | None] | None = None
    own: tuple[int, int] | None = None
    visible_NN: Tensor | None = None
    sees_context_N: Tensor | None = None
    then: Callable[[Tensor], Entry] | None = None
    state: State | None = None
    contexts: Sequence[Context | None] | None = None
    slots_places_BM: Tensor | None = None


class ModelMemory(nn.Module):
    """A memory that spans the layers of a model. The defaults remember nothing.

    Attributes:
        insertion: "input", "kv", "sublayer" or "none"; "sublayer" gives every block a cross-attention over the slots.
        step: tokens that the model reads between two writes; longer segments are read in such pieces, one after the
            other and with gradient. None for whole segments.
        causal: whether a causal model may use it.
        masks: whether it sets `Entry.visible_NN` or `Recalled.visible_BNR`, which attention must then take as a bias.
        own_weights: whether its tokens (those outside `Entry.own`) have projections and a feed-forward of their own in
            every block.
        own_keys: whether tokens attend their own segment. Without, they attend the context alone, and one that has none
            gets 0 from attention; traces then hold no keys and values.
        rereads: another pass over the same segments, begun with what `next_pass` returns, shows no token what stands
            behind it. The states after a pass have seen the whole text, so that a memory must see to it and say so;
            a next-token loss over several passes needs it.
        around: tokens that it puts round a segment, by which attention sees longer ones.
    """

    insertion: Literal["input", "kv", "sublayer", "none"] = "none"
    step: int | None = None
    causal: bool = True
    masks: bool = False
    own_weights: bool = False
    own_keys: bool = True
    rereads: bool = False
    around: int = 0

    def layer_keys(self, index: int) -> bool:
        """Whether the layer `index` has projections of keys and values; only without `own_keys` can one do without."""
        return True

    def layer_memory(self, index: int) -> LayerMemory:
        """Memory for the layer `index`, beside this one; called once a layer."""
        return LayerMemory()

    def position_scheme(self) -> Positions | None:
        """Position scheme for a layer, made anew at every call; None for the model's."""
        return None

    def slot_attention(self, index: int, width: int, heads: int) -> nn.Module | None:
        """Cross-attention over the slots for the layer `index`, made anew at every call (insertion "sublayer").

        It is called as (x_BND, slots_BMD, slots_valid_BM), and slots_places_BM where the memory offers them, and gives
        what is added to x_BND. None for a layer that does not read the slots.
        """
        from cached_transformers.layers.block import SlotAttention  # the blocks are built on memories

        return SlotAttention(width, heads)

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """State before the first segment, on the device and in the dtype of `like`."""
        return ()

    def open(self, state: State, layers: Sequence[SelfAttention]) -> Any:
        """What `enter` and `exit` get for a state during one segment, all its steps. It may hold more than tensors."""
        return state

    def close(self, opened: Any) -> State:
        """The state after the segment, of the structure that `init_state` gives."""
        return opened

    def enter(
        self, state: State, x_BND: Tensor, positions_BNP: Tensor, padding_BN: Tensor | None, inputs: Tensor | None
    ) -> Entry:
        """Called before the first block, with what `open` gave. `inputs` are the model's raw inputs (token ids)."""
        return Entry(x_BND, positions_BNP, padding_BN)

    def exit(self, state: State, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, State, Tensor | None]:
        """Called after the last block: outputs of the segment's own tokens, new state, auxiliary loss or None."""
        return x_BND, state, None

    def next_pass(self, before: State, after: Sequence[State]) -> State:
        """State of the whole model with which another pass over the same segments begins.

        Args:
            before: state with which the pass began, resets included. after: states after each of its segments.
        """
        return after[-1]
