"""The attention sublayer: the one place where projections, positions, a memory and an attention core meet.

    x -> norm -> q, k, v -> memory.read -> core -> memory.project (combine, output projection)

A memory that stands in front ("in_front") reads and combines between norm and projections.

Legend: B rows, N tokens, M slots, H heads, E head width, D model width (H * E unless said otherwise), P position
channels.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from cached_transformers.attentions.softmax import SoftmaxAttention, key_weights
from cached_transformers.interfaces.attention import Attention, AttentionOutput
from cached_transformers.interfaces.capabilities import CORE_WORDS, refuse_misfit
from cached_transformers.interfaces.contexts import join, logits_of, widened
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import Context, LayerMemory, Linear, Offer, Query, Reading, Trace
from cached_transformers.linear_maps import matrix_of, plain_weights
from cached_transformers.memories.parts.composite import SideBySide, members_of, stands_in_front
from cached_transformers.memories.parts.late_gradients import mapped
from cached_transformers.positions import Positions
from cached_transformers.state import State


class LayerState(NamedTuple):
    """State of a layer whose core carries one; that of other layers is their memory's."""

    memory: State
    core: State


class Attended(NamedTuple):
    """Result of a `SelfAttention`, with what the memory's `write` needs."""

    y_BND: Tensor
    query: Query
    reading: Reading
    auxiliary_loss: Tensor | None
    weights_BHNL: Tensor | None = None
    core_state: State = ()


class Keeper(Protocol):
    """Takes what is known of a segment's first tokens, for those that come one at a time."""

    def open(self, state: State, query: Query) -> Reading:
        """What the tokens read of a memory, which is opened for the segment."""
        ...

    def take(self, k_BHNE: Tensor, v_BHNE: Tensor, context: Context | None, core_state: State) -> None:
        """Keys with their positions, values, and what is attended beside them; or what the core goes on with."""
        ...


class TokenProjections(nn.Module):
    """Norm and projections of an attention layer for the tokens that a model memory puts round the segment."""

    def __init__(self, attention: SelfAttention) -> None:
        super().__init__()
        self.norm, self.qkv, self.output = (copy.deepcopy(m) for m in (attention.norm, attention.qkv, attention.output))


