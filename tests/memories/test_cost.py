"""What each memory says it costs is what the flop counter counts: multiply-adds on top of the model without it.

The formulas are those of `cached list memories`, with the terms that vanish beside D^2 written out; they are in
the rows of `CONTRACTS`. And each memory names what a narrower state would lose.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses
from contract.contracts import CONTRACTS
from contract.costs import LAYERS, RELATIVE, B, D, F, H, M, N
from torch import Tensor, nn

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers import create_memory, create_model
from cached_transformers import state as states
from cached_transformers.attentions import create_attention
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import Query
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

COSTS = {label: row.cost for label, row in CONTRACTS.items() if row.cost is not None}
IMAGE_COSTS = {label: row.image_cost for label, row in CONTRACTS.items() if row.image_cost is not None}


def language_model(memory: Any, model: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocabulary": 7, "width": D, "depth": LAYERS, "heads": H, "feed_forward": F}
    return create_model("language_model", **sizes, memory=memory, **(model or {}))


def per_token(model: nn.Module, segments: int = 30, mode: str = "eval") -> float:
    """Multiply-adds of a token's forward pass, when the memory is full."""
    x_BN = torch.randint(0, 7, (B, N))
    state = model.eval().init_state(B)
    with torch.no_grad():
        for _ in range(segments):
            state = model(x_BN, state).state
    return count_flops(model, x_BN, state, mode=mode) / 2 / B / N


@pytest.mark.parametrize("label", COSTS)
def test_a_token_costs_what_the_formula_says(label: str) -> None:
    cost = COSTS[label]
    memory = {"name": label.partition("/")[0], **cost.options}
    counted = per_token(language_model(memory, cost.model)) - per_token(language_model(None, cost.model), 1)
    assert counted == pytest.approx(cost.formula(), rel=1e-9)


def test_a_compression_costs_what_its_formula_says_and_each_memory_has_one() -> None:
    rate = 2
    options = {"length": M, "compressed": 6, "rate": rate}
    trained, evaluated = (
        per_token(language_model({"name": "compressive", **options}, RELATIVE), mode=mode) for mode in ("train", "eval")
    )
    assert trained - evaluated == pytest.approx(LAYERS * (2 * D * D + 2 * N * D) * (1 + 1 / rate), rel=1e-9)
    known = {label.partition("/")[0] for label in (*COSTS, *IMAGE_COSTS)}
    ours = {entry.name for entry in MEMORIES if entry.factory.__module__.startswith("cached_transformers.")}
    assert known >= ours >= {"grc", "rmt"}


@pytest.mark.parametrize("label", IMAGE_COSTS)
def test_an_image_costs_what_the_formula_says(label: str) -> None:
    def per_row(memory: Any, mode: str) -> float:
        torch.manual_seed(0)
        sizes = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 3, "width": D, "depth": LAYERS, "heads": H}
        model = create_model("vision_transformer", **sizes, feed_forward=F, memory=memory)
        return count_flops(model, torch.randn(B, 1, 8, 8), mode=mode) / 2 / B / LAYERS

    options, *formulas = IMAGE_COSTS[label]
    for mode, formula in zip(("train", "eval"), formulas, strict=True):
        counted = per_row({"name": label.partition("/")[0], **options}, mode) - per_row(None, mode)
        assert counted == pytest.approx(formula, rel=1e-9), mode


WIDTH, HEADS, ROWS, SEGMENT = 8, 2, 2, 4
OVER = {"name": "titans", "layers": 2}
NARROWED: list[Any] = [
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


@pytest.mark.parametrize("spec", NARROWED, ids=str)
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


@pytest.mark.parametrize("spec", [*NARROWED, *IN_MODELS], ids=str)
def test_a_model_of_bfloat16_keeps_it_wide_and_refuses_another(spec: Any) -> None:
    sizes = {"vocabulary": 7, "width": WIDTH, "depth": 1, "heads": HEADS, "feed_forward": 8}
    model = create_model("language_model", memory=spec, **sizes).bfloat16().eval()
    ids = torch.randint(0, 7, (ROWS, SEGMENT))
    with torch.no_grad():
        state = model(ids).state
        assert wide_ones(state)
        for name, wide in wide_ones(state).items():
            refuses(rf"{name} is .*torch.bfloat16.*expects.*torch.float32", model, ids, narrowed(state, wide))
