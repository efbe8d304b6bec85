"""Associative Recurrent Memory Transformer (Rodkin, Kuratov, Bulatov, Burtsev 2024, arXiv:2407.04841;
github.com/RodkinIvan/associative-recurrent-memory-transformer).

Memory tokens are after each segment, the same learned ones every time. What each layer makes of them is stored in an
associative matrix of that layer, by a delta rule; the tokens of the next segment read it before the layer.

    phi(x) = [r * roll(r, 1), ..., r * roll(r, nu)],  r = [relu(x), relu(-x)]          (DPFP, arXiv:2102.11174)
    read      x <- x + A phi(W_Q x) / (z . phi(W_Q x))
    write     A <- A + sum_i beta_i (v_i - A phi(k_i) / (z . phi(k_i))) phi(k_i)^T,    beta_i = sigmoid(w m_i + b)
              z <- z + sum_i gamma_i phi(k_i),                gamma_i = 1 - z . phi(k_i) / |phi(k_i)|^2

for k_i, v_i = W_K m_i, s W_V m_i (s is `value_scale`, 1 in the paper) of the layer's outputs m_i at the memory tokens,
all against the A and z at the start of a segment. gamma counts a key once, or z would grow and stored values fade.

Legend: B rows, N tokens, M memory tokens, L layers, D model width, C key width, K = 2 nu C features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import Entry, ModelMemory, Tokens, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.registry import MEMORIES

from .parts.memory_tokens import carried_norm, check_tokens, surround, visible_round
from .parts.options import NO_MEMORY, Gate, check_positive, gated
from .parts.recurrent import wrote

own_word("slots_in_front", "slots that are read before each block, whose result replaces the block's tokens")

EPSILON = 1e-5
"""Added to denominators, as in the authors' code."""


class Associations(NamedTuple):
    """A of each layer, transposed; z, the mass of its keys; and how many segments the row has stored."""

    values_BLKD: Tensor
    mass_BLK: Tensor
    segments_B: Tensor


def dpfp(x: Tensor, nu: int) -> Tensor:
    """Features (..., 2 nu C) of (..., C), none below 0: products of [relu(x), relu(-x)] with itself, rolled."""
    r = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([r * r.roll(shift, -1) for shift in range(1, nu + 1)], -1)


