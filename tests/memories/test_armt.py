"""ARMT: a slow twin, a pair that is written twice, and a gate that closes.

Legend: B rows, N tokens, M memory tokens, L layers, D model width, C key width, K features.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories.harness import ROWS, SEGMENT, WIDTH, agree, build, run, segments
from torch import Tensor

from cached_transformers.memories.armt import ARMT, dpfp, recall, store

M, DEPTH, C, NU = 2, 2, 6, 3


def armt(**options: Any) -> dict[str, Any]:
    return {"name": "armt", "length": M, "key_width": C, "nu": NU, **options}


def features(x_C: Tensor) -> Tensor:
    """DPFP, product by product."""
    r = [torch.relu(c) for c in x_C] + [torch.relu(-c) for c in x_C]
    return torch.stack([r[i] * r[(i - j) % len(r)] for j in range(1, NU + 1) for i in range(len(r))])


def slow_read(x_D: Tensor, query: Tensor, A_DK: Tensor, z_K: Tensor) -> Tensor:
    phi_K = features(query @ x_D)
    return x_D + (A_DK @ phi_K) / (z_K @ phi_K + 1e-5)


def slow_write(m_MD: Tensor, memory: ARMT, layer: int, A_DK: Tensor, z_K: Tensor) -> tuple[Tensor, Tensor]:
    """All memory tokens of one row against the same A and z."""
    new_A, new_z = A_DK, z_K
    for m_D in m_MD:
        phi_K = features(memory.keys[layer].weight @ m_D)
        beta = torch.sigmoid(memory.shares[layer].weight[0] @ m_D + memory.shares[layer].bias[0])
        if memory.write_gate == "stretched":
            beta = -0.1 + 1.2 * beta
            beta = beta * (beta > 0) if beta < 1 else torch.ones_like(beta)
        old_D = (A_DK @ phi_K) / (z_K @ phi_K + 1e-5)
        gamma = 1 - (z_K @ phi_K) / (phi_K @ phi_K + 1e-5)
        new_A = new_A + beta * torch.outer(memory.value_scale * memory.values[layer].weight @ m_D - old_D, phi_K)
        new_z = new_z + min(max(gamma.item(), 0.0), 1.0) * phi_K
    return new_A, new_z


def slow_model(model: Any, segments: tuple[Tensor, ...]) -> list[Tensor]:
    """The model segment by segment and row by row; blocks without memory see the segment and the memory tokens."""
    memory, outputs = model.stack.model_memory, []
    A = [[torch.zeros(WIDTH, 2 * NU * C, dtype=torch.float64)] * DEPTH for _ in range(ROWS)]
    z = [[torch.zeros(2 * NU * C, dtype=torch.float64)] * DEPTH for _ in range(ROWS)]
    for index, ids_BN in enumerate(segments):
        places = torch.arange(index * SEGMENT, (index + 1) * SEGMENT + M)[None, :, None]
        rows = []
        for row, ids_N in enumerate(ids_BN):
            x_ND = torch.cat([model.embedding(ids_N), memory.initial_MD])
            for layer, block in enumerate(model.stack.blocks):
                query = block.slot_attention.query.weight
                x_ND = torch.stack([slow_read(x, query, A[row][layer], z[row][layer]) for x in x_ND])
                slots, block.slot_attention = block.slot_attention, None
                x_ND = block(x_ND[None], places)[0][0]
                block.slot_attention = slots
                A[row][layer], z[row][layer] = slow_write(
                    memory.norm(x_ND[SEGMENT:]), memory, layer, A[row][layer], z[row][layer]
                )
            rows.append(model.head(model.stack.norm(x_ND[:SEGMENT])))
        outputs.append(torch.stack(rows))
    return outputs


@pytest.mark.parametrize("options", [{}, {"write_gate": "stretched"}, {"value_scale": 0.8}], ids=str)
def test_the_model_is_its_slow_twin_with_gradients(options: dict[str, Any]) -> None:
    model, ids = build(armt(**options)), segments(3)
    got = [out.outputs for out in run(model, ids)]
    assert (got[2] - build()(ids[2]).outputs).abs().max() > 0.1
    agree(got, slow_model(model, ids), model, atol=1e-9, grads=1e-7, rtol=1e-6)


def written(
    keys: Tensor, values: Tensor, before: tuple[Tensor, Tensor] | None = None, beta: float = 1.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """A and z of one row and layer after pairs of features (M, K) and values (M, D) that are written together."""
    if before is None:
        before = torch.zeros(keys.shape[1], values.shape[1]).double(), torch.zeros(keys.shape[1]).double()
    shares = torch.full((1, 1, len(keys), 1), beta).double()
    A, z = store(before[0][None, None], before[1][None, None], keys[None, None], values[None, None], shares, **options)
    return A[0, 0], z[0, 0]


def some(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = dpfp(torch.randn(count, C, generator=generator, dtype=torch.float64), NU)
    return keys, torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def test_what_is_written_twice_is_there_once() -> None:
    keys, values = some(1)
    once = written(keys, values)
    twice = written(keys, values, once)
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)  # exact but for the epsilon
    torch.testing.assert_close(recall(keys, *twice)[0], values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("write_gate", ["sigmoid", "stretched"])
def test_what_a_closed_gate_keeps_is_kept_to_the_last_bit(write_gate: str) -> None:
    """Left at -3 by all the text, a sigmoid stores a twentieth of every segment, a stretched gate nothing."""
    model, ids = build(armt(write_gate=write_gate)).eval(), segments(20)
    with torch.no_grad():
        held = model(ids[0]).state
        for share in model.stack.model_memory.shares:
            share.weight.zero_()
            share.bias.fill_(-3)
        state = run(model, ids[1:], held)[-1].state
    same = torch.equal(state.model.values_BLKD, held.model.values_BLKD)
    assert same == (write_gate == "stretched") and held.model.values_BLKD.abs().max() > 0.1
