"""Sessions: texts read and continued step by step, with our models and hosts; segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from common import refuses
from integrations.transformers_hosts import GPT2, SEGMENT, awaken, stream, words
from torch import Tensor

from cached_transformers import Session, create_model, generate
from cached_transformers.models.segments import cut, read_earlier_passes, read_segments
from cached_transformers.state import named_tensors

LENGTH = SEGMENT


def ours(memory: Any = "rmt") -> Any:
    torch.manual_seed(0)
    model = create_model("language_model", vocabulary=64, width=32, depth=2, heads=2, memory=memory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # so that what is read shows
    return model.eval()


def theirs(memory: str = "rmt") -> Any:
    return awaken(stream(GPT2, memory)).eval()


models = pytest.mark.parametrize("make", [ours, theirs])


def session(model: Any) -> Session:
    return Session(model, None if hasattr(model, "config") else LENGTH)


@models
@pytest.mark.parametrize("sizes", [(17,), (1, 16), (LENGTH, 17 - LENGTH), (3, 9, 5)])
def test_read_in_pieces_it_is_read_at_once(make: Callable[[], Any], sizes: tuple[int, ...]) -> None:
    model, text = make(), words(1, 17)
    found = session(model)
    for piece in text.split(list(sizes), 1):
        found.read(piece)
    expected = generate(model, text, tokens=2 * LENGTH, temperature=0, segment_length=LENGTH)
    again = found.generate(tokens=LENGTH, temperature=0).tokens
    rest = found.generate(tokens=LENGTH, temperature=0).tokens
    assert torch.equal(torch.cat([again, rest], 1), expected.tokens)
    assert found.tokens == 17 + 2 * LENGTH


@models
def test_one_prompt_many_questions(make: Callable[[], Any]) -> None:
    model, prompt = make(), words(1, 2 * LENGTH + 2)
    found = session(model)
    found.read(prompt)
    mark = found.mark()
    for seed in (1, 2):
        question = words(1, 3, seed)
        found.read(question)
        answer = found.generate(tokens=4, temperature=0)
        whole = generate(model, torch.cat([prompt, question], 1), tokens=4, temperature=0, segment_length=LENGTH)
        assert torch.equal(answer.tokens, whole.tokens)
        torch.testing.assert_close(answer.scores, whole.scores)
        found.rewind(mark)
        assert found.tokens == prompt.shape[1]
    mark = found.mark(weights=True)
    found.rewind(mark)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    for other, message in ((mark, "the mark was made with other weights"), (session(ours("infini")).mark(), "model")):
        refuses(message, found.rewind, other)


@models
def test_saved_it_goes_on_in_another_process(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    found = session(model)
    found.read(words(1, 2 * LENGTH + 3))
    found.save(tmp_path / "a")
    again = Session.load(make(), tmp_path / "a", found.segment_length)
    assert again.tokens == found.tokens
    assert torch.equal(*(s.generate(tokens=6, temperature=0).tokens for s in (found, again)))
    small = found.save(tmp_path / "b", dtype="int8")
    assert 0 < small.error < 0.02
    near = Session.load(make(), tmp_path / "b", found.segment_length)
    for (_, a), (_, b) in zip(named_tensors(near.state), named_tensors(found.state), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=max(b.abs().flatten().tolist(), default=0) / 100)


def test_what_does_not_fit_a_session_is_refused(tmp_path: Path) -> None:
    model = ours()
    refuses("give segment_length", Session, model)
    refuses("segment_length=0", Session, model, 0)
    found = session(model)
    refuses("nothing was read yet", found.generate, tokens=1)
    refuses(r"one text, \(1, tokens\), not \(2, 3\)", found.read, words(2, 3))
    found.read(words(1, 0))
    assert found.tokens == 0
    model = ours()
    found = session(model)
    found.read(words(1, 9))
    found.save(tmp_path / "a")
    refuses("here 7", Session.load, model, tmp_path / "a", 7)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    refuses("LanguageModel", Session.load, model, tmp_path / "a", LENGTH)


def test_without_memory_all_is_one_segment(tmp_path: Path) -> None:
    model, text = ours(None), words(1, 9)
    found = Session(model)
    for piece in text.split(4, 1):
        found.read(piece)
    expected = generate(model, text, tokens=3, temperature=0).tokens
    assert torch.equal(found.generate(tokens=3, temperature=0).tokens, expected)
    refuses(r"segment_length=None.*save the tokens", found.save, tmp_path / "a")


class Out(NamedTuple):
    value: Tensor
    state: Tensor


@pytest.mark.parametrize(("length", "filled"), [(None, 0), (1, 0), (4, 0), (4, 1), (4, 3), (20, 0), (20, 3)])
@pytest.mark.parametrize("tokens", [1, 4, 11, 12])
def test_all_tokens_are_in_segments_and_an_open_one_is_filled(tokens: int, length: int | None, filled: int) -> None:
    parts = [range(tokens)[part] for part in cut(tokens, length, filled)]
    assert [token for part in parts for token in part] == list(range(tokens))
    if length is None:
        assert len(parts) == 1
        return
    sizes = [len(part) for part in parts]
    assert sizes[0] == min(length - filled, tokens) and all(size == length for size in sizes[1:-1])
    assert 0 < sizes[-1] <= length


def test_nothing_is_read_before_it_is_asked_for() -> None:
    """An endless stream can be read, and the caller may stop."""
    drawn: list[int] = []

    def stream() -> Iterator[int]:
        number = 0
        while True:
            number += 1
            drawn.append(number)
            yield number

    outs = read_segments(lambda n, state, reset: Out(n, (0 if state is None else state) + n), stream(), None)
    assert drawn == []
    assert [next(outs).state for _ in range(3)] == [1, 3, 6] and drawn == [1, 2, 3]


@pytest.mark.parametrize(("bptt", "reached"), [(None, 3), (1, 1), (2, 1), (3, 3)])
def test_the_gradient_crosses_so_many_segments(bptt: int | None, reached: int) -> None:
    weights = [torch.ones(1, requires_grad=True) for _ in range(3)]
    outs = list(read_segments(lambda w, state, reset: Out(w, state + w), weights, torch.zeros(1), bptt=bptt))
    outs[-1].state.backward()
    assert outs[-1].state == 3 and sum(w.grad is not None for w in weights) == reached


def test_rows_begin_anew_with_the_first_segments_alone() -> None:
    met: list[object] = []
    resets = [torch.tensor([True]), None]
    list(read_segments(lambda n, state, reset: Out(met.append(reset), n), range(4), None, resets))
    assert met == [resets[0], None, None, None]


@pytest.mark.parametrize(("bptt", "cut_off"), [(None, False), (3, False), (2, True)])
def test_a_pass_begins_with_what_is_made_of_the_last_one(bptt: int | None, cut_off: bool) -> None:
    weight, calls = torch.ones(1, requires_grad=True), []

    def next_pass(before: Tensor, after: list[Tensor]) -> Tensor:
        calls.append((before.item(), [state.item() for state in after]))
        return before + 10 * after[-1]

    start = torch.zeros(1)
    state = read_earlier_passes(
        lambda n, state, reset: Out(n, state + n * weight), [1, 2, 3], start, next_pass, 3, bptt=bptt
    )
    assert calls == [(0, [1, 3, 6]), (60, [61, 63, 66])] and state == 720
    assert state.requires_grad is not cut_off
    assert read_earlier_passes(lambda *piece: pytest.fail("nothing is read"), [1], start, next_pass, 1) is start
