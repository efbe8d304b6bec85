"""The gated delta rule and its relatives: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), Kimi
Delta Attention (Kimi Team 2025, arXiv:2510.26692), Gated DeltaNet-2 (2026, arXiv:2605.22791), the gated delta product
(Siems et al. 2025, arXiv:2502.10297), Gated Linear Attention (Yang et al. 2023, arXiv:2312.06635), RetNet (Sun et al.
2023, arXiv:2307.08621) and Mamba-2 (Dao and Gu 2024, arXiv:2405.21060). Code of all in one place:
github.com/fla-org/flash-linear-attention.

One recurrence; each paper is a set of options (a preset):

    S'_t = diag(e^{g_t}) S_{t-1}                          g_t <= 0: none, fixed, a number a head, or one a channel
    S_t  = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T         rule "delta": beta_t = sigmoid(W x_t), or twice that
    S_t  = S'_t + k_t (w_t v_t - S'_t^T (e_t k_t))^T      rule "gates": e_t, w_t = sigmoid(W x_t), numbers a channel
    S_t  = S'_t + k_t v_t^T                               rule "sum"
    out_t = s S_t^T q_t                                   s = 1 / sqrt(E)
    out_t <- out_t / rms(out_t) * w * act(W_g x_t)        an RMS norm a head and a gate, as options

    features "unit": q, k <- SiLU(.), over its length;  "silu": SiLU alone;  "none": as they are

With `steps` n, the state decays once a token, and then takes n steps of the delta rule: the first with the token's key
and value, the later ones with keys, values and beta from its input. With beta up to 2, they are n reflections.

`parts/scan.py` has the chunks, `parts/decay.py` the gates g and their initial half-lives. Decay fades all that the
state holds; the delta rule replaces the value at a key, and keeps values at orthogonal keys. beta |k|^2 must be at most
2, beyond which S grows without bound, so that the delta rule takes "unit" features alone. With a beta of 2, a key flips
the sign of its value.

The presets' parts of the published layers are below. Projections are the layer's, with keys as wide as values; so
is the convolution in front (`short_convolution=4`: before the projections; as published, after them, with a SiLU that
values here do not have).

    gated_deltanet  all of the mixer; there, values are twice as wide as keys
    kda             all of the mixer; the output gate is one full map (there: of low rank, with a bias)
    gdn2            all of the mixer; the output gate as in kda
    delta_product   all of the mixer, with two steps; there, values are twice as wide as keys
    gla             all of the mixer; there, keys are half as wide as values
    retnet          all of the mixer, with positions="rotary" of the model; there, values are twice as wide as keys, and
                    the norm has no weights
    mamba2          decay, step length and gate; keys and queries are of each head (there: shared by all), the norm is
                    of a head and before the gate (in the paper: of all, after it), and there is no skip D x_t

Cost, in multiply-adds a head: "delta" N (C (2 E + V) + 3 E V), and N C (E + V) / 2 for the triangular systems; "sum"
N (C (E + V) + 2 E V). Of decays a channel, each product of queries or keys with keys, N C E, is N (C - 1) E / 2, and
there are N E log2(C) exponentials. Beta and scalar decays: N D each; decays of channels: N D E, or N R E with a middle
of R, and N R D for all heads; an output gate: N D V. "gates" costs what "delta" does, with maps of N D (E + V) for N D;
n steps cost n times the scan, and N D ((n - 1) (E + V) + n) in maps. A context adds M E V. State: E V numbers a head,
float32 or wider. Parameters of the maps: as many as their multiply-adds a token; and of decays 2 a head, or 1 + E.

What differs from the original implementations: decays begin with half-lives of 32 to 4096 tokens instead of a few
(presets begin as published); chunks take any decay exactly, with no bound on it.

Legend: B rows, H heads, N tokens, M keys of a context, D model width, E key width, V value width, F features (E), G
decays a head, C tokens of a chunk, Z numbers of a map, S steps but the first.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.registry import ATTENTIONS
from cached_transformers.state import State

from .parts.building_blocks import unit, wide
from .parts.decay import DecayGate, InputDecay, check_half_life, fixed_log_decay
from .parts.kernels import fla_scan, takes_fla
from .parts.linearised import LinearisedAttention, head_weights, hidden
from .parts.scan import causal_scan
from .parts.sizes import head_width

PUBLISHED: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"half_life": None, "output_norm": True, "output_gate": "swish"},
    "kda": {"decay": "channel", "decay_rank": "head", "half_life": None, "output_norm": True, "output_gate": "sigmoid"},
    "gdn2": {
        "rule": "gates",
        "decay": "channel",
        "decay_rank": "head",
        "half_life": None,
        "output_norm": True,
        "output_gate": "sigmoid",
    },
    "delta_product": {
        "steps": 2,
        "negative_eigenvalues": True,
        "half_life": None,
        "output_norm": True,
        "output_gate": "swish",
    },
    "gla": {
        "rule": "sum",
        "decay": "channel",
        "decay_gate": "logsigmoid",
        "decay_rank": 16,
        "half_life": None,
        "features": "none",
        "output_norm": True,
        "output_gate": "swish",
    },
    "retnet": {
        "rule": "sum",
        "decay": "fixed",
        "half_life": None,
        "features": "none",
        "output_norm": True,
        "output_gate": "swish",
    },
    "mamba2": {
        "rule": "sum",
        "half_life": None,
        "step_length": True,
        "features": "silu",
        "scale": 1.0,
        "output_norm": True,
        "output_gate": "swish",
    },
}
"""Options of each paper; the top of this file says which parts of its layer are missing."""


@ATTENTIONS.register(
    "gated_delta",
    paper="arXiv:2412.06464",
    title="Gated DeltaNet and its relatives",
    purpose="a state of fixed size, linear in N",
    equation="S' = diag(e^(g_t)) S_(t-1),  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T or S' + k_t v_t^T,  "
    "out_t = S_t^T q_t / sqrt(E)",
    order="N",
    cost="N (4 C E + 3 E^2 + 2 D) multiply-adds a head, in chunks of C tokens; as a sum N (2 C E + 2 E^2 + D)",
    presets=PUBLISHED,
)
class GatedDelta(LinearisedAttention):
    """A fast weight memory that decays, and corrects at each token what its key retrieves, or adds to it.

    Args:
        width: D. heads: H.
        rule: "delta" corrects the value at a key; "gates" does so with a share of each channel of the key, and writes
            a share of each channel of the value; "sum" adds to it.
        steps: n, steps of "delta" a token.
        decay: "none"; "scalar", a number a head from the layer's input; "channel", one for each channel of the keys;
            "fixed", a constant a head.
        decay_gate: of decays from the input: "softplus", "safe" (at most 5 a token) or "logsigmoid" (over 16).
        decay_rank: width of the middle of the decay's map, or "head" for that of a head; None for one full map.
        half_life: of a decay at the start, in tokens, the least and the greatest: heads (and channels) draw theirs
            log-uniform between the two. None for the published initialisation, which forgets within a segment.
        step_length: values are multiplied by softplus(W x + b), as in Mamba-2; of "scalar" decays of "softplus".
        negative_eigenvalues: beta (or e) lies in 0 .. 2 instead of 0 .. 1, so that a key may flip its value.
        features: of queries and keys: "unit", "silu" or "none"; "delta" and "gates" need "unit".
        scale: s; 1 / sqrt(E) when None.
        output_norm: each head's output goes through an RMS norm.
        output_gate: "none", or the output times "swish" or "sigmoid" of W_g x.
        value_width: V, where an output norm, a gate or a further step has to know that it is not E.
        chunk: C, tokens that are taken at once, for decays of channels rounded up to a power of two; changes the cost
            alone.
        carry: the state goes on from segment to segment; see `LinearisedAttention`.
        kernel: "plain" or "fla" (flash-linear-attention, on a GPU, which for "delta" rounds queries, keys and values to
            bfloat16: it is not taken unless it is asked for); "gates" has none.

    Raises:
        ValueError: width is no multiple of heads, an unknown word, a half-life or a scale that cannot be, or options
            that mean nothing together.
    """

    can = frozenset({"causal", "context", "exact_padding"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rule: Literal["delta", "gates", "sum"] = "delta",
        steps: int = 1,
        decay: Literal["none", "scalar", "channel", "fixed"] = "scalar",
        decay_gate: DecayGate = "softplus",
        decay_rank: int | Literal["head"] | None = None,
        half_life: tuple[float, float] | None = (32.0, 4096.0),
        step_length: bool = False,
        negative_eigenvalues: bool = False,
        features: Literal["unit", "silu", "none"] = "unit",
        scale: float | None = None,
        output_norm: bool = False,
        output_gate: Literal["none", "swish", "sigmoid"] = "none",
        value_width: int | None = None,
        chunk: int = 64,
        carry: bool = False,
        kernel: Literal["plain", "fla"] = "plain",
    ) -> None:
        super().__init__(carry=carry)
        size = head_width(width, heads)
        check_half_life(half_life)
        at_least_one(chunk=chunk, value_width=value_width, steps=steps)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f"scale={scale} must be positive and finite; None is 1 / sqrt(E)")
        rank = size if decay_rank == "head" else decay_rank
        if isinstance(rank, str):
            raise ValueError(f'decay_rank={rank!r} must be a width, "head" or None')
        at_least_one(decay_rank=rank)
        _check_together(rule, decay, decay_gate, rank, step_length, negative_eigenvalues, features)
        if steps > 1 and rule != "delta":
            raise ValueError(f'steps={steps} is of rule="delta", not of {rule!r}; take steps=1')
        if kernel == "fla" and rule == "gates":
            raise ValueError('kernel="fla" has no rule="gates"; take kernel="plain"')
        self.heads, self.size, self.value_width = heads, size, value_width or size
        self.kind, self.scale, self.chunk, self.kernel = features, scale or size**-0.5, chunk, kernel
        self.greatest_share, self.step_length = 2.0 if negative_eigenvalues else 1.0, step_length
        shares = {"delta": steps, "gates": size}
        self.share = nn.Linear(width, heads * shares[rule], bias=False) if rule in shares else None
        self.write_gate = nn.Linear(width, heads * self.value_width, bias=False) if rule == "gates" else None
        self.steps, more = steps, (steps - 1) * heads
        self.more_keys, self.more_values = (
            nn.Linear(width, more * channels, bias=False) if more else None for channels in (size, self.value_width)
        )
        self.decay: InputDecay | None = None
        if decay in ("scalar", "channel"):
            least = 0.0 if rule != "sum" and decay == "scalar" else 1.0  # as each paper's code draws it
            self.decay = InputDecay(
                width,
                heads,
                size if decay == "channel" else 1,
                gate=decay_gate,
                rank=rank,
                half_life=half_life,
                least_rate=least,
            )
        self.fixed, self.half_life = decay == "fixed", half_life
        self.norm_V = nn.Parameter(torch.ones(self.value_width)) if output_norm else None
        self.activation = output_gate
        self.gate = nn.Linear(width, heads * self.value_width, bias=False) if output_gate != "none" else None

    def features(self, x_BHNE: Tensor, maps: Tensor | None) -> Tensor:
        if self.kind == "none":
            return x_BHNE
        return F.silu(x_BHNE) if self.kind == "silu" else unit(F.silu(x_BHNE))

    def empty(self, rows: int, heads: int, width: int, value_width: int, like: Tensor) -> Tensor:
        if (heads, width) != (self.heads, self.size):
            raise ValueError(f"{heads} heads of width {width}: gated_delta was made for {self.heads} of {self.size}")
        made = (self.norm_V, self.gate, self.write_gate, self.more_values)
        if value_width != self.value_width and any(part is not None for part in made):
            raise ValueError(
                f"values of width {value_width}: weights of gated_delta were made for {self.value_width}; "
                f"give value_width={value_width}"
            )
        return like.new_zeros(rows, heads, width, value_width)

    def run(
        self, q_BHNF: Tensor, k_BHNF: Tensor, v_BHNV: Tensor, state: State, seen_BN: Tensor | None, x_BND: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        share_BHNZ, log_decay_BHNG = None, None
        if self.share is not None:
            share_BHNZ = self.greatest_share * torch.sigmoid(self._of_heads(self.share, x_BND, "beta"))
            share_BHNZ = hidden(share_BHNZ, seen_BN)
        else:
            k_BHNF = hidden(k_BHNF, seen_BN)
        if self.write_gate is not None:
            v_BHNV = hidden(v_BHNV * torch.sigmoid(self._of_heads(self.write_gate, x_BND, "w")), seen_BN)
        if self.decay is not None:
            if x_BND is None:
                raise ValueError("the decay of gated_delta is made of the layer's input; give it as x_BND (x_BD)")
            log_decay_BHNG, step_BHNG = self.decay(x_BND)
            v_BHNV = v_BHNV * step_BHNG if self.step_length else v_BHNV
        elif self.fixed:
            # Recomputed, since a buffer would be rounded with the model.
            log_decay_BHNG = fixed_log_decay(self.heads, self.half_life, v_BHNV).expand(*v_BHNV.shape[:3], 1)
        # A token that is not seen does not forget either.
        log_decay_BHNG = None if log_decay_BHNG is None else hidden(log_decay_BHNG, seen_BN)
        q_BHNF = q_BHNF * self.scale
        if self.steps > 1:
            assert share_BHNZ is not None
            k_BHNF, v_BHNV = self._with_more(k_BHNF, v_BHNV, x_BND)
            share_BHNZ = share_BHNZ.flatten(2)[..., None]
            q_BHNF = F.pad(q_BHNF[..., None, :], (0, 0, self.steps - 1, 0)).flatten(2, 3)  # the last step reads
            if log_decay_BHNG is not None:  # the first one decays
                log_decay_BHNG = F.pad(log_decay_BHNG[..., None, :], (0, 0, 0, self.steps - 1)).flatten(2, 3)
        name = "beta_BHN1" if self.write_gate is None else "erase_BHNF"
        shares: dict[str, Any] = {name: share_BHNZ, "log_decay_BHNG": log_decay_BHNG}
        if takes_fla(self.kernel, q_BHNF):
            out_BHNV, state = fla_scan(q_BHNF, k_BHNF, v_BHNV, state, **shares)
        else:
            out_BHNV, state = causal_scan(q_BHNF, k_BHNF, v_BHNV, state, chunk=self.chunk, **shares)
        return self._put_out(out_BHNV[:, :, self.steps - 1 :: self.steps], x_BND), state

    def _of_heads(self, module: nn.Linear, x_BND: Tensor | None, what: str) -> Tensor:
        """(B, H, N, Z / H) of a map of the layer's input to Z channels."""
        return head_weights(module, x_BND, f"{what} of gated_delta").unflatten(1, (self.heads, -1)).mT

    def _with_more(self, k_BHNF: Tensor, v_BHNV: Tensor, x_BND: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and values of all steps of a token, one after the other as if each was a token."""
        assert self.more_keys is not None and self.more_values is not None
        k_BHNSE, v_BHNSV = (
            self._of_heads(module, x_BND, "the steps").unflatten(-1, (self.steps - 1, -1))
            for module in (self.more_keys, self.more_values)
        )
        k_BHNSF = torch.cat([k_BHNF[..., None, :], self.features(k_BHNSE, None)], -2)
        return k_BHNSF.flatten(2, 3), torch.cat([v_BHNV[..., None, :], v_BHNSV], -2).flatten(2, 3)

    def _put_out(self, out_BHNV: Tensor, x_BND: Tensor | None) -> Tensor:
        """Through norm and gate, where there are."""
        if self.norm_V is not None:
            size_BHN1 = out_BHNV.square().mean(-1, keepdim=True) + 1e-5
            out_BHNV = out_BHNV * size_BHN1.rsqrt() * wide(self.norm_V)
        if self.gate is None:
            return out_BHNV
        raw_BHNV = self._of_heads(self.gate, x_BND, "the output gate")
        return out_BHNV * (F.silu(raw_BHNV) if self.activation == "swish" else torch.sigmoid(raw_BHNV))


def _check_together(
    rule: str, decay: str, gate: str, rank: int | None, step_length: bool, negative_eigenvalues: bool, features: str
) -> None:
    """Refuse (ValueError) options that mean nothing together."""
    if rule != "sum" and features != "unit":
        raise ValueError(
            f'features={features!r} leaves keys of any length, with which rule="{rule}" grows without bound: take '
            'features="unit", or rule="sum"'
        )
    if rule == "sum" and negative_eigenvalues:
        raise ValueError('negative_eigenvalues=True is of beta, which rule="sum" has not; take rule="delta"')
    if decay not in ("scalar", "channel") and (gate != "softplus" or rank is not None):
        raise ValueError(
            f"decay_gate={gate!r} and decay_rank={rank} are of decays from the input, and decay={decay!r} is none; "
            'take decay="scalar" or "channel", or leave them out'
        )
    if step_length and (decay, gate) != ("scalar", "softplus"):
        raise ValueError(
            f'step_length=True is of decay="scalar" with decay_gate="softplus", not of {decay!r} with {gate!r}'
        )
