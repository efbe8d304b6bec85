"""Sessions: texts read and continued step by step, with our models and hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations.transformers_hosts import GPT2, LLAMA, SEGMENT, awaken, stream, words

from cached_transformers import Session, create_model, generate
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


def windowed() -> Any:
    """A decoder whose memory attends slots, and which decodes with a KV cache."""
    return LLAMA.with_memory("streaming_llm", length=6, segment_length=LENGTH)


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
    assert 0 < found.save(tmp_path / "b", dtype="int8").error < 0.02
    near = Session.load(make(), tmp_path / "b", found.segment_length)
    for (_, a), (_, b) in zip(named_tensors(near.state), named_tensors(found.state), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=max(b.abs().flatten().tolist(), default=0) / 100)


def test_of_other_weights_or_segments_it_is_refused(tmp_path: Path) -> None:
    model = ours()
    found = session(model)
    found.read(words(1, 9))
    found.save(tmp_path / "a")
    refuses("here 7", Session.load, model, tmp_path / "a", 7)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    refuses("LanguageModel", Session.load, model, tmp_path / "a", LENGTH)


def test_bad_input() -> None:
    model = ours()
    refuses("give segment_length", Session, model)
    refuses("segment_length=0", Session, model, 0)
    found = session(model)
    refuses("nothing was read yet", found.generate, tokens=1)
    refuses(r"one text, \(1, tokens\), not \(2, 3\)", found.read, words(2, 3))
    found.read(words(1, 0))
    assert found.tokens == 0


def test_without_memory_all_is_one_segment(tmp_path: Path) -> None:
    model, text = ours(None), words(1, 9)
    found = Session(model)
    for piece in text.split(4, 1):
        found.read(piece)
    expected = generate(model, text, tokens=3, temperature=0).tokens
    assert torch.equal(found.generate(tokens=3, temperature=0).tokens, expected)
    refuses(r"segment_length=None.*save the tokens", found.save, tmp_path / "a")


@pytest.mark.parametrize("make", [ours, theirs, windowed])
@pytest.mark.parametrize("stop", [1, LENGTH - 1, LENGTH, 2 * LENGTH + 1])
def test_a_stream_stops_at_any_token(make: Callable[[], Any], stop: int) -> None:
    """It yields the tokens of `generate`; the text holds those that were yielded, and goes on after them."""
    model, text = make(), words(1, LENGTH + 3)
    expected = generate(model, text, tokens=3 * LENGTH, temperature=0, segment_length=LENGTH).tokens[0].tolist()
    found = session(model)
    found.read(text)
    streamed = found.stream(tokens=3 * LENGTH, temperature=0)
    assert [next(streamed) for _ in range(stop)] == expected[:stop] and found.tokens == text.shape[1] + stop
    assert list(found.stream(tokens=3 * LENGTH - stop, temperature=0)) == expected[stop:]
    again, more = session(model), words(1, 2, 5)  # which the partial segment has room for
    for part in (text, torch.tensor([expected]), more):
        again.read(part)
    found.read(more)
    assert list(found.stream(tokens=9, temperature=0)) == again.generate(tokens=9, temperature=0).tokens[0].tolist()
    refuses("beams=2", found.stream, tokens=1, beams=2)
    end = expected[1]
    found.rewind(session(model).mark())
    found.read(text)
    assert list(found.stream(tokens=9, temperature=0, eos=end)) == expected[: expected.index(end) + 1]


def test_new_tokens_are_read_once_and_full_segments_once_more() -> None:
    model, sizes = windowed(), []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, out: sizes.append(out.shape[1]))
    found, new = session(model), 0
    for turn, count in enumerate([2, 1, 3, 9, 2, 4]):
        found.read(words(1, count, turn))
        new += count + len(list(found.stream(tokens=3, temperature=0)))
    assert sum(sizes) <= new + LENGTH * (found.tokens // LENGTH)
    found = session(model)
    for _ in range(2):
        sizes.clear()
        found.read(words(1, 1))
        list(found.stream(tokens=1, temperature=0))
    assert sizes == [2], "the last token of the answer, and the new one"


@pytest.mark.parametrize("keep", ["mark", "fork", "save"])
def test_a_text_continues_in_the_same_bits(keep: str, tmp_path: Path) -> None:
    """From a mark, a fork and a file as in the session itself, in the middle of a segment and of an answer."""
    model, scores = windowed(), []
    model.get_output_embeddings().register_forward_hook(lambda _, inputs, out: scores.append(out[:, -1]))
    found = session(model)
    found.read(words(1, LENGTH + 2))
    list(found.stream(tokens=2, temperature=0))
    kept = found.mark() if keep == "mark" else found.fork() if keep == "fork" else found.save(tmp_path / "a")
    bits = []
    for _ in range(2):
        scores.clear()
        list(found.stream(tokens=2 * LENGTH, temperature=0))
        bits.append(torch.cat(scores))
        if keep == "mark":
            found.rewind(kept)
        else:
            found = kept if keep == "fork" else Session.load(model, tmp_path / "a")
    assert torch.equal(*bits)
