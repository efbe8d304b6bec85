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
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..state import State

ProjectKV = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps hidden states (B, M, D) to unrotated keys and values (B, H, M, E) with the layer's own norm and projections."""

Linear = Callable[[Tensor], Tensor]
"""An output projection, (B, N, D) -> (B, N, D)."""
Weights = tuple[Tensor, Tensor | None] | None
"""Weight and bias of a plain linear map."""


class Context(NamedTuple):
    """Keys and values that a memory offers to attention. Keys are unrotated: the layer applies their positions."""

    k_BHME: Tensor
    v_BHME: Tensor
    positions_BMP: Tensor
    valid_BM: Tensor


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
    """What a memory answers: a context (kv), a per-head result (head), and what it wants to see again in `write`."""

    context: Context | None = None
    output_BHNE: Tensor | None = None
    carry: Any = None


class Trace(NamedTuple):
    """What a block leaves for `write`: its input, its keys and values (unrotated), its output, and what was read."""

    x_BND: Tensor
    k_BHNE: Tensor
    v_BHNE: Tensor
    y_BND: Tensor
    query: Query
    reading: Reading


class LayerMemory(nn.Module):
    """A memory of one layer. The defaults remember nothing.

    Attributes:
        insertion: "kv", "head" or "none"; only "kv" asks the attention core to accept a context.
        shared: one state for all rows and steps, kept in buffers of the module (the state tuple is then empty).
        causal: whether a causal model may use it (no output may depend on a later token).
    """

    insertion: Literal["kv", "head", "none"] = "none"
    shared: bool = False
    causal: bool = True

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
    """What a model memory hands to the blocks: tokens, their positions, a context for all layers, slots for all layers.

    `slots_valid_BM` (bool) marks the slots that hold something; None when all do.
    """

    x_BND: Tensor
    positions_BNP: Tensor
    padding_BN: Tensor | None
    context: Context | None = None
    slots_BMD: Tensor | None = None
    slots_valid_BM: Tensor | None = None


class ModelMemory(nn.Module):
    """A memory that spans the layers of a model. The defaults remember nothing.

    Attributes:
        insertion: "input", "kv", "sublayer" or "none"; "sublayer" gives every block a cross-attention over the slots.
    """

    insertion: Literal["input", "kv", "sublayer", "none"] = "none"

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
