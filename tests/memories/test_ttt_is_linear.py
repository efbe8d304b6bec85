"""Nets that learn as they read are linear attention (arXiv:2602.21204): with inputs x_i and errors e_i of a matrix at
all tokens i, a token t reads x W_0 + sum_i c_ti (x . x_i) v_i, v_i = -rate_i e_i, whatever loss the errors come from.

c_ti is 1 but for momentum and TTT's shares. It holds for each matrix of a net, and fails where weights are changed by
more than gradients: by decay, or by a limit of their size.

Legend: B rows, G nets, T tokens of a stream, K width of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memories.harness import DOUBLE, recorded
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.memories.parts.fast_weights import FastWeights, activate
from cached_transformers.memories.titans.neural_memory import Gates, NeuralMemory
from cached_transformers.memories.ttt import InnerModel

B, G, T, K, CHUNK = 2, 3, 12, 4, 3
Stream = Callable[[Any, Any, slice], tuple[Tensor, Any]]


def watched(net: FastWeights) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Inputs and errors of each matrix, of the chunks to come."""
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    surprise = net.surprise

    def watch(*given: Any) -> tuple[list[Tensor], list[Tensor]]:
        seen.append(surprise(*given))
        return seen[-1]

    object.__setattr__(net, "surprise", watch)
    return seen


def rebuilt(
    net: Any, q: Tensor, chunks: list[tuple[list[Tensor], list[Tensor]]], rates_BGT: Tensor, c: Tensor
) -> Tensor:
    """What queries (B, G, T, K) read, from the initial weights and what was recorded of the chunks."""
    x = q
    for layer, matrix in enumerate(net.matrices(net.initial_GP)):
        inputs, errors = (
            torch.cat([chunk[part][layer] for chunk in chunks], 1).unflatten(0, (B, G)) for part in (0, 1)
        )
        x = F.pad(x, (0, 1), value=1.0) if net.biased else x
        y = x @ matrix + ((x @ inputs.mT) * c) @ (-rates_BGT[..., None] * errors)
        x = activate(y, net.activation)
    return y


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def stirred(net: Any) -> Any:
    net.double()
    with torch.no_grad():
        net.initial_GP.copy_(0.4 * normal(*net.initial_GP.shape, seed=5))
    return net


