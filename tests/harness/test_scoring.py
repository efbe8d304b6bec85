"""Scores of texts in batches equal those of single texts; generated texts equal those of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses
from integrations.transformers_hosts import GPT2, awaken, stream

from cached_lab.experiments.harness.batches import ScoredText, TextScore, ended_text, generate_until, log_probabilities
from cached_lab.tasks.language.completion import Words
from cached_transformers import create_model, generate
from cached_transformers.models.sampling import Choice

SEGMENT, VOCABULARY = 5, 30
WORDS = Words((), lambda text: [ord(c) - 97 for c in text], lambda ids: "".join(chr(97 + i) for i in ids), None)


def ours(memory: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": 16, "depth": 2, "heads": 2, "feed_forward": 16}
    model = create_model("language_model", **sizes, memory=memory).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # so that the context has an effect
    return model.eval()


def theirs(memory: str) -> Any:
    return awaken(stream(GPT2, memory)).double().eval()


MODELS = {
    "transformer_xl": lambda: ours("transformer_xl"),
    "rmt": lambda: ours({"name": "rmt", "length": 2}),
    "grc_stream": lambda: ours("grc_stream"),
    "memorizing": lambda: ours("memorizing"),
    "host with rmt": lambda: theirs("rmt"),
}


def texts() -> list[ScoredText]:
    """Return texts of unequal lengths: contexts over five segments, and some under one segment."""
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    long, other = some(5 * SEGMENT + 3), some(2 * SEGMENT)
    found = [([*long, *some(count)], len(long)) for count in (1, 3, SEGMENT + 4)]
    found += [([*other, *some(count)], len(other)) for count in (2, 2)]
    found += [(some(length), first) for length, first in ((4, 1), (3 * SEGMENT, 1), (SEGMENT + 1, SEGMENT))]
    return [*found, (some(4), 4)]


@torch.no_grad()
def alone(model: Any, text: ScoredText, segment: int | None = SEGMENT) -> TextScore:
    """Slow twin: the text by itself, segment by segment, and the log-probability of every scored token."""
    reader = model.for_loops() if hasattr(model, "for_loops") else model
    ids, first = text
    inputs = torch.tensor([ids[:-1]])
    state, rows = reader.init_state(1), []
    for piece in inputs.split(segment or inputs.shape[1], 1):
        out = reader(piece, state)
        state = out.state
        rows.append(out.outputs[0].log_softmax(-1))
    logp = torch.cat(rows)
    scored = [(place - 1, ids[place]) for place in range(first, len(ids))]
    return sum(logp[at, token].item() for at, token in scored), all(logp[at].argmax() == t for at, t in scored)


@pytest.mark.parametrize(("name", "rows"), [*((name, 4) for name in MODELS), ("rmt", 1)])
def test_a_batch_of_unequal_texts_is_scored_as_each_alone(name: str, rows: int) -> None:
    model, given = MODELS[name](), texts()
    found = dict(log_probabilities(model, given, SEGMENT, rows))
    assert sorted(found) == list(range(len(given)))
    for place, text in enumerate(given):
        assert found[place] == pytest.approx(alone(model, text), abs=1e-10)
    assert found[len(given) - 1] == (0.0, True)
    assert len({logp for logp, _ in found.values()}) == len(given)


def test_a_store_of_everything_scores_as_the_whole_text_in_one_pass() -> None:
    model = ours({"name": "transformer_xl", "length": 64, "relative": False})
    plain = ours(None)
    plain.load_state_dict(model.state_dict())
    given = texts()
    found = dict(log_probabilities(model, given, SEGMENT, 4))
    for place, text in enumerate(given[:-1]):
        assert found[place] == pytest.approx(alone(plain, text, None), abs=1e-10)
    cut = alone(plain, given[0])  # without the memory the context is lost, and the score differs
    assert abs(found[0][0] - cut[0]) > 1e-3
    whole = dict(log_probabilities(plain, given, None, 4))
    assert whole[0] == pytest.approx(found[0], abs=1e-10)


def test_only_the_likeliest_continuation_is_greedy_and_the_model_stays() -> None:
    model, context = ours("rmt"), texts()[0][0][: 5 * SEGMENT + 3]
    likely = generate(model, torch.tensor([context]), tokens=7, temperature=0, segment_length=SEGMENT)
    ids = likely.tokens[0].tolist()
    wrong = [*ids[:3], (ids[3] + 1) % VOCABULARY]
    found = dict(log_probabilities(model, [([*context, *end], len(context)) for end in (ids, wrong)], SEGMENT, 2))
    assert found[0] == (pytest.approx(float(likely.scores), abs=1e-10), True) and not found[1][1]
    model = ours("rmt").train()
    list(log_probabilities(model, texts(), SEGMENT, 4))
    assert model.training
    refuses("first=0", list, log_probabilities(model, [([1, 2], 0)], SEGMENT, 4))
    refuses("segment_length=None", list, log_probabilities(model, texts(), None, 4))


@pytest.mark.parametrize("name", ["rmt", "host with rmt"])
def test_texts_are_written_as_generate_writes_them(name: str) -> None:
    model = MODELS[name]()
    contexts = torch.randint(0, 26, (3, 2 * SEGMENT + 3), generator=torch.Generator().manual_seed(1))
    want = generate(model, contexts, tokens=12, temperature=0, segment_length=SEGMENT).tokens.tolist()
    texts = [WORDS.decode(ids) for ids in want]
    choice = Choice(12, temperature=0)
    assert generate_until(model, contexts.tolist(), WORDS, SEGMENT, choice, []) == texts
    string = texts[0][4:6]
    cut = [text.partition(string)[0] for text in texts]
    assert cut[0] != texts[0] and generate_until(model, contexts.tolist(), WORDS, SEGMENT, choice, [string]) == cut
    end = WORDS._replace(end=want[1][5])
    upto = ["".join(text.partition(chr(97 + want[1][5]))[0]) for text in texts]
    assert generate_until(model, contexts.tolist(), end, SEGMENT, choice, []) == upto


def test_writing_ends_with_every_row_and_at_the_first_string() -> None:
    model = ours("rmt")
    steps: list[Any] = []
    context = torch.randint(0, 26, (1, 7), generator=torch.Generator().manual_seed(1))
    want = WORDS.decode(generate(model, context, tokens=9, temperature=0, segment_length=SEGMENT).tokens[0].tolist())
    choice = Choice(9, temperature=0)
    object.__setattr__(choice, "token", lambda logp: steps.append(logp) or logp.argmax(-1))
    text = generate_until(model, context.tolist(), WORDS, SEGMENT, choice, [want[2]])
    assert text == [want.partition(want[2])[0]] and len(steps) == len(text[0]) + 1
    spell = {0: "a", 1: "\n", 2: "\nQ", 3: ":b"}
    words = Words((), lambda text: [], lambda ids: "".join(spell[i] for i in ids), 9)
    assert ended_text(words, [0], [0, 2, 3, 0], ["Q:", "b"]) == ("a\n", True)
    assert ended_text(words, [0], [0, 1, 2, 0], ["\n\nQ"]) == ("a", True)
    assert ended_text(words, [0], [0, 1, 0], ["\n\nQ"]) == ("a\na", False)
    assert ended_text(words, [0], [0, 3, 9, 0], ["never"]) == ("a:b", True)
    halves = Words((), lambda text: [], lambda ids: bytes(ids).decode(errors="replace"), None)
    assert ended_text(halves, [], [*"naïve".encode()], ["ï"]) == ("na", True)
