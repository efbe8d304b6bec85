"""The causal scan against its recurrence, token by token; its limits; and recorded values of other implementations."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cached_transformers.attentions.parts.scan import causal_scan

B, H, F, V = 2, 3, 6, 5
RULES = ["sum", "delta", "gates"]
DECAYS = {"none": 0, "scalar": 1, "channel": F}


def twin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    erase: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written."""
    outs = []
    for t in range(q.shape[2]):
        if decay is not None:
            state = decay[:, :, t, :, None].exp() * state
        new = v[:, :, t]
        if beta is not None:
            new = beta[:, :, t] * (new - torch.einsum("bhfv,bhf->bhv", state, k[:, :, t]))
        if erase is not None:
            new = new - torch.einsum("bhfv,bhf->bhv", state, erase[:, :, t] * k[:, :, t])
        state = state + torch.einsum("bhf,bhv->bhfv", k[:, :, t], new)
        outs.append(torch.einsum("bhfv,bhf->bhv", state, q[:, :, t]))
    return torch.stack(outs, 2), state


def given(rule: str, decay: str, tokens: int, strength: float = 1.0, seed: int = 0) -> dict[str, Tensor]:
    """Inputs with gradient, float64; keys of length 1, shares in 0 .. 2, decays to about e^-3 a token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, H, *shape, dtype=torch.double, generator=generator)

    made = {"q": normal(tokens, F), "k": torch.nn.functional.normalize(normal(tokens, F), dim=-1)}
    made |= {"v": normal(tokens, V), "state": normal(F, V)}
    if rule == "delta":
        made["beta"] = 2 * torch.sigmoid(normal(tokens, 1))
    if rule == "gates":
        made["erase"] = torch.sigmoid(normal(tokens, F))
    if decay != "none":
        made["decay"] = -strength * normal(tokens, DECAYS[decay]).abs()
    return {name: t.requires_grad_() for name, t in made.items()}


def scan(made: dict[str, Tensor], chunk: int = 4) -> tuple[Tensor, Tensor]:
    q, k, v, state = (made[name] for name in ("q", "k", "v", "state"))
    return causal_scan(q, k, v, state, chunk=chunk, **shares_of(made))


def shares_of(made: dict[str, Tensor]) -> dict[str, Any]:
    names = {"beta_BHN1": "beta", "erase_BHNF": "erase", "log_decay_BHNG": "decay"}
    return {keyword: made.get(name) for keyword, name in names.items()}


def same(made: dict[str, Tensor], got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], atol: float) -> None:
    """Values, and gradients into everything, of outputs and state."""
    weights = [torch.randn_like(t) for t in want]
    gradients = []
    for results in (got, want):
        total = sum((t * w).sum() for t, w in zip(results, weights, strict=True))
        gradients.append(torch.autograd.grad(total, list(made.values()), retain_graph=True))
    for a, b in (*zip(got, want, strict=True), *zip(*gradients, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("tokens", [1, 5, 8, 13])
def test_it_is_the_recurrence_in_chunks_of_any_size(rule: str, decay: str, tokens: int) -> None:
    made = given(rule, decay, tokens)
    want = twin(**made)
    for chunk in (1, 3, 4, 8, 64):
        same(made, scan(made, chunk), want, 1e-11)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", DECAYS)
def test_it_begins_with_nothing_and_half_precision_goes_in_and_out(rule: str, decay: str) -> None:
    made = {name: t.detach() for name, t in given(rule, decay, 13).items()}
    made["state"] = torch.zeros_like(made["state"])
    shares: Any = {**shares_of(made), "chunk": 4}
    q, k, v = (made[name] for name in "qkv")
    assert all(torch.equal(a, b) for a, b in zip(causal_scan(q, k, v, **shares), scan(made), strict=True))
    assert torch.equal(causal_scan(None, k, v, **shares)[1], scan(made)[1])
    half, state = causal_scan(*(t.bfloat16() for t in (q, k, v)), **shares)
    assert half.dtype == torch.bfloat16 and state.dtype == torch.float32
    out, last = causal_scan(q[:, :, :0], k[:, :, :0], v[:, :, :0], made["state"], **shares)
    assert out.shape == (B, H, 0, V) and torch.equal(last, made["state"])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", DECAYS)
def test_it_may_be_cut_anywhere(rule: str, decay: str) -> None:
    made = given(rule, decay, 11)
    want = scan(made)
    for cut in range(12):
        state, outs = made["state"], []
        for part in (slice(0, cut), slice(cut, 11)):
            piece = {name: t if name == "state" else t[:, :, part] for name, t in made.items()}
            out, state = scan({**piece, "state": state})
            outs.append(out)
        same(made, (torch.cat(outs, 2), state), want, 1e-11)


@pytest.mark.parametrize("kind", ["scalar", "channel"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strong", [-1e3, -torch.inf])
def test_total_decay_leaves_the_last_token_and_the_digits_of_those_behind(rule: str, kind: str, strong: float) -> None:
    made = given(rule, kind, 16)
    all_gone = {**made, "decay": torch.full_like(made["decay"], strong)}
    out, state = scan(all_gone, 8)
    beta = made.get("beta", torch.ones(B, H, 16, 1, dtype=torch.double))
    want = beta * made["v"]
    torch.testing.assert_close(state, made["k"][:, :, -1, :, None] * want[:, :, -1, None], rtol=0, atol=0)
    torch.testing.assert_close(out, (made["q"] * made["k"]).sum(-1, keepdim=True) * want, rtol=0, atol=1e-15)
    # One token forgets everything; the rest decay little, which float32 must not lose beside it.
    once = made["decay"].detach() * 1e-3
    once[:, :, 5] = strong
    once.requires_grad_()
    some = {**made, "decay": once}
    results = scan(some, 16)
    same({name: t for name, t in some.items() if name != "decay"}, results, twin(**some), 1e-12)
    assert torch.autograd.grad(results[0].sum(), once)[0].isfinite().all()
    short = scan({name: t.detach().float() for name, t in some.items()}, 16)
    for a, b in zip(short, results, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_strong_decays_of_channels_stay_exact_over_long_chunks(rule: str) -> None:
    """At e^-5 a token, e^-G would leave float32 after 18 of them."""
    made = given(rule, "channel", 64, strength=5.0)
    short = {name: t.detach().float().requires_grad_() for name, t in made.items()}
    got, want = scan(short, 64), twin(**made)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5)
    gradients = torch.autograd.grad(got[0].sum(), list(short.values()))
    exact = torch.autograd.grad(want[0].sum(), list(made.values()))
    for a, b in zip(gradients, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-4)


class Recorded:
    """One file of recorded values; `recorded["q"]` is a float64 tensor."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def heads_first(self, name: str) -> Tensor:
        """(B, H, N, ...) of (B, N, H, ...), with one channel where there is none."""
        t = self[name].transpose(1, 2)
        return t if t.dim() == 4 else t[..., None]


