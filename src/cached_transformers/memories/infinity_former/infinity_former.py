"""The infinity-former (Martins et al. 2021, arXiv:2109.00301; github.com/deep-spin/infinite-former).

Beside a short memory of the last inputs, as in Transformer-XL, each layer keeps all that came before as one continuous
signal of C coefficients, which contracts whenever new inputs enter.

    K = B W_K, V = B W_V;   s = K q / sqrt(E);   mean = sigmoid(w_m . s), variance = softplus(w_v . s)
    z = E_p[psi] V, p = N(mean, variance);       y = attention over [short memory, segment] + W_O z
    B <- G^T [X~ at T points, moved into [0, tau]; L new inputs in (tau, 1]]

Legend: B rows, N tokens, M slots, W = M + N, C basis functions, T samples, L inputs of a refit, K bins, H heads,
E head width, D = H * E model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Context, Linear, ProjectKV, Query, Reading, Trace, Weights
from cached_transformers.interfaces.probing import Probing
from cached_transformers.linear_maps import matrix_of
from cached_transformers.memories.parts.fifo_store import Rows, empty_rows, filled, push, taken
from cached_transformers.memories.parts.options import NO_MEMORY, check_heads, check_positive
from cached_transformers.memories.parts.sinks import KeepsSinks, placed
from cached_transformers.positions import Positions, RelativePositions
from cached_transformers.registry import MEMORIES

from . import continuous_signal as signal


class InfinityState(NamedTuple):
    """The inputs that are not in the signal yet, the signal's coefficients, and how often it was fitted."""

    recent: Rows
    coefficients_BCD: Tensor
    fits_B: Tensor


class InfinityOpened(NamedTuple):
    """During a segment: the short memory, keys and values of the signal, and the rows that have one."""

    context: Context
    k_BHCE: Tensor
    v_BHCE: Tensor
    fitted_B: Tensor


class SignalRead(NamedTuple):
    """Densities of a segment's queries over the signal, and the mask of queries that count (no padding, and a
    signal)."""

    mean_BHN: Tensor
    variance_BHN: Tensor
    counted_BN: Tensor


