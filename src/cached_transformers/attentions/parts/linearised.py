"""Base of linearised attentions: a state of fixed size replaces the keys.

With a feature map phi instead of the softmax, sums over keys are made once (or carried along) and read by each query:

    all keys: S = sum_j phi(k_j) [v_j, 1]^T,   out_i = the quotient of the parts of phi(q_i) S
    causal:   S_i from S_{i-1} and token i,    out_i from phi(q_i) and S_i

The causal form is a recurrent network: `init_step` makes the state before the first token, `step` takes one token,
`scan` takes several, and all of them are the causal pass, cut anywhere. A context of a memory is a set of keys that is
in the sums before the first token. States, sums and feature maps are float32 or wider, under autocast too.

Legend: B rows, H heads, N tokens, M keys of a context, E key width, V value width, F features, D model width.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.attention import Attention, AttentionOutput, Call, is_nothing
from cached_transformers.interfaces.memory import Context
from cached_transformers.linear_maps import matrix_of
from cached_transformers.state import State, refuse_narrow

from .building_blocks import wide


def with_ones(v_BHNV: Tensor) -> Tensor:
    """(B, H, N, V + 1): values with a column of ones, which becomes the normaliser."""
    return F.pad(wide(v_BHNV), (0, 1), value=1.0)


def quotient(sums_BHNV: Tensor, epsilon: float = 0.0) -> Tensor:
    """Weighted sums of values over the last column, the sum of the weights; 0 where nothing was summed."""
    total = sums_BHNV[..., -1:] + epsilon
    return sums_BHNV[..., :-1] / torch.where(total == 0, 1, total)


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1, with all digits where it is small: e^x below 0, where (e^x - 1) + 1 would round to 0."""
    # Of kernels whose gradients have no `where`, which takes ten times as long; at 0 the second has the slope, 1.
    return x.relu() + F.threshold(-x, -torch.finfo(x.dtype).tiny, 0.0).neg().exp()


