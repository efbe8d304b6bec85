"""Proof that ReadTwice reads twice: a question in the first block of a document, its answer in the last.

Only a second read that sees later blocks can answer; everything else can but guess.

A pass over earlier blocks with new layers is two passes.
"""

from __future__ import annotations

from typing import Any

import torch
from common import TORCH
from memories.learning import accuracy, trained, untrained
from memories.test_read_twice import BLOCK, DOCUMENT, ROWS, build, h_of, logits, tokens
from torch import nn

from cached_lab.experiments.probes.tasks import IGNORED, Episode, ProbeTask
from cached_transformers import generate
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.read_twice import SideAttentionOnce

STEPS = 500
VALUES, ASK, FILLER = 8, 8, 10  # tokens: 8 values, "which is first?" and "which is second?", filler


class Questions(ProbeTask):
    """Three blocks of three: [filler, filler, question], [value, filler, value], [value, filler, value]."""

    segment, vocabulary, chance = 3, 11, 1 / VALUES

    def draw(self, rows: int, distance: int, generator: torch.Generator) -> Episode:
        inputs_BN = torch.full((rows, self.segments(distance) * self.segment), FILLER)
        inputs_BN[:, [3, 5, 6, 8]] = torch.randint(0, VALUES, (rows, 4), generator=generator)
        which = torch.randint(0, 2, (rows,), generator=generator)
        inputs_BN[:, 2] = ASK + which
        targets_BN = torch.full_like(inputs_BN, IGNORED)
        targets_BN[:, 2] = inputs_BN.gather(1, 6 + 2 * which[:, None])[:, 0]
        return Episode(inputs_BN, targets_BN)


TASK = Questions()
SIZES: dict[str, Any] = {"heads": 2, "batch_size": 32, "learning_rate": 5e-3, "model": {"tied": False}}


def reader(memory: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if memory is None else {"name": "read_twice", "slots": 4, "summary": "ends", "clip": 2, **memory}


def answered(memory: dict[str, Any] | None, passes: int, steps: int = STEPS) -> float:
    """Share of right answers on new documents, after training."""
    model = trained(TASK, reader(memory), steps, distance=2, passes=passes, **SIZES)
    return accuracy(model, TASK, 2, passes=passes)


@torch.no_grad()
def heard(memory: dict[str, Any] | None, passes: int) -> float:
    """How much the answer in the first block changes with the values in the others, for random weights."""
    model = untrained(TASK, reader(memory), **SIZES).eval()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    inputs_BN, targets_BN = TASK.draw(100, 2, torch.Generator().manual_seed(0))
    other_BN = torch.where(inputs_BN < VALUES, (inputs_BN + 1) % VALUES, inputs_BN)
    answers = []
    for tokens_BN in (inputs_BN, other_BN):
        state = SegmentLoop(model, TASK.segment, 3, passes).earlier_passes(tokens_BN, targets_BN)
        answers.append(model(tokens_BN[:, : TASK.segment], state).outputs[:, -1])
    return (answers[0] - answers[1]).abs().max().item()


def test_a_question_is_answered_from_the_last_block_and_not_without_a_memory() -> None:
    assert answered(DOCUMENT, passes=2) > (0.95 if TORCH >= (2, 9) else 0.9)  # other initial weights
    assert answered(None, 1, steps=200) < 1 / VALUES + 0.05


def test_without_a_second_read_of_later_blocks_nothing_is_heard_of_them() -> None:
    assert heard(DOCUMENT, 2) > 0.01
    assert heard(None, 1) == heard(DOCUMENT, 1) == heard({"scope": "earlier"}, 2) == 0


def test_new_layers_read_once_what_a_first_read_without_them_made() -> None:
    """Summaries are those of the lower layers, whose weights alone the first read has; a closed side leaves a norm."""
    model, inputs = build({**DOCUMENT, "new_layers": 1}), tokens()
    readers = [type(block.slot_attention) for block in model.stack.blocks]
    assert readers == [type(None), SideAttentionOnce]
    lower = build(DOCUMENT, depth=1)
    stored = {k: v for k, v in model.state_dict().items() if k in lower.state_dict()}
    lower.load_state_dict({**lower.state_dict(), **stored})
    tables = [
        SegmentLoop(m, BLOCK, bptt=99, passes=2)(inputs, inputs)[1].model.table.hidden_BMD for m in (model, lower)
    ]
    torch.testing.assert_close(*tables, rtol=0, atol=1e-12)
    side = model.stack.blocks[1].slot_attention
    told = logits(model, inputs)
    with torch.no_grad():
        side.output.weight.zero_()
    closed = logits(model, inputs)
    x_BND = side.norm(h_of(nn.ModuleDict({"blocks": model.stack.blocks[:1]}), model.embedding(inputs[:, :BLOCK])))  # type: ignore[arg-type]
    x_BND = model.stack.blocks[1](x_BND, torch.arange(BLOCK)[None, :, None].expand(ROWS, -1, -1))[0]
    want = model.head(model.stack.norm(x_BND))
    torch.testing.assert_close(closed[:, :BLOCK], want, rtol=0, atol=1e-10)
    assert (told - closed).abs().max() > 1e-3


def test_with_new_layers_one_pass_over_earlier_blocks_is_two() -> None:
    """What the first read makes never meets the table, so that it is complete where a block is read."""
    running, again = build({"new_layers": 1}), build({"new_layers": 1, "first_read": "plain"})
    inputs = tokens()
    torch.testing.assert_close(logits(running, inputs, passes=1), logits(again, inputs), rtol=0, atol=1e-12)
    first = logits(again, inputs, passes=1)
    assert (first - logits(again, inputs))[:, BLOCK:].abs().max() > 1e-3
    prompt = inputs[:, :6]
    made = generate(running.eval(), prompt, tokens=5, temperature=0.0, segment_length=BLOCK).tokens
    said = logits(running, torch.cat([prompt, made], 1), passes=1)
    assert torch.equal(said[:, 5:-1].argmax(-1), made)
