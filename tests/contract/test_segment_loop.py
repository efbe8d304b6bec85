"""The segment loop: its loss, its state, and the passes of memories that read twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.contract_cases import ROWS, SEGMENT, STREAMS, VOCABULARY, Case, cases, stream
from torch import nn
from torch.nn import functional as F

from cached_transformers import state as states
from cached_transformers.interfaces.memory import ModelMemory
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.segments import SegmentLoop

PLAIN = next(case for case in STREAMS if case.memory == "none")
STREAM = next(case for case in STREAMS if case.memory == "grc_stream")


def batch(case: Case, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.cat(case.segments(5), 1)[:, : tokens + 1]
    return text[:, :-1], text[:, 1:]


@cases(STREAMS)
def test_the_loss_is_that_of_the_segments_one_by_one(case: Case) -> None:
    """15 tokens in segments of 6: the last one is short. What is cut changes gradients, never the loss."""
    model = case.build().eval()
    inputs, targets = batch(case, 15)
    state, outputs = model.init_state(ROWS), []
    for segment in inputs.split(SEGMENT, 1):
        out = model(segment, state)
        state = out.state
        outputs.append(out.outputs)
    want = F.cross_entropy(torch.cat(outputs, 1).flatten(0, 1), targets.flatten())
    for bptt in (1, 2, 5):
        loss, last = SegmentLoop(model, SEGMENT, bptt)(inputs, targets)
        torch.testing.assert_close(loss, want, rtol=0, atol=1e-6)
        assert loss.requires_grad and not any(t.requires_grad for _, t in states.named_tensors(last))
        torch.testing.assert_close(last, state, rtol=0, atol=1e-6)


@cases(STREAMS)
def test_one_backward_gives_the_gradients_of_all_windows(case: Case) -> None:
    together, apart = case.build(), case.build()
    # Windows weigh as their tokens do, but an auxiliary loss as its segment: where there is one, windows are equal.
    auxiliary = any(out.auxiliary_loss != 0 for out in stream(case.build(), case.segments(4)))
    tokens = 4 * SEGMENT - (0 if auxiliary else 1)
    inputs, targets = batch(case, tokens)
    SegmentLoop(together, SEGMENT, bptt=2)(inputs, targets)[0].backward()
    state: Any = None
    loop = SegmentLoop(apart, SEGMENT, bptt=2)
    for window in (slice(0, 12), slice(12, tokens)):
        loss, state = loop(inputs[:, window], targets[:, window], state)
        (loss * (window.stop - window.start) / tokens).backward()
    one, other = ({name: p.grad for name, p in model.named_parameters()} for model in (together, apart))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_tokens_that_take_no_part_are_neither_counted_nor_learnt() -> None:
    model = PLAIN.build().eval()
    inputs, targets = batch(PLAIN, 15)
    ignored = targets.clone()
    ignored[0, 3:9] = -100
    padding = torch.zeros_like(inputs, dtype=torch.bool)
    padding[1, 13:] = True
    loss, _ = SegmentLoop(model, SEGMENT)(inputs, ignored, padding=padding)
    logits = torch.cat([model(segment).outputs for segment in inputs.split(SEGMENT, 1)], 1)
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    counted = (ignored != -100) & ~padding
    torch.testing.assert_close(loss, each[counted].mean(), rtol=0, atol=1e-5)
    nothing, _ = SegmentLoop(model, SEGMENT)(inputs, torch.full_like(targets, -100))
    assert nothing.item() == 0 and nothing.requires_grad


def test_the_state_goes_in_and_rows_begin_anew_in_the_middle_of_a_batch() -> None:
    model = STREAM.build().eval()
    inputs, targets = batch(STREAM, 3 * SEGMENT)
    before = SegmentLoop(model, SEGMENT)(inputs, targets)[1]
    rows_BS = torch.tensor([[False, True], [True, True], [False, False]])
    got, _ = SegmentLoop(model, SEGMENT)(inputs, targets, before, rows_BS)
    state, want = before, 0.0
    for index, (part, wanted) in enumerate(zip(inputs.split(SEGMENT, 1), targets.split(SEGMENT, 1), strict=True)):
        if index < 2:
            state = states.reset(state, model.init_state(ROWS), rows_BS[:, index])
        loss, state = SegmentLoop(model, SEGMENT)(part, wanted, state)
        want = want + loss / 3
    torch.testing.assert_close(got, want)
    first, same = (SegmentLoop(model, SEGMENT)(inputs, targets, before, r)[0] for r in (rows_BS[:, 0], rows_BS[:, :1]))
    assert got != first == same


def test_resets_must_begin_segments_and_losses_are_added_in_float32() -> None:
    inputs, targets = batch(PLAIN, 2 * SEGMENT)
    with pytest.raises(ValueError, match="resets at 3 segments of a batch of 12 tokens"):
        SegmentLoop(PLAIN.build(), SEGMENT)(inputs, targets, reset=torch.zeros(ROWS, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="passes=2"):
        SegmentLoop(Counter(), SEGMENT, passes=2)(inputs, targets, reset=torch.zeros(ROWS, 2, dtype=torch.bool))
    inputs, targets = batch(PLAIN, 15)
    exact = SegmentLoop(PLAIN.build(), SEGMENT)(inputs, targets)[0]
    half = SegmentLoop(PLAIN.build().bfloat16(), SEGMENT)(inputs, targets)[0]
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0, atol=0.05)


class Counter(nn.Module):
    """Uniform logits; the state is the number of segments seen, the auxiliary loss what it was before the segment."""

    class Memory(ModelMemory):
        def next_pass(self, before: torch.Tensor, after: list[torch.Tensor]) -> torch.Tensor:
            self.before, self.after = before.tolist(), [s.tolist() for s in after]
            return torch.full((ROWS,), 100.0)

    def __init__(self) -> None:
        super().__init__()
        self.stack = self
        self.model_memory = self.Memory()

    def init_state(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows)

    def forward(self, inputs: torch.Tensor, state: Any, reset: Any = None, *, padding: Any = None) -> ModelOutput:
        assert reset is None, "the loop itself begins rows anew where there are several passes"
        return ModelOutput(torch.zeros(*inputs.shape, VOCABULARY), state + 1, state.mean())


def test_another_pass_begins_where_the_memory_says() -> None:
    model = Counter()
    inputs, targets = batch(PLAIN, 15)
    rows = torch.tensor([True, False, False])
    loop = SegmentLoop(model, SEGMENT, passes=2)
    loss, state = loop(inputs, targets, torch.full((ROWS,), 7.0), reset=rows)
    memory = model.model_memory
    assert memory.before == [0, 7, 7] and memory.after == [[1, 8, 8], [2, 9, 9], [3, 10, 10]]
    assert state.tolist() == [103] * ROWS
    loop(inputs, targets)
    assert memory.before == [0, 0, 0] and memory.after == [[1] * ROWS, [2] * ROWS, [3] * ROWS]
    uniform = torch.tensor(VOCABULARY).log()
    torch.testing.assert_close(loss, uniform + (100 + 101 + 102) / 3)  # of the last pass, averaged over segments
    assert loop.auxiliary_loss == 101


class Rewinding(ModelMemory):
    """Counts the segments that each row has seen in all passes, beside the memories of the layers."""

    def init_state(self, batch_size: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(batch_size, dtype=torch.long)

    def exit(self, state: torch.Tensor, x_BND: torch.Tensor, traces: Any) -> Any:
        return x_BND, state + 1, None

    def next_pass(self, before: Any, after: Any) -> Any:
        return before._replace(model=after[-1].model)


@pytest.mark.parametrize("carried", [False, True])
def test_a_memory_may_begin_a_pass_with_the_clock_and_the_layers_of_the_first(carried: bool) -> None:
    model = STREAM.build().eval()
    model.stack.model_memory = Rewinding()
    inputs, targets = batch(STREAM, 15)
    given = (SegmentLoop(model, SEGMENT)(inputs, targets)[1], torch.tensor([True, False, False])) if carried else ()
    once, after = SegmentLoop(model, SEGMENT)(inputs, targets, *given)
    thrice, last = SegmentLoop(model, SEGMENT, passes=3)(inputs, targets, *given)
    assert once == thrice
    torch.testing.assert_close(after.layers, last.layers, rtol=0, atol=0)
    before = [0, 1, 1] if carried else [0, 0, 0]
    assert last.clock_B.tolist() == after.clock_B.tolist() == [15 * (n + 1) for n in before]
    assert last.model.tolist() == [9 + 3 * n for n in before] and after.model.tolist() == [3 + 3 * n for n in before]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, x: SegmentLoop(m, 0), "segment_length=0 must be at least 1"),
        (lambda m, x: SegmentLoop(m, 4, bptt=0), "bptt=0 must be at least 1"),
        (lambda m, x: SegmentLoop(m, 4, passes=-1), "passes=-1 must be at least 1"),
        (lambda m, x: SegmentLoop(nn.Linear(1, 1), 4, passes=2), "passes=2 needs a model with a stack"),
        (lambda m, x: SegmentLoop(m, 4)(x, x, padding=x[:, 1:] > 0), r"padding of shape \(3, 14\) must have the shape"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(PLAIN.build(), batch(PLAIN, 15)[0])
