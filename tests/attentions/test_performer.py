"""FAVOR+: the exact kernel of its features, an unbiased estimate of softmax attention, and no trace of later keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.cases import B, E, H
from attentions.linearised_twins import average, compare, keys_and_mask, leaves
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions.performer import PerformerAttention, random_directions


def core_of(seed: int = 0, **options: Any) -> PerformerAttention:
    torch.manual_seed(seed)
    return PerformerAttention(H * E, H, **{"features": 10, **options}).double().eval()


def features(x: Tensor, w: Tensor, kernel: str = "softmax") -> Tensor:
    """As the paper writes them."""
    x = x * x.shape[-1] ** -0.25
    if kernel == "relu":
        return F.relu(x @ w.mT) + 1e-3
    return torch.exp(x @ w.mT - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(w))


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 1},
        {"chunk": 4},
        {"chunk": 64},
        {"chunk": 4, "kernel": "relu"},
        {"chunk": 2, "orthogonal": False, "paired": True},
    ],
)
def test_it_is_the_quadratic_form_of_its_features(options: dict[str, Any]) -> None:
    core = core_of(**options)

    def twin(q: Tensor, k: Tensor, v: Tensor, *, x: Tensor, causal: bool, seen: Tensor, context: Any) -> Tensor:
        keys, values, mask = keys_and_mask(k, v, causal, seen, context)
        of_q, of_k = (features(t, core.directions_FE, core.kernel) for t in (q, keys))
        return average(of_q @ of_k.mT, values, mask)

    compare(core, twin)


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_it_is_exact_at_every_size_of_the_inputs(scale: float) -> None:
    """Float32 against the same features as logarithms, put together by a dense log-sum-exp in float64."""
    core = core_of(features=32, chunk=16).float()
    given = {name: t.detach() * (scale if name in "qk" else 1) for name, t in leaves(40).items()}
    q, k, v = (given[name].float() for name in "qkv")
    logs = [core.features(t.double(), core.directions_FE) for t in (q, k)]
    kernel = (logs[0][:, :, :, None] + logs[1][:, :, None]).logsumexp(-1)
    for causal in (False, True):
        seen = torch.ones(40, 40, dtype=torch.bool).tril() if causal else torch.ones(40, 40, dtype=torch.bool)
        want = kernel.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double()
        got = core(q, k, v, causal=causal).out_BHNV
        # Logarithms of features grow with the square of the scale, and so does what float32 leaves of them.
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 * max(1, scale**2))


def test_a_key_that_is_far_larger_does_not_wipe_out_those_before() -> None:
    """One key of huge norm (its features are of e^-1000), then small ones in the same chunk."""
    core = core_of(features=16, chunk=8).float()
    q, k, v = (leaves(8)[name].detach().float() for name in "qkv")
    k[:, :, 0] *= 60 / k[:, :, 0].norm(dim=-1, keepdim=True)
    k[:, :, 1:] *= 0.01
    assert core.features(k, core.directions_FE)[:, :, 0].max() < -400
    out = core(q, k, v, causal=True).out_BHNV
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(out[:, :, 1], v[:, :, 1], rtol=0, atol=1e-5)


def test_directions_are_uniform_orthogonal_and_as_long_as_gaussian_ones() -> None:
    count, width = 4000, 8
    w = random_directions(count * width - 3, width, True, None, None)
    assert w.shape == (count * width - 3, width)
    blocks = w[: (count - 1) * width].view(-1, width, width)
    unit = F.normalize(blocks, dim=-1)
    torch.testing.assert_close(unit @ unit.mT, torch.eye(width).expand_as(unit), rtol=0, atol=1e-5)
    # Each entry of each row has mean 0; those of the first row are where QR's rule for signs would show.
    error = 4 / math.sqrt(count)
    assert (blocks.mean(0).abs() < error).all()
    assert abs(float(w.square().sum(-1).mean()) - width) < 4 * math.sqrt(2 * width / len(w))
    assert not torch.equal(random_directions(8, 8, False, None, None), random_directions(8, 8, False, None, None))


def estimates(q: Tensor, k: Tensor, draws: int, *, orthogonal: bool = True, paired: bool = False) -> Tensor:
    """(draws,): estimates of exp(q k / sqrt(E)) from E features each; from E and their negatives when paired."""
    width = len(q)
    w = random_directions(draws * width, width, orthogonal, None, None).double()
    sides = [w, -w] if paired else [w]
    products = [features(q, side) * features(k, side) * len(side) for side in sides]
    return torch.stack(products).mean(0).view(draws, width).mean(-1)


def test_the_estimate_of_the_kernel_is_unbiased_and_orthogonality_helps() -> None:
    q, k = torch.randn(2, 8, dtype=torch.double) * 0.3
    want = float((q @ k / math.sqrt(8)).exp())
    spread = {}
    for orthogonal in (False, True):
        for paired in (False, True):
            found = estimates(q, k, 40_000, orthogonal=orthogonal, paired=paired)
            assert abs(float(found.mean()) - want) < 4 * float(found.std()) / math.sqrt(40_000), (orthogonal, paired)
            # Pairs are of twice as many features, which halves the variance in any case.
            spread[orthogonal, paired] = float(found.var()) * (2 if paired else 1)
    assert spread[True, False] < 0.95 * spread[False, False]
    # Lemma 2 of the paper: pairs of independent directions have 1 - exp(-|z|^2) of the variance, z = q' + k'.
    share = 1 - float((-(q + k).square().sum() / math.sqrt(8)).exp())
    assert spread[False, True] / spread[False, False] == pytest.approx(share, rel=0.1)
    assert spread[True, True] < spread[True, False]


def test_without_the_signs_the_estimate_would_be_biased() -> None:
    width, draws = 8, 20_000
    q, k = (
        torch.tensor([-0.8, 0.2, -0.1, 0.3, 0.1, 0, 0, 0]).double(),
        torch.tensor([-0.9, 0, 0.2, 0, 0, 0.3, 0, 0]).double(),
    )
    plain = torch.linalg.qr(torch.randn(draws, width, width))[0].mT
    w = (plain * torch.randn(draws, width, width).norm(dim=-1, keepdim=True)).flatten(0, 1).double()
    found = (features(q, w) * features(k, w) * len(w)).view(draws, width).mean(-1)
    off = float(found.mean()) - float((q @ k / math.sqrt(width)).exp())
    assert abs(off) > 10 * float(found.std()) / math.sqrt(draws)


def test_with_many_features_it_is_softmax_attention() -> None:
    given = {name: F.normalize(t.detach(), dim=-1) for name, t in leaves(16).items()}
    q, k, v = (given[name] for name in "qkv")
    for causal in (False, True):
        want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        errors = [
            float((core_of(features=m)(q, k, v, causal=causal).out_BHNV - want).square().mean().sqrt())
            for m in (32, 512, 8192)
        ]
        assert errors[0] > 2 * errors[1] > 4 * errors[2] and errors[2] < 0.005


def test_steps_keep_the_saved_features_and_keys_their_width() -> None:
    """All steps have to agree."""
    core, given = core_of(redraw=True).train(), leaves(8)
    q, k, v = (given[name] for name in "qkv")
    out, _ = core.scan(q, k, v, core.init_step(B, H, E, v.shape[-1], like=q))
    fixed = core.eval()(q, k, v, causal=True).out_BHNV
    torch.testing.assert_close(out, fixed, rtol=0, atol=1e-12)
    core.directions_FE.copy_(core.draw())
    assert (core(q, k, v, causal=True).out_BHNV - fixed).abs().max() > 1e-3
    given = leaves(3)
    with pytest.raises(ValueError, match="keys of width 6: the random features were drawn for 4"):
        PerformerAttention(8, 2)(given["q"], given["k"], given["v"])
