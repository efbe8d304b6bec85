"""A memory in a file outside the package is right, trains, generates, is explained and is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract.outside_memory import Associations, OutsideInfini
from torch import Tensor, nn

from cached_lab.cli.main import main
from cached_transformers import SegmentLoop, create_model
from cached_transformers import state as states
from cached_transformers.interfaces.memory import Query, Reading, Trace
from cached_transformers.models.generation import generate

VOCABULARY, SEGMENT = 11, 6


def model_of(**options: Any) -> Any:
    torch.manual_seed(0)
    memory = {"name": "outside_infini", **options}
    sizes = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 32}
    return create_model("language_model", vocabulary=VOCABULARY, memory=memory, **sizes)


def words(rows: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("delta", [False, True])
def test_it_is_the_paper_s_sums(delta: bool) -> None:
    torch.manual_seed(0)
    memory = OutsideInfini(8, 2, delta=delta, initial_gate=0.3).double()
    state, written = memory.init_state(2, torch.zeros(1, dtype=torch.float64)), []
    for _ in range(3):
        q, k, v, y = (torch.randn(2, 2, 5, 4, dtype=torch.float64) for _ in range(4))
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        x = torch.zeros(2, 5, 8, dtype=torch.float64)
        query = Query(x, q, padding_BN=padding, k_BHNE=k, v_BHNE=v)
        reading = memory.read(state, query, None)
        found = memory.combine(y, query, reading)
        for b in range(2):
            for h in range(2):
                for n in range(5):
                    expected = y[b, h, n]
                    if written:
                        gate = torch.sigmoid(memory.gate_H[h])
                        expected = gate * answer(written, b, h, q[b, h, n]) + (1 - gate) * expected
                    torch.testing.assert_close(found[b, h, n], expected)
        news = []  # (row, head, key, value), all made with what was written before
        for b in range(2):
            for h in range(2):
                for n in range(5 if b == 0 else 3):
                    value = v[b, h, n]
                    if delta and written:
                        value = value - answer(written, b, h, k[b, h, n])
                    news.append((b, h, lift(k[b, h, n]), value))
        written += news
        state = memory.write(state, Trace(x, x, query, Reading()))[0]
    assert state.tokens_B.tolist() == [15, 9]


def lift(t: Tensor) -> Tensor:
    return torch.where(t > 0, t + 1, t.exp())


def answer(written: list[tuple[int, int, Tensor, Tensor]], b: int, h: int, asked: Tensor) -> Tensor:
    """Answers of the sums over all written keys, one key after the other."""
    above, below = torch.zeros_like(asked), torch.zeros((), dtype=asked.dtype)
    for row, head, key, value in written:
        if (row, head) == (b, h):
            weight = (lift(asked) * key).sum()
            above, below = above + weight * value, below + weight
    return above / below


def test_a_segment_loop_trains_it() -> None:
    model = model_of()
    loop = SegmentLoop(model, SEGMENT, bptt=2)
    optimizer = torch.optim.AdamW(loop.parameters(), 1e-2, weight_decay=0.0)
    ids, before, losses = words(3, 4 * SEGMENT + 1), [m.gate_H.clone() for m in memories(model)], []
    for _ in range(6):
        loss, _ = loop(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    assert all((m.gate_H != old).all() for m, old in zip(memories(model), before, strict=True))


def memories(model: nn.Module) -> list[OutsideInfini]:
    return [module for module in model.modules() if isinstance(module, OutsideInfini)]


@pytest.mark.parametrize("beams", [1, 3])
def test_it_generates_what_its_past_makes_likely(beams: int) -> None:
    model, prompt = model_of(initial_gate=2.0).eval(), words(2, 3, 5)
    with torch.no_grad():
        state = model(words(2, SEGMENT)).state
    options: dict[str, Any] = {"temperature": 0} if beams == 1 else {"beams": beams}
    out = generate(model, prompt, state, tokens=8, segment_length=SEGMENT, **options)
    text = torch.cat([prompt, out.tokens], 1)[:, :-1]
    fed, logits = state, []
    for piece in text.split(SEGMENT, 1):
        step = model(piece, fed)
        fed = step.state
        logits.append(step.outputs)
    scores = torch.cat(logits, 1)[:, 2:].log_softmax(-1).gather(2, out.tokens[..., None]).sum((1, 2))
    torch.testing.assert_close(out.scores, scores, rtol=1e-4, atol=1e-4)
    forgetful = generate(model, prompt, tokens=8, segment_length=SEGMENT, **options)
    assert (forgetful.scores - out.scores).abs().max() > 1e-3


def test_it_is_listed_and_explained_as_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "memories"]) == 0
    assert "outside_infini" in capsys.readouterr().out
    assert main(["explain", "outside_infini"]) == 0
    said = capsys.readouterr().out
    for line in ("outside_infini (memory)", "A matrix per head", "arXiv:2404.07143", "M' = M + s(K)^T V"):
        assert line in said
    assert "delta: bool = False" in said and "initial_gate: float = 0.0" in said


def test_weights_and_states_are_saved_and_loaded(tmp_path: Path) -> None:
    model, other = model_of().eval(), model_of(initial_gate=1.0).eval()
    other.load_state_dict(model.state_dict())
    state = model(words(2, SEGMENT)).state
    states.save(state, tmp_path / "state.safetensors")
    loaded = states.load(tmp_path / "state.safetensors", other.init_state(2))
    ids = words(2, SEGMENT, 1)
    assert torch.equal(other(ids, loaded).outputs, model(ids, state).outputs)
    assert isinstance(loaded.layers[0], Associations)
