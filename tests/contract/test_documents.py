"""Documents packed into rows are read as if each had a row of its own, with every memory and every causal attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contract_cases import ROWS, SEGMENT, STREAMS, VOCABULARY, Case, cases
from torch import Tensor, nn

from cached_transformers import state as states
from cached_transformers.models import documents

SEGMENTS = 3
LENGTHS = ((6, 1, -2, 9), (18,), (2, 13, 2, 1))
"""Tokens of each row's documents, negative for padding: one that ends with a segment, of one token, of a token after
padding, of a whole row, of more than two segments."""
IDS = torch.stack(
    [torch.cat([torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(row)]) for row in LENGTHS]
)


def spread(model: nn.Module, tokens_BN: Tensor) -> tuple[Tensor, Any]:
    """Run each document in a row of its own, with the segments of its packed row and padding after it.

    Outputs in the places of the packed rows, and the state of each packed row's last document.
    """
    pieces = [(row, int(i)) for row, ids in enumerate(IDS) for i in ids.unique() if i >= 0]
    state, outputs = model.init_state(len(pieces)), None  # type: ignore[operator]
    for part in range(SEGMENTS):
        begin = part * SEGMENT
        columns = [begin + (IDS[row, begin : begin + SEGMENT] == i).nonzero()[:, 0] for row, i in pieces]
        alone = torch.zeros(len(pieces), SEGMENT, dtype=torch.long)
        padding = torch.ones_like(alone, dtype=torch.bool)
        for index, ((row, _), places) in enumerate(zip(pieces, columns, strict=True)):
            alone[index, : len(places)], padding[index, : len(places)] = tokens_BN[row, places], False
        out = model(alone, state, padding=padding)
        state = out.state
        if outputs is None:
            outputs = out.outputs.new_zeros(*tokens_BN.shape, out.outputs.shape[2])
        for index, ((row, _), places) in enumerate(zip(pieces, columns, strict=True)):
            outputs = outputs.index_put((torch.tensor(row), places), out.outputs[index, : len(places)])
    assert outputs is not None
    last = torch.tensor([max(p for p, (r, _) in enumerate(pieces) if r == row) for row in range(ROWS)])
    return outputs, states.reorder(state, last)


def packed(model: nn.Module, tokens_BN: Tensor) -> tuple[Tensor, Any]:
    """The rows as they are, segment after segment."""
    state, outputs = model.init_state(ROWS), []  # type: ignore[operator]
    for part in range(SEGMENTS):
        begin = part * SEGMENT
        here = slice(begin, begin + SEGMENT)
        # Loops detect rows that restart between segments: tests/models/test_documents.py.
        reset = (IDS[:, begin] != IDS[:, begin - 1]) & (IDS[:, begin] >= 0) if part else torch.zeros(ROWS).bool()
        out = model(tokens_BN[:, here], state, reset, documents=IDS[:, here])
        state = out.state
        outputs.append(out.outputs)
    return torch.cat(outputs, 1), state


def of_weights(model: nn.Module, outputs_BNV: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters, of a loss in which each token weighs differently."""
    weights = torch.linspace(-1, 1, outputs_BNV.numel(), dtype=outputs_BNV.dtype).view_as(outputs_BNV)
    model.zero_grad()
    (outputs_BNV * weights * (IDS >= 0)[..., None]).sum().backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@cases(STREAMS, rule="packed")
def test_packed_documents_are_rows_of_their_own(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CALL", 0)  # several groups in each segment, however few tokens
    model = case.build().double().eval()
    tokens = torch.randint(0, VOCABULARY, IDS.shape, generator=torch.Generator().manual_seed(3))
    got, state = packed(model, tokens)
    got_gradients = of_weights(model, got)
    want, alone = spread(model, tokens)
    real = IDS >= 0
    torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-7)
    torch.testing.assert_close(state, alone, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got_gradients, of_weights(model, want), rtol=1e-6, atol=1e-7)
