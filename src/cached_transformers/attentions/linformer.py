"""Linformer (Wang, Li, Khabsa, Fang, Ma 2020, arXiv:2006.04768, eq. 7; github.com/facebookresearch/pytext, linformer).

Keys and values are projected along the length to a fixed number of slots, over which every query then has a softmax.

    K~ = E^T K,   V~ = F^T V,   out = softmax(q K~^T / sqrt(E)) V~,   E and F of length x slots

Cost: S (M + N) (E + V) multiply-adds a head for N queries, M keys and S slots: M in the projection, N in the softmax.

* Every slot mixes all places, so there is no causal form, and none is offered.
* Shorter segments use the first rows of E and F. Padding is 0 before the projection, so that it adds nothing; the slots
  of a row of padding alone are hidden. (The original, and PyPI's `linformer`, project padding as if it were text.)
* E and F start as N(0, 1 / S), the random projection of the paper's theorem; PyPI's package takes U(-1, 1) / sqrt(S).
* Slots take part in one softmax with the keys of a memory; the log-sum-exp is that of the slots' logits.
* With as many slots as places and E = F = 1 this is exact attention, for segments of the full length: of shorter ones
  the slots left over keep a logit of 0.

Legend: B rows, H heads, N queries, M keys, E key width, V value width, S slots, L longest segment, P projections (one
for keys and values, or one each), G heads that a projection tells apart.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.attention import AttentionOutput, Call
from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import attend
from .parts.pattern import PatternAttention

SHARING = {"none": 0, "heads": 1, "keys_values": 2}
"""Sharing of a projection: none; all heads; all heads, and keys with values."""


@ATTENTIONS.register(
    "linformer",
    paper="arXiv:2006.04768",
    title="Linformer",
    purpose="fewer keys",
    equation="softmax(q (E^T K)^T / sqrt(E)) F^T V",
    order="N S, S slots",
    cost="S (M + N) (E + V) multiply-adds a head",
)
class LinformerAttention(PatternAttention):
    """Softmax over a fixed number of slots, which are learned sums of the keys and values.

    Args:
        heads: H. length: L, the most keys that a segment may have.
        slots: S.
        sharing: "none" (a projection of keys and one of values for each head), "heads" (the same in all heads), or
            "keys_values" (one projection for keys, values and heads). `share_layers` makes the last one common to all
            layers of a model.
        dropout: on the weights.

    Raises:
        ValueError: fewer than one slot, head or place; an unknown way of sharing; a segment longer than `length`.
    """

    can = PatternAttention.can | {"cross"}

    def __init__(
        self, heads: int, length: int, *, slots: int = 128, sharing: str = "heads", dropout: float = 0.0
    ) -> None:
        super().__init__(dropout=dropout)
        at_least_one(heads=heads, length=length, slots=slots)
        if sharing not in SHARING:
            raise ValueError(f"sharing={sharing!r} must be one of {', '.join(map(repr, SHARING))}")
        self.heads, self.length, self.slots, self.sharing = heads, length, slots, sharing
        kinds = 1 if sharing == "keys_values" else 2
        groups = heads if sharing == "none" else 1
        self.projection_PGLS: nn.Parameter | None
        self.projection_PGLS = nn.Parameter(torch.randn(kinds, groups, length, slots) * slots**-0.5)
        # In a tuple, so that it is no submodule: its parameters are saved and trained once, where they belong.
        self.owner: tuple[LinformerAttention, ...] = ()

    def extra_repr(self) -> str:
        return f"length={self.length}, slots={self.slots}, sharing={self.sharing!r}"

    def projection(self) -> Tensor:
        """E and F; of another layer where layers share them."""
        projection_PGLS = self.owner[0].projection_PGLS if self.owner else self.projection_PGLS
        assert projection_PGLS is not None
        return projection_PGLS

    def pattern(self, q_BHNE: Tensor, k_BHNE: Tensor, v_BHNV: Tensor, call: Call) -> AttentionOutput:
        heads, keys = k_BHNE.shape[1:3]
        if keys > self.length:
            raise ValueError(f"a segment of {keys} keys is longer than length={self.length}; make it with a longer one")
        if self.sharing == "none" and heads != self.heads:
            raise ValueError(f"{heads} heads came, but heads={self.heads} have projections; make it with the right one")
        seen_B11S = None
        if call.key_padding_mask is not None:
            seen_B11S = ~call.key_padding_mask.all(1)[:, None, None, None].expand(-1, -1, -1, self.slots)
        projection_PGLS = self.projection()[:, :, :keys]
        k_BHSE = _project(k_BHNE, projection_PGLS[0])
        v_BHSV = _project(v_BHNV, projection_PGLS[-1])
        return AttentionOutput(*attend(q_BHNE, k_BHSE, v_BHSV, seen_B11S, dropout=self.drop, want_lse=call.want_lse))


def _project(t_BHNE: Tensor, projection_GNS: Tensor) -> Tensor:
    """(B, H, S, E): sums over the places, in one product of matrices; a broadcast one would copy the projection."""
    if len(projection_GNS) == 1:
        return torch.einsum("ns,bhne->bhse", projection_GNS[0], t_BHNE)
    return torch.einsum("hns,bhne->bhse", projection_GNS, t_BHNE)


def share_layers(model: nn.Module) -> int:
    """Let all Linformer layers of a model use the projection of the first (the paper's layer-wise sharing).

    To be called before the optimiser is made: the other layers give up their own parameters.

    Returns:
        the number of layers that share it now.

    Raises:
        ValueError: there are none; they do not share among keys, values and heads; their sizes differ.
    """
    cores = [module for module in model.modules() if isinstance(module, LinformerAttention)]
    if not cores:
        raise ValueError(f"{type(model).__name__} has no linformer layer whose projection could be shared")
    for core in cores:
        if core.sharing != "keys_values":
            raise ValueError(f"sharing={core.sharing!r} has more than one projection; layers need 'keys_values'")
        sizes = (core.length, core.slots)
        if sizes != (cores[0].length, cores[0].slots):
            raise ValueError(
                f"(length, slots)={sizes} differs from {(cores[0].length, cores[0].slots)} of the first layer; "
                "layers that share a projection need the same"
            )
    for core in cores[1:]:
        core.projection_PGLS, core.owner = None, (cores[0],)
    return len(cores)
