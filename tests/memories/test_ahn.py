"""AHN: recorded values, the window when it is closed, and each past token in exactly one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from common import stirred
from memories.harness import recorded
from torch import Tensor

from cached_transformers import create_model
from cached_transformers.interfaces.memory import Query, Trace
from cached_transformers.memories.ahn import AHN
from cached_transformers.memories.parts.fifo_store import keys_values

WINDOW, SINKS = 5, 2


def recorded_layer(values: dict[str, Tensor], length: int) -> AHN:
    """The memory with the recorded weights, in float64."""
    memory = AHN(8, 2, length, sinks=SINKS, relative=False, channels=10).double()
    with torch.no_grad():
        for parameter, name in (
            (memory.share.weight, "b_proj"),
            (memory.decay.weight_OR, "a_proj"),
            (memory.gate.weight, "g_proj"),
            (memory.decay.rate_H, "A_log"),
            (memory.decay.bias_O, "dt_bias"),
            (memory.norm_E, "o_norm"),
            (memory.output_HEE, "o_proj"),
        ):
            parameter.copy_(values[name])
    return memory


def stream(memory: AHN, values: dict[str, Tensor], segment: int) -> tuple[Tensor, list[Any]]:
    """Return the answers of M to all tokens, and the states after the segments."""
    state, answers, states = memory.init_state(2, values["x"]), [], []
    for start in range(0, values["x"].shape[1], segment):
        x, q, k, v = (values[name][:, start : start + segment] for name in "xqkv")
        place_BN1 = torch.arange(start, start + x.shape[1]).expand(2, -1)[..., None]
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        query = Query(x, heads[0], place_BN1, k_BHNE=heads[1], v_BHNE=heads[2])
        reading = memory.read(memory.open(state, place_BN1[:, :1], None), query, None)
        answers.append(memory.combine(torch.zeros_like(heads[0]), query, reading).transpose(1, 2))
        state, _ = memory.write(state, Trace(x, x, query, reading))
        states.append(state)
    return torch.cat(answers, 1), states


def test_tokens_that_leave_one_by_one_give_the_recorded_values(shared: Path) -> None:
    """In segments of one token, the window of the released form holds one token of the segment."""
    values = recorded(shared, "2026/ahn")
    answer, states = stream(recorded_layer(values, WINDOW - 1), values, 1)
    torch.testing.assert_close(answer[:, WINDOW + SINKS :], values["memory_out"], rtol=0, atol=1e-10)
    assert (answer[:, : WINDOW + SINKS] == 0).all()
    torch.testing.assert_close(states[-2].matrix_BHEE, values["state"], rtol=0, atol=1e-10)


def test_states_after_segments_are_the_recorded_ones(shared: Path) -> None:
    values = recorded(shared, "2026/ahn")
    _, states = stream(recorded_layer(values, WINDOW), values, int(values["segment"]))
    found = torch.stack([state.matrix_BHEE for state in states[:4]], 1)
    torch.testing.assert_close(found, values["segment_states"], rtol=0, atol=1e-10)


@pytest.mark.parametrize("relative", [True, False])
def test_a_closed_one_is_a_window_with_sinks(relative: bool) -> None:
    ids_BN = torch.randint(11, (2, 16), generator=torch.Generator().manual_seed(0))
    outputs = []
    for memory in ("ahn", "streaming_llm"):
        torch.manual_seed(0)
        options = {"name": memory, "length": 4, "sinks": 2, "relative": relative}
        model = create_model(
            "language_model", vocabulary=11, width=16, depth=2, heads=2, feed_forward=32, memory=options
        ).eval()
        if memory == "ahn":
            weights = model.state_dict()
        else:
            model.load_state_dict({k: v for k, v in weights.items() if k in model.state_dict()})
        state, parts = model.init_state(2), []
        for segment_BN in ids_BN.split(4, 1):
            out = model(segment_BN, state)
            state = out.state
            parts.append(out.outputs)
        outputs.append(torch.cat(parts, 1))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sinks", [0, 2])
def test_each_past_token_is_in_one_place(sinks: int) -> None:
    """Values of 1 under keys of their own, without decay: M holds what sinks and window do not."""
    tokens = 12
    memory = AHN(2 * tokens, 2, 3, sinks=sinks, relative=False).double()
    with torch.no_grad():
        memory.share.weight.fill_(1e3)
        memory.decay.bias_O.fill_(-1e3)
    state = memory.init_state(1, torch.zeros((), dtype=torch.float64))
    padding_BN = torch.zeros(1, 5, dtype=torch.bool)
    padding_BN[0, 2] = True
    seen = 0
    for _ in range(3):
        k_BHNE = torch.zeros(1, 2, 5, tokens, dtype=torch.float64)
        for column in (0, 1, 3, 4):
            k_BHNE[:, :, column, seen] = 1
            seen += 1
        place_BN1 = torch.arange(5)[None, :, None]
        query = Query(
            torch.ones(1, 5, 2 * tokens, dtype=torch.float64), k_BHNE, place_BN1, padding_BN, None, k_BHNE, k_BHNE
        )
        reading = memory.read(memory.open(state, place_BN1[:, :1], None), query, None)
        state, _ = memory.write(state, Trace(query.x_BND, query.x_BND, query, reading))
    assert seen == tokens and state.left_B.item() == tokens - 3 - sinks
    slots = memory.open(state, torch.zeros(1, 1, 1, dtype=torch.long), None).slots
    held = slots.v_BHME.sum(2) + state.matrix_BHEE.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(held, torch.ones_like(held), rtol=0, atol=1e-5)
    assert not keys_values(state.sinks.pairs_BMW, 2)[0].isnan().any()


def test_what_leaves_trains_the_gates() -> None:
    model = create_model(
        "language_model",
        vocabulary=11,
        width=16,
        depth=1,
        heads=2,
        feed_forward=32,
        memory={"name": "ahn", "length": 2},
    )
    stirred(model, 0.3)
    state = model.init_state(1)
    for segment_BN in torch.randint(11, (1, 32)).split(4, 1):
        out = model(segment_BN, state)
        state = out.state
    out.outputs.square().sum().backward()
    for name, parameter in model.named_parameters():
        if "memory" in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
