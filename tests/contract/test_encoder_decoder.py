"""Every memory and every attention in the encoder of an encoder-decoder: sentences of a document, with padding."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from contract.contract_cases import CONTRACTS, DEPTH, HEADS, SEGMENT, VOCABULARY, WIDTH, Contract, attention_spec
from contract.test_pairs import REASONS
from models.rereading import translate_rereading

from cached_lab.tasks.translation.translate import translate
from cached_transformers import state as states
from cached_transformers.memories.grc.shared_cache import commit_caches
from cached_transformers.models.encoder_decoder import EncoderDecoder
from cached_transformers.registry import ATTENTIONS, MEMORIES

ROWS = 3
PADDING = torch.arange(SEGMENT) >= torch.tensor([SEGMENT, 2, SEGMENT - 1])[:, None]
LABELS = [label for label, contract in CONTRACTS.items() if contract.models != ("vision_transformer",)]
LABELS += [name for name in MEMORIES.names() if name not in CONTRACTS]


def build(memory: Any, attention: Any = "softmax") -> EncoderDecoder:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "feed_forward": 2 * WIDTH}
    sizes |= {"max_length": 2 * SEGMENT, "dropout": 0.0}
    model = EncoderDecoder(VOCABULARY, memory=memory, attention=attention, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def sentences(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, ROWS, SEGMENT), generator=torch.Generator().manual_seed(seed))


def two_sentences(model: EncoderDecoder) -> torch.Tensor:
    """Loss of two sentences of a document, the state between them; its structure is held to stay."""
    state, total = model.init_state(ROWS), torch.zeros(())
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
    model = build(None if name == "none" else CONTRACTS.get(label, Contract()).spec(name))
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
            model = build(memory, attention_spec(attention))
        except ValueError as error:
            assert any(re.search(reason, str(error)) for reason in REASONS.values()), error
            continue
        learns(model)
