"""The neural memory of Titans against a twin that takes one token after the other, and its gradients from autograd.

Legend: B rows, G nets, N tokens, K width of keys, (I, O) of a matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from memories.harness import DOUBLE, agree
from memories.titans_twin import slow_learn
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.memories.parts.fast_weights import newton_schulz
from cached_transformers.memories.titans.neural_memory import NEWTON_SCHULZ, Gates, Learned, NeuralMemory, scan_of

B, G, N, K = 2, 2, 11, 4


def build(**options: Any) -> NeuralMemory:
    torch.manual_seed(0)
    memory = NeuralMemory(G, K, **{"chunk": 4, "expansion": 2, **options}).double()
    with torch.no_grad():
        memory.initial_GP.add_(0.3 * torch.randn_like(memory.initial_GP))
    return memory


def begun(memory: NeuralMemory, rows: int = B) -> Learned:
    """What rows that have learned nothing begin with."""
    zeros = torch.zeros(rows, memory.initial_GP.shape[0], memory.size, **DOUBLE)
    return memory.start(Learned(zeros, zeros), torch.ones(rows, dtype=torch.bool))


def given(tokens: int = N, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values; theta, alpha, 1 - eta."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, G, tokens, K, generator=generator, **DOUBLE) for _ in range(3))
    theta, alpha, damping = (torch.rand(B, G, tokens, generator=generator, **DOUBLE) for _ in range(3))
    return [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, 0.3 * theta, 0.3 * alpha, damping]


def learn(memory: NeuralMemory, inputs: list[Tensor], learned: Learned | None = None) -> tuple[Tensor, Learned]:
    q, k, v, theta, alpha, damping, *window = inputs
    gates, gamma = Gates(theta, alpha, damping, torch.ones_like(theta)), None
    if window:
        keys, values, shares, gamma = window
        k, v, gamma = (torch.cat(pair, 2) for pair in ((keys, k), (values, v), (shares, gamma)))
    out, behind = memory(begun(memory, len(q)) if learned is None else learned, q, k, v, gates, shares_BGN=gamma)
    assert out is not None
    return out, behind


def slow(memory: NeuralMemory, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (B, G, N, K), weights and momentum (B, G, P), token by token."""
    outs, states = [], []
    for row in range(B):
        for net in range(G):
            first_P = begun(memory).weights_BGP[row, net]
            own = [*inputs[:6], *inputs[9:]]
            tokens = [tuple(x[row, net, t] for x in own) for t in range(inputs[0].shape[2])]
            earlier = [tuple(x[row, net, t] for x in inputs[6:9]) for t in range(memory.window - 1)]
            out, *state = slow_learn(memory, first_P, torch.zeros_like(first_P), tokens, before=earlier)
            outs.append(torch.stack(out))
            states.append(state)
    stacked = (torch.stack(list(t)).unflatten(0, (B, G)) for t in (outs, *zip(*states, strict=True)))
    return tuple(stacked)  # type: ignore[return-value]


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layers": 2},
        {"layers": 2, "activation": "gelu"},
        {"layers": 3},
        {"layers": 2, "loss": "huber", "bound": 0.5},
        {"layers": 2, "limit": 0.3},
        {"loss": "lp"},
        {"layers": 2, "loss": "lp", "power": 2.5},
        {"window": 3},
        {"window": 6, "layers": 2, "loss": "huber", "bound": 0.5},
        {"orthogonal": True},
        {"window": 2, "orthogonal": True, "layers": 2},
    ],
    ids=str,
)
def test_it_is_its_slow_twin_with_gradients(options: dict[str, Any], chunk: int) -> None:
    memory = build(chunk=chunk, **options)
    inputs = given()
    if memory.window > 1 or memory.orthogonal:  # keys, values and shares of earlier tokens, and shares of these
        keys, values, shares = (t[:, :, : memory.window - 1] for t in given(seed=1)[1:4])
        inputs += [keys.clone(), values.clone(), shares + 0.5, inputs[3] + 0.5]
    inputs = [t.requires_grad_() for t in inputs]
    fast_out, fast_state = learn(memory, inputs)
    got, wanted = (fast_out, *fast_state), slow(memory, inputs)
    leaves = {**{str(i): t for i, t in enumerate(inputs) if t.numel()}, "initial": memory.initial_GP}
    agree(got, wanted, leaves, grads=1e-8, rtol=1e-8, least=1e-3)


