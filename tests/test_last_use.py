"""Where a state may be changed in place: where a loop promised not to use it again, and nowhere else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from common import stirred
from torch import Tensor, nn

from cached_transformers import Session, create_model
from cached_transformers import state as states
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.streaming import read_stream
from cached_transformers.models.segments import read_segments
from cached_transformers.state import last_use, may_change, seal, used_again

SEGMENT, VOCABULARY = 6, 11
STORE = {"name": "memorizing", "length": 40, "k": 4}
PREVIEWED = [STORE, {"name": "crtn", "segment": SEGMENT, "regions": 3, "query": "compute_first"}]


def build(memory: Any = STORE) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 16}
    model = create_model("language_model", vocabulary=VOCABULARY, memory=memory, **sizes)
    return stirred(model.eval(), 0.2)


def words(count: int, rows: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(1))


def tensors(state: Any) -> list[Tensor]:
    return [t for _, t in states.named_tensors(state)]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def test_a_promise_is_about_the_tensors_that_it_names_and_each_is_changed_once() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    assert not may_change(a)
    with torch.no_grad(), last_use((a,)):
        assert not may_change(b) and not may_change(a, b) and not may_change(a, a) and not may_change(a.view(2))
        assert may_change(a) and not may_change(a)
        with last_use((b,)):
            assert may_change(b)
        with used_again():
            assert not may_change(b)
    with torch.no_grad():
        assert not may_change(a)
        with last_use(None):
            assert not may_change(a)


def test_a_promise_ends_with_its_block_whatever_ends_it_and_with_its_thread() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    elsewhere: list[bool] = []
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="stop"), last_use((a,)), last_use((b,)):
            raise RuntimeError("stop")
        assert not may_change(a) and not may_change(b)
        with last_use((a,)):
            with pytest.raises(RuntimeError, match="stop"), used_again():
                raise RuntimeError("stop")
            thread = threading.Thread(target=lambda: elsewhere.append(may_change(a)))
            thread.start()
            thread.join()
            assert elsewhere == [False] and may_change(a)


def test_nothing_that_matters_is_changed_and_writing_in_place_copies_nothing() -> None:
    plain, parameter, spread = torch.zeros(2, 2), nn.Parameter(torch.zeros(2)), torch.zeros(1, 2).expand(2, 2)
    with last_use((plain, parameter, spread)):
        assert not may_change(plain)
        with torch.no_grad():
            assert not may_change(parameter) and not may_change(spread) and not may_change(plain, spread)
        with torch.inference_mode():
            assert not may_change(plain)
        with torch.no_grad():
            assert may_change(plain)
    a, b = torch.zeros(2), torch.zeros(2)
    with torch.no_grad(), last_use((a, b)):
        assert may_change(a)
        sealed = seal((a, b, a.clone()))
        assert sealed[0] is a and sealed[1] is not b
    assert seal((a,))[0] is not a


def read(model: nn.Module, pieces: list[Tensor], state: Any, in_place: bool) -> list[Any]:
    """Outputs, copies of the states, and where the stores lie."""

    def one(tokens: Tensor, before: Any, reset: Tensor | None) -> ModelOutput:
        out: ModelOutput = model(tokens, before)
        return out

    with torch.no_grad():
        return [
            (out.outputs, states.map_state(torch.clone, out.state), [t.data_ptr() for t in tensors(out.state)[1:3]])
            for out in read_segments(one, pieces, state, in_place=in_place)
        ]


@pytest.mark.parametrize("memory", [STORE, PREVIEWED], ids=["alone", "previewed"])
def test_a_store_is_written_where_it_lies_with_the_same_numbers(memory: Any) -> None:
    model = build(memory)
    pieces = list(words(60, rows=2).split(SEGMENT, 1))
    plain, quick = (read(model, pieces, model.init_state(2), in_place) for in_place in (False, True))
    for (x, before, _), (y, after, _) in zip(plain, quick, strict=True):
        assert torch.equal(x, y) and same(before, after)
    if memory is STORE:
        assert len({place for _, _, places in quick for place in places}) == 2, "the store was copied"


def test_rows_that_begin_anew_are_no_part_of_the_promise() -> None:
    model = build()
    *_, last = read(model, list(words(18, rows=2).split(SEGMENT, 1)), model.init_state(2), in_place=False)
    state = last[1]
    before = states.map_state(torch.clone, state)
    with torch.no_grad(), last_use(state):
        model(words(SEGMENT, rows=2), state, torch.tensor([True, False]))
    assert same(state, before)


def test_a_stream_in_place_gives_the_same_numbers_and_leaves_the_state_that_it_began_with() -> None:
    model, text = build(), words(80)[0].tolist()
    whole = list(read_stream(model, [text], SEGMENT))
    start = whole[3]
    assert start.state is not None
    before = states.map_state(torch.clone, start.state)
    for begin, rest in ((None, whole), (start, whole[4:])):
        pieces = [text[0 if begin is None else begin.consumed :]]
        for a, b in zip(read_stream(model, pieces, SEGMENT, start=begin, in_place=True), rest, strict=True):
            assert a[:5] == b[:5] and same(a.state, b.state)
    assert same(start.state, before)


def test_marks_and_forks_of_a_session_hold() -> None:
    model = build()
    session = Session(model, SEGMENT)
    session.read(words(20))
    mark, before = session.mark(), states.map_state(torch.clone, session.state)
    twin = session.fork()
    answers = []
    for one in (session, twin, session):
        one.read(words(3 * SEGMENT))
        answers.append(one.generate(tokens=8, temperature=0).tokens)
        session.rewind(mark)
        assert same(mark.state, before)
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
