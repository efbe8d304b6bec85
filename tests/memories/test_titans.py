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

from cached_transformers.memories.titans.neural_memory import Gates, Learned, NeuralMemory, scan_of

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
    q, k, v, theta, alpha, damping = inputs
    gates = Gates(theta, alpha, damping, torch.ones_like(theta))
    out, behind = memory(begun(memory, len(q)) if learned is None else learned, q, k, v, gates)
    assert out is not None
    return out, behind


def slow(memory: NeuralMemory, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (B, G, N, K), weights and momentum (B, G, P), token by token."""
    outs, states = [], []
    for row in range(B):
        for net in range(G):
            first_P = begun(memory).weights_BGP[row, net]
            tokens = [tuple(x[row, net, t] for x in inputs) for t in range(inputs[0].shape[2])]
            out, *state = slow_learn(memory, first_P, torch.zeros_like(first_P), tokens)
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
    ],
    ids=str,
)
def test_it_is_its_slow_twin_with_gradients(options: dict[str, Any], chunk: int) -> None:
    memory = build(chunk=chunk, **options)
    inputs = [t.requires_grad_() for t in given()]
    fast_out, fast_state = learn(memory, inputs)
    got, wanted = (fast_out, *fast_state), slow(memory, inputs)
    leaves = {**{str(i): t for i, t in enumerate(inputs)}, "initial": memory.initial_GP}
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