@pytest.fixture
def recurrent(shared: Path) -> Path:
    return shared / "golden" / "recurrent"


def check(got: tuple[Tensor, Tensor], recorded: Recorded, prefix: str = "") -> None:
    torch.testing.assert_close(got[0], recorded.heads_first(f"{prefix}out"), rtol=0, atol=1e-10)
    if f"{prefix}state" in recorded.arrays:
        torch.testing.assert_close(got[1], recorded[f"{prefix}state"], rtol=0, atol=1e-10)


def check_gradients(got: tuple[Tensor, Tensor], recorded: Recorded, sources: dict[str, Tensor]) -> None:
    total = (got[0] * recorded.heads_first("grad/w_out")).sum() + (got[1] * recorded["grad/w_state"]).sum()
    for (name, _), gradient in zip(sources.items(), torch.autograd.grad(total, list(sources.values())), strict=True):
        torch.testing.assert_close(gradient, recorded[f"grad/{name}"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_recorded_gated_delta_rule(recurrent: Path, chunk: int) -> None:
    recorded = Recorded(recurrent / "gated_delta_rule.npz")
    names = ("q", "k", "v", "beta", "g", "state0")
    sources = {name: recorded[name].requires_grad_() for name in names}
    q, k, v, beta, g = (t.transpose(1, 2) for name, t in sources.items() if name != "state0")
    beta, g, scale = beta[..., None], g[..., None], q.shape[-1] ** -0.5

    def run(state: Tensor | None, factor: float, share: float = 1.0) -> tuple[Tensor, Tensor]:
        return causal_scan(q * factor, k, v, state, beta_BHN1=share * beta, log_decay_BHNG=g, chunk=chunk)

    got = run(sources["state0"], scale)
    check(got, recorded)
    check_gradients(got, recorded, sources)
    check(run(None, scale), recorded, "zero_start/")
    check(run(None, 1.0), recorded, "scale1/")
    check(run(sources["state0"], scale, 2.0), recorded, "neg_eig/")


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_recorded_delta_rule(recurrent: Path, chunk: int) -> None:
    recorded = Recorded(recurrent / "delta_rule.npz")
    q, k, v = (recorded[name] for name in "qkv")
    out, state = causal_scan(q * q.shape[-1] ** -0.5, k, v, beta_BHN1=recorded["beta"][..., None], chunk=chunk)
    torch.testing.assert_close(out, recorded["out"], rtol=0, atol=1e-10)
    torch.testing.assert_close(state, recorded["state"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_recorded_kimi_delta_attention(recurrent: Path, chunk: int) -> None:
    recorded = Recorded(recurrent / "kda.npz")
    sources = {name: recorded[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "state0")}
    q, k, v, g, beta = (t.transpose(1, 2) for name, t in sources.items() if name != "state0")
    q, k = (t.repeat_interleave(2, 1) for t in (q * q.shape[-1] ** -0.5, k))  # two heads of values for one of keys
    got = causal_scan(q, k, v, sources["state0"], beta_BHN1=beta[..., None], log_decay_BHNG=g, chunk=chunk)
    check(got, recorded)
    check_gradients(got, recorded, sources)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_recorded_gates_of_channels(recurrent: Path, chunk: int) -> None:
    """Gated DeltaNet-2; and with equal gates, one decay a head, the gated delta rule."""
    recorded = Recorded(recurrent / "gdn2.npz")
    q, k, v, g, erase, write = (recorded.heads_first(name) for name in ("q", "k", "v", "g", "erase", "write"))
    q = q * q.shape[-1] ** -0.5
    shares: Any = {"erase_BHNF": erase, "log_decay_BHNG": g, "chunk": chunk}
    check(causal_scan(q, k, write * v, recorded["state0"], **shares), recorded)
    beta, g = torch.rand(2, *q.shape[:3], 1, dtype=torch.double)
    delta = causal_scan(q, k, v, recorded["state0"], beta_BHN1=beta, log_decay_BHNG=-g, chunk=chunk)
    shares = {"erase_BHNF": beta.expand_as(k), "log_decay_BHNG": (-g).expand_as(k), "chunk": chunk}
    for a, b in zip(causal_scan(q, k, beta * v, recorded["state0"], **shares), delta, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_gates_by_hand() -> None:
    """At width 1 with e = 1/2, half of the first value is left beside the second."""
    one, v = torch.ones(1, 1, 2, 1), torch.tensor([[[[3.0], [5.0]]]])
    out, state = causal_scan(one, one, v, erase_BHNF=one / 2)
    assert out.flatten().tolist() == [3, 6.5] and state.item() == 6.5


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("name", ["gla", "scalar_decay"])
def test_recorded_sums_with_decay(recurrent: Path, name: str, chunk: int) -> None:
    recorded = Recorded(recurrent / f"{name}.npz")
    q, k, v, g = (recorded.heads_first(key) for key in ("q", "k", "v", "g"))
    q = q * q.shape[-1] ** -0.5
    check(causal_scan(q, k, v, recorded["state0"], log_decay_BHNG=g, chunk=chunk), recorded)
    if name == "scalar_decay":
        check(causal_scan(q, k, v, log_decay_BHNG=g, chunk=chunk), recorded, "zero_start/")
        fixed = recorded["retention/log_decay"][:, None, None].expand_as(g)
        check(causal_scan(q, k, v, log_decay_BHNG=fixed, chunk=chunk), recorded, "retention/")


def test_repeated_keys_and_the_greatest_shares_stay_bounded() -> None:
    """4,000 tokens: two keys that all but coincide, with beta at 2, in float32 and against float64."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(1, 1, 1, F, generator=generator)
    nudges = 1e-3 * torch.randn(1, 1, 4000, F, generator=generator)
    k = torch.nn.functional.normalize(first + nudges, dim=-1)
    v = torch.randn(1, 1, 4000, V, generator=generator)
    for share, kind in itertools.product((1.0, 2.0), DECAYS):
        beta = torch.full((1, 1, 4000, 1), share)
        decay = None if kind == "none" else torch.full((1, 1, 4000, DECAYS[kind]), -1e-3)
        made: Any = {"beta_BHN1": beta, "log_decay_BHNG": decay}
        out, state = causal_scan(k, k, v, **made)
        wide: Any = {name: None if t is None else t.double() for name, t in made.items()}
        want, last = causal_scan(k.double(), k.double(), v.double(), **wide)
        # Each step is a contraction, so that norms grow by what is written at most, as a walk.
        assert state.abs().max() < 2 * 4000**0.5 * v.abs().max()
        scale = want.abs().max()
        assert (out - want).abs().max() < 1e-3 * scale and (state - last).abs().max() < 1e-3 * last.abs().max()