def by_place(x_BND: Tensor, segment: tuple[int, int], inside: Linear, outside: Linear) -> Tensor:
    """`inside` of the segment's tokens, given as (start, length), and `outside` of those round it."""
    start, length = segment
    front, middle, back = x_BND.split([start, length, x_BND.shape[1] - start - length], 1)
    return torch.cat([outside(front), inside(middle), outside(back)], 1)


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
        kv_heads: G, heads of keys and values, each of H / G neighbouring heads of queries (grouped queries,
            arXiv:2305.13245; 1 is one for all, arXiv:1911.02150); H when None. Projections make G of them; cores and
            memories see them repeated, H as ever, so that any may be combined with it.

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
        kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or (head_width is None and width % heads):
            raise ValueError(f"width={width} must be a positive multiple of heads={heads}")
        if head_width is not None and head_width < 1:
            raise ValueError(f"head_width={head_width} must be at least 1; None is width / heads")
        self.width, self.heads, self.causal = width, heads, causal
        self.norm = norm if norm is not None else nn.Identity()
        self.shared_query_key = shared_query_key
        self.inner = width if head_width is None else heads * head_width
        self.kv_heads = check_kv_heads(heads, kv_heads, shared_query_key)
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(self.inner // heads)
        self.qkv = nn.Linear(width, sum(self._projected()), bias=bias)
        self.output: nn.Module = nn.Linear(self.inner, width, bias=output_bias) if project_output else nn.Identity()
        self.core = core if core is not None else SoftmaxAttention()
        self.memory = memory if memory is not None else LayerMemory()
        if stands_in_front(self.memory) and not isinstance(self.memory, SideBySide):
            self.memory = SideBySide([self.memory])
        self.positions = positions if positions is not None else Positions()
        self.reduction = reduction
        self.dropout = nn.Dropout(dropout)
        self._check()

    def _projected(self) -> list[int]:
        """Outputs of the fused projection: of queries, keys and values, as far as each has its own."""
        keys = self.inner // self.heads * self.kv_heads
        return [self.inner, keys] if self.shared_query_key else [self.inner, keys, keys]

    def _needs(self) -> dict[str, str]:
        """What the core has to be able to do, and for whom."""
        memory, positions = f"memory {type(self.memory).__name__}", type(self.positions).__name__
        members = members_of(self.memory)
        needs = {word: f"memory {type(m).__name__}" for m in members for word in m.needs if word in CORE_WORDS}
        if type(self.positions).bias is not Positions.bias:
            needs["bias"] = f"the position scheme {positions}"
        elif self.causal and self.memory.window() is not None:
            needs["bias"] = f"the window of {memory}"
        return needs | {"causal" if self.causal else "bidirectional": "a layer with causal=" + str(self.causal)}

    def _check(self) -> None:
        memory, core = type(self.memory).__name__, type(self.core).__name__
        refuse_misfit(self._needs(), self.core.can, self.core.title)
        if self.causal and "bidirectional" in self.memory.needs:
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

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """State of rows that have seen nothing: the memory's, and the core's where it carries one."""
        memory = self.memory.init_state(batch_size, like)
        if not self.core.carry:
            return memory
        head_width = self.inner // self.heads
        return LayerState(memory, self.core.init_state(batch_size, self.heads, head_width, head_width, like))

    def write(self, state: State, trace: Trace, core_state: State) -> tuple[State, Tensor | None]:
        """State behind the segment, and an auxiliary loss of the memory or None."""
        if not self.core.carry:
            return self.memory.write(state, trace)
        memory, loss = self.memory.write(state.memory if len(state) else (), trace)
        return LayerState(memory, core_state), loss

    def _heads(self, t_BND: Tensor) -> Tensor:
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _of_all_heads(self, t_BNX: Tensor) -> Tensor:
        """(B, H, N, E) of keys or values, repeated where heads share them; without a copy where all do."""
        t_BGNE = t_BNX.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        each = self.heads // self.kv_heads
        return t_BGNE if each == 1 else t_BGNE[:, :, None].expand(-1, -1, each, -1, -1).flatten(1, 2)

    def _linear(self, x: Tensor, first: int, last: int, frozen: bool = False) -> Tensor:
        """Rows first..last of the fused projection."""
        if not frozen:
            return mapped(self.qkv, x, first, last)
        weight, bias = (None if t is None else t[first:last].detach() for t in matrix_of(self.qkv))
        assert weight is not None
        return F.linear(x, weight, bias)

    def project_kv(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
        """Unrotated keys and values (B, H, M, E) of hidden states, through this layer's norm and projections.

        Args:
            hidden_BMD: hidden states.
            frozen: norm and projections receive no gradient; the hidden states do.
            normed: the states went through the norm already.
        """
        if normed:
            h_BMD = hidden_BMD
        elif frozen:
            constants = {name: parameter.detach() for name, parameter in self.norm.named_parameters()}
            h_BMD = functional_call(self.norm, constants, (hidden_BMD,))
        else:
            h_BMD = self.norm(hidden_BMD)
        return self._keys_values(h_BMD, frozen)

    def _keys_values(self, h_BMD: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        first = 0 if self.shared_query_key else self.inner
        k, v = self._linear(h_BMD, first, sum(self._projected()), frozen).chunk(2, -1)
        return self._of_all_heads(k), self._of_all_heads(v)

    def _split(self, qkv_BNP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from all that was projected."""
        if self.shared_query_key:
            q, v = (self._heads(t) for t in qkv_BNP.chunk(2, -1))
            return q, q, v
        q, k, v = qkv_BNP.split(self._projected(), -1)
        return self._heads(q), self._of_all_heads(k), self._of_all_heads(v)

    def _project(self, h_BND: Tensor, size: tuple[int, int] | None) -> tuple[Tensor, Tensor, Tensor]:
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
        context: Offer | None = None,
        visible_NN: Tensor | None = None,
        consecutive: bool = False,
        bias_BHNM: Tensor | None = None,
        size: tuple[int, int] | None = None,
        segment: tuple[int, int] | None = None,
        others: TokenProjections | None = None,
        keep: Keeper | None = None,
    ) -> Attended:
        """Attend over the segment and what the memories offer.

        Args:
            x_BND: tokens, before the norm.
            positions_BNP: needed by schemes that act on queries and keys, and by memories that store positions.
            state: of memory and core, as `init_state` and `write` give it.
            padding_BN: bool, True = padding.
            context: from a model memory, placed behind that of the layer's own memory.
            visible_NN: bool, token i sees token j; replaces the causal mask.
            consecutive: the positions are those of neighbours, one each, which makes relative positions cheaper.
            bias_BHNM: added to the logits (a shift mask).
            size: (height, width) of the token map.
            segment: (start, length) of the segment's tokens; None for all.
            others: what the tokens round the segment have in place of norm and projections; None for the same.
            keep: takes what later tokens of the segment need; the state is then not written.
        """
        norm: Linear = self.norm
        qkv: Linear | None = None
        output: Linear = functools.partial(mapped, self.output)
        if segment is not None and others is not None:
            norm = functools.partial(by_place, segment=segment, inside=self.norm, outside=others.norm)
            qkv = functools.partial(by_place, segment=segment, inside=self.qkv, outside=others.qkv)
            output = functools.partial(by_place, segment=segment, inside=self.output, outside=others.output)
        memory_state, core_state = state if self.core.carry and len(state) else (state, ())
        h_BND = norm(x_BND)
        in_front: list[Reading | None] = []
        if isinstance(self.memory, SideBySide) and stands_in_front(self.memory):
            asked = Query(h_BND, None, positions_BNP, padding_BN, size, segment=segment)
            h_BND, in_front = self.memory.read_in_front(memory_state, asked, self.heads)
        q, k, v = self._project(h_BND, size) if qkv is None else self._split(qkv(h_BND))
        if self.query_factor != 1:
            q = q * self.query_factor
        query = Query(h_BND, q, positions_BNP, padding_BN, size, k, v, segment)
        if keep is None:
            reading = read_segment(self.memory, memory_state, query, self.project_kv)
        else:
            reading = keep.open(memory_state, query)
        if in_front:
            reading = reading._replace(carry=tuple(f or r for f, r in zip(in_front, reading.carry, strict=True)))
        context = join(reading.context, context(self.project_kv) if callable(context) else context)
        causal = self.causal and visible_NN is None
        run = causal and consecutive and (context is None or context.consecutive)
        look_up = run and "weights" not in self.memory.needs and self.core.looks_up(q, k, v)
        placed_q, placed_k, bias, distances, context = self._place(
            q, k, positions_BNP, context, bias_BHNM, run, look_up
        )
        slots = 0 if context is None else context.k_BHME.shape[2]
        keys = slots + k.shape[2]
        visible = _visible(visible_NN, context, q.shape[2])
        if visible is not None:
            bias = _hide(bias, visible[..., :keys], q.dtype)
        window = self.memory.window() if causal else None
        if window is not None and positions_BNP is not None:
            bias = _hide(bias, _near(positions_BNP, context, window, run)[..., :keys], q.dtype)
        mask: dict[str, Any] = {"causal": causal, "key_padding_mask": padding_BN, "context": context, "bias_BHNM": bias}
        weights = key_weights(placed_q, placed_k, **mask) if "weights" in self.memory.needs else None
        placed_v = v if context is None else widened(v, context.v_BHME.shape[-1])
        more = {"distances_BHNK": distances, "x_BND": h_BND, "state": core_state, "want_state": keep is not None}
        result = self._attend(placed_q, placed_k, placed_v, mask, more)
        if keep is not None:
            keep.take(placed_k, v, context, result.state)
        y_BHNE = result.out_BHNV
        if context is not None and context.gather is not None:
            y_BHNE = context.gather(y_BHNE)
        if "lse" in self.memory.needs:
            reading = reading._replace(lse_BHN=result.lse_BHN)
        plain = plain_weights(self.output) if segment is None or others is None else None
        y_BND = self.dropout(self.memory.project(y_BHNE, query, reading, output, plain))
        return Attended(y_BND, query, reading, result.auxiliary_loss, weights, result.state)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any], more: dict[str, Any]) -> AttentionOutput:
        """The core's result; `mask` says who sees what, `more` is what else cores may look at."""
        return self.core(q, k, v, **mask, **more, want_lse="lse" in self.memory.needs)

    def _place(
        self,
        q: Tensor,
        k: Tensor,
        positions_BNP: Tensor | None,
        context: Context | None,
        bias: Tensor | None,
        run: bool,
        look_up: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Context | None]:
        """Apply positions to queries, keys and the context's keys, and make empty slots of the context harmless.

        Returns:
            Queries, keys, bias, logits by distance where the core is to look them up, and the context.
        """
        slots = 0
        if context is not None:
            slots = context.k_BHME.shape[2]
            if not context.clean:
                # A NaN in an empty slot would survive a mask on the logits.
                keep = context.valid_BM[:, None, :, None]
                k_BHME, v_BHME = (torch.where(keep, t, 0) for t in (context.k_BHME, context.v_BHME))
                context = context._replace(k_BHME=k_BHME, v_BHME=v_BHME, attend=None)
        if positions_BNP is None:
            return q, k, bias, None, context
        if context is not None:
            k_BHME = self.positions.rotate(context.k_BHME, context.positions_BMP)
            if k_BHME is not context.k_BHME:
                context = context._replace(k_BHME=k_BHME, attend=None)
        distances = self.positions.by_distance(q, slots + q.shape[2]) if look_up else None
        placed = None
        if distances is None:
            placed = self.positions.bias(q, positions_BNP, _of_all(positions_BNP, context), causal_run=run)
        if placed is not None:
            if placed.shape[-1] > slots + k.shape[2]:
                placed = placed[..., : slots + k.shape[2]]
            bias = placed if bias is None else placed + bias
        placed_k = self.positions.rotate(k, positions_BNP[:, : k.shape[2]])
        return self.positions.query(q, positions_BNP), placed_k, bias, distances, context


def check_kv_heads(heads: int, kv_heads: int | None, shared_query_key: bool = False) -> int:
    """G.

    Raises:
        ValueError: it does not divide the heads, or keys are the queries, of which there are H.
    """
    if kv_heads is None:
        return heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}: 1 is one for all heads, None one for each")
    if shared_query_key and kv_heads != heads:
        raise ValueError(f"shared_query_key=True takes queries for keys, {heads} heads; leave kv_heads={kv_heads} out")
    return kv_heads


def _of_all(positions_BNP: Tensor, context: Context | None) -> Tensor:
    """(B, M + N, P): positions of the keys of context and segment."""
    if context is None:
        return positions_BNP
    return torch.cat([context.positions_BMP.expand(positions_BNP.shape[0], -1, -1), positions_BNP], 1)


def _hide(bias_BHNM: Tensor | None, visible_BHNM: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias with minus infinity where a token must not look, and less where it sees a share."""
    if visible_BHNM.dtype != torch.bool:
        shares_BHNM = logits_of(visible_BHNM).to(dtype)
        return shares_BHNM if bias_BHNM is None else bias_BHNM + shares_BHNM
    if bias_BHNM is None:
        bias_BHNM = torch.zeros_like(visible_BHNM, dtype=dtype)
    return bias_BHNM.masked_fill(~visible_BHNM, -torch.inf)


def _visible(visible_NN: Tensor | None, context: Context | None, tokens: int) -> Tensor | None:
    """(B or 1, 1, N, M + N): which keys of context and segment each token sees, or shares of them; None where no mask
    is needed."""
    slots_BHNM = None if context is None else context.visible_BHNM
    if visible_NN is None and slots_BHNM is None:
        return None
    if visible_NN is None:
        assert slots_BHNM is not None
        return F.pad(slots_BHNM, (0, tokens), value=True)
    if slots_BHNM is None:
        return F.pad(visible_NN, (0 if context is None else context.k_BHME.shape[2], 0), value=True)[None, None]
    return torch.cat([slots_BHNM, visible_NN.to(slots_BHNM.dtype).expand(*slots_BHNM.shape[:3], tokens)], -1)


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


def shows_the_future(memory: str) -> str:
    """Message for a memory in a causal model that cannot have it."""
    return (
        f"memory {memory} shows each token the rest of its segment and cannot serve a causal model; "
        "take its causal form (for GRC: memory='grc_stream'; for crtn: scope='previous' or 'token')"
    )
