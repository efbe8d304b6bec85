"""Memories that carry a symbol learn to; without the state, or with that of the next row, the answer is a guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories.learning import DISTANCE, LATCH, accuracy, reach, trained, untrained
from torch import nn

from cached_transformers.loops.curriculum import Curriculum
from cached_transformers.loops.replay import ReplayLoop

UNTIED: dict[str, Any] = {"heads": 2, "model": {"tied": False}}
COMPRESSIVE = {"name": "compressive", "length": 4, "compressed": 3, "rate": 4}
CRTN = {"name": "crtn", "segment": LATCH.segment, "regions": 3, "topk": 1}
FEEDBACK = {"name": "feedback", "length": 2}
INFINITY = {"name": "infinity_former", "length": 3, "chunk": 2, "basis": 16, "widths": (0.05, 0.15), "kl_weight": 0.0}
MEMORIZING = {"name": "memorizing", "length": 16, "k": 4}
RETRIEVAL = {"name": "block_retrieval", "sinks": 0, "recent": LATCH.segment, "block": LATCH.segment, "topk": 1}
RMT = {"name": "rmt", "length": 2}


def caching(**options: Any) -> dict[str, Any]:
    return {"name": "memory_caching", "over": "infini", **options}


LEARNS: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    ({"name": "ahn", "length": 1, "sinks": 0, "relative": False}, 400, {}),
    ({"name": "armt", "length": 2, "key_width": 8}, 600, {}),
    *(({"name": "block_recurrent", "length": 4, "gate": gate}, 600, {}) for gate in ("fixed", "lstm")),
    (RETRIEVAL, 300, {}),
    # The gradient crosses no segment, so that keeping symbols apart is left to the memory.
    ({**COMPRESSIVE, "function": "conv"}, 300, {"bptt": 1, **UNTIED}),
    ({**COMPRESSIVE, "function": "mean"}, 300, {"bptt": 1, **UNTIED}),
    ({**CRTN, "rescale": True, "scale": True}, 150, {}),
    ({"name": "delta_mem", "half_life": 8.0}, 400, {}),
    (FEEDBACK, 250, {"distance": 2, **UNTIED}),
    *(({"name": "infini", "update": update}, 600, {}) for update in ("linear", "delta", "exact", "gated_delta")),
    (INFINITY, 150, {}),
    ({"name": "lact", "rate": 1.0}, 600, {}),
    ({"name": "memformer", "length": 2}, 400, {"learning_rate": 1e-3}),
    (MEMORIZING, 150, {}),
    ({**MEMORIZING, "joint": True}, 150, {}),
    (RMT, 200, {}),
    ({**RMT, "slots": 2}, 200, {}),
    *(({"name": "titans", "place": place}, 600, {}) for place in ("gate", "context", "layer")),
    ({"name": "ttt"}, 600, {}),
]
SLOW: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    *(({**CRTN, **o}, 300, {}) for o in ({}, {"scope": "token"}, {"query": "compute_first", "summary": "bilstm"})),
    ({"name": "lact", "muon": True, "momentum": True}, 600, {}),
    ({"name": "titans", "layers": 2}, 600, {}),
    ({"name": "ttt", "model": "mlp"}, 600, {}),
    (caching(slots=3, start="restart"), 600, {}),
]


@pytest.mark.parametrize(
    ("memory", "steps", "options"), [*LEARNS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_it_carries_a_symbol_and_nothing_else_does(memory: dict[str, Any], steps: int, options: dict[str, Any]) -> None:
    model, distance = trained(LATCH, memory, steps, **options), options.get("distance", DISTANCE)
    assert accuracy(model, LATCH, distance) > (0.9 if memory["name"] == "memory_caching" else 0.95)
    assert accuracy(model, LATCH, distance, forget=True) < 0.4 and accuracy(model, LATCH, distance, shuffle=True) < 0.4


@pytest.mark.slow
def test_a_choice_that_nothing_trains_falls_short() -> None:
    """To the letter no gradient reaches CRTN's summary; its choice still changes, since the embeddings learn."""
    memory = {**CRTN, "rescale": True, "scale": True, "alpha_grad": False}
    assert 0.5 < accuracy(trained(LATCH, memory, 150), LATCH) < 0.9


def xl(length: int) -> dict[str, Any]:
    return {"name": "transformer_xl", "length": length}


@pytest.mark.parametrize(
    ("near", "far", "options"),
    [
        ([None], [{"name": "block_recurrent", "length": 4}, {"name": "infini"}, MEMORIZING, RMT], {}),
        ([None, xl(4)], [INFINITY, CRTN], {}),
        ([xl(4)], [{**COMPRESSIVE, "function": "mean"}], UNTIED),
        ([xl(2)], [FEEDBACK], {"distance": 2, **UNTIED}),
        ([{"name": "memory_transformer", "length": 2}], [], {}),
        ([caching(slots=2, start="restart")], [caching(slots=3, start="restart"), caching(slots=1)], {}),
        ([{"name": "expire_span", "length": 4}], [{"name": "expire_span", "length": 16}], {}),
    ],
    ids=str,
)
def test_the_first_segment_is_in_reach_of_the_right_ones(near: list[Any], far: list[Any], options: Any) -> None:
    """Where nothing changes, no training helps."""
    assert all(reach(LATCH, memory, **options) == 0 for memory in near)
    assert all(reach(LATCH, memory, **options) > 1e-6 for memory in far)


def test_rmt_learns_on_a_growing_number_of_segments() -> None:
    """Few segments first, drawn evenly, and replayed: shorter texts remain solved."""
    model = untrained(LATCH, RMT)
    optimizer, generator = torch.optim.AdamW(model.parameters(), 3e-3), torch.Generator().manual_seed(1)
    for segments in Curriculum([2, 3, 4, 6], steps_each=60):
        optimizer.zero_grad()
        ReplayLoop(model, LATCH.segment, segments)(*LATCH.draw(64, segments - 1, generator))[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert [accuracy(model, LATCH, n - 1) > 0.95 for n in (1, 2, 4, 6)] == [True] * 4