@MEMORIES.register(
    "infinity_former",
    paper="arXiv:2109.00301",
    title="∞-former",
    carries="the last inputs of every layer, and the whole past as a continuous signal",
    purpose="more of the past in as many slots",
    equations="y = attention over [SG(last inputs), segment] + W_O E_p[psi] B W_V;  B <- G^T [X~(t_1 .. t_T); X_new]",
    state="per row and layer, M = length + chunk - 1: M (4 D + 8) + 8 bytes, and 4 C D + 8",
    cost="per token and layer: D^2 + 2 C D + 2 H C multiply-adds and those of transformer_xl; per "
    "segment 2 C D^2; per chunk 2 (T + chunk) C D, T = samples",
    reach="unbounded, ever coarser: after n more refits an input fills a share of about tau^n (1 - tau) / chunk",
    gradient="none into inputs of earlier segments; the projections, mean and variance learn from the signal",
    without={"own_loss": "kl_weight=0"},
    probe=Probing(
        lambda segment, distance, depth: {"length": segment, "chunk": segment, "basis": 16, "widths": (0.05, 0.1)}
    ),
)
class InfinityFormer(KeepsSinks):
    """A short memory of the last inputs, and before it the whole past as a continuous signal of fixed size.

    As soon as a row has `length + chunk` inputs in the short memory, its oldest `chunk` enter the signal. It is fitted
    without gradient, in float32 or wider, and sampled where the segment's queries looked (sticky memories).

    Args:
        width: D. heads: H.
        length: least number of inputs in the short memory, once it has seen that many. chunk: L.
        basis: C, as many of each of `widths`, whose centres are evenly spaced on [0, 1].
        widths: of the basis functions.
        samples: T; as many as basis functions when None. contraction: tau. ridge: penalty of the regression.
        sampling: "quantiles", "random" (at the left edges of bins drawn with replacement, the original), or "uniform"
            (no sticky memories). bins: K of the density.
        min_variance: lower limit of the queries' variance.
        kl_weight: of the auxiliary loss, the mean divergence of the queries' densities from one of `prior_deviation`
            (of its part in the variance unless `prior_mean` is given); 0 for none. prior_deviation, prior_mean: of that
            density.
        normalise: whether inputs enter the signal with mean 0 and variance 1.
        relative, sinks: see `TransformerXL`.
    """

    needs = frozenset({"state", "context", "head", "own_loss"})
    centre_C: Tensor
    width_C: Tensor
    first_LC: Tensor
    update_SC: Tensor
    levels_T: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        chunk: int = 64,
        basis: int = 128,
        widths: Sequence[float] = (0.01, 0.05),
        samples: int | None = None,
        contraction: float = 0.75,
        ridge: float = 1.0,
        sampling: Literal["quantiles", "random", "uniform"] = "quantiles",
        bins: int = 128,
        min_variance: float = 1e-6,
        kl_weight: float = 1e-6,
        prior_deviation: float = 0.05,
        prior_mean: float | None = None,
        normalise: bool = True,
        relative: bool = True,
        sinks: int = 0,
    ) -> None:
        super().__init__()
        at_least_one("; 0 keeps none", least=0, sinks=sinks)
        self.sinks = sinks
        samples = basis if samples is None else samples
        at_least_one(NO_MEMORY, basis=basis, length=length, chunk=chunk, samples=samples, bins=bins)
        check_positive(ridge=ridge, min_variance=min_variance, prior_deviation=prior_deviation)
        if not 0 < contraction < 1:
            raise ValueError(
                f"contraction={contraction} must lie between 0 and 1: the share of [0, 1] left to the past"
            )
        if kl_weight < 0:
            raise ValueError(f"kl_weight={kl_weight} must not be negative; 0 takes no auxiliary loss")
        check_heads(width, heads)
        self.sampling = sampling
        self.width, self.heads, self.relative, self.normalise = width, heads, relative, normalise
        self.length, self.chunk, self.samples, self.bins = length, chunk, samples, bins
        self.min_variance, self.kl_weight, self.prior_deviation = min_variance, kl_weight, prior_deviation
        self.prior_mean = prior_mean
        if not kl_weight:
            self.needs = self.needs - {"own_loss"}
        self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mean, self.variance = (nn.Linear(basis, 1, bias=False) for _ in range(2))
        functions = signal.bumps(basis, widths)
        # Constants that follow from the options are not saved. They are kept in float64 beside their buffers: a model
        # turned to half precision and back must not lose their digits.
        self._exact = {
            "centre_C": functions.centre_C,
            "width_C": functions.width_C,
            "first_LC": signal.first_operator(chunk, functions, ridge),
            "update_SC": signal.update_operator(samples, chunk, contraction, functions, ridge),
            "levels_T": signal.uniform_points(samples),
        }
        for name, tensor in self._exact.items():
            like = torch.empty(0)  # of the default device and dtype
            self.register_buffer(name, tensor.to(like), persistent=False)
        self._restore()

    def _restore(self) -> None:
        for name, exact in self._exact.items():
            buffer = getattr(self, name)
            setattr(self, name, exact.to(buffer.device, torch.promote_types(buffer.dtype, torch.float32)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._restore()
        return self

    @property
    def functions(self) -> signal.Bumps:
        """The basis."""
        return signal.Bumps(self.centre_C, self.width_C)

    def position_scheme(self) -> Positions | None:
        return RelativePositions(self.heads, self.width // self.heads) if self.relative else None

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        recent = empty_rows(batch_size, self.length + self.chunk - 1, self.width, like)
        wide = torch.promote_types(like.dtype, torch.float32)
        coefficients_BCD = like.new_zeros(batch_size, len(self.centre_C), self.width, dtype=wide)
        store = InfinityState(recent, coefficients_BCD, torch.zeros_like(recent.count_B))
        return self.beside_sinks(store, batch_size, like)

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> InfinityOpened:
        assert project_kv is not None
        sinks, state = state if self.sinks else (None, state)
        recent = state.recent if sinks is None else placed(sinks, state.recent, first_B1P)
        k_BHME, v_BHME = project_kv(recent.clean_BMD)
        context = Context(k_BHME, v_BHME, recent.positions_BMP, recent.valid_BM, consecutive=True, clean=True)
        with torch.autocast(recent.hidden_BMD.device.type, enabled=False):
            return InfinityOpened(context, *self.keys_values(_clean(state)), state.fits_B > 0)

    def read(self, opened: InfinityOpened, query: Query, project_kv: ProjectKV | None) -> Reading:
        assert query.q_BHNE is not None
        with torch.autocast(query.q_BHNE.device.type, enabled=False):
            z_BHNE, mean_BHN, variance_BHN = self.attend(opened.k_BHCE, opened.v_BHCE, query.q_BHNE)
        counted_BN = opened.fitted_B[:, None].expand(query.x_BND.shape[:2])
        if query.padding_BN is not None:
            counted_BN = counted_BN & ~query.padding_BN
        return Reading(opened.context, z_BHNE.to(query.q_BHNE.dtype), SignalRead(mean_BHN, variance_BHN, counted_BN))

    def keys_values(self, coefficients_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, C, E) of the signal's coefficients, as wide as these."""
        k_BHCE, v_BHCE = (
            F.linear(coefficients_BCD, matrix_of(p)[0].to(coefficients_BCD.dtype))
            .unflatten(-1, (self.heads, -1))
            .transpose(1, 2)
            for p in (self.key, self.value)
        )
        return k_BHCE, v_BHCE

    def attend(self, k_BHCE: Tensor, v_BHCE: Tensor, q_BHNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Result of the queries' attention over the signal, and mean and variance of their densities."""
        wide = k_BHCE.dtype
        scores_BHNC = q_BHNE.to(wide) @ k_BHCE.mT / math.sqrt(q_BHNE.shape[-1])
        mean, variance = (
            F.linear(scores_BHNC, matrix_of(p)[0].to(wide)).squeeze(-1) for p in (self.mean, self.variance)
        )
        mean_BHN, variance_BHN = mean.sigmoid(), F.softplus(variance).clamp(min=self.min_variance)
        return signal.expectation(mean_BHN, variance_BHN, self._in(wide)) @ v_BHCE, mean_BHN, variance_BHN

    def _in(self, dtype: torch.dtype) -> signal.Bumps:
        return signal.Bumps(self.centre_C.to(dtype), self.width_C.to(dtype))

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        assert reading.output_BHNE is not None
        y_BND = super().project(y_BHNE, query, reading, linear, weights)
        # Without a signal z is 0, and so is its projection.
        return y_BND + self.output(reading.output_BHNE.transpose(1, 2).flatten(2)).to(y_BND.dtype)

    def store(self, state: InfinityState, trace: Trace) -> tuple[InfinityState, Tensor | None]:
        attention: SignalRead = trace.reading.carry
        with torch.no_grad(), torch.autocast(trace.x_BND.device.type, enabled=False):
            after = self._store(state, trace, attention)
        return after, self._divergence(attention) if self.kl_weight else None

    def _divergence(self, attention: SignalRead) -> Tensor:
        mean_BHN, variance_BHN, counted_BN = attention
        each_BHN = signal.divergence(mean_BHN, variance_BHN, self.prior_deviation, self.prior_mean)
        count = (counted_BN.sum() * self.heads).clamp(min=1)
        return self.kl_weight * torch.where(counted_BN[:, None], each_BHN, 0).sum() / count

    def _store(self, state: InfinityState, trace: Trace, attention: SignalRead) -> InfinityState:
        """Put the segment into the short memory, and its overflow into the signal."""
        assert trace.query.positions_BNP is not None
        n, slots = trace.x_BND.shape[1], state.recent.hidden_BMD.shape[1]
        hidden_BMD, positions_BMP, count_B = state.recent
        roomy = Rows(F.pad(hidden_BMD, (0, 0, n, 0)), F.pad(positions_BMP, (0, 0, n, 0)), count_B)
        all_BW = push(roomy, trace.x_BND, trace.query.positions_BNP, trace.query.padding_BN)
        refits_B = (all_BW.count_B - self.length).clamp(min=0) // self.chunk
        coefficients_BCD, fits_B = _clean(state), state.fits_B
        place_BL = slots + n - all_BW.count_B[:, None] + torch.arange(self.chunk, device=fits_B.device)
        for turn in range((self.chunk - 1 + n) // self.chunk):
            index_BL = (place_BL + turn * self.chunk).clamp(max=slots + n - 1)
            due_B = refits_B > turn
            # Rows that are not due look at whatever it holds, which must stay without effect.
            new_BLD = filled(taken(all_BW.hidden_BMD, index_BL), due_B[:, None])
            points_BT = self._sample(attention if turn == 0 else None, coefficients_BCD)
            fitted_BCD = self.refit(coefficients_BCD, fits_B, new_BLD, points_BT)
            coefficients_BCD = torch.where(due_B[:, None, None], fitted_BCD, coefficients_BCD)
            fits_B = fits_B + due_B
        kept = Rows(all_BW.hidden_BMD[:, n:], all_BW.positions_BMP[:, n:], all_BW.count_B - refits_B * self.chunk)
        positions_BMP = torch.where(kept.valid_BM[..., None], kept.positions_BMP, 0)
        return InfinityState(Rows(kept.clean_BMD, positions_BMP, kept.count_B), coefficients_BCD, fits_B)

    def _sample(self, attention: SignalRead | None, coefficients_BCD: Tensor) -> Tensor:
        """(B, T): points at which the old signal is sampled."""
        levels_T = self.levels_T.to(coefficients_BCD.dtype)
        if attention is None or self.sampling == "uniform":
            return levels_T.expand(len(coefficients_BCD), -1)
        mass_BK = signal.attended_mass(*attention, self.bins)
        if self.sampling == "random":
            return signal.random_points(mass_BK, self.samples)
        return signal.quantile_points(mass_BK, levels_T)

    def refit(self, coefficients_BCD: Tensor, fits_B: Tensor, new_BLD: Tensor, points_BT: Tensor) -> Tensor:
        """Coefficients with L inputs taken in; the old signal, where there is one, is sampled at the points."""
        wide = coefficients_BCD.dtype
        new_BLD = new_BLD.to(wide)
        if self.normalise:
            new_BLD = F.layer_norm(new_BLD, new_BLD.shape[-1:])
        old_BTD = signal.evaluate(points_BT, self._in(wide)) @ coefficients_BCD
        again_BCD = self.update_SC.to(wide).mT @ torch.cat([old_BTD, new_BLD], 1)
        return torch.where((fits_B > 0)[:, None, None], again_BCD, self.first_LC.to(wide).mT @ new_BLD)


def _clean(state: InfinityState) -> Tensor:
    """The coefficients, 0 where there is no signal, whatever it holds."""
    return filled(state.coefficients_BCD, (state.fits_B > 0)[:, None])
