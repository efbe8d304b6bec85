"""What a memory is: the two protocols, and the records that pass between a memory and a block.

A *layer memory* lives in one layer, a *model memory* spans layers; both may be present. Every method has an identity
default, so that a paper's file overrides only what the paper changes. Four insertion points cover the literature:

* input: the model memory puts tokens round the segment (`enter`, `exit`);
* kv: `read` returns a `Context`, extra keys and values for the attention core;
* head: `read` returns a second per-head result, which `combine` mixes with the core's before the output projection;
* sublayer: the model memory offers slots, over which every block runs a cross-attention of its own.

Legend: B rows, N tokens, M slots, H heads, E head width, D = H * E model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn

from ..state import State

if TYPE_CHECKING:
    from ..layers.positions import Positions

ProjectKV = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps hidden states (B, M, D) to unrotated keys and values (B, H, M, E) with the layer's own norm and projections."""

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
    """

    hidden_BMD: Tensor
    positions_BMP: Tensor
    valid_BM: Tensor
    weight_BM: Tensor | None = None
    consecutive: bool = False


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
    """What a block leaves for `write`: its input, its keys and values (unrotated), its output, and what was read."""

    x_BND: Tensor
    k_BHNE: Tensor
    v_BHNE: Tensor
    y_BND: Tensor
    query: Query
    reading: Reading

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
        return Trace(
            self.x_BND.narrow(1, start, length), k, v, self.y_BND.narrow(1, start, length), query, self.reading
        )


class LayerMemory(nn.Module):
    """A memory of one layer. The defaults remember nothing.

    Attributes:
        insertion: "kv", "head" or "none"; only "kv" asks the attention core to accept a context.
        shared: one state for all rows and steps, kept in buffers of the module (the state tuple is then empty).
        causal: whether a causal model may use it (no output may depend on a later token).
        wants_lse: `combine` needs the log-sum-exp of the core's logits, which only some cores give.
    """

    insertion: Literal["kv", "head", "none"] = "none"
    shared: bool = False
    causal: bool = True
    wants_lse: bool = False

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
        context: keys and values for all layers.
        slots_BMD: slots for the cross-attention of every block.
        slots_valid_BM: bool, the slots that hold something; None when all do.
        recalled: hidden states for each layer.
        own: (start, length) of the segment's own tokens, which alone reach the layer memories' `write`; None for all.
        visible_NN: bool, token i sees token j; replaces the causal mask. Every token sees itself.
        sees_context_N: bool, the tokens that see a context; None when all do. Only beside `visible_NN`.
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


class ModelMemory(nn.Module):
    """A memory that spans the layers of a model. The defaults remember nothing.

    Attributes:
        insertion: "input", "kv", "sublayer" or "none"; "sublayer" gives every block a cross-attention over the slots.
        step: tokens that the model reads between two writes; longer segments are read in such pieces, one after the
            other and with gradient. None for whole segments.
        causal: whether a causal model may use it.
    """

    insertion: Literal["input", "kv", "sublayer", "none"] = "none"
    step: int | None = None
    causal: bool = True

    def layer_memory(self, index: int) -> LayerMemory:
        """Memory for the layer `index`, beside this one; called once a layer."""
        return LayerMemory()

    def position_scheme(self) -> Positions | None:
        """Position scheme for a layer, made anew at every call; None for the model's."""
        return None

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """State before the first segment, on the device and in the dtype of `like`."""
        return ()

    def enter(
        self, state: State, x_BND: Tensor, positions_BNP: Tensor, padding_BN: Tensor | None, inputs: Tensor | None
    ) -> Entry:
        """Called before the first block. `inputs` are the raw inputs of the model (token ids)."""
        return Entry(x_BND, positions_BNP, padding_BN)

    def exit(self, state: State, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, State, Tensor | None]:
        """Called after the last block: outputs of the segment's own tokens, new state, auxiliary loss or None."""
        return x_BND, state, None

    def next_pass(self, states: Sequence[State]) -> State:
        """State with which another pass over the same segments begins, given the state after each of them."""
        return states[-1]
