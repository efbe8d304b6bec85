"""The mean update block by block, as a CPU makes it where there is much of it, is the update of everything at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cached_transformers.memories.grc import equations
from cached_transformers.memories.grc.equations import Candidate, GateWeights, mean_gate_update

B, M, C, D = 5, 7, 4, 8


def update(candidate: Candidate, dtype: torch.dtype, marked: bool) -> list[Tensor]:
    """The new cache, and the gradients of tokens (a slice of wider ones) and of every weight."""
    torch.manual_seed(0)
    x_BMD = torch.randn(B, M, D).to(dtype).requires_grad_()
    tokens, bias, cache = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((12, C), (12,), (12, C)))
    scale, shift = (torch.randn(C).to(dtype).requires_grad_() for _ in range(2))
    norm = (scale, shift, 1e-5) if candidate == "norm" else None
    weight_B = torch.tensor([True, False, True, True, False]) if marked else None
    weights = GateWeights(tokens, bias, cache, norm)
    cache_MC = torch.randn(M, C, dtype=torch.promote_types(dtype, torch.float32))
    new_MC = mean_gate_update(x_BMD[..., :C], cache_MC, weights, candidate, weight_B)
    inputs = [x_BMD, tokens, bias, cache, *([scale, shift] if norm else [])]
    return [new_MC, *torch.autograd.grad((new_MC * torch.randn(M, C)).sum(), inputs)]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("candidate", ["norm", "tanh", "affine"])
@pytest.mark.parametrize("block", [1, 3 * C, M * C, 2 * M * C, 3 * M * C + 1])
def test_blocks_add_up(monkeypatch: pytest.MonkeyPatch, candidate: Candidate, block: int, marked: bool) -> None:
    """Blocks of one slot, of some, of one row, of two and a rest, of three and a rest."""
    whole = update(candidate, torch.float64, marked)
    monkeypatch.setattr(equations, "LARGE", 0)
    monkeypatch.setattr(equations, "_BLOCK", block)
    blocks = list(equations._blocks(torch.zeros(B, M, C)))
    assert len(blocks) == {1: B * M, 3 * C: B * 3, M * C: B, 2 * M * C: 3, 3 * M * C + 1: 2}[block]
    for a, b in zip(update(candidate, torch.float64, marked), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_half_precision_loses_no_digits_to_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = update("norm", torch.float64, False)
    whole = update("norm", torch.bfloat16, False)
    monkeypatch.setattr(equations, "LARGE", 0)
    monkeypatch.setattr(equations, "_BLOCK", C)
    for a, b, c in zip(update("norm", torch.bfloat16, False), whole, exact, strict=True):
        scale = c.abs().max()
        assert a.dtype == b.dtype and (a - c).abs().max() <= 2 * (b - c).abs().max() + 0.01 * scale


def test_little_is_one_block() -> None:
    assert list(equations._blocks(torch.zeros(B, M, C))) == [(slice(0, B), slice(0, M))]
