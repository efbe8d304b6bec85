"""States of sums belong in float32: one that somebody made narrower is refused, by a model and by each part alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refuses
from torch import Tensor

from cached_transformers import create_memory, create_model
from cached_transformers import state as states
from cached_transformers.attentions import create_attention
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import Query
from cached_transformers.state import State

WIDTH, HEADS, ROWS, SEGMENT = 8, 2, 2, 4
OVER = {"name": "titans", "layers": 2}
MEMORIES: list[Any] = [
    {"name": "titans"},
    {"name": "titans", "place": "context"},
    {"name": "ttt"},
    {"name": "lact", "momentum": True},
    {"name": "infini"},
    {"name": "memory_caching"},
    {"name": "memory_caching", "over": OVER, "read": "soup"},
    {"name": "memory_caching", "over": "ttt"},
]
IN_MODELS = [
    *({"name": "armt", "length": 2}, {"name": "block_recurrent", "length": 2}, {"name": "h2o"}),
    {"name": "infinity_former", "length": 4},
]


def wide_ones(state: State) -> dict[str, Tensor]:
    return {name: t for name, t in states.named_tensors(state) if t.dtype == torch.float32}


def narrowed(state: State, wide: Tensor) -> State:
    return states.map_state(lambda t: t.bfloat16() if t is wide else t, state)


@pytest.mark.parametrize("spec", MEMORIES, ids=str)
def test_a_memory_by_itself_names_what_would_be_lost(spec: Any) -> None:
    memory: Any = create_memory(spec, WIDTH, HEADS, causal=True)
    x = torch.randn(ROWS, SEGMENT, WIDTH)
    q, k, v = torch.randn(3, ROWS, HEADS, SEGMENT, WIDTH // HEADS)
    places = torch.arange(SEGMENT).expand(ROWS, -1)[..., None]
    query, state = Query(x, q, places, None, None, k, v), memory.init_state(ROWS, x)
    project = lambda t, **_: t.unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(1)[0].expand(2, -1, -1, -1, -1)  # noqa: E731
    read_segment(memory, state, query, project)
    assert wide_ones(state)
    for name, wide in wide_ones(state).items():
        message = (
            rf"a state of torch.bfloat16 loses .*{name.rpartition('.')[2]} of it; keep it in float32, as init_state"
        )
        refuses(message, read_segment, memory, narrowed(state, wide), query, project)


@pytest.mark.parametrize("name", ["linear", "delta_net", "gated_delta", "performer", "rfa"])
def test_a_core_that_carries_sums_does_so_too(name: str) -> None:
    core: Any = create_attention({"name": name, "carry": True}, width=WIDTH, heads=HEADS, causal=True)
    q, k, v = torch.randn(3, ROWS, HEADS, SEGMENT, WIDTH // HEADS)
    x = torch.randn(ROWS, SEGMENT, WIDTH)
    state = core(q, k, v, causal=True, x_BND=x).state
    for wide in wide_ones(state).values():
        narrow = narrowed(state, wide)
        with pytest.raises(ValueError, match=r"state of torch.bfloat16 loses what attention \w+.* adds to its sums"):
            core(q, k, v, causal=True, x_BND=x, state=narrow)
        refuses("keep it in float32", core.scan, q, k, v, narrow, x_BND=x)


@pytest.mark.parametrize("spec", [*MEMORIES, *IN_MODELS], ids=str)
def test_a_model_of_bfloat16_keeps_it_wide_and_refuses_another(spec: Any) -> None:
    sizes = {"vocabulary": 7, "width": WIDTH, "depth": 1, "heads": HEADS, "feed_forward": 8}
    model = create_model("language_model", memory=spec, **sizes).bfloat16().eval()
    ids = torch.randint(0, 7, (ROWS, SEGMENT))
    with torch.no_grad():
        state = model(ids).state
        assert wide_ones(state)
        for name, wide in wide_ones(state).items():
            refuses(rf"{name} is .*torch.bfloat16.*expects.*torch.float32", model, ids, narrowed(state, wide))
