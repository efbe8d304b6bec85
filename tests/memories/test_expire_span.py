"""Expire-Span: a twin that forgets nothing and multiplies weights, limits, what is dropped, and what learns.

Legend: B rows, N tokens, M slots, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from integrations.families import GROUPED, PAD, decoder, words
from memories.harness import agree, logit, project, sines
from memories.learning import accuracy, trained, untrained
from memories.xl_family import joined, language_model, run, text
from torch import Tensor

from cached_lab.experiments.probes.tasks import Latch
from cached_transformers import add_memory
from cached_transformers import state as states
from cached_transformers.interfaces.memory import Query, Reading, Trace
from cached_transformers.memories.expire_span import ExpireSpan
from cached_transformers.memories.parts.fifo_store import Rows, empty_rows
from cached_transformers.models.language_model import LanguageModel

SPEC: dict[str, Any] = {"name": "expire_span", "length": 12, "longest": 9.3, "ramp": 3, "initial": 0.4}


def memories_of(model: LanguageModel) -> list[Any]:
    blocks: list[Any] = list(model.stack.blocks)
    return [block.attention.memory for block in blocks]


def span(memory: Any, hidden: Tensor, options: dict[str, Any]) -> Tensor:
    """e of one hidden state, a vector."""
    mean = hidden.mean()
    normed = (hidden - mean) / ((hidden - mean).square().mean() + 1e-5).sqrt()
    logit = (
        sum(w * x for w, x in zip(memory.weight_D, normed, strict=True)) / options.get("divisor", 1.0) + memory.bias[0]
    )
    return options["longest"] / (1 + torch.exp(-logit))


def twin(
    model: LanguageModel, tokens: list[int], segment: int, options: dict[str, Any], keeps: Any = None
) -> tuple[Tensor, Tensor]:
    """(N, V) logits of one row, and the sum of all layers' and segments' losses; a token, head and key at a time.

    Nothing is ever dropped, unless `keeps` says which of all stored states stay; weights are multiplied by m behind
    the softmax and then divided by their sum.
    """
    blocks: list[Any] = list(model.stack.blocks)
    stored: list[list[tuple[Tensor, int]]] = [[] for _ in blocks]
    logits, loss, ramp = [], torch.zeros(()).double(), options["ramp"]
    for first in range(0, len(tokens), segment):
        x = [model.embedding.weight[token] for token in tokens[first : first + segment]]
        for index, block in enumerate(blocks):
            layer = block.attention
            spans = [span(layer.memory, hidden, options) for hidden, _ in stored[index]]
            merged = []
            for i, hidden in enumerate(x):
                here, found = first + i, []
                known = [*zip(stored[index], spans, strict=True)]
                ages = [here - place for (_, place), _ in known]
                m = [(1 + (s - age) / ramp).clamp(0, 1) for (_, s), age in zip(known, ages, strict=True)]
                for (_, s), age, share in zip(known, ages, m, strict=True):
                    if 0 < share < 1:
                        loss = loss + (s - age) / (ramp * len(x))
                seen = [(t, place) for (t, place), _ in known] + [(t, first + j) for j, t in enumerate(x[: i + 1])]
                shares = [*m, *([torch.ones(()).double()] * (i + 1))]
                q, pairs = project(layer, hidden)[0], [project(layer, t)[1:] for t, _ in seen]
                codes = [sines(here - place, layer.width) for _, place in seen]
                for h in range(layer.heads):
                    scores = [
                        logit(layer.positions, q[h], k[h], h, code) for code, (k, _) in zip(codes, pairs, strict=True)
                    ]
                    weights = torch.stack(shares) * torch.stack(scores).softmax(0)
                    found.append((weights / weights.sum()) @ torch.stack([v[h] for _, v in pairs]))
                merged.append(torch.cat(found))
            stored[index] += [(t.detach(), first + i) for i, t in enumerate(x)]
            if keeps is not None:
                stored[index] = keeps(stored[index], first + len(x), layer.memory)
            x = [t + layer.output(found) for t, found in zip(x, merged, strict=True)]
            x = [t + block.feed_forward(t) for t in x]
        logits += [model.head(model.stack.norm(t)) for t in x]
    return torch.stack(logits), loss


def with_most_left(slots: int, options: dict[str, Any]) -> Callable[..., list[tuple[Tensor, int]]]:
    """Of the living, those that live longest, in the order of time."""

    def keeps(stored: list[tuple[Tensor, int]], following: int, memory: Any) -> list[tuple[Tensor, int]]:
        left = [float(span(memory, t, options).detach()) + options["ramp"] - (following - place) for t, place in stored]
        alive = sorted((i for i in range(len(stored)) if left[i] > 0), key=lambda i: -left[i])[:slots]
        return [stored[i] for i in sorted(alive)]

    return keeps


def auxiliary(model: LanguageModel, tokens_BN: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    outs = run(model, tokens_BN, segment)
    return joined(outs), torch.stack([out.auxiliary_loss for out in outs]).sum()


@pytest.mark.parametrize("segment", [1, 3, 7])
@pytest.mark.parametrize("changes", [{}, {"divisor": 3.0, "ramp": 2.5}], ids=["plain", "other"])
def test_the_twin(segment: int, changes: dict[str, Any]) -> None:
    """Values, loss and gradients, those of w and b through m among them; what is dropped is never missed."""
    spec = {**SPEC, **changes, "price": 0.3}
    model, tokens_BN = language_model(spec), text(2, 17)
    ours, loss = auxiliary(model, tokens_BN, segment)
    rows = [twin(model, row.tolist(), segment, spec) for row in tokens_BN]
    wanted, wanted_loss = torch.stack([logits for logits, _ in rows]), 0.3 * sum(part for _, part in rows) / 2
    spans = {n: p for n, p in model.named_parameters() if n.endswith(("memory.weight_D", "memory.bias"))}
    agree([loss], [wanted_loss], spans, least=1e-4)
    agree([ours], [wanted], model, least=1e-6)


def test_the_twin_where_more_are_alive_than_there_are_slots() -> None:
    spec = {**SPEC, "length": 4, "longest": 20.0, "evict": True}
    model, tokens_BN = language_model(spec), text(2, 19, 1)
    with torch.no_grad():
        for memory in memories_of(model):  # so that it is not the last ones that stay
            memory.weight_D.mul_(2)
    keeps = with_most_left(4, spec)
    wanted = torch.stack([twin(model, row.tolist(), 3, spec, keeps)[0] for row in tokens_BN])
    agree([joined(run(model, tokens_BN, 3))], [wanted], model, least=None)
    last = run(model, tokens_BN, 3)[-1].state.layers[0]
    assert any(row != list(range(15, 19)) for row in last.positions_BMP[..., 0].tolist())


def test_dropping_changes_nothing_and_frees_slots() -> None:
    """Evaluation, with slots for all that could live, for those that do, and for all that ever was."""
    tokens_BN = text(2, 60)
    found = {}
    for length in (12, 60):
        model = language_model({**SPEC, "length": length}).eval()
        found[length] = joined(run(model, tokens_BN, 4))
        wanted = torch.stack([twin(model, row.tolist(), 4, SPEC)[0] for row in tokens_BN[:, :24]])
        torch.testing.assert_close(found[length][:, :24], wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[12], found[60], rtol=0, atol=1e-12)
    state = run(model, tokens_BN, 4)[-1].state
    for memory, rows in zip(memories_of(model), state.layers, strict=True):
        left_BM = memory.spans(rows.hidden_BMD) + memory.ramp - (60 - rows.positions_BMP[..., 0])
        assert (left_BM[rows.valid_BM] > 0).all() and rows.count_B.max() < 12
        assert (rows.hidden_BMD[~rows.valid_BM] == 0).all()
    few = language_model({**SPEC, "length": int(max(s.count_B.max() for s in state.layers)) + 4, "evict": True}).eval()
    torch.testing.assert_close(joined(run(few, tokens_BN, 4)), found[12], rtol=0, atol=1e-12)


def reading(memory: ExpireSpan, state: Rows, first: int, tokens: int, **given: Any) -> Reading:
    positions_BNP = torch.arange(first, first + tokens)[None, :, None].expand(len(state.count_B), -1, -1)
    query = Query(torch.zeros(len(state.count_B), tokens, memory.width), None, positions_BNP, **given)
    return memory.read(memory.open(state, positions_BNP[:, :1], lambda h, **_: (h[:, None], h[:, None])), query, None)


def test_a_short_ramp_is_exact_and_spans_have_a_price() -> None:
    memory = ExpireSpan(6, 2, 4, longest=16384, ramp=128, evict=True).bfloat16()
    state = empty_rows(1, 4, 6, torch.zeros((), dtype=torch.bfloat16))
    state = state._replace(count_B=torch.ones(1, dtype=torch.long))
    share_N = reading(memory, state, 8192 + 1, 128).context.visible_BHNM[0, 0, :, -1]  # type: ignore[union-attr, index]
    assert share_N.dtype == torch.float32
    torch.testing.assert_close(share_N, 1 - torch.arange(1, 129) / 128, rtol=0, atol=1e-5)
    spec = {**SPEC, "price": 0.5, "loss": "mean"}
    model, tokens_BN = language_model(spec, depth=1), text(2, 9)
    _, loss = auxiliary(model, tokens_BN, 3)
    memory = memories_of(model)[0]
    spans = [span(memory, model.embedding.weight[token].detach(), spec) for token in tokens_BN.flatten().tolist()]
    torch.testing.assert_close(loss, 0.5 * sum(spans) / 6, rtol=1e-12, atol=0)
    assert run(model.eval(), tokens_BN, 3)[-1].auxiliary_loss == 0
    assert "own_loss" not in ExpireSpan(6, 2, price=0).needs


def test_the_loss_leaves_padding_out_and_is_the_mean_of_rows() -> None:
    """Of a row with two tokens and padding, in front or behind, and one with four."""
    model = language_model({**SPEC, "price": 1.0})
    begin = run(model, text(2, 12), 4)[-1].state

    def loss(tokens_BN: Tensor, padding_BN: Tensor | None, rows: slice) -> Tensor:
        cut = states.map_state(lambda t: t[rows], begin)
        return model(tokens_BN, cut, padding=padding_BN).auxiliary_loss

    tokens_BN = text(2, 4, 3)
    wanted = (loss(tokens_BN[:1, :2], None, slice(0, 1)) + loss(tokens_BN[1:], None, slice(1, 2))) / 2
    behind = torch.tensor([[False, False, True, True], [False] * 4])
    torch.testing.assert_close(loss(tokens_BN, behind, slice(0, 2)), wanted)
    moved = torch.cat([tokens_BN[:1].roll(2, 1), tokens_BN[1:]])
    torch.testing.assert_close(loss(moved, behind.roll(2, 1) & behind.any(1, keepdim=True), slice(0, 2)), wanted)


def test_what_is_not_finite_does_not_stay() -> None:
    """And the row beside it does not notice."""
    model = language_model(SPEC)
    memory, rows = memories_of(model)[0], run(model, text(2, 16)[:, :8], 4)[-1].state.layers[0]
    x_BND = torch.randn(2, 4, 12).double()
    x_BND[0, 2] = torch.nan
    positions_BNP = torch.arange(8, 12)[None, :, None].expand(2, -1, -1)
    query = Query(x_BND, None, positions_BNP)
    read = memory.read(memory.open(rows, positions_BNP[:, :1], lambda h, **_: (h[:, None], h[:, None])), query, None)
    after, _ = memory.write(rows, Trace(x_BND, x_BND, query, read))
    assert after.hidden_BMD.isfinite().all() and after.count_B.tolist()[1] >= after.count_B.tolist()[0]
    assert 10 not in after.positions_BMP[0, after.valid_BM[0], 0].tolist()


def test_noise_cuts_spans_in_training_alone_and_drops_nothing() -> None:
    spec = {**SPEC, "noisy": True, "price": 0.0}
    model, tokens_BN = language_model(spec), text(2, 17)
    quiet = language_model({**spec, "noisy": False})
    kept: dict[str, Any] = {}
    for mode in (True, False):
        outs, wanted = run(model.train(mode), tokens_BN, 4), run(quiet.train(mode), tokens_BN, 4)
        assert torch.equal(joined(outs), joined(wanted)) is not mode
        kept[str(mode)] = (outs[-1].state.layers[0].positions_BMP, wanted[-1].state.layers[0].positions_BMP)
    assert torch.equal(*kept["True"]), "of the first layer, whose inputs are the tokens"
    memory = ExpireSpan(6, 2, 30, longest=20, ramp=2, initial=0.9, noisy=True)
    state = empty_rows(1, 30, 6, torch.zeros(()))._replace(count_B=torch.ones(1, dtype=torch.long))
    torch.manual_seed(0)
    ends = [int((reading(memory, state, 1, 28).context.visible_BHNM > 0).sum(2)[..., -1]) for _ in range(300)]  # type: ignore[union-attr, operator]
    assert min(ends) <= 2 and max(ends) == 19 and 8 < sum(ends) / 300 < 13


def test_beside_another_memory_that_says_nothing_of_who_sees_whom() -> None:
    """One softmax over both, of which the other is seen whole."""
    tokens_BN = text(2, 18)
    beside: dict[str, Any] = {"name": "transformer_xl", "length": 3}
    for memory in ([beside, SPEC], [SPEC, beside]):
        model = language_model(memory)
        with torch.no_grad():
            for block in model.stack.blocks:
                own = next(m for m in block.attention.memory.members if isinstance(m, ExpireSpan))  # type: ignore[union-attr]
                own.weight_D.zero_()
                own.bias.fill_(-1000)
                own.ramp = 1
        window = language_model(beside)
        names = window.state_dict().keys()
        window.load_state_dict({name: t for name, t in model.state_dict().items() if name in names})
        torch.testing.assert_close(
            joined(run(model, tokens_BN, 4)), joined(run(window, tokens_BN, 4)), rtol=0, atol=1e-12
        )


def small(family: Any, kind: str, **options: Any) -> Any:
    model = family.build()
    model.set_attn_implementation(kind)
    if options:
        add_memory(model, {"name": "expire_span", "price": 0, **options}, segment_length=4)
    return model


DECODERS = [decoder("llama", "Llama", **GROUPED), decoder("phi3", "fused", **GROUPED), decoder("bloom", "alibi")]


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
@torch.no_grad()
def test_in_a_decoder_spans_of_all_time_are_the_host(family: Any, kind: str) -> None:
    plain, ids = small(family, kind), words(tokens=14)
    model = small(family, kind, length=32, longest=1e6, initial=0.999, evict=True)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    assert torch.equal(model.generate(ids, num_beams=2, **options), plain.generate(ids, num_beams=2, **options))


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_in_a_decoder_slots_fade_out_and_spans_learn(family: Any, kind: str) -> None:
    """Token by token as by segments; and what is on the ramp has a say, and a gradient."""
    model, ids = small(family, kind, length=8, ramp=4).eval(), words(tokens=19)
    out = model(ids).logits
    sharp = small(family, kind, length=8, ramp=1, longest=8 - 3.5).eval()
    assert (out - sharp(ids).logits).abs().max() > 1e-5
    with torch.no_grad():
        state, found = model(ids[:, :14]), []
        for place in range(14, 19):
            state = model(ids[:, place : place + 1], past_key_values=state.past_key_values, use_cache=True)
            found.append(state.logits)
    torch.testing.assert_close(torch.cat(found, 1), out[:, 14:], rtol=0, atol=1e-5)
    out.square().sum().backward()
    names = [name for name, p in model.named_parameters() if name.endswith("memory.bias")]
    assert names and all(float(dict(model.named_parameters())[name].grad.abs()) > 0 for name in names)


# What is worth keeping: a symbol among noise and other symbols, asked for 32 tokens later.
TASK, DISTANCE = Latch(decoys=True), 7
BEGINS: dict[str, Any] = {"name": "expire_span", "length": 64, "longest": 48, "ramp": 16, "initial": 0.4, "price": 0.1}
"""Spans begin at 19 tokens, so that what is older stands on the ramp, or just behind it."""


def learnt_spans(model: Any) -> Tensor:
    """(V,): of each token in the first layer, whose inputs are nothing but tokens."""
    with torch.no_grad():
        found: Tensor = model.stack.blocks[0].attention.memory.spans(model.embedding.weight)
    return found


def test_it_keeps_what_is_asked_for_and_drops_the_rest() -> None:
    """All is stored in training; afterwards a single slot holds all that is needed, in as many tokens."""
    model: Any = trained(TASK, BEGINS, 100, distance=DISTANCE)
    assert accuracy(model, TASK, DISTANCE) > 0.99
    found = learnt_spans(model)
    cues, others = found[: TASK.classes], found[TASK.classes : -1]
    assert cues.min() > 26 and others.max() < 10, "a cue is asked for after 29 to 32 tokens"
    small: Any = untrained(TASK, {**BEGINS, "length": 1, "evict": True}).eval()
    small.load_state_dict(model.state_dict())
    assert accuracy(small, TASK, DISTANCE) > 0.99
    assert accuracy(small, TASK, DISTANCE, forget=True) < 0.4


@pytest.mark.slow
def test_without_a_price_what_is_of_no_use_may_stay() -> None:
    model = trained(TASK, {**BEGINS, "price": 0}, 100, distance=DISTANCE)
    assert accuracy(model, TASK, DISTANCE) > 0.99
    assert learnt_spans(model)[TASK.classes : -1].max() > 10
