"""The infinity-former: loops, recorded values, limiting cases, sampling and precision.

Legend: B rows, N tokens, C basis functions, T samples, L inputs of a refit, H heads, E head width, D model width.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memories.harness import HEADS, WIDTH, agree, layer_of, run_layer
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.memory import LayerMemory, Query, Reading
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.infinity_former import continuous_signal as signal
from cached_transformers.memories.infinity_former.infinity_former import InfinityFormer, SignalRead

ROWS, HEAD = 2, 4
SMALL: dict[str, Any] = {"basis": 6, "widths": (0.1, 0.3)}


def near(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def close(a: Tensor, b: Tensor) -> None:
    """As near as what was recorded in float32 allows."""
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def make(memory: LayerMemory, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return layer_of(memory, positions=memory.position_scheme())


def normal(x: float | Tensor, mean: float | Tensor, variance: float | Tensor) -> Tensor:
    variance = torch.as_tensor(variance)
    return torch.exp(-((torch.as_tensor(x) - mean) ** 2) / (2 * variance)) / torch.sqrt(2 * math.pi * variance)


def psi(t: float, memory: InfinityFormer) -> Tensor:
    pairs = zip(memory.centre_C.tolist(), memory.width_C.tolist(), strict=True)
    return torch.stack([normal(t, m, s * s) for m, s in pairs])


def fit(points: list[float], values: list[Tensor], memory: InfinityFormer, ridge: float) -> Tensor:
    """Ridge regression by its normal equations; values are given at the points that are among [0, 1]."""
    design = torch.stack([psi(t, memory) for t in points])
    return torch.linalg.solve(design.T @ design + ridge * torch.eye(design.shape[1]), design.T @ torch.stack(values))


def twin_refit(memory: InfinityFormer, old: Tensor | None, new: list[Tensor], mass: list[float] | None) -> Tensor:
    ridge, tau, count, samples = 1.0, 0.75, len(new), memory.samples
    zero = torch.zeros(WIDTH)
    new = [(x - x.mean()) / torch.sqrt(x.var(unbiased=False) + 1e-5) for x in new]
    if old is None:
        half = count // 2
        points = [(i + 0.5) / count for i in range(-half, count + half)]
        return fit(points, [zero] * half + new + [zero] * half, memory, ridge)
    levels = [(m + 1) / samples for m in range(samples)]
    if mass is not None:
        places = []
        for level in levels:
            below = 0.0
            for k, share in enumerate(mass):
                if below + share >= level - 1e-12 or k == len(mass) - 1:
                    places.append((k + min(max((level - below) / share, 0.0), 1.0)) / len(mass))
                    break
                below += share
    else:
        places = levels
    shift = 1 / (2 * count + samples)
    grid = np.linspace(-0.5 + shift, 1.5 - shift, 2 * (samples + count)).tolist()
    before, behind = [t for t in grid if t < 0], [t for t in grid if t > 1]
    inside = [tau * t for t in levels] + [tau + (1 - tau) * (j + 1) / count for j in range(count)]
    values = [psi(t, memory) @ old for t in places] + new
    values = [zero] * len(before) + values + [zero] * len(behind)
    return fit(before + inside + behind, values, memory, ridge)


def twin(layer: SelfAttention, inputs: list[Tensor], paddings: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """The same, row by row and token by token, with quantile sampling; no positions."""
    memory: InfinityFormer = layer.memory  # type: ignore[assignment]
    recent: list[list[Tensor]] = [[] for _ in range(ROWS)]
    coefficients: list[Tensor | None] = [None] * ROWS
    outs, total = [], torch.zeros(())
    for x, padding in zip(inputs, paddings, strict=True):
        rows, divergences = [], []
        for b in range(ROWS):
            mass, tokens = [0.0] * memory.bins, []
            for i in range(x.shape[1]):
                seen = torch.stack(recent[b] + [x[b, j] for j in range(i + 1) if not padding[b, j] or j == i])
                q = layer.qkv(x[b, i])[:WIDTH].view(HEADS, HEAD)
                k, v = (layer.qkv(seen)[:, part * WIDTH : (part + 1) * WIDTH].view(-1, HEADS, HEAD) for part in (1, 2))
                heads = [(k[:, h] @ q[h] / HEAD**0.5).softmax(0) @ v[:, h] for h in range(HEADS)]
                y = layer.output(torch.cat(heads))
                old, found = coefficients[b], []
                for h in range(HEADS if old is not None else 0):
                    assert old is not None
                    keys, values = (p(old)[:, h * HEAD : (h + 1) * HEAD] for p in (memory.key, memory.value))
                    scores = keys @ q[h] / HEAD**0.5
                    mean = memory.mean(scores).squeeze().sigmoid()
                    variance = F.softplus(memory.variance(scores)).squeeze()
                    weights = [
                        normal(mean, m, variance + s * s)
                        for m, s in zip(memory.centre_C.tolist(), memory.width_C.tolist(), strict=True)
                    ]
                    found.append(torch.stack(weights) @ values)
                    if not padding[b, i]:
                        ratio = variance / 0.05**2
                        divergences.append((ratio - ratio.log() - 1) / 2)
                        scale = (2 * variance.item()) ** 0.5
                        for c in range(memory.bins):
                            ends = [math.erf((e / memory.bins - mean.item()) / scale) / 2 for e in (c, c + 1)]
                            mass[c] += ends[1] - ends[0]
                tokens.append(y + memory.output(torch.cat(found)) if found else y)
            rows.append(torch.stack(tokens))
            recent[b] += [x[b, j].detach() for j in range(x.shape[1]) if not padding[b, j]]
            shares = [m / sum(mass) for m in mass] if sum(mass) else None
            while len(recent[b]) >= memory.length + memory.chunk:
                new, recent[b] = recent[b][: memory.chunk], recent[b][memory.chunk :]
                coefficients[b] = twin_refit(memory, coefficients[b], new, shares)
                shares = None
        outs.append(torch.stack(rows))
        if divergences:
            total = total + memory.kl_weight * torch.stack(divergences).mean()
    return outs, total


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("length", "chunk"), [(3, 2), (2, 5), (1, 1)])
def test_it_is_what_loops_compute(length: int, chunk: int) -> None:
    options: dict[str, Any] = {"chunk": chunk, "samples": 7, "bins": 16, "relative": False, "kl_weight": 0.01, **SMALL}
    layer, shapes = make(InfinityFormer(WIDTH, HEADS, length, **options)), [5, 4, 9, 2, 5]
    leaves = [torch.randn(ROWS, n, WIDTH, requires_grad=True) for n in shapes]
    paddings = [torch.rand(ROWS, n) < 0.3 for n in shapes]
    sides = []
    for outs, auxiliary in (run_layer(layer, leaves, paddings, counted=True)[::2], twin(layer, leaves, paddings)):
        sides.append([*(y[~p] for y, p in zip(outs, paddings, strict=True)), auxiliary])
    assert sides[0][-1] > 0
    agree(*sides, {**dict(layer.named_parameters()), **{f"x{i}": x for i, x in enumerate(leaves)}}, least=None)


@pytest.fixture
def golden(shared: Path) -> Any:
    arrays = np.load(shared / "golden" / "memories" / "infty_former.npz")
    return lambda name: torch.tensor(arrays[name]).double()


@pytest.mark.device
@pytest.mark.parametrize(
    ("tag", "basis", "widths"),
    [("wide", 8, (0.1, 0.2)), ("wide_mask_kl", 8, (0.1, 0.2)), ("paper_sigma", 16, (0.01, 0.05))],
)
def test_recorded_values(golden: Any, tag: str, basis: int, widths: tuple[float, float]) -> None:
    def load(name: str) -> Tensor:
        return golden(f"{tag}/{name}")

    prior_mean = 0.5 if tag == "wide_mask_kl" else None
    options: dict[str, Any] = {"sampling": "uniform", "normalise": False, "prior_mean": prior_mean}
    memory = InfinityFormer(6, 2, chunk=load("k").shape[1], basis=basis, widths=widths, samples=16, **options).double()
    close(memory.centre_C, load("basis_mu"))
    close(memory.width_C, load("basis_sigma"))
    close(memory.first_LC, load("G_first"))
    close(memory.update_SC, load("G_inf"))
    close(signal.evaluate(memory.levels_T, memory.functions), load("samples_psi"))
    names = {"key": "proj_key", "value": "proj_value", "output": "attn_out", "mean": "mu", "variance": "sigma"}
    with torch.no_grad():
        for ours, theirs in names.items():
            getattr(memory, ours).weight.copy_(load(f"param/{theirs}.weight"))
    state = memory.init_state(2, torch.zeros((), dtype=torch.float64))
    coefficients_BCD, fits_B = state.coefficients_BCD, state.fits_B
    for segment in range(4):
        k, q = (load(name)[segment].transpose(0, 1) for name in ("k", "q"))
        if tag == "wide_mask_kl":  # a trained gate on the inputs, which this memory does not have
            gate = F.conv1d(k.mT, load("param/mask_net.weight"), load("param/mask_net.bias"), padding=1)
            k = k * gate.mT.sigmoid()
        points_BT = memory.levels_T.expand(2, -1)
        coefficients_BCD = memory.refit(coefficients_BCD, fits_B, k, points_BT)
        fits_B = fits_B + 1
        close(coefficients_BCD, load(f"seg{segment}/B"))
        q_BHNE = q.unflatten(-1, (2, 3)).transpose(1, 2)
        z, mean, variance = memory.attend(*memory.keys_values(coefficients_BCD), q_BHNE)
        read = (Query(q, q_BHNE), Reading(output_BHNE=z))
        y = memory.project(torch.zeros_like(q_BHNE), *read, lambda y: y, None)
        close(y.transpose(0, 1), load(f"seg{segment}/context"))
        kl = signal.divergence(mean, variance, 0.05, prior_mean).flatten(1)
        close(kl, load(f"seg{segment}/kl"))
        counted = torch.ones(2, 5, dtype=torch.bool)
        close(memory._divergence(SignalRead(mean, variance, counted)), 1e-6 * kl.mean())


@pytest.mark.device
def test_recorded_continuous_softmax(golden: Any) -> None:
    basis = signal.Bumps(golden("csoftmax/mu_b"), golden("csoftmax/sigma_b"))
    mean, variance = golden("csoftmax/mu"), golden("csoftmax/var")
    near(signal.expectation(mean, variance, basis), golden("csoftmax/r"), 1e-9)
    theta = torch.stack([mean / variance, -0.5 / variance], -1).requires_grad_()
    variance = -0.5 / theta[:, 1]
    signal.expectation(theta[:, 0] * variance, variance, basis).square().sum().backward()
    torch.testing.assert_close(theta.grad, golden("csoftmax/grad_theta_of_sum_r2"), rtol=1e-8, atol=1e-8)


def test_a_constant_is_kept_inside() -> None:
    """Not at the ends, behind which the signal is 0, nor, after a refit, where the old end was."""
    basis = signal.bumps(128, (0.01, 0.05))
    one = torch.ones(65, 1).double()

    def at(ends: tuple[float, float], coefficients: Tensor) -> Tensor:
        return signal.evaluate(torch.linspace(*ends, 65).double(), basis) @ coefficients

    first = signal.first_operator(65, basis, 1e-3).mT @ one
    near(at((0.2, 0.8), first), one, 0.005)
    samples = signal.evaluate(signal.uniform_points(128), basis) @ first
    again = signal.update_operator(128, 65, 0.75, basis, 1e-3).mT @ torch.cat([samples, one])
    near(at((0.2, 0.6), again), one, 0.01)
    near(at((0.86, 0.9), again), one, 0.03)


def test_attention_draws_the_samples() -> None:
    mean, variance = torch.full((1, 2, 3), 0.25), torch.full((1, 2, 3), 0.001)
    mass = signal.attended_mass(mean, variance, torch.ones(1, 3, dtype=torch.bool), 128)
    quantiles = signal.quantile_points(mass, signal.uniform_points(101))
    assert abs(quantiles[0, 50].item() - 0.25) < 0.01 and (quantiles.diff() > 0).all()
    torch.manual_seed(5)
    drawn = signal.random_points(mass, 20000)
    torch.manual_seed(5)
    assert torch.equal(drawn, signal.random_points(mass, 20000)) and (drawn.diff() >= 0).all()
    counts = torch.bincount((drawn[0] * 128).round().long(), minlength=128) / 20000
    near(counts, mass[0], 0.02)
    assert abs(quantiles.std().item() - drawn.std().item()) < 0.01


def test_random_sampling_repeats_with_the_seed_and_the_signal_stays() -> None:
    layer = make(InfinityFormer(WIDTH, HEADS, 2, chunk=3, sampling="random", relative=False, **SMALL))
    inputs = [torch.randn(ROWS, 6, WIDTH).double() for _ in range(3)]
    told = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        told.append(run_layer(layer, inputs, counted=True)[0][-1])
    assert torch.equal(told[0], told[1]) and not torch.equal(told[0], told[2])
    even = make(InfinityFormer(WIDTH, HEADS, 2, chunk=3, sampling="uniform", relative=False, **SMALL))
    assert (run_layer(even, inputs, counted=True)[0][-1] - told[0]).abs().max() > 1e-4
    # The first segment reaches outputs 20 segments later; gradients stop at the segment.
    layer = make(InfinityFormer(WIDTH, HEADS, 2, chunk=2, relative=False, contraction=0.95, **SMALL))
    inputs = [torch.randn(ROWS, 4, WIDTH).double().requires_grad_() for _ in range(20)]
    outs, (*_, state), _ = run_layer(layer, inputs, counted=True)
    changed = [inputs[0].flip(0), *inputs[1:]]
    assert (run_layer(layer, changed, counted=True)[0][-1] - outs[-1]).abs().max() > 1e-5
    outs[-1].sum().backward()
    assert [x.grad is not None for x in inputs] == [False] * 19 + [True]
    assert not state.coefficients_BCD.requires_grad


def test_precision_of_the_signal() -> None:
    memory = InfinityFormer(WIDTH, HEADS, 2, chunk=4, relative=False, **SMALL)
    exact = InfinityFormer(WIDTH, HEADS, 2, chunk=4, relative=False, **SMALL).double()
    assert memory.update_SC.dtype == torch.float32
    memory.bfloat16()
    assert memory.update_SC.dtype == torch.float32
    assert memory.init_state(1, torch.zeros((), dtype=torch.bfloat16)).coefficients_BCD.dtype == torch.float32
    memory.double()
    assert torch.equal(memory.update_SC, exact.update_SC) and torch.equal(memory.centre_C, exact.centre_C)
    assert not any(name.endswith(("_SC", "_LC", "_C", "_T")) for name in memory.state_dict())
    layer = make(InfinityFormer(WIDTH, HEADS, 2, chunk=4, relative=False, **SMALL)).float()
    inputs = [torch.randn(ROWS, 6, WIDTH) for _ in range(3)]
    _, (*_, plain), _ = run_layer(layer, inputs, counted=True)
    with torch.autocast("cpu", torch.bfloat16):
        _, (*_, cast), _ = run_layer(layer, inputs, counted=True)
    near(cast.recent.hidden_BMD, plain.recent.hidden_BMD, 0)
    assert cast.coefficients_BCD.dtype == torch.float32


def test_the_auxiliary_loss_counts_real_queries_of_rows_with_a_signal() -> None:
    memory = InfinityFormer(WIDTH, HEADS, 2, chunk=2, relative=False, kl_weight=0.5, **SMALL)
    mean, variance = torch.rand(3, HEADS, 4), torch.rand(3, HEADS, 4) + 0.1
    counted = torch.tensor([[True] * 4, [False] * 4, [True, False, False, False]])
    each = signal.divergence(mean, variance, 0.05)
    want = 0.5 * torch.cat([each[0].flatten(), each[2, :, 0]]).mean()
    near(memory._divergence(SignalRead(mean, variance, counted)), want, 1e-4)
    assert memory._divergence(SignalRead(mean, variance, counted & False)) == 0
    near(signal.divergence(mean[:1] * 0 + 0.3, variance[:1] * 0 + 0.05**2, 0.05, 0.3), torch.zeros(1, HEADS, 4), 1e-6)
