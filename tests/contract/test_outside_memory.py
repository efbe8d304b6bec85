"""A memory in a file outside the package is right and is explained; `CONTRACTS` holds it to the rules of all."""

from __future__ import annotations

import pytest
import torch
from contract.outside_memory import OutsideInfini
from torch import Tensor

from cached_lab.cli.main import main
from cached_transformers.interfaces.memory import Query, Reading, Trace


@pytest.mark.parametrize("delta", [False, True])
def test_it_is_the_paper_s_sums(delta: bool) -> None:
    torch.manual_seed(0)
    memory = OutsideInfini(8, 2, delta=delta, initial_gate=0.3).double()
    state, written = memory.init_state(2, torch.zeros(1, dtype=torch.float64)), []
    for _ in range(3):
        q, k, v, y = (torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(4))
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        x = torch.zeros(2, 5, 8, dtype=torch.float64)
        query = Query(x, q, padding_BN=padding, k_BHNE=k, v_BHNE=v)
        reading = memory.read(state, query, None)
        found = memory.combine(y, query, reading)
        for b in range(2):
            for h in range(2):
                for n in range(5):
                    expected = y[b, h, n]
                    if written:
                        gate = torch.sigmoid(memory.gate_H[h])
                        expected = gate * answer(written, b, h, q[b, h, n]) + (1 - gate) * expected
                    torch.testing.assert_close(found[b, h, n], expected)
        news = []  # (row, head, key, value), all made with what was written before
        for b in range(2):
            for h in range(2):
                for n in range(5 if b == 0 else 3):
                    value = v[b, h, n]
                    if delta and written:
                        value = value - answer(written, b, h, k[b, h, n])
                    news.append((b, h, lift(k[b, h, n]), value))
        written += news
        state = memory.write(state, Trace(x, x, query, Reading()))[0]
    assert state.tokens_B.tolist() == [15, 9]


def lift(t: Tensor) -> Tensor:
    return torch.where(t > 0, t + 1, t.exp())


def answer(written: list[tuple[int, int, Tensor, Tensor]], b: int, h: int, asked: Tensor) -> Tensor:
    """Answers of the sums over all written keys, one key after the other."""
    above, below = torch.zeros_like(asked), torch.zeros((), dtype=asked.dtype)
    for row, head, key, value in written:
        if (row, head) == (b, h):
            weight = (lift(asked) * key).sum()
            above, below = above + weight * value, below + weight
    return above / below


def test_it_is_listed_and_explained_as_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "memories"]) == 0
    assert "outside_infini" in capsys.readouterr().out
    assert main(["explain", "outside_infini"]) == 0
    said = capsys.readouterr().out
    for line in ("outside_infini (memory)", "A matrix per head", "arXiv:2404.07143", "M' = M + s(K)^T V"):
        assert line in said
    assert "delta: bool = False" in said and "initial_gate: float = 0.0" in said
