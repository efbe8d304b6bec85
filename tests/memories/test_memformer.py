"""Memformer: a slow twin of the write and of the model, and golden values of the write.

Legend: B rows, N tokens, M slots, H heads, E head width, D model width.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from memories.harness import HEADS, WIDTH, agree, build, logit, recorded
from torch import Tensor, nn

from cached_transformers.interfaces.memory import Tokens
from cached_transformers.memories.memformer import Memformer, write_slots

M, N, ROWS = 3, 5, 2


def memory(**options: Any) -> Memformer:
    torch.manual_seed(0)
    return Memformer(WIDTH, HEADS, M, **options).double()


def slots_and_tokens() -> tuple[Tensor, Tensor]:
    slots = nn.functional.normalize(torch.randn(ROWS, M, WIDTH, dtype=torch.float64), dim=-1)
    return slots.requires_grad_(), torch.randn(ROWS, N, WIDTH, dtype=torch.float64, requires_grad=True)


def twin(module: Memformer, slots_BMD: Tensor, x_BND: Tensor, padding_BN: Tensor | None = None) -> Tensor:
    """The write, slot by slot and head by head."""
    rows: list[Tensor] = []
    for b in range(len(slots_BMD)):
        made = []
        for i, slot in enumerate(slots_BMD[b]):
            tokens = [t for j, t in enumerate(x_BND[b]) if padding_BN is None or not padding_BN[b, j]]
            heads = []
            for h in range(HEADS):
                q = (module.query.weight @ slot).chunk(HEADS)[h]
                keys = [(module.key.weight @ t).chunk(HEADS)[h] for t in (slot, *tokens)]
                values = [t.chunk(HEADS)[h] for t in (slot, *(module.value.weight @ t for t in tokens))]
                scores = torch.stack([logit(None, q, k, h) / module.temperature for k in keys])
                heads.append(sum(w * v for w, v in zip(scores.softmax(0), values, strict=True)))
            moved = torch.cat(heads) + module.bias_MD[i]  # type: ignore[arg-type]
            made.append(moved / moved.square().sum().sqrt())
        rows.append(torch.stack(made))
    return torch.stack(rows)


@pytest.mark.parametrize("padded", [False, True])
def test_the_write_is_that_of_a_slow_twin(padded: bool) -> None:
    module, (slots, x) = memory(), slots_and_tokens()
    padding = torch.tensor([[False, True, False, False, True], [True, False, False, False, False]]) if padded else None
    got, want = module.write(slots, x, padding), twin(module, slots, x, padding)
    used = {name: p for name, p in module.named_parameters() if not name.startswith("norm")}
    agree([got], [want], {"slots": slots, "x": x, **used})


def test_the_model_is_that_of_a_slow_twin() -> None:
    """Two segments: every block reads what the segment before wrote, and nothing of its own."""
    model = build({"name": "memformer", "length": M}, scale=0, positions="none")
    spanning = model.stack.model_memory  # type: ignore[union-attr]
    segments = torch.randint(0, 11, (ROWS, 2 * N)).split(N, 1)
    slots = nn.functional.normalize(spanning.bias_MD, dim=-1).expand(ROWS, -1, -1)  # type: ignore[union-attr, arg-type]
    state: Any = None
    for segment in segments:
        out = model(segment, state)
        x = model.embedding(segment)  # type: ignore[operator]
        for block in model.stack.blocks:  # type: ignore[union-attr]
            x = x + block.attention(x, torch.arange(N)[None, :, None].expand(ROWS, -1, -1)).y_BND  # type: ignore[operator]
            x = x + read_by_hand(block.slot_attention, x, slots)
            x = x + block.feed_forward(x)  # type: ignore[operator]
        slots = twin(spanning, slots, spanning.norm(x))  # type: ignore[arg-type, union-attr, operator]
        torch.testing.assert_close(out.outputs, model.head(model.stack.norm(x)), rtol=0, atol=1e-10)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(out.state.model.slots_BMD, slots, rtol=0, atol=1e-10)
        state = out.state


def read_by_hand(attention: Any, x: Tensor, slots: Tensor) -> Tensor:
    e = WIDTH // HEADS
    q, (k, v) = attention.query(attention.norm(x)), attention.key_value(slots).chunk(2, -1)
    heads = []
    for h in range(HEADS):
        part = slice(h * e, (h + 1) * e)
        heads.append((q[..., part] @ k[..., part].mT / math.sqrt(e)).softmax(-1) @ v[..., part])
    return attention.output(torch.cat(heads, -1))


@pytest.mark.device
def test_golden_writes(shared: Path) -> None:
    """Three writes of the paper's equations, attention and forgetting apart."""
    given = recorded(shared, "memories/spec_memformer_crtn", "memformer/")
    module = Memformer(WIDTH, HEADS, M, temperature=given["tau"].item(), norm="post").double()
    names = {"query": "Wq", "key": "Wk", "value": "Wv"}
    weights = {f"{mine}.weight": given[theirs].T for mine, theirs in names.items()}
    module.load_state_dict({**weights, "bias_MD": given["v_bias"]})
    start = torch.zeros(1, N, WIDTH, dtype=torch.float64)
    (slots,) = module.open(module.init_state(1, start), Tokens(start, torch.zeros(1, N, 1)), [])
    torch.testing.assert_close(slots[0], given["M0"], rtol=0, atol=1e-12)
    for step in range(3):
        x = given[f"t{step}/x_enc"][None]
        heads = [
            module._heads(t) for t in (slots, module.query(slots), module.key(slots), module.key(x), module.value(x))
        ]
        before = write_slots(*heads, module.temperature).transpose(1, 2).flatten(2)
        torch.testing.assert_close(before[0], given[f"t{step}/M_pre_bmn"], rtol=0, atol=1e-12)
        slots = module.write(slots, x)
        torch.testing.assert_close(slots[0], given[f"t{step}/M_next"], rtol=0, atol=1e-12)