def test_gates_at_their_ends_and_odd_values_stay_bounded() -> None:
    memory, inputs = build(layers=2), given()
    inputs[3][:, :, 2], inputs[3][:, :, 5] = 0, 0
    inputs[4][:, :, 3], inputs[4][:, :, 5], inputs[4][:, :, 6] = 1, 0, 1
    inputs[5][:, :, 3:6], inputs[5][:, :, 7] = 1, 0
    inputs = [t.requires_grad_() for t in inputs]
    leaves = {str(i): t for i, t in enumerate(inputs)}
    agree([learn(memory, inputs)[0]], [slow(memory, inputs)[0]], leaves, grads=1e-8, rtol=1e-8)
    q, k, v, *_ = given(1)
    gates = [torch.full((B, G, 1), value, **DOUBLE) for value in (0.5, 0, 1)]
    steps = [learn(build(loss=loss), [q, k, v * 1e6, *gates])[1].sums_BGP.abs().max() for loss in ("l2", "huber")]
    assert steps[0] > 1e5 and steps[1] < 0.5 * K**0.5 + 1e-9
    small = given(1)
    small[2] = small[2] * 0.01
    memories = [build(loss=loss, bound=100.0) for loss in ("l2", "huber")]
    torch.testing.assert_close(*(learn(memory, small)[0] for memory in memories), rtol=0, atol=1e-12)


@pytest.mark.device
@pytest.mark.parametrize("chunk", [1, 4])
def test_the_scans_give_golden_values_of_an_independent_implementation(shared: Path, chunk: int) -> None:
    """fla's Titans, its inner gradient repaired: |LN(k M) - (v - k)|^2 is learned, and q M + LN(q M) is the output."""
    golden = {k: torch.tensor(v) for k, v in np.load(shared / "golden/recurrent/titans_linear_core.npz").items()}
    sequences = [golden[name].transpose(1, 2) for name in ("q", "k", "v", "theta", "alpha", "eta")]

    def normed(x: Tensor) -> Tensor:
        weight, bias = golden["norm_weight"][:, None], golden["norm_bias"][:, None]
        return F.layer_norm(x, x.shape[-1:], eps=1e-6) * weight + bias

    W, S, outs = golden["state0"], torch.zeros_like(golden["state0"]), []
    for q, k, v, theta, alpha, eta in zip(*(t.split(chunk, 2) for t in sequences), strict=True):
        sums = (k @ W).requires_grad_()
        (errors,) = torch.autograd.grad((normed(sums) - (v - k)).square().sum(), sums)
        b, f, from_j, m, n = scan_of(Gates(*(t[..., 0] for t in (theta, alpha, 1 - eta, torch.ones_like(eta)))))
        outs.append(b * (q @ W) + f * (q @ S) - ((q @ k.mT) * from_j) @ errors)
        W, S = (
            b[..., -1:, :] * W + f[..., -1:, :] * S - (k * from_j[..., -1, :, None]).mT @ errors,
            m[..., -1:, :] * S - (k * n[..., -1, :, None]).mT @ errors,
        )
    out = torch.cat(outs, 2)
    torch.testing.assert_close(W, golden[f"c{chunk}/state"], rtol=0, atol=1e-12)
    torch.testing.assert_close((out + normed(out)).transpose(1, 2), golden[f"c{chunk}/out"], rtol=0, atol=1e-12)


def golden_omega(shared: Path) -> dict[str, Tensor]:
    return {k: torch.tensor(v) for k, v in np.load(shared / "golden/2026/omega.npz").items()}


