"""Base of recurrent memories whose earlier states can be read beside the current one.

Legend: B rows, N tokens, S snapshots, G groups (heads, or nets beside each other), K width of keys, F of answers; `...`
any further dimensions between rows and groups.
"""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cached_transformers.attentions.parts.building_blocks import unit, wide
from cached_transformers.attentions.parts.scan import causal_scan
from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading


class Asked(NamedTuple):
    """Queries of a segment's tokens, the keys under which they write, and values for the memory that made them."""

    q_BGNK: Tensor
    k_BGNK: Tensor
    rest: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """Answer of a state to the tokens, the rows with an answer (None: all), and a record for `write`."""

    answer_BGNF: Tensor
    any_B: Tensor | None = None
    carry: Any = None


class Recurrent(LayerMemory):
    """A layer memory that mixes the answer of a fixed-size state into the attention's result, head by head.

    `read` is `settle` of what `online` finds, or of a sum of several states' answers with weights.

    Attributes:
        groups: G. key_width: K.
        linear: an answer is linear in the snapshot; one that is not may write `soup`.
        sums_tokens: a state is a sum over tokens, so that states of texts add up to that of both.
        no_snapshots: why, with these options, there is no such reading; None where there is.
    """

    groups: int
    key_width: int
    linear: bool = True
    sums_tokens: bool = False
    no_snapshots: str | None = None

    @abc.abstractmethod
    def ask(self, opened: Any, query: Query) -> Asked:
        """Queries (B, G, N, K) of all tokens, and keys, which mean nothing at padding."""

    @abc.abstractmethod
    def online(self, opened: Any, query: Query, asked: Asked) -> Answer:
        """Answer of the state before the segment."""

    @abc.abstractmethod
    def snapshot(self, state: Any) -> Tensor:
        """Tensors of a written state, (B, G, ...), that are kept for later reads."""

    @abc.abstractmethod
    def answer(self, snapshot: Tensor, asked: Asked) -> Tensor:
        """(B, ..., G, N, F): what snapshots (B, ..., G, ...) say; those of zeros say 0."""

    def matrices(self, opened: Any) -> Tensor | None:
        """(B, G, K, F), if the online answer to each token of a segment is the product of query and this; else None."""
        return None

    def soup(self, opened: Any, query: Query, asked: Asked, snapshots_BS: Tensor, weights_BGNS: Tensor) -> Answer:
        """Answer of `online` with a state per token, mixed by (B, G, N, S + 1) weights, its own last."""
        raise NotImplementedError("this memory mixes answers alone")

    @abc.abstractmethod
    def settle(self, found: Answer) -> Reading:
        """The reading of an answer, or of a mix of answers."""

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        return self.settle(self.online(opened, query, self.ask(opened, query)))


def mix(answers_BSGNF: Tensor, online_BGNF: Tensor, weights_BGNS: Tensor) -> Tensor:
    """(B, G, N, F): answers of snapshots and of the online state, by weights (B, G, N, S + 1), its own last."""
    weights_SBGN1 = weights_BGNS[..., None].movedim(-2, 0)
    return weights_SBGN1[-1] * online_BGNF + (weights_SBGN1[:-1].movedim(0, 1) * answers_BSGNF).sum(1)


def corrected(
    matrix_BHEF: Tensor, k_BHNE: Tensor, v_BHNF: Tensor, beta_BHN1: Tensor, log_decay_BHNG: Tensor | None
) -> Tensor:
    """Matrices after these pairs, by the gated delta rule with keys of length 1."""
    with torch.autocast(k_BHNE.device.type, enabled=False):
        k_BHNE = unit(k_BHNE)
        v_BHNF = wide(v_BHNF)
        return causal_scan(None, k_BHNE, v_BHNF, matrix_BHEF, beta_BHN1=beta_BHN1, log_decay_BHNG=log_decay_BHNG)[1]


def full_precision(t: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on the tensor's device, which costs nothing where there is none."""
    device = t.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def beside(t_BGNK: Tensor, dims: int) -> Tensor:
    """Expand per snapshot to tensors of that many dimensions, which begin with B and end with G and two more."""
    return t_BGNK[(slice(None),) + (None,) * (dims - 4)]


def wrote(padding_BN: Tensor | None, x_BND: Tensor) -> Tensor:
    """(B,) bool: rows with a token that is none of padding."""
    if padding_BN is None:
        return torch.ones(x_BND.shape[0], dtype=torch.bool, device=x_BND.device)
    return (~padding_BN).any(1)


def shown(t: Tensor, padding_BN: Tensor | None) -> Tensor:
    """(B, N, ...) or (B, H, N, E) with 0 at padding, so that whatever it holds reaches no sum, and no gradient."""
    if padding_BN is None:
        return t
    return t.masked_fill(padding_BN[:, :, None] if t.dim() == 3 else padding_BN[:, None, :, None], 0)
