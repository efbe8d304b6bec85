"""The reconstruction loss: against a loop, its gradient, and refused uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses
from torch import Tensor
from torch.nn import functional as F

from cached_lab.experiments.probes.distances import Course
from cached_lab.training.reconstruction_loss import ReconstructionLoss
from cached_lab.training.settings import TrainingConfig
from cached_transformers import create_model
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop

SEGMENT, ROWS, VOCABULARY, WEIGHT = 5, 2, 11, 0.4


def build(memory: Any = "memformer", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": 16, "depth": 1, "heads": 2, "feed_forward": 32}
    return create_model("language_model", **{**sizes, **options}, memory=memory).double()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, 3 * SEGMENT), generator=torch.Generator().manual_seed(1))
    padding = torch.zeros(ROWS, 3 * SEGMENT - 1, dtype=torch.bool)
    padding[1, 7:9] = True
    return tokens[:, :-1], tokens[:, 1:], padding


def twin(model: Any) -> tuple[Tensor, Tensor]:
    """Loss of the text, and mean over segments of the recall, token by token."""
    inputs, targets, padding = batch()
    state, text, recalls = model.init_state(ROWS), [], []
    for begin in range(0, inputs.shape[1], SEGMENT):
        part = slice(begin, begin + SEGMENT)
        x, pad = inputs[:, part], padding[:, part]
        out = model(x, state, padding=pad)
        again = model(x, out.state, padding=pad).outputs.log_softmax(-1)
        state, told = out.state, []
        for row in range(ROWS):
            for i in range(x.shape[1]):
                if not pad[row, i]:
                    text.append(F.cross_entropy(out.outputs[row, i], targets[row, begin + i]))
                if i + 1 < x.shape[1] and not pad[row, i + 1]:
                    told.append(-again[row, i, x[row, i + 1]])
        recalls.append(torch.stack(told).mean())
    return torch.stack(text).mean(), torch.stack(recalls).mean()


@pytest.mark.parametrize("memory", ["memformer", "rmt"])
@pytest.mark.parametrize("kind", [SegmentLoop, ReplayLoop])
def test_the_loss_is_that_of_the_text_and_of_saying_it_again(memory: str, kind: type[SegmentLoop]) -> None:
    model, (inputs, targets, padding) = build(memory), batch()
    text, recall = twin(model)
    want = torch.autograd.grad(text + WEIGHT * recall, list(model.parameters()), allow_unused=True)
    loop = kind(model, SEGMENT, bptt=3, scoring=ReconstructionLoss(WEIGHT))
    loss, _ = loop(inputs, targets, padding=padding)
    torch.testing.assert_close(loss, text + WEIGHT * recall, rtol=0, atol=1e-10)
    torch.testing.assert_close(loop.auxiliary_loss, WEIGHT * recall.detach(), rtol=0, atol=1e-10)
    loss.backward()
    for (name, parameter), b in zip(model.named_parameters(), want, strict=True):
        torch.testing.assert_close(parameter.grad, b, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_it_needs_a_gradient_and_teaches_one_segment() -> None:
    model, scoring = build(), ReconstructionLoss(WEIGHT)
    with torch.no_grad():
        plain, told = (SegmentLoop(model, SEGMENT, scoring=s)(*batch()[:2])[0] for s in (None, scoring))
    assert torch.equal(plain, told)
    # The text's own loss never hears of a memory that is not read again.
    model, (inputs, targets, _) = build(), batch()
    for scoring, taught in ((None, False), (ReconstructionLoss(WEIGHT), True)):
        model.zero_grad()
        SegmentLoop(model, SEGMENT, scoring=scoring)(inputs, targets)[0].backward()
        grad = model.stack.model_memory.value.weight.grad
        assert (grad is not None and bool(grad.abs().max() > 0)) == taught


def test_refused_uses() -> None:
    for weight in (0.0, -1.0, float("nan")):
        refuses(r"weight=", ReconstructionLoss, weight)
    inputs, targets, _ = batch()
    refuses("LanguageModel", SegmentLoop(build(None), SEGMENT, scoring=ReconstructionLoss(1.0)), inputs, targets)
    refuses(r"training\.recall=-1\.0", TrainingConfig, recall=-1.0)
    refuses(r"recall=-1\.0", Course, recall=-1.0)
