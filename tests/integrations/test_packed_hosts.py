"""Several documents in a row of GPT-2 and Llama with a memory: packed rows are separate rows, whoever says so and how.

Legend: B rows, M columns of a call.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from integrations.hosts import library
from integrations.test_kv_memories import KINDS
from integrations.test_recent_memories import CASES as RECENT
from integrations.transformers_hosts import (
    BERT,
    DECODERS,
    GPT2,
    LLAMA,
    PAD,
    SEGMENT,
    STREAMS,
    Architecture,
    architectures,
    awaken,
    differences,
    stream,
    words,
)
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import ReplayLoop, SegmentLoop, add_memory, create_model
from cached_transformers.integrations.transformers.packed_rows import labels_within
from cached_transformers.state import map_state

IDS = torch.tensor(
    [
        [7, 7, 7, 7, 7, 7, 7, 3, 5, 5, 5, 5, 5, 8, 8, 8],  # longer than a segment, one token, a segment, what is left
        [-1, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 2, 2, -1],  # padding in front, inside, behind; more than two segments
        [1] * 16,  # one document alone
        [4, 4, 6, 6, 6, -1, -1, -1, 9, 9, 9, 9, 9, 9, -1, -1],  # padding between documents
    ]
)
TOKENS = words(*IDS.shape).masked_fill(IDS < 0, PAD)


class Document(NamedTuple):
    """Where one stands: its row, its columns, and whether it is the row's first."""

    row: int
    columns: Tensor
    first: bool


def documents(ids_BM: Tensor = IDS) -> list[Document]:
    """In the order of the rows."""
    found = []
    for row, ids in enumerate(ids_BM):
        names = list(dict.fromkeys(ids[ids >= 0].tolist()))
        found += [Document(row, (ids == name).nonzero()[:, 0], name == names[0]) for name in names]
    return found


def row_of(state: Any, index: int) -> Any:
    return map_state(lambda t: t[index : index + 1], state)


def separately(
    model: Any, past: Any, ids_BM: Tensor = IDS, tokens: Tensor = TOKENS
) -> tuple[Tensor, Tensor, list[Any]]:
    """Logits at the places of the packed rows, the loss, and each row's state: every document is called by itself."""
    logits, states = None, [row_of(past, row) for row in range(len(ids_BM))]
    loss, count = torch.zeros(()), 0
    for row, columns, first in documents(ids_BM):
        text = tokens[row : row + 1, columns]
        out = model(text, **({"memory_state": row_of(past, row)} if first else {}))
        logits = out.logits.new_zeros(*ids_BM.shape, out.logits.shape[-1]) if logits is None else logits
        logits = logits.index_put((torch.full_like(columns, row), columns), out.logits[0])
        states[row] = out.memory_state
        loss = loss + F.cross_entropy(out.logits[0, :-1], text[0, 1:], reduction="sum")
        count += len(columns) - 1
    assert logits is not None
    return logits, loss / count, states


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(model: Any, past: Any, close: float = 2e-5, **call: Any) -> Any:
    """Packed rows are separate rows: logits, loss, gradients of all parameters and of the state given, state after."""
    logits, loss, states = separately(model, past)
    expected = gradients(model, loss)
    out = model(TOKENS, labels=TOKENS, memory_state=past, **call)
    real = IDS >= 0
    torch.testing.assert_close(out.logits[real], logits[real], rtol=close, atol=close)
    torch.testing.assert_close(out.loss, loss, rtol=close, atol=close)
    for row, state in enumerate(states):
        assert differences(row_of(out.memory_state, row), state) < 10 * close
    found = gradients(model, out.loss)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-3, atol=5 * close, msg=lambda m, n=name: f"{n}: {m}")
    return out


def given(model: Any) -> Any:
    """A state that rows go on with."""
    with torch.no_grad():
        return model(words(len(IDS), SEGMENT + 2, 5)).memory_state


MEMORIES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    **{f"{memory}/{host}": (host, spec) for memory, spec in STREAMS.items() for host in DECODERS},
    **RECENT,
    **{f"{name}/kv": (LLAMA, spec) for name, spec in KINDS.items()},
}


@pytest.mark.parametrize("case", list(MEMORIES))
def test_packed_rows_are_separate_rows(case: str) -> None:
    host, memory = MEMORIES[case]
    model = awaken(host.with_memory(memory, segment_length=SEGMENT))
    same(model, given(model), document_ids=IDS)
