"""What a recurrent memory lets others do with its states: ask one that it had before, beside the one that it has.

Legend: B rows, N tokens, S snapshots, G groups (heads, or nets beside each other), K width of keys, F of answers; `...`
any further dimensions between rows and groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading


class Asked(NamedTuple):
    """What the tokens of a segment ask a state with, and the keys under which they write."""

    q_BGNK: Tensor
    k_BGNK: Tensor


class Answer(NamedTuple):
    """What a state says to the tokens, in the rows in which it says anything (None: in all), and what `write` needs."""

    answer_BGNF: Tensor
    any_B: Tensor | None = None
    carry: Any = None


class Recurrent(LayerMemory):
    """A layer memory that mixes what a state of fixed size says into the attention's result, head by head.

    What several of its states say may be mixed: `read` is `settle` of what `online` finds, and the sum of answers with
    weights may be in that place.

    Attributes:
        groups: G. key_width: K.
        linear: an answer is linear in what `snapshot` keeps, so that a state of mixed numbers says what the mix of the
            answers does. One that is not may write `soup`.
        no_snapshots: why, with these options, there is no such reading; None where there is.
    """

    groups: int
    key_width: int
    linear: bool = True
    no_snapshots: str | None = None

    def ask(self, opened: Any, query: Query) -> Asked:
        """Queries (B, G, N, K) of all tokens, and keys, which mean nothing at padding.

        Args:
            opened: the state that the segment goes on from.
        """
        raise NotImplementedError

    def online(self, opened: Any, query: Query, asked: Asked) -> Answer:
        """What the state says that the segment goes on from."""
        raise NotImplementedError

    def snapshot(self, state: Any) -> Tensor:
        """What is to be kept of a state that was written, (B, G, ...), so that it can be asked later."""
        raise NotImplementedError

    def answer(self, snapshot: Tensor, asked: Asked) -> Tensor:
        """(B, ..., G, N, F): what snapshots (B, ..., G, ...) say; those of zeros say 0."""
        raise NotImplementedError

    def soup(self, opened: Any, query: Query, asked: Asked, snapshots_BS: Tensor, weights_BGNS: Tensor) -> Answer:
        """What `online` would find with a state for each token that is mixed, number by number, of snapshots
        (B, S, G, ...) and the one that goes on.

        Args:
            weights_BGNS: (B, G, N, S + 1), those of the online state last.
        """
        raise NotImplementedError

    def settle(self, found: Answer) -> Reading:
        """The reading of an answer, or of a mix of answers."""
        raise NotImplementedError

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None = None) -> Reading:
        return self.settle(self.online(opened, query, self.ask(opened, query)))


def mix(answers_BSGNF: Tensor, online_BGNF: Tensor, weights_BGNS: Tensor) -> Tensor:
    """(B, G, N, F): answers of snapshots and of the online state, by weights (B, G, N, S + 1), its own last."""
    weights_SBGN1 = weights_BGNS[..., None].movedim(-2, 0)
    return weights_SBGN1[-1] * online_BGNF + (weights_SBGN1[:-1].movedim(0, 1) * answers_BSGNF).sum(1)


def wide(t: Tensor) -> Tensor:
    """In float32, or what is wider."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def beside(t_BGNK: Tensor, dims: int) -> Tensor:
    """The same for each snapshot of tensors of so many dimensions, which begin with B and end with G and two more."""
    return t_BGNK[(slice(None),) + (None,) * (dims - 4)]
