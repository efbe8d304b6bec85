"""Segatron-XL: a twin in loops, its distances, Transformer-XL as a limit, and numbers that the caller gives.

Legend: B rows, N tokens, M slots, K = M + N."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from common import refuses
from memories.harness import agree, same_states, sines
from memories.xl_family import HEADS, WIDTH, Place, copying, joined, language_model, run, text, twin
from torch import Tensor

from cached_transformers import generate
from cached_transformers.layers.stack import Stack
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.segatron import SegatronPositions, paper_widths
from cached_transformers.models.generation import GeneratedText

SENTENCE_ENDS, PARAGRAPH_ENDS = (2, 5, 7), (3, 11)
SPEC: dict[str, Any] = {"name": "segatron", "sentence_ends": SENTENCE_ENDS, "paragraph_ends": PARAGRAPH_ENDS}
WIDTHS = (4, 6, 2)


def numbered(tokens: list[int]) -> list[Place]:
    """Token, sentence and paragraph of each token of a text."""
    places, sentence, paragraph = [], 0, 0
    for i, token in enumerate(tokens):
        places.append((i, sentence, paragraph))
        sentence += token in SENTENCE_ENDS or token in PARAGRAPH_ENDS
        paragraph += token in PARAGRAPH_ENDS
    return places


def near(ours: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"clamp": 2}, {"same_length": True}])
def test_the_model_is_its_slow_twin(options: dict[str, Any]) -> None:
    length, segment, n = 5, 4, 12
    model, tokens = language_model({**SPEC, "length": length, "widths": WIDTHS, **options}), text(2, n)
    limit = options.get("clamp", n)

    def code(here: Place, there: Place) -> Tensor:
        return torch.cat([sines(min(i - j, limit), w) for i, j, w in zip(here, there, WIDTHS, strict=True)])

    rows = []
    for row in tokens:
        places = numbered(row.tolist())
        assert places[-1][1] > places[-1][2] > 0
        window = length if "same_length" in options else None
        rows.append(twin(model, row.tolist(), places, segment, length, code, window=window))
    agree([joined(run(model, tokens, segment))], [torch.stack(rows)], model, least=1e-6)


def test_without_channels_for_sentences_it_is_transformer_xl() -> None:
    options, tokens = {"length": 6, "clamp": 7}, text(2, 16)
    xl = language_model({"name": "transformer_xl", **options})
    model = language_model({**SPEC, **options, "widths": (WIDTH, 0, 0)})
    model.load_state_dict(xl.state_dict())
    near(joined(run(model, tokens, 4)), joined(run(xl, tokens, 4)))


SHIFTS: dict[str, dict[str, Any]] = {"exact": {"shift": "exact"}, "official": {"shift": "official", "allow_leak": True}}


@pytest.mark.parametrize("shift", SHIFTS)
def test_with_the_released_distances_tokens_know_where_later_sentences_end(shift: str) -> None:
    """Token 3 of a segment ends a sentence or not, after another segment."""
    model, tokens = language_model({**SPEC, "length": 6, **SHIFTS[shift]}), text(1, 12)
    told = []
    for token in (0, SENTENCE_ENDS[0]):
        changed = tokens.clone()
        changed[:, 9] = token
        told.append(joined(run(model, changed, 6))[0, 6:])
    difference_N = (told[0] - told[1]).abs().amax(1)
    assert difference_N[3 if shift == "exact" else 0 :].min() > 1e-3
    assert shift == "official" or difference_N[:3].max() == 0


def climbing(rows: int, count: int) -> Tensor:
    """(rows, count, 3): tokens one by one, sentences and paragraphs now and then."""
    steps = (torch.rand(rows, count, 3) < torch.tensor([2.0, 0.5, 0.25])).long()
    return steps.cumsum(1) + torch.tensor([30, 9, 4])


@pytest.mark.parametrize("clamp", [None, 2])
@pytest.mark.parametrize("shift", ["exact", "official", "signed"])
@pytest.mark.parametrize(("n", "m"), [(1, 4), (4, 0), (5, 3)])
def test_distances_are_their_formulas(n: int, m: int, shift: str, clamp: int | None) -> None:
    """One query, key, head and row at a time: D = X_i - X_j, or X_last - X_(j + n - 1 - i); below 0 to later keys."""
    e, signed = WIDTH // HEADS, shift == "signed"
    options = {"signed": True} if signed else {"shift": shift}
    scheme = SegatronPositions(HEADS, e, widths=WIDTHS, clamp=clamp, **options).double()
    places, q = climbing(2, m + n), torch.randn(2, HEADS, n, e, dtype=torch.double)
    got = scheme.bias(q, places[:, m:], places)
    for b, h, i in itertools.product(range(2), range(HEADS), range(n)):
        for j in range(m + n if signed else m + i + 1):
            first, last = (j + n - 1 - i, m + n - 1) if shift == "official" else (j, m + i)
            distance = (places[b, last] - places[b, first]).clamp(-(clamp or 99), clamp or 99)
            code = torch.cat([sines(d, w) for d, w in zip(distance.tolist(), WIDTHS, strict=True)])
            r = (scheme.project.weight @ code)[h * e : (h + 1) * e]
            near(got[b, h, i, j], (q[b, h, i] + scheme.position_bias[h]) @ r / math.sqrt(e))


@pytest.mark.parametrize(("signed", "clamp"), [(False, None), (True, None), (True, 1)])
def test_few_numbers_are_looked_up_once_each(signed: bool, clamp: int | None, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    positions = SegatronPositions(2, 8, signed=signed, clamp=clamp).double()
    channels = [torch.arange(24)[None, :, None] + torch.zeros(2, 1, 1, dtype=torch.long)]
    channels += [(torch.rand(2, 24, 1) < rate).cumsum(1) + 7 for rate in (0.15, 0.1)]
    k_BKP, q = torch.cat(channels, -1), torch.randn(2, 2, 10, 8, dtype=torch.float64, requires_grad=True)
    counts, few = [], SegatronPositions._few
    monkeypatch.setattr(SegatronPositions, "_few", lambda *given: counts.append(few(*given)) or counts[-1])
    ours = positions.bias(q, k_BKP[:, -10:], k_BKP)
    assert counts[0] == 0 < counts[1] and counts[2] > 0
    monkeypatch.setattr(SegatronPositions, "_few", lambda *_: 0)
    theirs = positions.bias(q, k_BKP[:, -10:], k_BKP)
    leaves = [q, positions.position_bias, positions.project.weight]
    seen = torch.ones(10, 24, dtype=torch.bool).tril(14) | signed
    direction = torch.randn_like(ours) * seen
    results = [[t * seen, *torch.autograd.grad(t, leaves, direction)] for t in (ours, theirs)]
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_distances_agree_without_ends_and_token_ids_are_asked_for() -> None:
    tokens = text(2, 12)
    quiet = torch.where(torch.isin(tokens, torch.tensor([*SENTENCE_ENDS, *PARAGRAPH_ENDS])), 0, tokens)
    models = [language_model({**SPEC, "length": 6, **shift}) for shift in SHIFTS.values()]
    one, other = (joined(run(model, quiet, 4)) for model in models)
    near(one, other)
    one, other = (joined(run(model, tokens, 4)) for model in models)
    assert (one - other).abs().max() > 0.01
    stack: Stack = language_model({**SPEC, "length": 4}).stack
    refuses("inputs=token_ids", stack, torch.randn(1, 3, WIDTH, dtype=torch.double))


@pytest.mark.parametrize(
    ("width", "widths"), [(410, (136, 136, 138)), (1024, (342, 342, 340)), (768, (256, 256, 256)), (16, (6, 6, 4))]
)
def test_the_widths_of_the_paper(width: int, widths: tuple[int, ...]) -> None:
    assert paper_widths(width) == widths


def test_it_learns_to_copy() -> None:
    """Without a memory nothing is copied: see the tests of Transformer-XL."""
    assert copying({"name": "segatron", "length": 4, "sentence_ends": (1, 3), "paragraph_ends": (5,)}, 150) > 0.95


ROWS, SEGMENT, TOKENS = 2, 4, 16
ENDS: dict[str, Any] = {"sentence_ends": (2, 5, 7), "paragraph_ends": (3, 11)}
COUNTING: dict[str, Any] = {"name": "segatron", "length": 6}


def counted(tokens_BN: Tensor, more: Tensor | None = None, padding: Tensor | None = None, ends: Any = ENDS) -> Tensor:
    """(B, N, 2): numbers of sentences and paragraphs, token by token; `more` is where a caller lets others begin."""
    rows = []
    for b, row in enumerate(tokens_BN.tolist()):
        following, numbers = [0, 0], []
        for i, token in enumerate(row):
            real = padding is None or not padding[b, i]
            own = [following[c] + int(more[b, i, c] if more is not None and real else 0) for c in (0, 1)]
            numbers.append(own)
            paragraph = token in ends.get("paragraph_ends", ())
            step = (paragraph or token in ends.get("sentence_ends", ()), paragraph)
            following = [n + (s and real) for n, s in zip(own, step, strict=True)]
        rows.append(numbers)
    return torch.tensor(rows)


def by_segments(model: Any, tokens_BN: Tensor, places: Tensor | None, **options: Any) -> list[Any]:
    state, outs = None, []
    for begin in range(0, tokens_BN.shape[1], SEGMENT):
        part = slice(begin, begin + SEGMENT)
        more = {name: t[:, part] for name, t in options.items()}
        outs.append(model(tokens_BN[:, part], state, places=None if places is None else places[:, part], **more))
        state = outs[-1].state
    return outs


@pytest.mark.parametrize("known", [1.0, 0.4], ids=["all", "some"])
def test_the_numbers_that_separators_have_are_what_separators_give(known: float) -> None:
    model, tokens = language_model({**COUNTING, **ENDS}), text(ROWS, TOKENS)
    places = counted(tokens).masked_fill(torch.rand(ROWS, TOKENS, 1) >= known, -1)
    plain, told = run(model, tokens, SEGMENT), by_segments(model, tokens, places)
    same_states((joined(plain), plain[-1].state), (joined(told), told[-1].state))
    without = by_segments(language_model(COUNTING), tokens, counted(tokens))  # no separators at all
    assert torch.equal(joined(plain), joined(without)) and counted(tokens).amax((0, 1)).min() > 1


@pytest.mark.parametrize("ends", [ENDS, {}], ids=["with separators", "without"])
def test_any_numbers_are_kept_and_counted_on_from(ends: Any) -> None:
    """Against a loop, with padding whose numbers are of no account, and rows that begin with the number 9."""
    model, tokens = language_model({**COUNTING, "length": TOKENS, **ends}), text(ROWS, TOKENS)
    padding = torch.rand(ROWS, TOKENS) < 0.2
    padding[:, 4:8] = True  # one segment of padding alone
    more = (torch.rand(ROWS, TOKENS, 2) < 0.4).long()
    for row in range(ROWS):
        more[row, (~padding[row]).nonzero()[0]] = 9
    want = counted(tokens, more, padding, ends)
    given = want.masked_fill(more == 0, -1)
    outs = by_segments(model, tokens, given, padding=padding)
    for row in range(ROWS):
        real = ~padding[row]
        for layer in outs[-1].state.layers:
            assert layer.positions_BMP[row, -int(real.sum()) :, 1:].tolist() == want[row, real].tolist()
    other = given.masked_fill(padding[..., None], 77)
    same_states(outs[-1].state, by_segments(model, tokens, other, padding=padding)[-1].state)


def test_a_number_is_heard_of_from_its_token_on() -> None:
    model, tokens = language_model(COUNTING), text(ROWS, TOKENS)
    places = counted(tokens)
    before = joined(by_segments(model, tokens, places))
    moved = places.clone()
    moved[:, 6:] += (places[:, 6:7] == places[:, 5:6]).long()
    assert (moved != places).any(2)[:, 6].all()
    change = (joined(by_segments(model, tokens, moved)) - before).abs().amax((0, 2))
    assert change[:6].max() == 0 and change[6:].min() > 1e-6


def test_a_loop_hands_each_segment_its_own() -> None:
    model, tokens = language_model(COUNTING), text(ROWS, TOKENS + 1)
    counting = language_model({**COUNTING, **ENDS})
    inputs, targets, found = tokens[:, :-1], tokens[:, 1:], []
    for kind, of, places in (
        (SegmentLoop, counting, None),
        (SegmentLoop, model, counted(inputs)),
        (ReplayLoop, model, counted(inputs)),
    ):
        of.zero_grad()
        loss, state = kind(of, SEGMENT)(inputs, targets, places=places)
        loss.backward()
        # What the next token's numbers will be, a model without separators does not know.
        found.append((loss.detach(), state.layers, tuple(p.grad.clone() for p in of.parameters())))
    same_states(found[0], found[1])
    same_states(found[0], found[2])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beams": 3}], ids=["greedy", "beams"])
def test_a_text_goes_on_from_the_numbers_of_its_prompt(options: dict[str, Any]) -> None:
    model, prompt = language_model({**COUNTING, **ENDS}).eval(), text(ROWS, 10)
    places, how = counted(prompt), {"tokens": 7, "segment_length": SEGMENT, **options}
    plain, told = generate(model, prompt, **how), generate(model, prompt, places=places, **how)
    assert torch.equal(plain.tokens, told.tokens)
    same_states((plain.scores, plain.state), (told.scores, told.state))
    far = generate(model, prompt, places=places + 40, **how)  # only differences count
    torch.testing.assert_close(far.scores, plain.scores, rtol=0, atol=1e-10)
    assert torch.equal(far.state.model.sentence_B, plain.state.model.sentence_B + 40)
    places[:, 9] = places[:, 8] + 1  # in the open segment
    texts = [
        GeneratedText(model, prompt, model.init_state(ROWS), SEGMENT, again=again, places=places)
        for again in (False, True)
    ]
    with torch.no_grad():
        for token in text(6, ROWS, seed=3):
            first, second = (one.read() for one in texts)
            torch.testing.assert_close(first, second, rtol=0, atol=1e-10)
            for one in texts:
                one.append(token)
        same_states(*(one.after() for one in texts))


def test_what_are_no_places_is_refused() -> None:
    model, tokens = language_model(COUNTING), text(ROWS, SEGMENT)
    for wrong in (torch.zeros(ROWS, SEGMENT).long(), torch.zeros(ROWS, SEGMENT, 2)):
        refuses("must be two numbers per token", model, tokens, places=wrong)
        refuses("must be two numbers per token", SegmentLoop(model, SEGMENT), tokens, tokens, places=wrong)
    places = torch.zeros(ROWS, SEGMENT, 2).long()
    state = model(tokens, places=places + 6).state
    for leap in (2, -2):
        wrong = places + 6
        wrong[1, 2:, 1] += leap
        refuses("a number in places leaps", model, tokens, places=wrong)
        refuses("reset a row that begins anew", model, tokens, state, places=places + 6 + leap)
    model(tokens, state, torch.ones(ROWS).bool(), places=places)
    with pytest.raises(ValueError, match="must be of the prompt"):
        generate(model, tokens, tokens=1, segment_length=SEGMENT, places=torch.zeros(ROWS, 2, 2).long())
    with pytest.raises(ValueError, match="need a memory that takes them"):
        language_model("transformer_xl")(tokens, places=torch.zeros(ROWS, SEGMENT, 2).long())
