"""The attention sublayer: the one place where projections, positions, a memory and an attention core meet.

    x -> norm -> q, k, v -> memory.read -> core -> memory.combine -> output projection -> memory.finish

Legend: B rows, N tokens, M slots, H heads, E head width, D model width (H * E unless said otherwise), P position
channels.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from cached_transformers.attentions.softmax import SoftmaxAttention, mean_weights
from cached_transformers.seam.attention import Attention, AttentionOutput
from cached_transformers.seam.memory import Context, LayerMemory, Linear, Query, Reading, Recalled, Weights
from cached_transformers.seam.positions import Positions
from cached_transformers.state import State

from .choice import choice_of


class Attended(NamedTuple):
    """Result of a `SelfAttention`, with what the memory's `write` needs."""

    y_BND: Tensor
    k_BHNE: Tensor
    v_BHNE: Tensor
    query: Query
    reading: Reading
    auxiliary_loss: Tensor | None
    usage_BL: Tensor | None = None


class OwnProjections(nn.Module):
    """Norm and projections of an attention layer for the tokens that a model memory puts round the segment."""

    def __init__(self, attention: SelfAttention) -> None:
        super().__init__()
        self.norm, self.qkv, self.output = (copy.deepcopy(m) for m in (attention.norm, attention.qkv, attention.output))


def by_owner(x_BND: Tensor, own: tuple[int, int], segment: Linear, memory: Linear) -> Tensor:
    """`segment` of the segment's own tokens, given as (start, length), and `memory` of those round it."""
    start, length = own
    front, middle, back = x_BND.split([start, length, x_BND.shape[1] - start - length], 1)
    return torch.cat([memory(front), segment(middle), memory(back)], 1)


def plain_weights(linear: nn.Module) -> Weights:
    """Weight and bias of an nn.Linear; None for what replaces one (adapters, quantised or parametrised layers)."""
    return (linear.weight, linear.bias) if type(linear) is nn.Linear else None


