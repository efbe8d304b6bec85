"""The attention sublayer: projections, positions, a memory and an attention mechanism ("core") in one module.

    x -> norm -> q, k, v -> memory.read -> core -> memory.project (combine, output projection)

A memory that needs "in_front" reads and combines between norm and projections; "queries": it corrects projected ones.

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
from torch.nn import functional as F

from cached_transformers.attentions.softmax import SoftmaxAttention, key_weights
from cached_transformers.checks import at_least_one, none_true
from cached_transformers.interfaces.attention import Attention, AttentionOutput
from cached_transformers.interfaces.capabilities import CORE_WORDS, refuse_misfit
from cached_transformers.interfaces.contexts import join, logits_of, widened
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import Context, LayerMemory, Linear, Offer, Query, Reading, Trace
from cached_transformers.linear_maps import Weights, call_with, matrix_of, plain_weights
from cached_transformers.memories.parts.composite import SideBySide, members_of, stands_in_front
from cached_transformers.memories.parts.late_gradients import mapped
from cached_transformers.positions import Positions
from cached_transformers.state import State


class LayerState(NamedTuple):
    """State of a layer whose core carries one; other layers have only their memory's state."""

    memory: State
    core: State


class Attended(NamedTuple):
    """Result of a `SelfAttention`, with the inputs of the memory's `write`."""

    y_BND: Tensor
    query: Query
    reading: Reading
    auxiliary_loss: Tensor | None
    weights_BHWL: Tensor | None = None
    core_state: State = ()


class Keeper(Protocol):
    """Receives the first tokens of a partial segment, for incremental decoding of the next ones."""

    def open(self, state: State, query: Query) -> Reading:
        """Open the memory for the segment, and read for its first tokens."""
        ...

    def take(self, k_BHNE: Tensor, v_BHNE: Tensor, context: Context | None, core_state: State) -> None:
        """Keep rotated keys, values and the context, or the core's state."""
        ...


class TokenProjections(nn.Module):
    """Norm and projections of an attention layer for a model memory's tokens around the segment."""

    def __init__(self, attention: SelfAttention) -> None:
        super().__init__()
        self.norm, self.qkv, self.output = (copy.deepcopy(m) for m in (attention.norm, attention.qkv, attention.output))


def by_place(x_BND: Tensor, segment: tuple[int, int], inside: Linear, outside: Linear) -> Tensor:
    """Apply `inside` to the segment's tokens, given as (start, length), and `outside` to the tokens around them."""
    start, length = segment
    front, middle, back = x_BND.split([start, length, x_BND.shape[1] - start - length], 1)
    return torch.cat([outside(front), inside(middle), outside(back)], 1)


class _Maps(NamedTuple):
    """Linear maps of one forward; `qkv` is None for the layer's own, `plain` holds the output's weights if usable."""

    norm: Linear
    qkv: Linear | None
    output: Linear
    plain: Weights


