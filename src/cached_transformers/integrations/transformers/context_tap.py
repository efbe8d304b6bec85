"""A memory whose keys and values one attention layer of transformers attends in front of those of its segment.

The layer's own code runs: it is handed a cache that puts the slots in front of what it keeps, and a mask with columns
for them. Keys and values are made of stored states as the layer makes those of its tokens: by its own norm, projections
and rotation, each looked up where it stands at the time. What is stored went into the block and not yet through its
norm, so that the norm as it is now applies to slots and tokens alike, and learns from both, as in a stack.

Legend: B rows, N tokens, M slots, L tokens of the open segment up to here, K keys of these that the layer has,
H heads, G heads of keys, E head width, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.integrations.hosts import Host, Site
from cached_transformers.integrations.offload import with_weights
from cached_transformers.integrations.tracked_modules import Place, Spot, root_of
from cached_transformers.interfaces.contexts import join, logits_of, widened
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import Context, LayerMemory, Linear, ProjectKV, Query, Reading

from .segment_cache import Made
from .stream_tap import Passage, StreamTap


class Slots(NamedTuple):
    """Bool, which slots a token sees, (B, 1, N, M); and what is added to their logits, each or None: (B, H, 1, M) by a
    slope, (B, 1, N, M) where a token sees a share of them."""

    sees_BHNM: Tensor
    slope_BH1M: Tensor | None
    shares_BHNM: Tensor | None = None


class InFront:
    """Stands in the place of a layer's cache, if it has one: what the layer attends begins with the slots."""

    def __init__(self, k_BGME: Tensor, v_BGME: Tensor, own: Any) -> None:
        self.k_BGME, self.v_BGME, self.own = k_BGME, v_BGME, own

    def update(self, k_BGNE: Tensor, v_BGNE: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots, of kept tokens, and of new ones."""
        if self.own is not None:
            k_BGNE, v_BGNE = self.own.update(k_BGNE, v_BGNE, *args, **kwargs)
        shared = k_BGNE.shape[1] // self.k_BGME.shape[1]  # Falcon gives each head its keys
        k_BGME, v_BGME = (t if shared == 1 else t.repeat_interleave(shared, 1) for t in (self.k_BGME, self.v_BGME))
        v_BGNE = widened(v_BGNE, v_BGME.shape[-1])
        return torch.cat([k_BGME.to(k_BGNE.dtype), k_BGNE], 2), torch.cat([v_BGME.to(v_BGNE.dtype), v_BGNE], 2)


class Once:
    """`project_kv` for a segment that goes on: what was made for its first tokens serves the later ones."""

    def __init__(self, project_kv: ProjectKV, made: Made, rows: int) -> None:
        self.project_kv, self.made, self.rows, self.asked = project_kv, made, rows, 0

    def __call__(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
        if self.asked == len(self.made.pairs):
            pair = self.project_kv(hidden_BMD, frozen=frozen, normed=normed)
            k, v = (t.expand(self.rows, *t.shape[1:]) for t in pair)
            self.made.pairs.append((k, v))
        self.asked += 1
        return self.made.pairs[self.asked - 1]


class ContextTap(StreamTap):
    """Lets a memory into one causal layer that can attend slots in front of its segment."""

    def __init__(self, site: Site, host: Host, number: int) -> None:
        super().__init__(site, host, number)
        stream = host.stream
        assert stream is not None and stream.stored is not None

        def place(module: nn.Module) -> Place:
            return Place(*root_of(site, module))

        self.chains = [
            [*map(place, chain[:-1]), last] for chain, last in zip(stream.sources, self.sources, strict=True)
        ]
        stored = stream.stored
        self.norm, self.rotary = (None if m is None else place(m) for m in (stored.norm, stored.rotary))
        first: list[Spot] = [spot for chain in self.chains for spot in chain[:-1]]
        self.spots += [*first, *(spot for spot in (self.norm, self.rotary) if spot is not None)]
        self.between, self.window = stream.between, stream.window
        self.turn, self.slope, self.cache = stored.turn, stored.slope, stored.cache
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.mask: Tensor | None = None

    def attach(self, memory: LayerMemory, before: Callable[..., Any]) -> None:
        super().attach(memory, before)
        if "weights" in memory.needs:
            self.handles.append(self.layer.register_forward_hook(self.hear_weights))

    def hear_weights(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Keep the weights that the layer returns, which eager attention alone does."""
        mask, attended, self.mask = self.mask, self.attended, None
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if not isinstance(weights, Tensor):
            raise ValueError(
                f"memory {type(self.memory).__name__} needs the weights of {type(layer).__name__}, which gave none; "
                "call model.set_attn_implementation('eager')"
            )
        if attended is None or mask is None:
            return
        sees = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if attended.query.padding_BN is not None:
            sees = sees & ~attended.query.padding_BN[:, None, :, None]
        self.attended = attended._replace(weights_BHNL=weights.detach().masked_fill(~sees, torch.nan))

    def project_kv(self, hidden_BMD: Tensor, *, frozen: bool = False, normed: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, M, E) without positions; see `seam.memory.ProjectKV`."""
        run = _frozen if frozen else _called
        if self.norm is not None and not normed:
            hidden_BMD = run(self.norm.module, hidden_BMD)
        _, k_BGME, v_BGME = self._projected(hidden_BMD, run, queries=False)
        return k_BGME, v_BGME

    def _projected(
        self, h_BND: Tensor, run: Callable[[nn.Module, Tensor], Tensor], queries: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Queries, keys and values of what went through the norm."""
        outputs: list[Tensor | None] = []
        for number, chain in enumerate(self.chains):
            if not queries and number == 0 and len(self.chains) > 1:
                outputs.append(None)
                continue
            t = run(chain[0].module, h_BND)
            for spot in chain[1:]:
                t = run(spot.module, t if self.between is None else self.between(t))
            outputs.append(t)
        return self.split(*outputs)

    def look(self, call: dict[str, Any]) -> Reading | None:
        passage, query, memory = self.passage, self.query, self.memory
        assert passage is not None and query is not None
        made, project_kv = Made(), self.project_kv
        if passage.host_cache is not None:
            made = passage.host_cache.made[self.number]
            project_kv = Once(self.project_kv, made, query.x_BND.shape[0])
        reading: Reading | None = None
        if memory.needs & {"context"}:
            if "head" in memory.needs:  # it asks with queries, which the layer has not made yet
                query = self._with_heads(query, *self._projected(query.x_BND, _called, queries=True))
            reading = with_weights(memory, read_segment, memory, passage.states[self.number], query, project_kv)
        offer = None if passage.offers is None else passage.offers[self.number]
        offered = offer(project_kv) if callable(offer) else offer
        context = join(None if reading is None else reading.context, offered)
        if context is not None or memory.window() is not None:
            self._look_back(context, passage, made, query.x_BND, call)
        return reading

    def _look_back(
        self, context: Context | None, passage: Passage, made: Made, x_BND: Tensor, call: dict[str, Any]
    ) -> None:
        """Change the layer's call: slots in front of its own keys, and a mask of what it may see of both."""
        if self.exchange is not None and not isinstance(self.layer.core, SoftmaxAttention):
            raise ValueError(
                f"memory {type(self.memory).__name__} has slots attended in front of the segment, which attention "
                f"{type(self.layer.core).__name__} in the place of the model's own does not do; call "
                "restore_attention(model), or replace_attention(model, 'softmax')"
            )
        assert passage.positions_BLP is not None and passage.shift_B1 is not None
        own, n, window = call.get(self.cache), x_BND.shape[1], self.memory.window()
        tokens_BL = passage.positions_BLP[..., 0].to(x_BND.device)
        slots = None
        if context is not None:
            slots = self._put_in_front(context, tokens_BL[:, -n:], passage, made, x_BND, call)
        keys = n if own is None else own.get_mask_sizes(n, self.layer.layer_idx)[0]
        mask = call.get("attention_mask")
        if mask is None:  # the order of the tokens
            mask = torch.ones(n, keys, dtype=torch.bool, device=x_BND.device).tril(keys - n)[None, None]
        if window is not None:
            mask = _hidden(mask, _near(tokens_BL[:, -n:], tokens_BL[:, -keys:], window))
        call["attention_mask"] = mask if slots is None else _with_slots(mask, slots)
        self.mask = call["attention_mask"]

    def _put_in_front(
        self, context: Context, tokens_BN: Tensor, passage: Passage, made: Made, x_BND: Tensor, call: dict[str, Any]
    ) -> Slots:
        """Hand the layer the slots' keys and values, and tell who sees them."""
        assert passage.shift_B1 is not None
        rows, n = x_BND.shape[:2]
        if made.positions_BM is None:
            made.positions_BM = context.positions_BMP[..., 0].expand(rows, -1)
        slots_BM, valid_BM = made.positions_BM, context.valid_BM.expand(rows, -1)
        # A NaN in an empty slot would survive a mask on the logits.
        k, v = (torch.where(valid_BM[:, None, :, None], t, 0) for t in (context.k_BHME, context.v_BHME))
        places_BL = torch.cat([slots_BM, tokens_BN.expand(rows, -1)], 1) + passage.shift_B1.to(x_BND.device)
        k = self.turn(self.layer, None if self.rotary is None else self.rotary.module, k, places_BL, x_BND)
        slope = None if self.slope is None else self.slope(self.layer, call, places_BL[:, : k.shape[2]])
        call[self.cache], self.gather = InFront(k, v, call.get(self.cache)), context.gather
        sees_BHNM = valid_BM[:, None, None].expand(-1, -1, n, -1)
        shares_BHNM = None
        if context.visible_BHNM is not None and context.visible_BHNM.dtype != torch.bool:
            sees_BHNM = sees_BHNM & (context.visible_BHNM > 0)
            shares_BHNM = logits_of(context.visible_BHNM).to(x_BND.dtype)
        elif context.visible_BHNM is not None:
            sees_BHNM = sees_BHNM & context.visible_BHNM
            if passage.host_cache is not None:
                passage.host_cache.again = True
        for window in (self.window, self.memory.window()):
            if window is not None:
                sees_BHNM = sees_BHNM & _near(tokens_BN, slots_BM, window)
        return Slots(sees_BHNM, slope, shares_BHNM)

    def _mix(self, y_BND: Tensor, query: Query, linear: Linear) -> Tensor:
        if self.gather is not None:
            y_BHNE = self.gather(y_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2))
            y_BND, self.gather = y_BHNE.transpose(1, 2).flatten(2), None
        return super()._mix(y_BND, query, linear)


