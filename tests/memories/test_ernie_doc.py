"""ERNIE-Doc: recorded values of its maintained port, a twin in loops, the second feed, and places of slots.

Legend: B rows, N tokens, M slots, T longest segment.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from memories.harness import agree, build, same_states, sines
from memories.xl_family import WIDTH, Place, copying, joined, language_model, run, text, twin
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import Stack
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.ernie_doc import ErnieDoc, ErnieDocPositions


@pytest.fixture(scope="module")
def golden(shared: Path) -> Any:
    return np.load(shared / "golden/memories/ernie_doc.npz", allow_pickle=False)


class Recorded:
    """The recorded encoder made of our blocks: T = 6, M = 4, three post-norm layers, three tasks."""

    def __init__(self, golden: Any) -> None:
        self.golden = golden
        self.unused = {key for key in golden.files if key.startswith("param/")}
        self.embedding, self.norm = self.take("embeddings.word_emb.weight"), nn.LayerNorm(16)
        self.fill(self.norm, "embeddings.norms.0")
        self.pooler = nn.Linear(16, 16)
        self.fill(self.pooler, "pooler.dense")
        self.stack = Stack(self.block, 3).eval()
        # These move all logits of a query alike, which softmax does not see; ours has none.
        idle = {"param/embeddings.norms.1.bias", "param/embeddings.norms.2.bias"}
        idle |= {f"param/encoder.layers.{i}.attn.{name}_proj.bias" for i in range(3) for name in "rt"}
        assert self.unused == idle

    def take(self, name: str) -> Tensor:
        self.unused.discard(f"param/{name}")
        return torch.tensor(self.golden[f"param/{name}"])

    def fill(self, module: Any, name: str, rows: slice | None = None) -> None:
        """Copies a recorded layer into (some rows of) ours; the reference's matrices are transposed."""
        with torch.no_grad():
            for kind in ("weight", "bias"):
                parameter = getattr(module, kind)
                if parameter is not None:
                    value = self.take(f"{name}.{kind}")
                    (parameter if rows is None else parameter[rows]).copy_(value.T if value.dim() == 2 else value)

    def block(self, index: int) -> Block:
        path = f"encoder.layers.{index}"
        scheme = ErnieDocPositions(2, 8, 6, 4, tasks=3)
        layer = SelfAttention(16, 2, memory=ErnieDoc(16, 2, 4, start="zeros"), positions=scheme)
        forward = FeedForward(16, 64)
        norms = (nn.LayerNorm(16, eps=1e-12), nn.LayerNorm(16, eps=1e-12))
        for third, name in enumerate("qkv"):
            self.fill(layer.qkv, f"{path}.attn.{name}_proj", slice(16 * third, 16 * third + 16))
        parts: dict[str, nn.Module] = {
            f"{path}.attn.out_proj": layer.output,
            f"{path}.ffn.linear1": forward.enter,
            f"{path}.ffn.linear2": forward.leave,
            f"{path}.norm1": norms[0],
            f"{path}.norm2": norms[1],
        }
        for name, module in parts.items():
            self.fill(module, name)
        with torch.no_grad():
            scheme.table.copy_(self.take("embeddings.pos_emb.weight"))
            scheme.task_table.copy_(self.take("embeddings.token_type_emb.weight"))
            for ours, theirs in {"table_norm": "norms.1", "task_norm": "norms.2"}.items():
                getattr(scheme, ours).weight.copy_(self.take(f"embeddings.{theirs}.weight"))
            for ours, theirs in {"project": "r", "project_task": "t"}.items():
                getattr(scheme, ours).weight.copy_(self.take(f"{path}.attn.{theirs}_proj.weight").T)
            for ours, theirs in {"content_bias": "w", "position_bias": "r", "task_bias": "t"}.items():
                getattr(scheme, ours).copy_(self.take(f"{path}.attn.r_{theirs}_bias").view(2, 8))
        return Block(layer, forward, norms=norms)

    def inputs(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Embedded tokens, their positions with tasks, and which of them are padding."""
        ids, tasks, mask = (torch.tensor(self.golden[name][step % 3]) for name in ("ids", "task_ids", "mask"))
        positions = torch.arange(6).expand(2, -1) + 6 * step
        return self.norm(F.embedding(ids, self.embedding)), torch.stack([positions, tasks], -1), mask == 0


def near(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.device
@pytest.mark.parametrize(("feed", "steps"), [("skim", 3), ("retrospective", 6)])
def test_the_recorded_document_without_its_padding(golden: Any, feed: str, steps: int) -> None:
    """Row 0 in both feeds; row 1 has padding in segment 2, which the reference stores, and which we do not."""
    recorded = Recorded(golden)
    state = recorded.stack.init_state(2)
    for step in range(steps):
        x, positions, padding = recorded.inputs(step)
        out = recorded.stack(x, state, positions_BNP=positions, padding_BN=padding)
        state = out.state
        wanted = {name: torch.tensor(golden[f"{feed}/step{step}/{name}"]) for name in ("out", "pooled", "mems")}
        rows = 2 if step < 3 else 1
        for row in range(rows):
            seen = ~padding[row]
            near(out.outputs[row, seen], wanted["out"][row, seen])
            near(recorded.pooler(out.outputs[row, -1]).tanh(), wanted["pooled"][row])
            if seen.all():
                mems = torch.stack([layer.hidden_BMD[row] for layer in state.layers])
                near(mems, wanted["mems"][:, row])


@pytest.mark.parametrize("options", [{}, {"start": "zeros"}, {"longest": 5}])
def test_the_model_is_its_slow_twin(options: dict[str, Any]) -> None:
    length, segment, n = 3, 4, 11
    model, tokens = language_model({"name": "ernie_doc", "length": length, **options}), text(2, n)
    zeros = [(torch.zeros(WIDTH, dtype=torch.double), (i,)) for i in range(-length, 0)]
    start = zeros if "start" in options else []

    def code(here: Place, there: Place) -> Tensor:
        return sines(here[0] - there[0], WIDTH)

    rows = []
    for row in tokens:
        places = [(i,) for i in range(n)]
        if "longest" in options:
            rows.append(_twin_with_trained_distances(model, row.tolist(), places, segment, length, options["longest"]))
        else:
            rows.append(twin(model, row.tolist(), places, segment, length, code, keep="output", start=start))
    agree([joined(run(model, tokens, segment))], [torch.stack(rows)], model, least=1e-6)


def _twin_with_trained_distances(
    model: Any, tokens: list[int], places: list[Place], segment: int, length: int, longest: int
) -> Tensor:
    """The twin asks each layer's own table, so the code is looked up in the layer that runs."""
    running: list[ErnieDocPositions] = []
    for block in model.stack.blocks:
        block.attention.norm.register_forward_pre_hook(
            lambda *_, scheme=block.attention.positions: running.__setitem__(slice(None), [scheme])
        )

    def code(here: Place, there: Place) -> Tensor:
        (scheme,) = running
        distance = here[0] - there[0]
        return scheme.table_norm(scheme.table[longest - 1 + distance if distance >= 1 else -distance])

    return twin(model, tokens, places, segment, length, code, keep="output")


def test_a_layer_that_sees_both_ways_with_tasks_is_its_formula() -> None:
    e, n, m, longest = 3, 4, 2, 6
    scheme = ErnieDocPositions(2, e, longest, m, tasks=3).double()
    q = torch.randn(2, 2, n, e, dtype=torch.double)
    where = torch.arange(m + n).expand(2, -1)
    places = torch.stack([where, torch.randint(0, 3, where.shape)], -1)
    got = scheme.bias(q, places[:, m:], places)
    for b in range(2):
        for h in range(2):
            part = slice(h * e, (h + 1) * e)
            for i in range(n):
                for j in range(m + n):
                    d = m + i - j
                    r = scheme.project(scheme.table_norm(scheme.table[longest - 1 + d if d >= 1 else -d]))[part]
                    t = scheme.project_task(scheme.task_norm(scheme.task_table[places[b, j, 1]]))[part]
                    want = (q[b, h, i] + scheme.position_bias[h]) @ r + (q[b, h, i] + scheme.task_bias[h]) @ t
                    torch.testing.assert_close(got[b, h, i, j], want / math.sqrt(e))


def test_the_loop_feeds_a_document_twice_and_learns_from_the_second_feed() -> None:
    """As two documents in a row of which the first has no targets; clock and positions go on."""
    model, tokens = language_model({"name": "ernie_doc", "length": 3}), text(2, 13)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss, state = SegmentLoop(model, 4, passes=2)(inputs, targets)
    silent = torch.full_like(targets, -100)
    twice, other = SegmentLoop(model, 4)(torch.cat([inputs, inputs], 1), torch.cat([silent, targets], 1))
    same_states(state, other)
    agree([loss], [twice], model, least=None)
    assert state.clock_B.tolist() == [24, 24]
    once, _ = SegmentLoop(model, 4)(inputs, targets)
    assert (loss - once).abs() > 1e-3


def test_slots_stand_right_before_a_segment_whether_its_positions_go_on_or_begin_anew() -> None:
    memory: Any = {"name": "ernie_doc", "length": 3}
    made: dict[str, Any] = {"classes": 3, "max_length": 6, "width": WIDTH, "depth": 1, "positions": "alibi"}
    model = build(memory, model="sequence_classifier", **made)
    offered: list[Any] = []
    memory = model.stack.blocks[0].attention.memory
    read = memory.read
    memory.read = lambda *args: offered.append(read(*args).context) or read(*args)
    state = model(text(2, 5) % 11).state
    model(text(2, 5, seed=1) % 11, state)
    assert offered[1].positions_BMP[..., 0].tolist() == [[3, 4, 5]] * 2  # the class token was the sixth
    model.stack(
        torch.randn(2, 6, WIDTH).double(), state, positions_BNP=torch.arange(6)[None, :, None].expand(2, -1, -1)
    )
    assert offered[2].positions_BMP[..., 0].tolist() == [[-3, -2, -1]] * 2


def test_trained_distances_say_what_they_cannot_do() -> None:
    model = language_model({"name": "ernie_doc", "length": 3, "longest": 4})
    refuses(r"5.*longest=4", model, text(1, 5))
    refuses("slots=0", ErnieDocPositions, 2, 4, 6, 0)
    with pytest.raises(ValueError, match="tasks=2"):
        places = torch.zeros(1, 3, 1, dtype=torch.long)
        ErnieDocPositions(2, 4, 6, 3, tasks=2).bias(torch.zeros(1, 2, 3, 4), places, places)


def test_it_learns_to_copy() -> None:
    """It learns slower than Transformer-XL, which stores what a layer reads: here what to store gets no gradient."""
    assert copying({"name": "ernie_doc", "length": 4}, 300, symbols=4) > 0.95
