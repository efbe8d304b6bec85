"""A memory whose keys and values an attention layer of transformers attends before those of its segment.

The layer's own code runs, with a KV cache that prepends the slots, and a mask with columns for them. Keys and values
are made of stored hidden states as the layer makes those of its tokens: by its own norm, projections and rotation,
each looked up at the time. Stored states are inputs of the block, before its norm, so that the current norm applies to
slots and tokens alike, and learns from both, as in a stack.

Legend: B rows, N tokens, W of these, M slots, L tokens of the partial segment up to here, or slots and tokens, K keys
that the layer has, H heads, G heads of keys, E head width, D width, P position channels.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.attentions.softmax import SoftmaxAttention, weights_of
from cached_transformers.integrations.hosts import Host, Site
from cached_transformers.integrations.memory_hooks import MemoryHook
from cached_transformers.integrations.memory_lookup import with_weights
from cached_transformers.integrations.segment_context import AttentionCall, SegmentContext, running
from cached_transformers.integrations.tracked_modules import track
from cached_transformers.interfaces.contexts import join, logits_of, widened
from cached_transformers.interfaces.memory import Context, LayerMemory, Linear, Reading
from cached_transformers.linear_maps import call_with

from .adapter_utils import first_of, lowered
from .memory_cache import OpenedLayer, keeps_opened


class SlotMask(NamedTuple):
    """Bool, the slots that a token sees, (B, 1, N, M); and addends of their logits, each or None: (B, H, 1, M) by a
    slope, (B, H or 1, N or 1, M) for shares from 0 to 1 and biases."""

    sees_BHNM: Tensor
    slope_BH1M: Tensor | None
    shares_BHNM: Tensor | None = None


class SlotCache:
    """The layer's KV cache, if it has one, with the slots before its keys."""

    def __init__(self, k_BGME: Tensor, v_BGME: Tensor, own: Any) -> None:
        self.k_BGME, self.v_BGME, self.own = k_BGME, v_BGME, own

    def update(self, k_BGNE: Tensor, v_BGNE: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots, of cached tokens, and of new ones."""
        if self.own is not None:
            k_BGNE, v_BGNE = self.own.update(k_BGNE, v_BGNE, *args, **kwargs)
        shared = k_BGNE.shape[1] // self.k_BGME.shape[1]  # Falcon gives each head its keys
        k_BGME, v_BGME = (t if shared == 1 else t.repeat_interleave(shared, 1) for t in (self.k_BGME, self.v_BGME))
        v_BGNE = widened(v_BGNE, v_BGME.shape[-1])
        return torch.cat([k_BGME.to(k_BGNE.dtype), k_BGNE], 2), torch.cat([v_BGME.to(v_BGNE.dtype), v_BGNE], 2)


class ContextHook(MemoryHook):
    """Lets a memory into one causal layer that can attend slots before its segment."""

    attends_context = True

    def __init__(self, site: Site, host: Host, number: int) -> None:
        super().__init__(site, host, number)
        stream = host.stream
        assert stream is not None and stream.stored is not None
        self.chains = [
            [*(track(site, module) for module in chain[:-1]), last]
            for chain, last in zip(stream.sources, self.sources, strict=True)
        ]
        stored = stream.stored
        self.norm, self.rotary = (None if m is None else track(site, m) for m in (stored.norm, stored.rotary))
        self.tracked += [module for chain in self.chains for module in chain[:-1]]
        self.tracked += [module for module in (self.norm, self.rotary) if module is not None]
        self.between, self.window = stream.between, stream.window
        self.turn, self.slope, self.cache, self.more = stored.turn, stored.slope, stored.cache, stored.more

    def install(self, memory: LayerMemory) -> None:
        super().install(memory)
        if "weights" in memory.needs:
            self.handles.append(self.layer.register_forward_hook(self.keep_weights, with_kwargs=True))

    def keep_weights(self, layer: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Record the attention weights of the last tokens: the layer's, which only eager attention gives, or its own.

        Raises:
            ValueError: the layer gives none, and its logits are not known.
        """
        context = running().segment
        call = None if context is None else context.attended[self.number]
        if context is None or call is None or call.mask is None or not context.writes:
            return
        query, mask = call.query, call.mask
        columns_BW = query.last(self.memory.observe)
        sees = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor):
            if self.more:
                who = f"memory {type(self.memory).__name__} needs the weights of {type(layer).__name__}"
                raise ValueError(f"{who}: {self.more}")
            q_BHNE, k_BHLE = self._compared(call)
            if self.slope is lowered:
                bias_BH1L = kwargs["alibi"].unflatten(0, (-1, self.heads))
                mask = bias_BH1L if mask.dtype == torch.bool else mask + bias_BH1L
            if mask.dtype != torch.bool:
                mask = mask.masked_fill(~sees, -torch.inf)
            cap = getattr(layer, "attn_logit_softcapping", None)
            call.weights_BHWL = weights_of(q_BHNE, k_BHLE, mask, query.padding_BN, columns_BW, cap)
            return
        if query.padding_BN is not None:
            sees = sees & ~query.padding_BN[:, None, :, None]
        weights = weights.detach().masked_fill(~sees, torch.nan)
        call.weights_BHWL = weights if columns_BW is None else weights.take_along_dim(columns_BW[:, None, :, None], 2)

    @torch.no_grad()
    def _compared(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Queries, and keys of slots and segment, with positions: their products over sqrt(E) are its logits."""
        query, slots_BGME, places_BL = call.query, call.slots_BGME, call.places_BL
        q, k = query.q_BHNE, query.k_BHNE
        assert q is not None and k is not None and places_BL is not None and slots_BGME is not None
        shared = self.heads // slots_BGME.shape[1]
        places_BL = torch.cat([places_BL[:, slots_BGME.shape[2] :], places_BL], 1)
        q, k = (self._turned(t, places_BL, query.x_BND) for t in (q, k[:, ::shared]))
        scale = first_of(self.layer, "scaling", "inv_norm_factor")
        if scale is not None:
            q = q * (scale * math.sqrt(q.shape[-1]))
        return q, torch.cat([slots_BGME.to(k.dtype), k], 2).repeat_interleave(shared, 1)

    def _turned(self, k_BGME: Tensor, places_BL: Tensor, x_BND: Tensor) -> Tensor:
        """Keys with the first of these positions; the other ones are the furthest that the layer has."""
        return self.turn(self.layer, None if self.rotary is None else self.rotary.module, k_BGME, places_BL, x_BND)

    def placed(
        self, shift_B1: Tensor, places_BL: Tensor, x_BND: Tensor, k_BGME: Tensor, positions_BMP: Tensor
    ) -> Tensor:
        """`Query.turn` of a call that has slots and tokens at these places."""
        rows = len(k_BGME)
        return self._turned(k_BGME, torch.cat([positions_BMP[..., 0] + shift_B1[:rows], places_BL[:rows]], 1), x_BND)

    def project_kv(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, M, E) without positions; see `ProjectKV`."""
        if self.norm is not None and not normed:
            hidden_BMD = _called(self.norm.module, hidden_BMD, frozen)
        _, k_BGME, v_BGME = self._projected(hidden_BMD, frozen, queries=False)
        return k_BGME, v_BGME

    def _projected(self, h_BND: Tensor, frozen: bool, queries: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        """Queries, keys and values of normed hidden states."""
        outputs: list[Tensor | None] = []
        for number, chain in enumerate(self.chains):
            if not queries and number == 0 and len(self.chains) > 1:
                outputs.append(None)
                continue
            t = _called(chain[0].module, h_BND, frozen)
            for tracked in chain[1:]:
                t = _called(tracked.module, t if self.between is None else self.between(t), frozen)
            outputs.append(t)
        return self.split(*outputs)

    def read_early(self, call: AttentionCall, context: SegmentContext, kwargs: dict[str, Any]) -> Reading | None:
        query, memory = call.query, self.memory
        opened = OpenedLayer() if context.opened_layers is None else context.opened_layers[self.number]
        reading: Reading | None = None
        if memory.needs & {"context", "queries"}:
            if "head" in memory.needs:  # it is read with queries, which the layer has not made yet
                query = self.with_heads(query, *self._projected(query.x_BND, False, queries=True))
            reading = with_weights(memory, self.read, query, context, self.project_kv)
        offer = None if context.offers is None else context.offers[self.number]
        offered = offer(opened.once(self.project_kv, len(query.x_BND))) if callable(offer) else offer
        attended = join(None if reading is None else reading.context, offered)
        if attended is not None or memory.window() is not None:
            self._attend(attended, call, opened, kwargs)
        return reading

    def _attend(
        self, attended: Context | None, call: AttentionCall, opened: OpenedLayer, kwargs: dict[str, Any]
    ) -> None:
        """Change the layer's call: slots before its own keys, and a mask of both."""
        if "exchange" in vars(self.layer) and not isinstance(self.layer.core, SoftmaxAttention):
            raise ValueError(
                f"memory {type(self.memory).__name__} has slots attended before the segment, which attention "
                f"{type(self.layer.core).__name__} that replaces the model's own cannot do; call "
                "restore_attention(model), or replace_attention(model, 'softmax')"
            )
        context: Any = call.context
        x_BND = call.query.x_BND
        own, n, window = kwargs.get(self.cache), x_BND.shape[1], self.memory.window()
        tokens_BL = context.positions_BLP[..., 0].to(x_BND.device)
        slots = None
        if attended is not None:
            slots = self._prepend(attended, tokens_BL[:, -n:], call, opened, kwargs)
        keys = n if own is None else own.get_mask_sizes(n, self.layer.layer_idx)[0]
        mask = kwargs.get("attention_mask")
        if mask is None:  # the order of the tokens
            mask = torch.ones(n, keys, dtype=torch.bool, device=x_BND.device).tril(keys - n)[None, None]
        if window is not None:
            mask = _hidden(mask, _near(tokens_BL[:, -n:], tokens_BL[:, -keys:], window))
        kwargs["attention_mask"] = call.mask = mask if slots is None else _with_slots(mask, slots)

    def _prepend(
        self, attended: Context, tokens_BN: Tensor, call: AttentionCall, opened: OpenedLayer, kwargs: dict[str, Any]
    ) -> SlotMask:
        """Give the layer the slots' keys and values, and return the mask of the slots."""
        context: Any = call.context
        x_BND = call.query.x_BND
        rows, n = x_BND.shape[:2]
        slots_BM, valid_BM = attended.positions_BMP[..., 0].expand(rows, -1), attended.valid_BM.expand(rows, -1)
        shift_B1 = context.shift_B1.to(x_BND.device)
        places_BL = torch.cat([slots_BM, tokens_BN.expand(rows, -1)], 1) + shift_B1
        if opened.slots is None or not keeps_opened():
            # A NaN in an empty slot would survive a mask on the logits.
            k, v = (torch.where(valid_BM[:, None, :, None], t, 0) for t in (attended.k_BHME, attended.v_BHME))
            opened.slots = self._turned(k, places_BL, x_BND), v
        k, v = opened.slots
        call.slots_BGME, call.places_BL = k, places_BL
        if "turn" in self.memory.needs:
            call.query = call.query._replace(turn=partial(self.placed, shift_B1, places_BL, x_BND))
        slope = None if self.slope is None else self.slope(self.layer, kwargs, places_BL[:, : k.shape[2]])
        kwargs[self.cache], call.gather = SlotCache(k, v, kwargs.get(self.cache)), attended.gather
        sees_BHNM = valid_BM[:, None, None].expand(-1, -1, n, -1)
        shares_BHNM = None
        if attended.visible_BHNM is not None and attended.visible_BHNM.dtype != torch.bool:
            sees_BHNM = sees_BHNM & (attended.visible_BHNM > 0)
            shares_BHNM = logits_of(attended.visible_BHNM).to(x_BND.dtype)
        elif attended.visible_BHNM is not None:
            sees_BHNM = sees_BHNM & attended.visible_BHNM
            context.varies = True
        if attended.bias_BHM is not None:
            bias_BH1M = attended.bias_BHM.repeat_interleave(self.heads // k.shape[1], 1)[:, :, None].to(x_BND.dtype)
            shares_BHNM = bias_BH1M if shares_BHNM is None else bias_BH1M + shares_BHNM
        for window in (self.window, self.memory.window()):
            if window is not None:
                sees_BHNM = sees_BHNM & _near(tokens_BN, slots_BM, window)
        return SlotMask(sees_BHNM, slope, shares_BHNM)

    def mix(self, call: AttentionCall, y_BND: Tensor, linear: Linear) -> Tensor:
        if call.gather is not None:
            y_BHNE = call.gather(y_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2))
            y_BND = y_BHNE.transpose(1, 2).flatten(2)
        return super().mix(call, y_BND, linear)


def _called(module: nn.Module, t: Tensor, frozen: bool) -> Any:
    """The module's output; with `frozen` without gradient for its parameters."""
    return call_with(module, {n: p.detach() for n, p in module.named_parameters()}, t) if frozen else module(t)


def _near(tokens_BN: Tensor, keys_BM: Tensor, window: int) -> Tensor:
    """(B, 1, N, M): keys less than `window` positions before the token."""
    return (tokens_BN[:, :, None] - keys_BM[:, None] < window)[:, None]


def _hidden(mask: Tensor, sees_BHNK: Tensor) -> Tensor:
    """The mask, bool with True = visible or additive, without the keys that a token does not see."""
    if mask.dtype == torch.bool:
        return mask & sees_BHNK
    return torch.where(sees_BHNK, mask, torch.finfo(mask.dtype).min)


def _with_slots(mask: Tensor, slots: SlotMask) -> Tensor:
    """The mask (B or 1, H or 1, N, K), bool or additive, after columns of the slots."""
    front, shares = slots.sees_BHNM, slots.shares_BHNM
    if shares is not None and mask.dtype == torch.bool:
        mask = _hidden(shares.new_zeros(()), mask)
    if mask.dtype != torch.bool:
        slope = mask.new_zeros(()) if slots.slope_BH1M is None else slots.slope_BH1M.to(mask.dtype)
        front = _hidden(slope if shares is None else slope + shares.to(mask.dtype), front)
    heads = max(front.shape[1], mask.shape[1])
    return torch.cat([front.expand(-1, heads, -1, -1), mask.expand(front.shape[0], heads, -1, -1)], -1)
