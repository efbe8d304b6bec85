"""Documents packed into rows, and sentences of a document in an encoder-decoder: with every memory and attention."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from common import stirred
from contract import contract_cases as C
from contract.test_pairs import REASONS
from models.test_translation import translate_rereading
from torch import Tensor, nn

from cached_lab.tasks.translation.translate import translate
from cached_transformers import state as states
from cached_transformers.memories.grc.shared_cache import commit_caches
from cached_transformers.models import documents
from cached_transformers.models.encoder_decoder import EncoderDecoder
from cached_transformers.registry import ATTENTIONS, MEMORIES

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
        begin = part * C.SEGMENT
        columns = [begin + (IDS[row, begin : begin + C.SEGMENT] == i).nonzero()[:, 0] for row, i in pieces]
        alone = torch.zeros(len(pieces), C.SEGMENT, dtype=torch.long)
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
    last = torch.tensor([max(p for p, (r, _) in enumerate(pieces) if r == row) for row in range(C.ROWS)])
    return outputs, states.reorder(state, last)


def packed(model: nn.Module, tokens_BN: Tensor) -> tuple[Tensor, Any]:
    """The rows as they are, segment after segment."""
    state, outputs = model.init_state(C.ROWS), []  # type: ignore[operator]
    for part in range(SEGMENTS):
        begin = part * C.SEGMENT
        here = slice(begin, begin + C.SEGMENT)
        # Loops detect rows that restart between segments: tests/models/test_documents.py.
        reset = (IDS[:, begin] != IDS[:, begin - 1]) & (IDS[:, begin] >= 0) if part else torch.zeros(C.ROWS).bool()
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


@C.cases(C.STREAMS, rule="packed")
def test_packed_documents_are_rows_of_their_own(case: C.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CALL", 0)  # several groups in each segment, however few tokens
    model = case.build().double().eval()
    tokens = torch.randint(0, C.VOCABULARY, IDS.shape, generator=torch.Generator().manual_seed(3))
    got, state = packed(model, tokens)
    got_gradients = of_weights(model, got)
    want, alone = spread(model, tokens)
    real = IDS >= 0
    torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-7)
    torch.testing.assert_close(state, alone, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got_gradients, of_weights(model, want), rtol=1e-6, atol=1e-7)


PADDING = torch.arange(C.SEGMENT) >= torch.tensor([C.SEGMENT, 2, C.SEGMENT - 1])[:, None]
LABELS = [label for label, contract in C.CONTRACTS.items() if contract.models != ("vision_transformer",)]
LABELS += [name for name in MEMORIES.names() if name not in C.CONTRACTS]


def build(memory: Any, attention: Any = "softmax") -> EncoderDecoder:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"width": C.WIDTH, "depth": C.DEPTH, "heads": C.HEADS, "feed_forward": 2 * C.WIDTH}
    sizes |= {"max_length": 2 * C.SEGMENT, "dropout": 0.0}
    model = EncoderDecoder(C.VOCABULARY, memory=memory, attention=attention, **sizes)
    return stirred(model, 0.2)


def sentences(seed: int) -> torch.Tensor:
    return torch.randint(C.VOCABULARY, (2, C.ROWS, C.SEGMENT), generator=torch.Generator().manual_seed(seed))


def two_sentences(model: EncoderDecoder) -> torch.Tensor:
    """Loss of two sentences of a document, the state between them; its structure is held to stay."""
    state, total = model.init_state(C.ROWS), torch.zeros(())
    for seed in range(2):
        source, target = sentences(seed)
        out = model(source, target, PADDING, state, targets=target.roll(1, 1))
        assert states.signature(out.state) == states.signature(state)
        state, total = out.state, total + out.outputs.mean() + out.auxiliary_loss
    return total


def learns(model: EncoderDecoder) -> None:
    total = two_sentences(model.train())
    total.backward()
    assert total.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("label", LABELS)
def test_memories(label: str) -> None:
    name = label.partition("/")[0]
    model = build(None if name == "none" else C.CONTRACTS.get(label, C.Contract()).spec(name))
    learns(model)
    commit_caches(model)
    source, target = sentences(2)
    model.eval()
    with torch.no_grad():
        state = model.encode(*[sentences(3)[0], PADDING]).state
        want = model(source.masked_fill(PADDING, 0), target, PADDING, state)
        got = model(source.masked_fill(PADDING, 1), target, PADDING, state)
    torch.testing.assert_close(got.outputs, want.outputs)
    options: dict[str, Any] = {"padding": PADDING, "begin": 0, "end": 1, "beams": 2, "tokens": 4, "state": state}
    kept, again = (find(model, source, **options) for find in (translate, translate_rereading))
    torch.testing.assert_close(kept, again)


@pytest.mark.parametrize("attention", ATTENTIONS.names())
def test_attentions(attention: str) -> None:
    for memory in (None, "grc"):
        try:
            model = build(memory, C.attention_spec(attention))
        except ValueError as error:
            assert any(re.search(reason, str(error)) for reason in REASONS.values()), error
            continue
        learns(model)
