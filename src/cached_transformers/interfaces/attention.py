"""What an attention mechanism ("core") is: it mixes the tokens of one segment, head by head, and declares what it can
do.

Projections and positions live outside, so the same core serves in a plain layer, inside a GRC layer and in models of
others.

Legend: B rows, H heads, N queries, M keys (of the segment, or of context and segment), E key width, V value width,
D width of a layer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.state import State

from .capabilities import refuse_misfit
from .memory import Context

StepsFrom = Literal["keys", "state"] | None
"""From what a core reads tokens that come one at a time; see `Attention`."""


class Call(NamedTuple):
    """What one call of a core asks for beside queries, keys and values; `Attention.forward` has checked it.

    Attributes:
        causal: token i sees the whole context and the keys up to i.
        key_padding_mask: (B, M) bool, True = padding, over the keys of the segment; None without padding.
        context: keys and values of a memory, which every query sees.
        bias_BHNM: added to the logits, over context and segment.
        distances_BHNK: added to the logit of the key 0, 1, ... places before a query, (B or 1, H, N or 1, M + N), for a
            core that `looks_up`; the context stands right before the segment.
        x_BND: the layer's input, for mechanisms that need more than q, k and v.
        generator: source of randomness of mechanisms that draw; torch's global one when None.
        want_lse: give the log-sum-exp of the logits, too.
        state: what the core gave behind the segment before; () before the first one.
        want_state: give the state behind these tokens, too, where the core goes on from one.
    """

    causal: bool = False
    key_padding_mask: Tensor | None = None
    context: Context | None = None
    bias_BHNM: Tensor | None = None
    distances_BHNK: Tensor | None = None
    x_BND: Tensor | None = None
    generator: torch.Generator | None = None
    want_lse: bool = False
    state: State = ()
    want_state: bool = False


class AttentionOutput(NamedTuple):
    """Result of a core: values, the log-sum-exp of the logits where it is defined and asked for, an auxiliary loss, and
    the core's state behind the segment.

    A query that sees no key has values of 0 and the lowest finite number as its log-sum-exp (float32 or wider).
    """

    out_BHNV: Tensor
    lse_BHN: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    state: State = ()


class Attention(nn.Module):
    """Base of all cores. A subclass says what it `can` and writes `attend`.

    Options that a core has in common with the model get the model's value unless the user set them: `width`, `heads`,
    `length` (the longest segment, where the model knows one), `prefix` (class tokens), `size` (of the token map),
    `causal`, `index` (of the layer), `depth`.

    A core with a state of its own sets `carry`, gives the state of rows that have seen nothing in `init_state`, begins
    `attend` with `call.state` and returns the state behind the segment.

    A causal core may read a text token by token, each as the last one of a segment that grows. It says from what:
    "keys", where the result of a query is one softmax over the kept keys that it `sees`; or a "state", with which
    `scan` goes on.

    Args:
        dropout: share of the attention weights that is dropped in training.

    Attributes:
        can: words of `fit.CORE_WORDS`. An instance whose options change what it can do sets its own.
        carry: whether a state goes on from segment to segment.
        steps_from: "keys", "state", or None for a core that reads a segment as a whole; likewise.
    """

    can: frozenset[str] = frozenset({"bidirectional"})
    carry: bool = False
    steps_from: StepsFrom = None

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"attention dropout={dropout} must lie in [0, 1)")
        self.dropout = dropout

    @property
    def drop(self) -> float:
        """The share of weights to drop now."""
        return self.dropout if self.training else 0.0

    @property
    def title(self) -> str:
        """What messages call it."""
        taken = ", ".join(sorted(type(self).can - self.can))
        return f"attention {type(self).__name__}" + (f" (its options take away {taken})" if taken else "")

    def init_state(self, rows: int, heads: int, key_width: int, value_width: int, like: Tensor) -> State:
        """The state of rows that have seen nothing: () for a core without one.

        Args:
            rows: B. heads: H. key_width: E. value_width: V.
            like: has the device and the dtype of the inputs.
        """
        return ()

    def forward(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        v_BHNV: Tensor,
        *,
        causal: bool = False,
        key_padding_mask: Tensor | None = None,
        context: Context | None = None,
        bias_BHNM: Tensor | None = None,
        distances_BHNK: Tensor | None = None,
        x_BND: Tensor | None = None,
        generator: torch.Generator | None = None,
        want_lse: bool = False,
        state: State = (),
        want_state: bool = False,
    ) -> AttentionOutput:
        """Attend. Whatever padding holds, NaN included, reaches no other token, and no gradient of one.

        Args:
            q_BHNE: queries, with positions applied already, as `k_BHNE` and the keys of `context`.
            k_BHNE: keys. Without queries, or without any keys, the result is that of queries that see no key.
            v_BHNV: values.
            causal, key_padding_mask, context, bias_BHNM, distances_BHNK, x_BND, generator, want_lse, state, want_state:
                see `Call`.

        Raises:
            ValueError: the core does not support the call, the mask is not bool or not of the keys' shape, or a state
                comes to a core that carries none; the message names the core and what it lacks.
        """
        asked = {
            "context": context is not None,
            "causal": causal,
            "bidirectional": not causal,
            "cross": q_BHNE.shape[2] != k_BHNE.shape[2],
            "bias": bias_BHNM is not None,
            "lse": want_lse,
        }
        needs = {word: "this call" for word, needed in asked.items() if needed}
        refuse_misfit(needs, self.can, self.title, "`cached list attentions` shows which cores can")
        if not self.carry and not is_nothing(state):
            raise ValueError(f"{self.title} carries no state from segment to segment; call it without one")
        if key_padding_mask is not None:
            _check_mask(key_padding_mask, k_BHNE, self.title)
            hidden_B1N1 = key_padding_mask[:, None, :, None]
            k_BHNE, v_BHNV = k_BHNE.masked_fill(hidden_B1N1, 0), v_BHNV.masked_fill(hidden_B1N1, 0)
            # The mask is of the keys. Other queries may be as many as these, so that finite ones stay as they are.
            if q_BHNE.shape[2] == k_BHNE.shape[2]:
                q_BHNE = _without_nan(q_BHNE, hidden_B1N1)
            if x_BND is not None and x_BND.shape[1] == k_BHNE.shape[2]:
                x_BND = _without_nan(x_BND, key_padding_mask[..., None])
        if distances_BHNK is not None and not self.looks_up(q_BHNE, k_BHNE, v_BHNV):
            raise ValueError(f"{self.title} looks up no logits by distance in this call; give them as a bias")
        keys = k_BHNE.shape[2] + (0 if context is None else context.k_BHME.shape[2])
        if q_BHNE.shape[2] == 0 or keys == 0:
            if is_nothing(state):
                rows, heads, _, width = q_BHNE.shape
                state = self.init_state(rows, heads, width, v_BHNV.shape[3], q_BHNE)
            return sees_nothing(q_BHNE, v_BHNV, want_lse=want_lse)._replace(state=state)
        positions = bias_BHNM, distances_BHNK
        call = Call(causal, key_padding_mask, context, *positions, x_BND, generator, want_lse, state, want_state)
        return self.attend(q_BHNE, k_BHNE, v_BHNV, call)

    def looks_up(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor) -> bool:
        """Whether the core takes logits by distance in the place of a bias, in a call with such inputs.

        Raises:
            ValueError: a kernel that would was asked for by name, and cannot take the call.
        """
        return False

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """The mechanism itself."""
        raise NotImplementedError("abstract: a core writes attend()")

    def sees(self, place: int, place_S: Tensor) -> Tensor | None:
        """Which of the segment's keys a causal query sees: bool (S) or (H, S); None for all of them.

        Args:
            place: of the query, counted from the first token that the core is given.
            place_S: of the keys, none of them behind the query.
        """
        return None

    def scan(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        v_BHNV: Tensor,
        state: State,
        *,
        key_padding_mask: Tensor | None = None,
        x_BND: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Outputs of the next tokens (B, H, N, V), each of which sees those before it, and the state behind them."""
        raise NotImplementedError("abstract: a core with steps_from='state' writes scan()")