def omega(
    golden: dict[str, Tensor], part: str, *, chunk: int = 1, momentum: bool = True, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, weights and S, in the letters of ATLAS: M = alpha M - eta S, S = theta S + gradients."""
    q, k, W = (golden[f"{part}{name}"] for name in ("q", "k", "state0"))
    v, gamma, eta, theta, alpha = (golden[name] for name in ("v", "gamma", "eta", "theta", "alpha"))
    rows, keys, values = len(k), k.shape[-1], v.shape[-1]
    memory = NeuralMemory(1, keys, chunk=chunk, **options).double()
    memory.shapes = [(keys, values)]  # these nets are not square
    theta = theta if momentum else torch.zeros_like(theta)
    if not memory.orthogonal:  # where eta is within S, S keeps theta eta_t / eta_(t-1) of itself
        theta = theta * eta / F.pad(eta, (1, 0), value=1.0)[:, :-1]
    gates = Gates(*(t[:, None] for t in (eta, 1 - alpha, 1 - theta, torch.ones_like(eta))))
    back = (0, 0, memory.window - 1, 0)
    k_BGNK, v_BGNV = (F.pad(t, back)[:, None] for t in (k, v))
    shares_BGN = F.pad(gamma, back[2:])[:, None]
    learned = Learned(W.flatten(1)[:, None], torch.zeros(rows, 1, keys * values, **DOUBLE))
    out, after = memory(learned, q[:, None], k_BGNK, v_BGNV, gates, shares_BGN=shares_BGN)
    W, S = (t.unflatten(-1, (keys, values))[:, 0] for t in after)
    assert out is not None
    return out[:, 0], W, S if memory.orthogonal else -S / eta[:, -1, None, None]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("omega", {"window": 3}),
        ("omega_no_momentum", {"window": 3, "momentum": False}),
        ("window1", {}),
        ("whole", {"window": 12}),
        ("chunked", {"window": 3, "chunk": 4}),
        ("atlas", {"window": 3, "orthogonal": True}),
    ],
)
def test_recorded_values_of_omega_and_atlas(shared: Path, name: str, options: dict[str, Any]) -> None:
    golden = golden_omega(shared)
    out, W, S = omega(golden, "", **options)
    torch.testing.assert_close(W, golden[f"{name}/state"], rtol=0, atol=1e-10)
    torch.testing.assert_close(-S if name == "atlas" else S, golden[f"{name}/momentum"], rtol=0, atol=1e-10)
    if name == "atlas":  # read after the step there, before it here
        out = golden["q"][:, -1:] @ W
        torch.testing.assert_close(out, golden["atlas/out"][:, -1:], rtol=0, atol=1e-10)
    else:
        torch.testing.assert_close(out, golden[f"{name}/out"], rtol=0, atol=1e-10)


def test_recorded_values_of_the_delta_rule_polynomial_keys_orthogonal_steps_and_losses(shared: Path) -> None:
    golden = golden_omega(shared)
    ones = {name: torch.ones_like(golden[name]) for name in ("gamma", "alpha")}
    torch.testing.assert_close(
        omega(golden | ones, "", momentum=False)[0], golden["delta_limit/out"], rtol=0, atol=1e-10
    )
    out, W, _ = omega(golden, "poly/", window=3)
    torch.testing.assert_close(out, golden["poly/out"], rtol=0, atol=1e-10)
    torch.testing.assert_close(W, golden["poly/state"], rtol=0, atol=1e-10)
    steps = newton_schulz(golden["ns5/in"], NEWTON_SCHULZ)
    torch.testing.assert_close(steps, golden["ns5/out"], rtol=0, atol=1e-10)
    error, zero = golden["miras/error"], torch.zeros_like(golden["miras/error"])
    bound = float(golden["miras/huber_bound"]) / error.shape[-1] ** 0.5
    for name, memory in {"l2": build(), "lp3": build(loss="lp"), "huber": build(loss="huber", bound=bound)}.items():
        torch.testing.assert_close(memory.error(error, zero), golden[f"miras/{name}"], rtol=0, atol=1e-10)