class SelfAttention(nn.Module):
    """Multi-head self-attention with a memory.

    Args:
        width: D. heads: H.
        core: attention mechanism; None for exact softmax attention.
        memory: layer memory; None for none.
        positions: scheme for queries and keys (rotary, bias); tokens are embedded by the model.
        norm: applied to the input and to hidden states that a memory stores; None for the identity.
        causal: no output depends on a later token.
        bias: whether the projections of q, k, v have biases. output_bias: whether the output projection has one.
        shared_query_key: one projection serves as queries and keys (Reformer, arXiv:2001.04451).
        project_output: whether there is an output projection; without, the result is the concatenated heads.
        reduction: module called with (x, size) that shortens the input of keys and values (PVT).
        dropout: on the output.
        head_width: E, so that all heads together may be wider or narrower than D; None for D / H.
        scale: factor of the logits, None for 1 / sqrt(E). It multiplies the queries, so that every core and memory
            still divides by sqrt(E).
        kv_heads: G, heads of keys and values, each shared by H / G neighbouring heads of queries (grouped queries,
            arXiv:2305.13245; 1 is one for all, arXiv:1911.02150); None for H. Cores and memories see H heads, repeated.

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
        at_least_one("; None is width / heads", head_width=head_width)
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
        """Widths of queries, keys and values in the fused projection."""
        keys = self.inner // self.heads * self.kv_heads
        return [self.inner, keys] if self.shared_query_key else [self.inner, keys, keys]

    def _needs(self) -> dict[str, str]:
        """Capabilities that the core must have, and for each the part that needs it."""
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
        if self.causal and "bidirectional" in self.memory.needs:
            raise ValueError(shows_the_future(memory))
        refuse_misfit(self._needs(), self.core.can, self.core.title)
        if "turn" in self.memory.needs and type(self.positions).query is not Positions.query:
            scheme = type(self.positions).__name__
            raise ValueError(f"memory {memory} needs turned keys, and {scheme} turns none; take relative=False")
        if self.inner != self.width:
            if type(self.memory) is not LayerMemory or type(self.core) is not SoftmaxAttention:
                raise ValueError(
                    f"head_width={self.inner // self.heads}: {self.heads} heads must be as wide together as the layer, "
                    f"{self.width}, for memory {memory} and attention {core}; take "
                    f"head_width={self.width // self.heads}, or memory=None with attention='softmax'"
                )
            if isinstance(self.output, nn.Identity):
                raise ValueError(
                    f"project_output=False needs heads as wide together as the layer, {self.width}, not {self.inner}"
                )
        if self.shared_query_key and self.query_factor != 1:
            raise ValueError("shared_query_key=True has no separate queries to scale; leave scale out")
        if self.shared_query_key and "queries" in self.memory.needs:
            raise ValueError(
                f"shared_query_key=True: memory {memory} corrects queries, which are the keys as well; leave one out"
            )

    def init_state(self, batch_size: int, like: Tensor) -> State:
        """State before the first segment: the memory's, and the core's if it carries one."""
        memory = self.memory.init_state(batch_size, like)
        if not self.core.carry:
            return memory
        head_width = self.inner // self.heads
        return LayerState(memory, self.core.init_state(batch_size, self.heads, head_width, head_width, like))

    def write(self, state: State, trace: Trace, core_state: State) -> tuple[State, Tensor | None]:
        """Return the state after the segment, and the memory's auxiliary loss or None."""
        if not self.core.carry:
            return self.memory.write(state, trace)
        memory, loss = self.memory.write(state.memory if len(state) else (), trace)
        return LayerState(memory, core_state), loss

    def _heads(self, t_BND: Tensor) -> Tensor:
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _of_all_heads(self, t_BNX: Tensor) -> Tensor:
        """(B, H, N, E) of keys or values, repeated if heads share them; without a copy if all heads share one."""
        t_BGNE = t_BNX.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        each = self.heads // self.kv_heads
        return t_BGNE if each == 1 else t_BGNE[:, :, None].expand(-1, -1, each, -1, -1).flatten(1, 2)

    def _linear(self, x: Tensor, first: int, last: int, frozen: bool = False) -> Tensor:
        """Outputs first..last of the fused projection."""
        if not frozen:
            return mapped(self.qkv, x, first, last)
        weight, bias = (None if t is None else t[first:last].detach() for t in matrix_of(self.qkv))
        assert weight is not None
        return F.linear(x, weight, bias)

    def project_kv(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
        """Map hidden states to unrotated keys and values (B, H, M, E); see `ProjectKV`."""
        if normed:
            h_BMD = hidden_BMD
        elif frozen:
            constants = {name: parameter.detach() for name, parameter in self.norm.named_parameters()}
            h_BMD = call_with(self.norm, constants, hidden_BMD)
        else:
            h_BMD = self.norm(hidden_BMD)
        return self._keys_values(h_BMD, frozen)

    def _keys_values(self, h_BMD: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        first = 0 if self.shared_query_key else self.inner
        k, v = self._linear(h_BMD, first, sum(self._projected()), frozen).chunk(2, -1)
        return self._of_all_heads(k), self._of_all_heads(v)

    def _split(self, qkv_BNP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the fused projection into queries, keys and values."""
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
        """Attend over the segment and the contexts of the memories.

        Args:
            x_BND: tokens, before the norm.
            positions_BNP: for position schemes of queries and keys, and memories that store positions.
            state: of memory and core, from `init_state` or `write`.
            padding_BN: bool, True = padding.
            context: from a model memory, placed after the layer memory's own.
            visible_NN: bool, token i sees token j; replaces the causal mask.
            consecutive: each position is the last one plus 1, so that relative positions are cheaper.
            bias_BHNM: added to the logits (a shift mask).
            size: (height, width) of the token map.
            segment: (start, length) of the segment's tokens; None for all.
            others: norm and projections of the tokens around the segment; None for the layer's own.
            keep: takes the keys, values and context for later tokens of the segment; the state is then not written.
        """
        maps = self._maps(segment, others)
        memory_state, core_state = state if self.core.carry and len(state) else (state, ())
        turn = self.positions.rotate if "turn" in self.memory.needs else None
        inputs = Query(maps.norm(x_BND), None, positions_BNP, padding_BN, size, turn=turn, segment=segment)
        query, in_front = self._query(inputs, memory_state, maps)
        if keep is None:
            reading = read_segment(self.memory, memory_state, query, self.project_kv)
        else:
            reading = keep.open(memory_state, query)
        if in_front:
            reading = reading._replace(carry=tuple(f or r for f, r in zip(in_front, reading.carry, strict=True)))
        if reading.query_BND is not None:
            query = query._replace(q_BHNE=self.corrected(query.q_BHNE, reading.query_BND))
        context = join(reading.context, context(self.project_kv) if callable(context) else context)
        causal = self.causal and visible_NN is None
        run = causal and consecutive and (context is None or context.consecutive)
        q, k, bias, distances, context = self._place(query, context, bias_BHNM, run)
        bias = self._mask(bias, query, context, visible_NN, run)
        mask: dict[str, Any] = {"causal": causal, "key_padding_mask": padding_BN, "context": context, "bias_BHNM": bias}
        weights = None
        if "weights" in self.memory.needs:
            weights = key_weights(q, k, **mask, columns_BW=query.last(self.memory.observe))
        assert query.v_BHNE is not None
        v = query.v_BHNE if context is None else widened(query.v_BHNE, context.v_BHME.shape[-1])
        more = {"distances_BHNK": distances, "x_BND": query.x_BND, "state": core_state, "want_state": keep is not None}
        result = self._attend(q, k, v, mask, more)
        if keep is not None:
            keep.take(k, query.v_BHNE, context, result.state)
        y_BHNE = result.out_BHNV
        if context is not None and context.gather is not None:
            y_BHNE = context.gather(y_BHNE)
        if "lse" in self.memory.needs:
            reading = reading._replace(lse_BHN=result.lse_BHN)
        y_BND = self.dropout(self.memory.project(y_BHNE, query, reading, maps.output, maps.plain))
        return Attended(y_BND, query, reading, result.auxiliary_loss, weights, result.state)

    def _maps(self, segment: tuple[int, int] | None, others: TokenProjections | None) -> _Maps:
        """Norm and projections of the layer, or of segment and memory tokens separately."""
        if segment is None or others is None:
            return _Maps(self.norm, None, functools.partial(mapped, self.output), plain_weights(self.output))
        pairs = ((getattr(self, name), getattr(others, name)) for name in ("norm", "qkv", "output"))
        norm, qkv, output = (functools.partial(by_place, segment=segment, inside=i, outside=o) for i, o in pairs)
        return _Maps(norm, qkv, output, None)

    def _query(self, inputs: Query, memory_state: State, maps: _Maps) -> tuple[Query, list[Reading | None]]:
        """Project queries, keys and values, after the readings of memories before the projections ("in_front")."""
        in_front: list[Reading | None] = []
        if isinstance(self.memory, SideBySide) and stands_in_front(self.memory):
            h_BND, in_front = self.memory.read_in_front(memory_state, inputs, self.heads)
            inputs = inputs._replace(x_BND=h_BND)
        h_BND = inputs.x_BND
        q, k, v = self._project(h_BND, inputs.size) if maps.qkv is None else self._split(maps.qkv(h_BND))
        if self.query_factor != 1:
            q = q * self.query_factor
        return inputs._replace(q_BHNE=q, k_BHNE=k, v_BHNE=v), in_front

    def corrected(self, q_BHNE: Any, term_BND: Tensor) -> Tensor:
        """Queries with the memory's term."""
        term_BHNE = self._heads(term_BND.reshape(len(q_BHNE), q_BHNE.shape[2], -1).to(q_BHNE.dtype))
        return q_BHNE + (term_BHNE if self.query_factor == 1 else term_BHNE * self.query_factor)  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: dict[str, Any], more: dict[str, Any]) -> AttentionOutput:
        """Call the core with its attention mask and with further inputs."""
        return self.core(q, k, v, **mask, **more, want_lse="lse" in self.memory.needs)

    def _place(
        self, query: Query, context: Context | None, bias: Tensor | None, run: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Context | None]:
        """Apply positions to queries, keys and the context's keys, and zero empty slots of the context.

        Returns:
            Queries, keys, bias, logits by distance if the core looks them up, and the context.
        """
        q, k, v, positions_BNP = query.q_BHNE, query.k_BHNE, query.v_BHNE, query.positions_BNP
        assert q is not None and k is not None and v is not None
        slots = 0
        if context is not None:
            slots = context.k_BHME.shape[2]
            if not (context.clean or none_true(~context.valid_BM)):
                # A NaN in an empty slot would survive a mask on the logits.
                filled = context.valid_BM[:, None, :, None]
                k_BHME, v_BHME = (torch.where(filled, t, 0) for t in (context.k_BHME, context.v_BHME))
                context = context._replace(k_BHME=k_BHME, v_BHME=v_BHME, attend=None)
        look_up = run and "weights" not in self.memory.needs and self.core.looks_up(q, k, v)
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

    def _mask(
        self, bias: Tensor | None, query: Query, context: Context | None, visible_NN: Tensor | None, run: bool
    ) -> Tensor | None:
        """Add the attention mask of context, model memory and window to the bias."""
        assert query.q_BHNE is not None and query.k_BHNE is not None
        dtype, keys = query.q_BHNE.dtype, query.k_BHNE.shape[2] + (0 if context is None else context.k_BHME.shape[2])
        tokens = query.q_BHNE.shape[2]
        if context is not None and context.bias_BHM is not None:
            added = F.pad(context.bias_BHM[:, :, None].to(dtype), (0, query.k_BHNE.shape[2])).expand(-1, -1, tokens, -1)
            bias = added if bias is None else bias + added
        visible = _visible(visible_NN, context, tokens)
        if visible is not None:
            bias = _hide(bias, visible[..., :keys], dtype)
        window = self.memory.window() if self.causal and visible_NN is None else None
        if window is not None and query.positions_BNP is not None:
            bias = _hide(bias, _near(query.positions_BNP, context, window, run)[..., :keys], dtype)
        return bias


def check_kv_heads(heads: int, kv_heads: int | None, shared_query_key: bool = False) -> int:
    """Return G, the number of heads of keys.

    Raises:
        ValueError: it does not divide the heads, or shared_query_key=True has another number of keys than queries.
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
    """Add the logarithm of the visible shares to the bias: minus infinity for hidden slots."""
    if visible_BHNM.dtype != torch.bool:
        shares_BHNM = logits_of(visible_BHNM).to(dtype)
        return shares_BHNM if bias_BHNM is None else bias_BHNM + shares_BHNM
    if bias_BHNM is None:
        bias_BHNM = torch.zeros_like(visible_BHNM, dtype=dtype)
    return bias_BHNM.masked_fill(~visible_BHNM, -torch.inf)


def _visible(visible_NN: Tensor | None, context: Context | None, tokens: int) -> Tensor | None:
    """(B or 1, 1, N, M + N): the keys of context and segment, or shares of them, that each token sees; None for all."""
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
    """Return the message for a bidirectional memory in a causal model."""
    return (
        f"memory {memory} shows each token the rest of its segment and cannot serve a causal model; "
        "take its causal form (for GRC: memory='grc_stream'; for crtn: scope='previous' or 'token')"
    )