class SelfAttention(nn.Module):
    """Multi-head self-attention with a memory.

    Args:
        width: D. heads: H.
        core: attention mechanism; exact softmax attention when None.
        memory: layer memory; none when None.
        positions: scheme for queries and keys (rotary, bias); tokens are embedded by the model.
        norm: applied to the input and to hidden states that a memory stores; identity when None.
        causal: no output depends on a later token.
        bias: whether the projections of q, k, v have biases. output_bias: whether the output projection has one.
        shared_query_key: one projection serves as queries and keys (Reformer, arXiv:2001.04451).
        project_output: whether there is an output projection; without, heads stand side by side in the result.
        reduction: module called with (x, size) that shortens what keys and values are made of (PVT).
        dropout: on the output.
        head_width: E, with which the heads together may be wider or narrower than D; D / H when None.
        scale: factor of the logits, 1 / sqrt(E) when None. Queries are multiplied for it, so that every core and memory
            may go on dividing by sqrt(E).
        own_keys: whether tokens attend their own segment. Without, they attend the context alone, and get 0 if it is
            empty.
        keys: whether there are projections of keys and values, which only a layer without `own_keys` can lack.

    Raises:
        ValueError: the width is no multiple of the heads; the memory offers a context that the core cannot take; the
            layer is causal and the memory or the core has no causal form.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        core: Attention | None = None,
        memory: LayerMemory | None = None,
        positions: Positions | None = None,
        norm: nn.Module | None = None,
        causal: bool = False,
        bias: bool = True,
        output_bias: bool = True,
        shared_query_key: bool = False,
        project_output: bool = True,
        reduction: nn.Module | None = None,
        dropout: float = 0.0,
        head_width: int | None = None,
        scale: float | None = None,
        own_keys: bool = True,
        keys: bool = True,
    ) -> None:
        super().__init__()
        if heads < 1 or (head_width is None and width % heads):
            raise ValueError(f"width={width} must be a positive multiple of heads={heads}")
        if head_width is not None and head_width < 1:
            raise ValueError(f"head_width={head_width} must be at least 1; None is width / heads")
        self.width, self.heads, self.causal, self.own_keys, self.keys = width, heads, causal, own_keys, keys
        self.norm = norm if norm is not None else nn.Identity()
        self.shared_query_key = shared_query_key
        self.inner = width if head_width is None else heads * head_width
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(self.inner // heads)
        self.qkv = nn.Linear(width, (3 - shared_query_key if keys else 1) * self.inner, bias=bias)
        self.output: nn.Module = nn.Linear(self.inner, width, bias=output_bias) if project_output else nn.Identity()
        self.core = core if core is not None else SoftmaxAttention()
        self.memory = memory if memory is not None else LayerMemory()
        self.positions = positions if positions is not None else Positions()
        self.reduction = reduction
        self.dropout = nn.Dropout(dropout)
        self._check()

    def _check(self) -> None:
        memory, core = type(self.memory).__name__, type(self.core).__name__
        if self.memory.insertion == "kv" and "context" not in self.core.can:
            raise ValueError(
                f"memory {memory} offers keys and values, which attention {core} cannot take (it lacks context)"
            )
        if self.memory.wants_lse and "lse" not in self.core.can:
            raise ValueError(
                f"memory {memory} shares one softmax with the layer, for which attention {core} would have to give its "
                "log-sum-exp (it lacks lse)"
            )
        if "bias" not in self.core.can:
            if type(self.positions).bias is not Positions.bias:
                raise ValueError(
                    f"{type(self.positions).__name__} act on the logits, which attention {core} does not let them "
                    "(it lacks bias); take positions='rotary', 'sinusoidal' or 'none', and relative=False for a "
                    "memory that brings relative ones"
                )
            if self.causal and self.memory.window() is not None:
                raise ValueError(
                    f"memory {memory} limits how far tokens see, by a mask that attention {core} cannot take "
                    "(it lacks bias)"
                )
        if self.causal and "causal" not in self.core.can:
            raise ValueError(f"attention {core} has no causal form (it lacks causal)")
        if "bidirectional" not in self.core.can and not self.causal:
            raise ValueError(f"attention {core} has no other than a causal form; take causal=True")
        if self.causal and not self.memory.causal:
            raise ValueError(shows_the_future(memory))
        if self.inner != self.width:
            if type(self.memory) is not LayerMemory or type(self.core) is not SoftmaxAttention:
                raise ValueError(
                    f"{self.heads} heads of head_width={self.inner // self.heads} are not as wide together as the "
                    f"layer, {self.width}, which memory {memory} and attention {core} may rely on; take "
                    f"head_width={self.width // self.heads}, or memory=None with attention='softmax'"
                )
            if isinstance(self.output, nn.Identity):
                raise ValueError(
                    f"project_output=False needs heads as wide together as the layer, {self.width}, not {self.inner}"
                )
        if self.shared_query_key and self.query_factor != 1:
            raise ValueError("shared_query_key=True leaves no queries that a scale of their own could apply to")
        if self.shared_query_key and not self.keys:
            raise ValueError(
                "shared_query_key=True makes the queries keys, which keys=False leaves out; set one of them"
            )
        if self.own_keys and not self.keys:
            raise ValueError("keys=False leaves tokens nothing of their segment to attend; take own_keys=False with it")
        if not self.own_keys and not {"context", "cross", "bidirectional"} <= self.core.can:
            raise ValueError(
                f"own_keys=False needs an attention of context alone, which attention {core} is not "
                "(it lacks context, cross or bidirectional)"
            )
        if self.memory.weighs and not isinstance(self.core, SoftmaxAttention):
            raise ValueError(
                f"memory {memory} weighs keys by exact attention, which {core} is not; take attention='softmax', or a "
                "memory that does not weigh keys"
            )
        if not self.own_keys and self.memory.weighs:
            raise ValueError(f"memory {memory} weighs the keys of the segment, which own_keys=False leaves out")

    def _heads(self, t_BND: Tensor) -> Tensor:
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _linear(self, x: Tensor, first: int, last: int, frozen: bool = False) -> Tensor:
        """Rows first..last of the fused projection."""
        weight, bias = self.qkv.weight[first:last], None if self.qkv.bias is None else self.qkv.bias[first:last]
        if frozen:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return F.linear(x, weight, bias)

    def project_kv(self, hidden_BMD: Tensor, *, frozen: bool = False) -> tuple[Tensor, Tensor]:
        """Unrotated keys and values (B, H, M, E) of hidden states, through this layer's norm and projections.

        With `frozen` the norm and the projections receive no gradient; the hidden states do.

        Raises:
            ValueError: the layer was made without such projections.
        """
        if not self.keys:
            raise ValueError("a layer with keys=False projects no keys and values; ask one that does")
        if frozen:
            constants = {name: parameter.detach() for name, parameter in self.norm.named_parameters()}
            h_BMD = functional_call(self.norm, constants, (hidden_BMD,))
        else:
            h_BMD = self.norm(hidden_BMD)
        return self._keys_values(h_BMD, frozen)

    def _keys_values(self, h_BMD: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        first = 0 if self.shared_query_key else self.inner
        k, v = self._linear(h_BMD, first, first + 2 * self.inner, frozen).chunk(2, -1)
        return self._heads(k), self._heads(v)

    def _split(self, qkv_BNP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from all that was projected."""
        if self.shared_query_key:
            q, v = (self._heads(t) for t in qkv_BNP.chunk(2, -1))
            return q, q, v
        q, k, v = (self._heads(t) for t in qkv_BNP.chunk(3, -1))
        return q, k, v

    def _project(self, h_BND: Tensor, size: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
        if not self.own_keys:
            q = self._heads(self._linear(h_BND, 0, self.inner))
            return q, q[:, :, :0], q[:, :, :0]
        if self.reduction is None:
            return self._split(self.qkv(h_BND))
        q = self._heads(self._linear(h_BND, 0, self.inner))
        return q, *self._keys_values(self.reduction(h_BND, size))

    def forward(
        self,
        x_BND: Tensor,
        positions_BNP: Tensor | None = None,
        *,
        state: State = (),
        padding_BN: Tensor | None = None,
        context: Context | None = None,
        recalled: Recalled | None = None,
        visible_NN: Tensor | None = None,
        sees_context_N: Tensor | None = None,
        consecutive: bool = False,
        bias_BHNM: Tensor | None = None,
        size: tuple[int, int] | None = None,
        own: tuple[int, int] | None = None,
        weights: OwnProjections | None = None,
    ) -> Attended:
        """Attend over the segment and what the memories offer.

        Args:
            x_BND: tokens, before the norm.
            positions_BNP: needed by schemes that act on queries and keys, and by memories that store positions.
            state: the memory's state.
            padding_BN: bool, True = padding.
            context: keys and values from a model memory, placed behind those of the layer's own memory.
            recalled: hidden states from a model memory, which become keys and values in the same place.
            visible_NN: bool, token i sees token j; replaces the causal mask.
            sees_context_N: bool, the tokens that see the context; None when all do.
            consecutive: the positions are those of neighbours, one each, which makes relative positions cheaper.
            bias_BHNM: added to the logits (a shift mask).
            size: (height, width) of the token map.
            own: (start, length) of the segment's own tokens; None for all.
            weights: what the other tokens have in place of norm and projections; None for the same.
        """
        output: Linear = self.output
        if own is None or weights is None:
            h_BND = self.norm(x_BND)
            q, k, v = self._project(h_BND, size)
        else:
            h_BND = by_owner(x_BND, own, self.norm, weights.norm)
            q, k, v = self._split(by_owner(h_BND, own, self.qkv, weights.qkv))
            output = functools.partial(by_owner, own=own, segment=self.output, memory=weights.output)
        if self.query_factor != 1:
            q = q * self.query_factor
        query = Query(h_BND, q, positions_BNP, padding_BN, size)
        reading = self.memory.read(state, query, self.project_kv)
        before = 0 if reading.context is None else reading.context.k_BHME.shape[2]
        context = join(join(reading.context, self._recall(recalled)), context)
        causal = self.causal and visible_NN is None
        run = causal and consecutive and (context is None or context.consecutive)
        placed_q, placed_k, bias, context = self._place(q, k, positions_BNP, context, bias_BHNM, run)
        slots = 0 if context is None else context.k_BHME.shape[2]
        keys = slots + k.shape[2]
        if visible_NN is not None:
            bias = _hide(bias, _with_context(visible_NN, sees_context_N, slots)[..., :keys], q.dtype)
        window = self.memory.window() if causal else None
        if window is not None and positions_BNP is not None:
            bias = _hide(bias, _near(positions_BNP, context, window, run)[..., :keys], q.dtype)
        placed_v, choice = v, None if recalled is None else choice_of(recalled, before, slots)
        if choice is not None and context is not None:
            bias = bias if choice.visible_BNR is None else _hide(bias, choice.visible(v.shape[2]), q.dtype)
            placed_v, context = choice.spread(v, context)
        seen: dict[str, Any] = {"causal": causal, "key_padding_mask": padding_BN, "context": context, "bias_BHNM": bias}
        usage_BL = mean_weights(placed_q, placed_k, **seen) if self.memory.weighs else None
        if self.own_keys:
            result = self.core(placed_q, placed_k, placed_v, **seen, x_BND=h_BND, want_lse=self.memory.wants_lse)
        else:
            result = self._attend_context(placed_q, context, bias, h_BND)
        y_BHNE = result.out_BHNV if choice is None else choice.gather(result.out_BHNV)
        if self.memory.wants_lse:
            reading = reading._replace(lse_BHN=result.lse_BHN)
        plain = plain_weights(self.output) if output is self.output else None
        y_BND = self.memory.project(y_BHNE, query, reading, output, plain)
        y_BND = self.dropout(self.memory.finish(y_BND, query, reading))
        return Attended(y_BND, k, v, query, reading, result.auxiliary_loss, usage_BL)

    def _attend_context(
        self, q: Tensor, context: Context | None, bias_BHNM: Tensor | None, h_BND: Tensor
    ) -> AttentionOutput:
        """Attention of all queries over all valid slots of the context."""
        if context is None:
            return AttentionOutput(torch.zeros_like(q))
        rows = q.shape[0]
        k_BHME, v_BHME, empty_BM = (t.expand(rows, *t.shape[1:]) for t in (*context[:2], ~context.valid_BM))
        return self.core(q, k_BHME, v_BHME, key_padding_mask=empty_BM, bias_BHNM=bias_BHNM, x_BND=h_BND)

    def _recall(self, recalled: Recalled | None) -> Context | None:
        if recalled is None:
            return None
        hidden_BMD = torch.where(recalled.valid_BM[..., None], recalled.hidden_BMD, 0)
        k, v = self.project_kv(hidden_BMD)
        if recalled.weight_BM is not None:
            v = v * recalled.weight_BM[:, None, :, None]
        return Context(k, v, recalled.positions_BMP, recalled.valid_BM, recalled.consecutive)

    def _place(
        self,
        q: Tensor,
        k: Tensor,
        positions_BNP: Tensor | None,
        context: Context | None,
        bias: Tensor | None,
        run: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Context | None]:
        """Apply positions to queries, keys and the context's keys, and make empty slots of the context harmless."""
        if context is not None:
            keep = context.valid_BM[:, None, :, None]
            # A NaN in an empty slot would survive a mask on the logits.
            k_BHME, v_BHME = (torch.where(keep, t, 0) for t in (context.k_BHME, context.v_BHME))
            context = context._replace(k_BHME=k_BHME, v_BHME=v_BHME)
        if positions_BNP is None:
            return q, k, bias, context
        if context is not None:
            context = context._replace(k_BHME=self.positions.rotate(context.k_BHME, context.positions_BMP))
        own = self.positions.bias(q, positions_BNP, _of_all(positions_BNP, context), causal_run=run)
        if own is not None:
            if not self.own_keys:
                own = own[..., : own.shape[-1] - positions_BNP.shape[1]]
            bias = own if bias is None else own + bias
        placed_k = self.positions.rotate(k, positions_BNP) if self.own_keys else k
        return self.positions.query(q, positions_BNP), placed_k, bias, context


def _of_all(positions_BNP: Tensor, context: Context | None) -> Tensor:
    """(B, M + N, P): positions of the keys of context and segment."""
    if context is None:
        return positions_BNP
    return torch.cat([context.positions_BMP.expand(positions_BNP.shape[0], -1, -1), positions_BNP], 1)


def _hide(bias_BHNM: Tensor | None, visible_BHNM: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias with minus infinity where a token must not look."""
    if bias_BHNM is None:
        bias_BHNM = torch.zeros_like(visible_BHNM, dtype=dtype)
    return bias_BHNM.masked_fill(~visible_BHNM, -torch.inf)


def _with_context(visible_NN: Tensor, sees_context_N: Tensor | None, slots: int) -> Tensor:
    """(1, 1, N, slots + N) from what is visible in the segment."""
    n = visible_NN.shape[0]
    context_NM = visible_NN.new_ones(n, slots) if sees_context_N is None else sees_context_N[:, None].expand(n, slots)
    return torch.cat([context_NM, visible_NN], 1)[None, None]


def _near(positions_BNP: Tensor, context: Context | None, window: int, run: bool) -> Tensor:
    """(B or 1, 1, N, M + N): keys less than `window` positions before the query."""
    slots = 0 if context is None else context.k_BHME.shape[2]
    if run:
        n, device = positions_BNP.shape[1], positions_BNP.device
        query_BN1 = torch.arange(slots, slots + n, device=device)[None, :, None]
        key_B1M = torch.arange(slots + n, device=device)[None, None]
    else:
        query_BN1 = positions_BNP[..., :1]
        key_B1M = _of_all(positions_BNP, context)[..., 0][:, None]
    return (query_BN1 - key_B1M < window)[:, None]


def join(first: Context | None, second: Context | None) -> Context | None:
    """Both contexts, one behind the other; a context of one row serves all rows."""
    if first is None or second is None:
        return first if second is None else second
    rows = max(first.k_BHME.shape[0], second.k_BHME.shape[0])
    pairs = [[t.expand(rows, *t.shape[1:]) for t in pair] for pair in zip(first[:4], second[:4], strict=True)]
    (k_BHME, v_BHME), (positions_BMP, valid_BM) = (
        [torch.cat(pair, dim) for pair in some] for some, dim in ((pairs[:2], 2), (pairs[2:], 1))
    )
    return Context(k_BHME, v_BHME, positions_BMP, valid_BM)


def shows_the_future(memory: str) -> str:
    """Message for a memory in a causal model that cannot have it."""
    return (
        f"memory {memory} shows each token the rest of its segment and cannot serve a causal model; "
        "take its causal form (for GRC: memory='grc_stream'; for crtn: scope='previous' or 'token')"
    )