class LinearisedAttention(Attention):
    """Base of mechanisms with a recurrent form. A subclass writes `features`, `empty`, `write`, `read` and `run`.

    Example:
        >>> state = core.init_step(rows, heads, width, values, like=q)
        >>> out_BHNV, state = core.scan(q, k, v, state)  # the prompt
        >>> out_BHV, state = core.step(q_BHE, k_BHE, v_BHV, state)  # one token more

    Args:
        carry: the state goes on from segment to segment, so that segments are one sequence. The mechanism is then
            causal alone, and takes no context: a memory's earlier segments would count twice.
    """

    can = frozenset({"causal", "bidirectional", "cross", "context", "exact_padding"})
    steps_from = "state"

    def __init__(self, *, carry: bool = False) -> None:
        super().__init__()
        self.carry = carry
        if carry:
            self.can = self.can & {"causal", "exact_padding"}

    def maps(self, generator: torch.Generator | None = None, *, fixed: bool = True) -> Tensor | None:
        """Random part of the feature map: the saved sample, or a new one per call if training asks for it."""
        return None

    def features(self, x_BHNE: Tensor, maps: Tensor | None) -> Tensor:
        """(B, H, N, F): features of queries or of keys, or their logarithms, as the subclass needs them."""
        raise NotImplementedError("abstract: a mechanism writes features()")

    def empty(self, rows: int, heads: int, width: int, value_width: int, like: Tensor) -> State:
        """The state that holds nothing, on the device of `like` and in its dtype, already wide."""
        raise NotImplementedError("abstract: a mechanism writes empty()")

    def write(self, state: State, k_BHMF: Tensor, v_BHMV: Tensor, seen_BM: Tensor | None) -> State:
        """Add a set of keys, unseen ones as zeros, to a state that is one matrix (B, H, F, V)."""
        return state + hidden(k_BHMF, seen_BM).mT @ v_BHMV  # type: ignore[operator, no-any-return]

    def read(self, q_BHNF: Tensor, state: State) -> Tensor:
        """(B, H, N, V): what queries find in a state."""
        raise NotImplementedError("abstract: a mechanism writes read()")

    def run(
        self, q_BHNF: Tensor, k_BHNF: Tensor, v_BHNV: Tensor, state: State, seen_BN: Tensor | None, x_BND: Tensor | None
    ) -> tuple[Tensor, State]:
        """Token by token (in effect): write its key, then read with its query. Tokens not seen leave the state."""
        raise NotImplementedError("abstract: a mechanism writes run()")

    def init_state(self, rows: int, heads: int, key_width: int, value_width: int, like: Tensor) -> State:
        return self.init_step(rows, heads, key_width, value_width, like=like) if self.carry else ()

    def init_step(
        self, rows: int, heads: int, width: int, value_width: int, *, like: Tensor, context: Context | None = None
    ) -> State:
        """The state before the first token.

        Args:
            rows: B. heads: H. width: E. value_width: V.
            like: has the device and the dtype of the inputs; the state is float32 or wider.
            context: keys and values that every token sees; slots that are not valid add nothing.
        """
        with contextlib.nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False):
            # Of `like`, only the device and the dtype are wanted.
            state = self.empty(rows, heads, width, value_width, wide(like[..., :0]))
            return self._with_context(state, context, self.maps(), rows)

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
        return self._scan(q_BHNE, k_BHNE, v_BHNV, state, key_padding_mask, x_BND, self.maps())

    def step(
        self, q_BHE: Tensor, k_BHE: Tensor, v_BHV: Tensor, state: State, *, x_BD: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """The output of the next token (B, H, V), and the state after it: constant time and memory."""
        x_BND = None if x_BD is None else x_BD[:, None]
        out_BHNV, state = self.scan(q_BHE[:, :, None], k_BHE[:, :, None], v_BHV[:, :, None], state, x_BND=x_BND)
        return out_BHNV[:, :, 0], state

    def attend(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        rows, heads, tokens, width = q_BHNE.shape
        if call.causal and tokens != k_BHNE.shape[2]:
            raise ValueError(
                f"{tokens} queries and {k_BHNE.shape[2]} keys: a causal call of {type(self).__name__} needs one key a "
                "query; keys that all queries see belong in the context"
            )
        maps = self.maps(call.generator, fixed=not self.training)
        state = call.state
        if is_nothing(state):
            with torch.autocast(q_BHNE.device.type, enabled=False):
                state = self.empty(rows, heads, width, v_BHNV.shape[-1], wide(q_BHNE[..., :0]))
                state = self._with_context(state, call.context, maps, rows)
        if call.causal:
            out, state = self._scan(q_BHNE, k_BHNE, v_BHNV, state, call.key_padding_mask, call.x_BND, maps)
            return AttentionOutput(out, state=state if self.carry or call.want_state else ())
        with torch.autocast(q_BHNE.device.type, enabled=False):
            seen_BN = None if call.key_padding_mask is None else ~call.key_padding_mask
            if k_BHNE.shape[2]:
                state = self.write(state, self.features(wide(k_BHNE), maps), wide(v_BHNV), seen_BN)
            return AttentionOutput(self.read(self.features(wide(q_BHNE), maps), state).to(v_BHNV.dtype))

    def _scan(
        self,
        q_BHNE: Tensor,
        k_BHNE: Tensor,
        v_BHNV: Tensor,
        state: State,
        key_padding_mask: Tensor | None,
        x_BND: Tensor | None,
        maps: Tensor | None,
    ) -> tuple[Tensor, State]:
        refuse_narrow(state, f"what {self.title} adds to its sums")
        with torch.autocast(q_BHNE.device.type, enabled=False):
            q_BHNF, k_BHNF = (self.features(wide(t), maps) for t in (q_BHNE, k_BHNE))
            seen_BN = None if key_padding_mask is None else ~key_padding_mask
            x_BND = None if x_BND is None else wide(x_BND)
            out, state = self.run(q_BHNF, k_BHNF, wide(v_BHNV), state, seen_BN, x_BND)
        return out.to(v_BHNV.dtype), state

    def _with_context(self, state: State, context: Context | None, maps: Tensor | None, rows: int) -> State:
        if context is None:
            return state
        k_BHME, v_BHMV = (wide(t).expand(rows, -1, -1, -1) for t in (context.k_BHME, context.v_BHME))
        return self.write(state, self.features(k_BHME, maps), v_BHMV, context.valid_BM)


def hidden(t_BHNF: Tensor, seen_BN: Tensor | None, value: float = 0.0) -> Tensor:
    """Features with `value` instead of those of keys that are not seen."""
    return t_BHNF if seen_BN is None else t_BHNF.masked_fill(~seen_BN[:, None, :, None], value)


def head_weights(module: torch.nn.Linear, x_BND: Tensor | None, what: str) -> Tensor:
    """(B, H, N): one number a token and head from the layer's input, wide whatever the module's dtype is.

    Raises:
        ValueError: the call has no input.
    """
    if x_BND is None:
        raise ValueError(f"{what} is made of the layer's input; give it as x_BND (x_BD for one step)")
    weight_HD, bias_H = matrix_of(module)
    return F.linear(wide(x_BND), wide(weight_HD), None if bias_H is None else wide(bias_H)).mT