def _called(module: nn.Module, t: Tensor) -> Tensor:
    return module(t)  # type: ignore[no-any-return]


def _frozen(module: nn.Module, t: Tensor) -> Tensor:
    """What the module makes of it, with parameters that get no gradient."""
    return functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, (t,))  # type: ignore[no-any-return]


def _near(tokens_BN: Tensor, keys_BM: Tensor, window: int) -> Tensor:
    """(B, 1, N, M): keys less than `window` positions before the token."""
    return (tokens_BN[:, :, None] - keys_BM[:, None] < window)[:, None]


def _hidden(mask: Tensor, sees_BHNK: Tensor) -> Tensor:
    """The mask, bool with True = visible or added to the logits, without what a token does not see."""
    if mask.dtype == torch.bool:
        return mask & sees_BHNK
    return torch.where(sees_BHNK, mask, torch.finfo(mask.dtype).min)


def _with_slots(mask: Tensor, slots: Slots) -> Tensor:
    """The mask (B or 1, H or 1, N, K), bool or added to the logits, with columns of the slots in front."""
    front, shares = slots.sees_BHNM, slots.shares_BHNM
    if shares is not None and mask.dtype == torch.bool:
        mask = _hidden(shares.new_zeros(()), mask)
    if mask.dtype != torch.bool:
        slope = mask.new_zeros(()) if slots.slope_BH1M is None else slots.slope_BH1M.to(mask.dtype)
        front = _hidden(slope if shares is None else slope + shares.to(mask.dtype), front)
    return torch.cat([front.expand(-1, mask.shape[1], -1, -1), mask.expand(front.shape[0], -1, -1, -1)], -1)
