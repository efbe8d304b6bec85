"""Documents read in segments: what theory says they equal, gradients, padding, replay, passes, memories exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses
from torch import Tensor
from torch.nn import functional as F

from cached_lab.tasks.documents.loop import DocumentLoop
from cached_transformers import create_model
from cached_transformers.models.sequence_classifier import SequenceClassifier

LENGTH, SEGMENTS = 4, 4
MEMORIES: dict[str, Any] = {
    "rmt": {"name": "rmt", "length": 2},
    "memformer": {"name": "memformer", "length": 3},
    "transformer_xl": {"name": "transformer_xl", "length": 6},
    "ernie_doc": {"name": "ernie_doc", "length": 6},
    "grc_stream": "grc_stream",
}
REACHES = [name for name in MEMORIES if name not in ("transformer_xl", "ernie_doc")]
"""Memories with a gradient into their state."""


def classifier(memory: Any = None, **options: Any) -> SequenceClassifier:
    torch.manual_seed(0)
    sizes = {"vocabulary": 11, "classes": 3, "max_length": LENGTH, "width": 8, "depth": 2, "heads": 2}
    model = create_model("sequence_classifier", **{**sizes, "feed_forward": 12, "memory": memory, **options})
    assert isinstance(model, SequenceClassifier)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def documents(*lengths: int) -> tuple[Tensor, Tensor]:
    """Padded documents of these lengths, and their padding."""
    torch.manual_seed(1)
    inputs_BN = torch.randint(1, 11, (len(lengths), max(lengths)))
    padding_BN = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    return inputs_BN.masked_fill(padding_BN, 0), padding_BN


@pytest.mark.parametrize("replay", [False, True])
def test_a_memory_that_reaches_all_gives_what_the_whole_document_gives(replay: bool) -> None:
    """With one layer, the memory stores the embeddings of a segment: the last class token attends all of them."""
    memory = {"name": "transformer_xl", "length": 64, "relative": False}
    model = classifier(memory, depth=1, positions="none")
    inputs_BN, _ = documents(14, 14)
    parts = [
        p for piece in inputs_BN.split(LENGTH, 1) for p in (model.class_token.expand(2, -1, -1), model.embedding(piece))
    ]
    whole_BND = model.stack(torch.cat(parts, 1)).outputs
    want_BK = model.head(whole_BND[:, -3])  # in front of the last two tokens
    logits_BK, _ = DocumentLoop(model, LENGTH, SEGMENTS, replay=replay)(inputs_BN)
    torch.testing.assert_close(logits_BK, want_BK)
    short_BK, _ = DocumentLoop(model, LENGTH, SEGMENTS)(inputs_BN[:, -2:])
    assert not torch.allclose(short_BK, want_BK, atol=1e-3), "the segments before count"


@pytest.mark.parametrize("memory", [None, *MEMORIES])
def test_the_gradient_reaches_the_first_segment(memory: str | None) -> None:
    model = classifier(MEMORIES.get(memory or ""))
    inputs_BN = torch.tensor([[10, 1, 2, 3, *[4] * 11]])  # id 10 occurs nowhere else
    logits_BK, _ = DocumentLoop(model, LENGTH, SEGMENTS)(inputs_BN)
    logits_BK.sum().backward()
    assert model.embedding.weight.grad is not None
    reached = model.embedding.weight.grad[10].abs().max() > 1e-9
    assert reached == (memory in REACHES)


@pytest.mark.parametrize("pool", ["class_token", "last"])
@pytest.mark.parametrize(
    ("memory", "passes"), [(None, 1), *((name, 1) for name in MEMORIES), ("rmt", 2), ("ernie_doc", 2)]
)
def test_padding_of_short_documents_changes_nothing(memory: str | None, passes: int, pool: str) -> None:
    """Neither within the last segment, nor by segments that others still have, nor before a second pass."""
    model = classifier(MEMORIES.get(memory or ""), pool=pool)
    loop = DocumentLoop(model, LENGTH, SEGMENTS, passes)
    lengths = (5, 16, 9, 2)
    inputs_BN, padding_BN = documents(*lengths)
    logits_BK, _ = loop(inputs_BN, padding_BN)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(logits_BK[row : row + 1], loop(inputs_BN[row : row + 1, :length])[0])
    if memory is not None:
        assert not torch.allclose(logits_BK[1], loop(inputs_BN[1:2, -LENGTH:])[0][0], atol=1e-4), "memory counts"


@pytest.mark.parametrize(("memory", "passes"), [("rmt", 1), ("ernie_doc", 2)])
def test_replay_gives_the_same_loss_and_gradients(memory: str, passes: int) -> None:
    inputs_BN, padding_BN = documents(15, 7)
    found = []
    for replay in (False, True):
        model = classifier(MEMORIES[memory])
        logits_BK, auxiliary = DocumentLoop(model, LENGTH, SEGMENTS, passes, replay)(inputs_BN, padding_BN)
        (F.cross_entropy(logits_BK, torch.tensor([0, 2])) + auxiliary).backward()
        found.append([logits_BK, *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*found)


def test_a_second_pass_hears_of_the_whole_document() -> None:
    """It goes on from the state that the first one left, and gives its own answer."""
    model = classifier(MEMORIES["ernie_doc"])
    inputs_BN, _ = documents(16, 16)
    once, twice = (DocumentLoop(model, LENGTH, SEGMENTS, passes)(inputs_BN)[0] for passes in (1, 2))
    assert not torch.allclose(once, twice, atol=1e-4)
    state = model.init_state(2)
    for _ in range(2):
        for piece in inputs_BN.split(LENGTH, 1):
            logits_BK, state, _ = model(piece, state)
    torch.testing.assert_close(twice, logits_BK)


def test_evaluation_gives_the_same_and_can_empty_or_exchange_the_memory() -> None:
    model = classifier(MEMORIES["rmt"])
    inputs_BN, padding_BN = documents(15, 15, 6)
    want_BK, _ = DocumentLoop(model, LENGTH, SEGMENTS)(inputs_BN, padding_BN)

    def read(memory: str, inputs: Tensor = inputs_BN, padding: Tensor | None = padding_BN) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        loop = DocumentLoop(model, LENGTH, SEGMENTS, memory=memory, generator=generator)
        with torch.no_grad():
            return loop(inputs, padding)[0]

    torch.testing.assert_close(read("carry"), want_BK)
    alone_BK, _ = DocumentLoop(model, LENGTH, 1)(inputs_BN[:2, 12:])
    torch.testing.assert_close(read("reset")[:2], alone_BK)
    same_BN = inputs_BN[:1].repeat(3, 1)
    torch.testing.assert_close(read("shuffle", same_BN, None), read("carry", same_BN, None))
    assert not torch.allclose(read("shuffle"), want_BK, atol=1e-4)
    refuses("--memory shuffle needs two rows or more", read, "shuffle", inputs_BN[:1], None)


def test_the_last_token_that_is_no_padding_answers() -> None:
    model = classifier(pool="last")
    inputs_BN, padding_BN = documents(4, 2)
    x_BND, options = model.embed(inputs_BN, None, padding_BN)
    h_BND = model.stack(x_BND, None, **options).outputs
    want = torch.stack([model.head.classify(model.head.pool(h).tanh()) for h in (h_BND[0, 4], h_BND[1, 2])])  # type: ignore[operator, union-attr]
    torch.testing.assert_close(model(inputs_BN, padding=padding_BN).outputs, want)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": "first"}, "pool='first'"),
        ({"pool": "last", "init": "lra"}, "pool='last' .*init='lra'"),
        ({"pool": "last", "head_width": 4}, "pool='last' .*head_width=4"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    refuses(message, classifier, **options)