def is_nothing(state: State) -> bool:
    """Whether this is the state of a core that carries none, or that has seen nothing yet."""
    return isinstance(state, tuple) and not state


def sees_nothing(q_BHNE: Tensor, v_BHNV: Tensor, *, want_lse: bool = False) -> AttentionOutput:
    """The result of queries that see no key."""
    out_BHNV = v_BHNV.new_zeros(*q_BHNE.shape[:3], v_BHNV.shape[3])
    dtype = torch.promote_types(q_BHNE.dtype, torch.float32)
    lowest_BHN = q_BHNE.new_full(q_BHNE.shape[:3], torch.finfo(dtype).min, dtype=dtype) if want_lse else None
    return AttentionOutput(out_BHNV, lowest_BHN)


def _check_mask(mask: Tensor, k_BHNE: Tensor, title: str) -> None:
    shape = (k_BHNE.shape[0], k_BHNE.shape[2])
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"{title} got a key_padding_mask of {mask.dtype} and shape {tuple(mask.shape)}; it must be bool, True = "
            f"padding, of (rows, keys) = {shape}: mask.bool() where 1 is padding, mask == 0 where 0 is"
        )


def _without_nan(t: Tensor, hidden: Tensor) -> Tensor:
    """The same with 0 for what is not finite where `hidden` is True."""
    return torch.where(hidden & ~t.isfinite(), 0, t)