def recall(features: Tensor, values: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Values stored under features (..., N, K), (..., N, D), and the mass of their keys, (..., N, 1)."""
    found = (features @ mass[..., None]).clamp(min=0)
    return features @ values / (found + EPSILON), found


def store(
    values_BLKD: Tensor,
    mass_BLK: Tensor,
    features_BLMK: Tensor,
    values_BLMD: Tensor,
    beta_BLM1: Tensor,
    *,
    corrected: bool = True,
) -> tuple[Tensor, Tensor]:
    """A and z after these values replace a share beta of the old; `corrected`: only a key's new part counts."""
    old_BLMD, found_BLM1 = recall(features_BLMK, values_BLKD, mass_BLK)
    values_BLKD = values_BLKD + features_BLMK.mT @ (beta_BLM1 * (values_BLMD - old_BLMD))
    new_BLM1 = torch.ones_like(found_BLM1)
    if corrected:
        new_BLM1 = (1 - found_BLM1 / (features_BLMK.square().sum(-1, keepdim=True) + EPSILON)).clamp(0, 1).detach()
    return values_BLKD, mass_BLK + (new_BLM1 * features_BLMK).sum(-2)


class AssociativeRead(nn.Module):
    """Read of one layer's associations, added to the tokens before the layer."""

    in_front = True

    def __init__(self, width: int, key_width: int, nu: int, index: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, key_width, bias=False)
        self.nu, self.index = nu, index

    def forward(self, x_BND: Tensor, values: Sequence[Tensor], mass: Sequence[Tensor]) -> Tensor:
        return self.read(x_BND, *self.open(values, mass))

    def open(self, values: Sequence[Tensor], mass: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(B, K, D) and (B, K) of this layer, from those of all layers."""
        return values[self.index], mass[self.index]

    def read(self, x_BND: Tensor, values_BKD: Tensor, mass_BK: Tensor) -> Tensor:
        """`forward`, of what `open` gave."""
        features_BNK = dpfp(self.query(x_BND).to(values_BKD.dtype), self.nu)
        return x_BND + recall(features_BNK, values_BKD, mass_BK)[0].to(x_BND.dtype)


LONG = {"write_gate": "stretched"}
"""Options that keep a stored value until another one replaces it."""


@MEMORIES.register(
    "armt",
    paper="arXiv:2407.04841",
    title="Associative Recurrent Memory Transformer",
    carries="a matrix in each layer, to which memory tokens after a segment are written by a delta rule",
    purpose="associations, as many as keys are wide",
    equations="x + A phi(W_Q x) / z.phi(W_Q x); A' = A + beta (v - A phi(k) / z.phi(k)) phi(k)^T of memory tokens",
    state="per row: 8 bytes, and per layer 4 K (D + 1), K = 2 nu key_width",
    cost="per token and layer: D key_width + K (D + 1) (read) and M / N (4 D^2 + 2 D F + D key_width + D^2 + 2 K D) "
    "(memory tokens and writing) multiply-adds",
    reach="unbounded; as many keys as features are independent",
    gradient="through the associations, over `bptt` segments; none through gamma",
    without={"bias": "mask='causal'"},
    probe=Probing(fixed(length=4, key_width=16), farther=fixed(length=4, key_width=16, **LONG)),
    presets={"long": LONG, "text": {"value_scale": 0.1}},
)
class ARMT(ModelMemory):
    """Memory tokens after each segment, stored layer by layer as associations that the next segments read.

    In pre-norm models the written vectors pass through a LayerNorm of the memory, so that the residual stream cannot
    grow from segment to segment. A and z are float32 at least: sums of many writes want the digits.

    Args:
        width: D. heads: H, of the model; the memory has none of its own.
        length: M, memory tokens after a segment.
        key_width: C, channels of keys before their features. nu: rolls of the features.
        correction: gamma, by which a key counts once; False adds its mass every time.
        write_gate: beta; a "sigmoid" as in the paper, by which every segment that says nothing stores a little, or
            "stretched", which can close (arXiv:1712.01312).
        value_scale: ours, a factor of the values v; at 1 they soon drown small embeddings (`preset="text"`: 0.1).
        mask: of a causal model: memory tokens see each other in the "causal" order, or "full" (a bias for the core).
        causal, depth, norm: of the model, which gives them; with norm="post" what is written has no further norm.
    """

    needs = frozenset({"state", "tokens_round", "slots_in_front", "layer_traces"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 10,
        *,
        key_width: int = 64,
        nu: int = 3,
        correction: bool = True,
        write_gate: Gate = "sigmoid",
        value_scale: float = 1.0,
        mask: str = "causal",
        causal: bool = True,
        depth: int = 1,
        norm: str = "pre",
    ) -> None:
        super().__init__()
        check_tokens(length, mask)
        at_least_one(NO_MEMORY, key_width=key_width, nu=nu, depth=depth)
        check_positive(value_scale=value_scale)
        self.width, self.length, self.key_width, self.nu, self.depth = width, length, key_width, nu, depth
        self.correction, self.full, self.value_scale = correction, causal and mask == "full", value_scale
        self.write_gate: Gate = write_gate
        self.extra_tokens = length
        self.needs |= {"bias"} if self.full else set()
        self.initial_MD = nn.Parameter(torch.randn(length, width) / width**0.5)
        self.norm = carried_norm(norm, width)
        self.keys = nn.ModuleList(nn.Linear(width, key_width, bias=False) for _ in range(depth))
        self.values = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.shares = nn.ModuleList(nn.Linear(width, 1) for _ in range(depth))
        for linear in self.values:
            assert isinstance(linear, nn.Linear)
            nn.init.zeros_(linear.weight)  # at first the model computes the same as without the memory

    def init_state(self, batch_size: int, like: Tensor) -> Associations:
        features, wide = 2 * self.nu * self.key_width, torch.promote_types(like.dtype, torch.float32)
        values_BLKD = like.new_zeros(batch_size, self.depth, features, self.width, dtype=wide)
        mass_BLK = like.new_zeros(batch_size, self.depth, features, dtype=wide)
        return Associations(values_BLKD, mass_BLK, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    def slot_attention(self, index: int) -> AssociativeRead:
        return AssociativeRead(self.width, self.key_width, self.nu, index)

    def open(self, state: Associations, *_: Any) -> tuple[Tensor, Tensor]:
        # where, not multiplication: no value of an empty state may reach a result, not even NaN
        empty_B11 = (state.segments_B == 0)[:, None, None]
        return torch.where(empty_B11[..., None], 0, state.values_BLKD), torch.where(empty_B11, 0, state.mass_BLK)

    def enter(self, opened: tuple[Tensor, Tensor], tokens: Tokens) -> Entry:
        rows, n = tokens.x_BND.shape[:2]
        behind_BMD = self.initial_MD.expand(rows, -1, -1)
        visible_NN = visible_round(0, n, self.length, tokens.x_BND.device) if self.full else None
        slots = tuple(t.unbind(1) for t in opened)  # whose gradient is one stack, without a tensor of zeros a layer
        return Entry(surround(tokens, None, behind_BMD), slots=slots, segment=(0, n), visible_NN=visible_NN)

    def exit(self, state: Associations, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, Associations, None]:
        n, before = x_BND.shape[1] - self.length, self.open(state)
        made_BLMD = self.norm(torch.stack([trace.y_BND[:, n:] for trace in traces], 1))
        keys, values, shares = (
            torch.stack([linear(m) for linear, m in zip(linears, made_BLMD.unbind(1), strict=True)], 1)
            for linears in (self.keys, self.values, self.shares)
        )
        keys, values, shares = (t.to(state.values_BLKD.dtype) for t in (keys, self.value_scale * values, shares))
        values_BLKD, mass_BLK = store(
            *before, dpfp(keys, self.nu), values, gated(shares, self.write_gate), corrected=self.correction
        )
        padding_BN = traces[0].query.narrow(0, n).padding_BN
        wrote_B = wrote(padding_BN, x_BND)
        if padding_BN is not None:
            values_BLKD = torch.where(wrote_B[:, None, None, None], values_BLKD, state.values_BLKD)
            mass_BLK = torch.where(wrote_B[:, None, None], mass_BLK, state.mass_BLK)
        return x_BND[:, :n], Associations(values_BLKD, mass_BLK, state.segments_B + wrote_B), None
