"""The interface of attention mechanisms ("cores"): they mix the tokens of one segment, head by head.

Projections and positions are outside, so that the same core serves in a plain layer, in a GRC layer and in host models.

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
"""Incremental decoding from a KV cache or a state; see `Attention`."""


class Call(NamedTuple):
    """Options of one call of a core, checked by `Attention.forward`.

    Attributes:
        causal: token i sees the whole context and the keys up to i.
        key_padding_mask: (B, M) bool, True = padding, over the keys of the segment; None without padding.
        context: keys and values of a memory, which every query sees.
        bias_BHNM: added to the logits, over context and segment.
        distances_BHNK: (B or 1, H, N or 1, M + N), added to the logits of keys 0, 1, ... positions before a query, for
            a core that `looks_up`; the context is right before the segment.
        x_BND: the layer's input, for mechanisms that need more than q, k and v.
        generator: source of randomness; None for torch's global one.
        want_lse: also return the log-sum-exp of the logits.
        state: the core's state after the segment before; () before the first one.
        want_state: also return the state after these tokens.
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
    """Result of a core: values, the log-sum-exp of the logits on request, an auxiliary loss, and the state after the
    segment.

    A query that sees no key has values of 0 and the lowest finite number as its log-sum-exp (float32 or wider).
    """

    out_BHNV: Tensor
    lse_BHN: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    state: State = ()


class Attention(nn.Module):
    """Base of all cores. A subclass declares `can` and implements `attend`.

    Options that a core shares with the model take the model's value unless set: `width`, `heads`, `length` (the longest
    segment, if known), `prefix` (class tokens), `size` (of the token map), `causal`, `index` (of the layer), `depth`.

    A core with a state sets `carry`, returns the initial state from `init_state`, starts `attend` from `call.state` and
    returns the state after the segment.

    A causal core with `steps_from` supports incremental decoding: from "keys", if the result of a query is one softmax
    over the keys that it `sees`; or from a "state", which `scan` advances.

    Args:
        dropout: share of the attention weights that is dropped in training.

    Attributes:
        can: words of `CORE_WORDS`. An instance whose options change them sets its own.
        carry: whether a state is passed from segment to segment.
        steps_from: "keys", "state", or None for a core that reads only whole segments. An instance may set its own.
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
        """Current dropout rate: 0 in evaluation."""
        return self.dropout if self.training else 0.0

    @property
    def title(self) -> str:
        """Name in messages."""
        taken = ", ".join(sorted(type(self).can - self.can))
        return f"attention {type(self).__name__}" + (f" (its options take away {taken})" if taken else "")

    def init_state(self, rows: int, heads: int, key_width: int, value_width: int, like: Tensor) -> State:
        """Return the initial state; () for a core without one.

        Args:
            rows: B. heads: H. key_width: E. value_width: V.
            like: a tensor with the inputs' device and dtype.
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
        """Attend. Values of padding, NaN included, change no other token and no gradient of one.

        Args:
            q_BHNE: queries, with positions applied, like `k_BHNE` and the keys of `context`.
            k_BHNE: keys. Without queries or keys, the result is that of queries that see no key.
            v_BHNV: values.
            causal, key_padding_mask, context, bias_BHNM, distances_BHNK, x_BND, generator, want_lse, state, want_state:
                see `Call`.

        Raises:
            ValueError: the core does not support the call, the mask is not bool or has another shape than the keys, or
                the core gets a state and carries none.
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
            # The mask is of the keys. There may be as many other queries, so finite ones stay unchanged.
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
        """True if the core takes logits by distance instead of a bias for such inputs.

        Raises:
            ValueError: the kernel chosen by name cannot take the call.
        """
        return False

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        """Compute the attention."""
        raise NotImplementedError("abstract: a core writes attend()")

    def sees(self, place: int, place_S: Tensor) -> Tensor | None:
        """Return a mask of the segment's keys that a causal query sees, bool (S) or (H, S); None for all.

        Args:
            place: of the query, counted from the first token of the call.
            place_S: of the keys, none of them after the query.
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
        """Return causal outputs of the next tokens (B, H, N, V), and the state after them."""
        raise NotImplementedError("abstract: a core with steps_from='state' writes scan()")


def is_nothing(state: State) -> bool:
    """True for the empty state of a core without one, or before the first segment."""
    return isinstance(state, tuple) and not state


def sees_nothing(q_BHNE: Tensor, v_BHNV: Tensor, *, want_lse: bool = False) -> AttentionOutput:
    """Return the result of queries that see no key."""
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
    """Replace values that are not finite by 0 where `hidden` is True."""
    return torch.where(hidden & ~t.isfinite(), 0, t)
