"""Longformer (Beltagy et al. 2020, arXiv:2004.05150; github.com/allenai/longformer).

Each token sees a window round it, dilated head by head, and a few global tokens, which in turn see every token:

    out_i = softmax over N(i) of (q_i k_j / sqrt(E)) v_j,   N(i) = {j: |i - j| <= d w / 2, d divides i - j} + G
    out_g = softmax over all j of (q'_g k'_j / sqrt(E)) v'_j,   g in G

q', k', v' are projections of their own with `global_projections`, and q, k, v without. Causal: the window is the w
tokens before i and i itself, and global tokens are seen, and see, no later token.

Cost: N (1.5 w + 2 G) (E + V) multiply-adds a head, for N a multiple of d w / 2: blocks of w / 2 queries take the keys
from w / 2 before to w / 2 after (from w before, causally).

What differs from the original: a global key in the window is the same one key whatever the precision (masks are bool,
where the original adds large negative numbers); global tokens are the same for all rows of a batch; a sequence need not
be a multiple of the window. The paper starts the global projections from the local ones of a trained model; here they
start as linear layers do, since the local ones belong to the layer.

Legend: B rows, H heads, N tokens, D model width, E key width, V value width, G global tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.attention import AttentionOutput, Call, StepsFrom
from cached_transformers.registry import ATTENTIONS

from .parts.flex import Sees
from .parts.kernels import FlexKernel
from .parts.pattern import PatternAttention
from .parts.windows import attend_all, local_attention


@ATTENTIONS.register(
    "longformer",
    paper="arXiv:2004.05150",
    title="Longformer",
    purpose="near tokens and a few that all see",
    equation="softmax over {j: |i - j| <= w / 2} and global tokens of (q k^T / sqrt(E)) v; global tokens see all",
    order="N w",
    cost="N (1.5 w + 2 G) (E + V) multiply-adds a head, for w = window and G global tokens",
)
class LongformerAttention(PatternAttention):
    """A sliding window for each token, and a few global tokens that see all and are seen by all.

    Args:
        window: w, even: w / 2 tokens on each side and the token itself; causally, the w before it. A sequence gives
            each layer its own.
        dilation: step between the keys of a window; a sequence gives each head its own, and a sequence of sequences
            each layer and head.
        prefix: leading tokens that are global (class tokens).
        global_tokens: places of further global tokens; one beyond the end of a sequence is left out of it.
        global_projections: whether global tokens look with projections of their own, made from the layer's input.
            Positions that the layer applies to queries and keys (rotary) are not applied to these.
        width: D, and heads: H; needed with global projections.
        index: of the layer.

    Raises:
        ValueError: an odd window or one below 2; a dilation below 1; sequences that do not fit layers or heads; a
            negative place; global projections without global tokens or without sizes.
    """

    can = PatternAttention.can | {"causal"}
    steps_from: StepsFrom = "keys"
    place_P: Tensor

    def __init__(
        self,
        *,
        window: int | Sequence[int] = 512,
        dilation: int | Sequence[int] | Sequence[Sequence[int]] = 1,
        prefix: int = 0,
        global_tokens: Sequence[int] = (),
        global_projections: bool = False,
        width: int | None = None,
        heads: int | None = None,
        index: int = 0,
        kernel: FlexKernel = "plain",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout=dropout, kernel=kernel)
        self.window: int = of_layer("window", window, index)
        if self.window < 2 or self.window % 2:
            raise ValueError(f"window={self.window} must be even and at least 2: as many tokens on each side")
        steps: Any = dilation
        if not isinstance(steps, int) and steps and not isinstance(steps[0], int):
            steps = of_layer("dilation", steps, index)
        self.dilations: tuple[int, ...] = (steps,) if isinstance(steps, int) else tuple(steps)
        self.told_heads = len(self.dilations)
        if not self.dilations or not all(isinstance(step, int) and step >= 1 for step in self.dilations):
            raise ValueError(f"dilation={dilation} must be at least 1 for each head; 1 is a window without gaps")
        if heads is not None and len(self.dilations) not in (1, heads):
            raise ValueError(f"dilation={dilation} must have one number, or one for each of heads={heads}")
        if prefix < 0 or any(place < 0 for place in global_tokens):
            raise ValueError(
                f"prefix={prefix} and global_tokens={tuple(global_tokens)} must not be negative: places are counted "
                "from the first token, since the last ones may be padding"
            )
        self.places = tuple(sorted({*range(prefix), *global_tokens}))
        self.register_buffer("place_P", torch.tensor(self.places, dtype=torch.long), persistent=False)
        self.query: nn.Linear | None = None
        self.key_value: nn.Linear | None = None
        if global_projections:
            if width is None or heads is None or width % heads:
                raise ValueError(f"global_projections=True needs a width={width} that is a multiple of heads={heads}")
            if not self.places:
                raise ValueError("global_projections=True needs global tokens; give prefix or global_tokens")
            self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
            self.steps_from = None  # other keys than those that are kept

    def rule(self, heads: int, tokens: int, causal: bool) -> _Windows:
        if len(self.dilations) not in (1, heads):
            raise ValueError(
                f"dilation={self.dilations} must have one number, or one for each of the {heads} heads of this call"
            )
        before, after = (self.window, 0) if causal else (self.window // 2, self.window // 2)
        return _Windows(before, after, self.dilations, self.places)

    def takes_flex(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor) -> bool:
        # With projections of their own, global tokens have a softmax of their own: only the windows are for the kernel.
        return self.query is None and super().takes_flex(q_BHNE, k_BHNE, v_BHNV)

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        tokens = q_BHNE.shape[2]
        count = sum(place < tokens for place in self.places)
        if count == 0:
            return self._windows(q_BHNE, k_BHNE, v_BHNV, call, None)
        place_G = self.place_P[:count]
        q, k, v = self._global(q_BHNE, k_BHNE, v_BHNV, call.x_BND, place_G)
        seeing_all = attend_all(q, k, v, call, place_G, dropout=self.drop)
        if count == tokens:
            return seeing_all
        # The windows of global tokens are computed in vain: leaving them out would cut blocks into pieces.
        by_flex = self.query is not None and super().takes_flex(q_BHNE, k_BHNE, v_BHNV)
        qkv = q_BHNE, k_BHNE, v_BHNV
        near = self.by_flex(*qkv, call) if by_flex else self._windows(*qkv, call, place_G)
        out = near.out_BHNV.index_copy(2, place_G, seeing_all.out_BHNV)
        if near.lse_BHN is None or seeing_all.lse_BHN is None:
            return AttentionOutput(out)
        return AttentionOutput(out, near.lse_BHN.index_copy(2, place_G, seeing_all.lse_BHN))

    def _windows(
        self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call, place_G: Tensor | None
    ) -> AttentionOutput:
        heads = q_BHNE.shape[1]
        before, after, steps, _ = self.rule(heads, q_BHNE.shape[2], call.causal)

        def of_heads(step: int, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
            return local_attention(
                q,
                k,
                v,
                call,
                lambda i, j: (i - j <= before * step) & (j - i <= after * step),
                size=self.window // 2,
                before=before,
                after=after,
                stride=step,
                everywhere_G=place_G,
                dropout=self.drop,
            )

        if len(set(steps)) == 1:
            return of_heads(steps[0], q_BHNE, k_BHNE, v_BHNV)
        groups = [[head for head in range(heads) if steps[head] == step] for step in sorted(set(steps))]
        parts = [of_heads(steps[group[0]], *(t[:, group] for t in (q_BHNE, k_BHNE, v_BHNV))) for group in groups]
        order = [head for group in groups for head in group]
        back = [order.index(head) for head in range(heads)]
        out = torch.cat([part.out_BHNV for part in parts], 1)[:, back]
        given = [part.lse_BHN for part in parts if part.lse_BHN is not None]
        return AttentionOutput(out, torch.cat(given, 1)[:, back] if given else None)

    def _global(
        self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, x_BND: Tensor | None, place_G: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, G, E), (B, H, N, E), (B, H, N, V): queries of the global tokens, and the keys and values they see."""
        if self.query is None or self.key_value is None:
            return q_BHNE[:, :, place_G], k_BHNE, v_BHNV
        if x_BND is None or v_BHNV.shape[-1] != q_BHNE.shape[-1]:
            raise ValueError(
                "global_projections=True needs the layer's input x_BND, and values as wide as the keys; "
                "take global_projections=False to use queries, keys and values as given"
            )
        heads = q_BHNE.shape[1]
        q, kv = self.query(x_BND[:, place_G]), self.key_value(x_BND)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1)))
        return q, k, v


class _Windows(NamedTuple):
    """This many tokens before and after a query, in steps by head, and places that see all and are seen by all."""

    before: int
    after: int
    steps: tuple[int, ...]
    places: tuple[int, ...]

    def bind(self, length: int, device: torch.device) -> Sees:
        step_H, only = torch.tensor(self.steps, device=device), self.steps[0]
        everywhere_N = torch.zeros(length, dtype=torch.bool, device=device)
        everywhere_N[[place for place in self.places if place < length]] = True
        several, dilated = len(self.steps) > 1, max(self.steps) > 1

        def sees(row: Any, head: Any, i: Any, j: Any) -> Tensor:
            apart, step = i - j, step_H[head] if several else only
            near = (apart <= self.before * step) & (-apart <= self.after * step)
            near = near & (apart % step == 0) if dilated else near
            return near | everywhere_N[i] | everywhere_N[j] if self.places else near

        return sees


def of_layer(name: str, value: Any, index: int) -> Any:
    """A number for all layers, or the one of a sequence that is this layer's."""
    if isinstance(value, int):
        return value
    if index >= len(value):
        raise ValueError(f"{name}={value} has no entry for layer {index}; give one for each layer")
    return value[index]
