"""ReadTwice's second read as released: once over the table, from the last states of the first read, then new layers.

Values and gradients are held to the slow twin of test_read_twice.py.
"""

from __future__ import annotations

import torch
from memories.test_read_twice import BLOCK, DOCUMENT, ROWS, build, h_of, logits, tokens
from torch import nn

from cached_transformers import generate
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.read_twice import SideAttentionOnce


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