def apart(net: Any, segment: int, run: Stream, rates_BGT: Tensor, c: Tensor) -> float:
    """The greatest difference between what a stream of segments reads and linear attention."""
    q, chunks = normal(B, G, T, K, seed=1), []
    seen, outs = watched(net), []
    state = net.start(net.empty(B, q), torch.ones(B, dtype=torch.bool))
    for start in range(0, T, segment):
        out, state = run(q, state, slice(start, start + segment))
        outs.append(out)
        chunks += seen[: segment // CHUNK]  # a mini-batch of no token may follow
        seen.clear()
    with torch.no_grad():
        return float((torch.cat(outs, 2) - rebuilt(net, q, chunks, rates_BGT, c)).abs().max())


def titans_apart(*, decay: float = 0.0, **options: Any) -> float:
    net = stirred(NeuralMemory(G, K, expansion=2, chunk=CHUNK, **{"limit": 1e9, **options}))
    k, v = F.normalize(normal(B, G, T, K, seed=2), dim=-1), 2 * normal(B, G, T, K, seed=3)
    greatest = 0.01 if net.loss == "lp" else 1 / CHUNK  # steps of "lp" grow with the error
    theta, eta, one = greatest * normal(B, G, T).sigmoid(), normal(B, G, T, seed=4).sigmoid(), torch.ones(B, G, T)
    gates = Gates(theta, torch.full_like(theta, decay), 1 - eta, one.double())

    def run(q: Tensor, state: Any, part: slice) -> tuple[Tensor, Any]:
        return net(state, *(t[:, :, part] for t in (q, k, v)), Gates(*(gate[:, :, part] for gate in gates)))

    # A gradient goes into the weights at every token since, each time with less momentum.
    c = torch.zeros(B, G, T, T, dtype=torch.double)
    for i in range(T):
        speed = torch.ones(B, G, dtype=torch.double)
        for t in range(i, T):
            speed = speed * eta[:, :, t] if t > i else speed
            c[:, :, t, i] = (c[:, :, t - 1, i] if t > i else 0) + speed
    return apart(net, 6, run, theta, c)


def ttt_apart(**options: Any) -> float:
    net = stirred(InnerModel(G, K, mini_batch=CHUNK, **{"model": "linear", "limit": None, **options}))
    with torch.no_grad():
        net.tau_C.copy_(normal(CHUNK, seed=6) / 4)
    k, v = normal(2, B, G, T, K, seed=2)
    rates, there = normal(B, G, T).sigmoid(), torch.ones(B, T, dtype=torch.bool)

    def run(q: Tensor, state: Any, part: slice) -> tuple[Tensor, Any]:
        tokens_B = torch.full((B,), part.start)
        given = (*(t[:, :, part] for t in (q, k, v)), rates[:, :, part], there[:, part])
        return net(state, tokens_B, *given)

    # All of a mini-batch that is over counts alike; of its own, a token sees the part up to itself.
    place, share = torch.arange(T), net.shares(torch.float64)
    over = place[:, None] // CHUNK > place // CHUNK
    c = torch.where(over, share[-1], share[place % CHUNK][:, None]).tril()
    return apart(net, 6, run, rates, c)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("loss", ["l2", "huber", "lp"])
@torch.no_grad()
def test_titans_is_linear_attention_without_decay(layers: int, loss: str) -> None:
    assert titans_apart(layers=layers, loss=loss) < 1e-10
    assert titans_apart(layers=layers, loss=loss, decay=0.1) > 1e-3
    assert titans_apart(layers=layers, loss=loss, limit=0.1) > 1e-3


@pytest.mark.parametrize("model", ["linear", "mlp"])
@torch.no_grad()
def test_ttt_is_linear_attention_without_a_limit(model: str) -> None:
    assert ttt_apart(model=model) < 1e-10
    assert ttt_apart(model=model, limit=0.1) > 1e-3


@pytest.mark.parametrize("tag", ["plain", "momentum"])
@torch.no_grad()
def test_recorded_values(shared: Path, tag: str) -> None:
    """There, tokens read after the whole chunk, and momentum is of chunks: the last token alone adds S."""
    values = recorded(shared, "2026/ttt_is_linear")
    q, k, v, eta = (values[name][:, None] for name in ("q", "k", "v", "eta"))
    size, momentum = int(values["chunk"]), 0.6 if tag == "momentum" else 0.0
    net = NeuralMemory(1, 4, layers=2, chunk=size, limit=1e9).double()
    net.shapes = [(4, 6), (6, 3)]
    net.initial_GP = nn.Parameter(torch.zeros(1, 42, **DOUBLE))
    learned = net.empty(2, q)
    first = torch.cat([values[name].flatten(1) for name in ("W1", "W2")], 1)[:, None]
    learned, seen, found = learned._replace(weights_BGP=first), watched(net), []
    there = torch.tensor([0.0] * (size - 1) + [1.0], **DOUBLE).expand(2, 1, -1)
    damping = torch.tensor([1 - momentum] + [0.0] * (size - 1), **DOUBLE).expand(2, 1, -1)
    for start in range(0, q.shape[2], size):
        part = slice(start, start + size)
        gates = Gates(eta[:, :, part], torch.zeros_like(there), damping, there)
        _, learned = net(learned, None, k[:, :, part], v[:, :, part], gates)
        inputs, errors = seen.pop()
        read = net.matrices(learned.weights_BGP)
        found.append((F.silu(q[:, :, part] @ read[0])[:, 0], inputs[1], -eta[:, 0, part, None] * errors[1]))
        out = net.read(learned.weights_BGP, q[:, :, part])[:, 0]
        torch.testing.assert_close(out, values[f"{tag}/out"][:, part], rtol=0, atol=1e-10)
    q_hat, k_hat, v_hat = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    for name, t in {"q_hat": q_hat, "k_hat": k_hat, "v_hat": v_hat}.items():
        torch.testing.assert_close(t, values[f"{tag}/{name}"], rtol=0, atol=1e-10)
    linear = q_hat @ values["W2"] + ((q_hat @ k_hat.mT) * values[f"{tag}/weights"]) @ v_hat
    torch.testing.assert_close(linear, values[f"{tag}/out"], rtol=0, atol=1e-10)
