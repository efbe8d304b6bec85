"""Block retrieval: golden values, a twin in loops, equal memories, and prompts that ask first.

Legend: B rows, H heads, G heads of keys, N tokens, M slots, C blocks, b tokens of a block, V layers, E head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import TORCH, refuses
from integrations import family_checks as checks
from integrations.families import GROUPED, Family, decoder, words
from memories.harness import HEADS, ROWS, build, paddings, run, segments
from memories.scored_streams import golden, turned
from torch import Tensor

from cached_transformers import Session, add_memory, create_memory
from cached_transformers import state as states
from cached_transformers.interfaces.memory import Query, Reading, Tokens, Trace
from cached_transformers.memories.block_retrieval import BlockRetrieval
from cached_transformers.memories.block_retrieval.scores import RULES
from cached_transformers.models.generation import generate

SMALL: dict[str, Any] = {"name": "block_retrieval", "sinks": 2, "recent": 4, "block": 3, "topk": 2}
KEPT: list[dict[str, Any]] = [{}, {"capacity": 30}, {"dtype": "bfloat16"}, {"dtype": "int8"}]
LLAMA = decoder("llama", "Llama", **GROUPED)


def trace(q: Tensor, k_BGNE: Tensor, v_BGNE: Tensor, padding_BN: Tensor | None = None) -> Trace:
    """A segment's trace, as a host gives it: keys and values repeated for every head."""
    x_BND = torch.zeros(q.shape[0], q.shape[2], q.shape[1] * q.shape[3], dtype=q.dtype)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k_BGNE, v_BGNE))
    return Trace(x_BND, x_BND, Query(x_BND, q, None, padding_BN, None, k, v), Reading())


def memory_of(heads: int, groups: int, width: int, depth: int = 1, **options: Any) -> BlockRetrieval:
    memory = create_memory({**SMALL, **options}, heads * width, heads, depth=depth)
    assert isinstance(memory, BlockRetrieval)
    memory.key_shape = (groups, width)
    return memory


def tokens_at(place: int, n: int, rows: int) -> Tokens:
    return Tokens(torch.zeros(rows, n, 1), torch.arange(place, place + n).expand(rows, -1)[..., None])


@pytest.mark.parametrize("options", [{}, {"capacity": 17}], ids=str)
@pytest.mark.parametrize("rule", ["mean/cache", "mean/same", "bounds/cache", "attention/cache"])
def test_golden_choices_scores_and_outputs(shared: Path, rule: str, options: dict[str, Any]) -> None:
    g = golden(shared, "block_retrieval")
    (score, places), q, k, v = rule.split("/"), g["q"], g["k"], g["v"]
    sizes = {name: int(g[name]) for name in ("sinks", "recent", "block", "topk")}
    observe = 1 if score == "attention" else int(g["observe"])
    memory = memory_of(6, 2, 8, **sizes, score=score, places=places, observe=observe, **options)  # type: ignore[arg-type]
    state, segment, outs = memory.init_state(2, q), int(g["segment"]), []
    for number, place in enumerate(range(0, q.shape[2], segment)):
        here = [t[:, :, place : place + segment] for t in (q, k, v)]
        n = here[0].shape[2]
        assert torch.equal(state.chosen_BUK[:, 0], g[f"{rule}/chosen"][:, number])
        (context,) = memory.open(state, tokens_at(place, n, 2), ())
        own_N = torch.arange(place, place + n)
        keys = torch.cat([turned(context.k_BHME, context.positions_BMP[:, None, :, 0]), turned(here[1], own_N)], 2)
        values = torch.cat([context.v_BHME, here[2]], 2)
        sees = torch.cat([context.valid_BM[:, None].expand(-1, n, -1), torch.ones(2, n, n).tril().bool()], 2)
        logits = turned(here[0], own_N) @ keys.repeat_interleave(3, 1).mT / math.sqrt(8)
        outs.append(logits.masked_fill(~sees[:, None], -math.inf).softmax(-1) @ values.repeat_interleave(3, 1))
        _, state, _ = memory.exit(state, here[0], [trace(*here)])
    torch.testing.assert_close(torch.cat(outs, 2), g[f"{rule}/out"], rtol=0, atol=1e-10)


def test_golden_bounds_of_pages(shared: Path) -> None:
    g = golden(shared, "block_scores")
    q_B1VGQE = g["q_rot"][:, :, -1].unflatten(1, (2, 3))[:, None, None]
    pages = g["k_rot"].split(int(g["quest/page"]), 2)
    found = [RULES["bounds"](q_B1VGQE, page[:, None, None])[:, 0, 0].flatten(1) for page in pages]
    torch.testing.assert_close(torch.stack(found, -1), g["quest/upper_bounds_all_pages"], rtol=0, atol=1e-10)


def twin(q: Tensor, k: Tensor, v: Tensor, cuts: list[int], o: dict[str, Any]) -> list[list[list[Tensor]]]:
    """Keys and values before each segment of one row in each layer, token after token, (V, H or G, N, E) given."""
    layers, queries = len(q), q.shape[1] // k.shape[1]
    seen, told = 0, []
    found: list[list[int]] = [[] for _ in range(layers)]
    for end in cuts:
        later = seen - min(o["sinks"], seen)
        count = max(later - o["recent"], 0) // o["block"]
        spans = [range(o["sinks"] + i * o["block"], o["sinks"] + (i + 1) * o["block"]) for i in range(count)]
        spans = spans if o.get("capacity") is None else spans[-o["capacity"] :]
        scores = torch.zeros(layers, len(spans), dtype=q.dtype)
        for layer in range(layers):
            asked = range(max(seen - o.get("observe", 1), o["start"]), seen)
            for head in range(q.shape[1] if spans else 0):
                keys = k[layer, head // queries]
                for t in asked:
                    logits = [[float(q[layer, head, t] @ keys[j]) for j in span] for span in spans]
                    if o["score"] == "attention":
                        weights = torch.tensor(logits, dtype=q.dtype).flatten() / math.sqrt(q.shape[-1])
                        parts = weights.softmax(0).view(len(spans), -1).sum(1)
                    elif o["score"] == "mean":
                        parts = torch.tensor([sum(part) / len(part) for part in logits], dtype=q.dtype)
                    else:
                        each = [(q[layer, head, t] * keys[list(span)]).amax(0).sum() for span in spans]
                        parts = torch.stack(each)
                    scores[layer] += parts
        scores = scores.sum(0, keepdim=True).expand(layers, -1) if o.get("vote", "layers") == "layers" else scores
        if seen > o["start"]:  # a segment without tokens chooses nothing new
            found = []
            for row in scores:
                best = sorted(range(len(spans)), key=lambda i: (-float(row[i]), -i))[: o["topk"]]
                found.append([t for i in sorted(best) for t in spans[i]])
        first_recent = min(o["sinks"], seen) + count * o["block"]
        slots = [[*range(min(o["sinks"], seen)), *chosen, *range(first_recent, seen)] for chosen in found]
        told.append([[k[layer][:, slots[layer]], v[layer][:, slots[layer]]] for layer in range(layers)])
        o["start"], seen = (seen, end) if end > seen else (o["start"], seen)
    return told


TWINS: list[dict[str, Any]] = [
    {"score": "attention"},
    {"score": "mean", "observe": 3, "sinks": 0},
    {"score": "bounds", "observe": 2, "vote": "layer", "topk": 1},
    {"score": "attention", "capacity": 3},
    {"score": "attention", "capacity": 3, "dtype": "int8", "exact": False},
]


@pytest.mark.parametrize("options", TWINS, ids=str)
@torch.no_grad()
def test_contexts_are_those_of_a_twin_in_loops(options: dict[str, Any]) -> None:
    """With padding before, after and inside rows, and a row that waits."""
    options = dict(options)
    exact, generator = options.pop("exact", True), torch.Generator().manual_seed(1)
    memory = memory_of(4, 2, 8, depth=2, **options)
    real_BT = torch.rand(3, 60, generator=generator) < 0.8
    real_BT[0] = True
    real_BT[1, 14:28] = False  # two segments
    real_BT[2, 42:48], real_BT[2, 48] = False, True  # a segment of one token
    q, k, v = (torch.randn(3, 2, h, 60, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    ends_BS = real_BT.long().cumsum(1)[:, 6::7]
    twins = []
    for row, real in enumerate(real_BT):
        given = {**SMALL, **options, "start": 0}
        twins.append(twin(*(t[row][:, :, real] for t in (q, k, v)), ends_BS[row].tolist(), given))
    state = memory.init_state(3, q)
    for number, place in enumerate(range(0, 56, 7)):
        contexts = memory.open(state, tokens_at(place, 7, 3), ())
        for row in range(3):
            for layer, context in enumerate(contexts):
                real_M = context.valid_BM[row]
                assert bool((real_M.long().diff() >= 0).all())  # empty slots come first
                for got, want in zip((context.k_BHME, context.v_BHME), twins[row][number][layer], strict=True):
                    torch.testing.assert_close(got[row][:, real_M], want, rtol=0, atol=1e-12 if exact else 0.03)
        here = [[t[:, layer, :, place : place + 7] for t in (q, k, v)] for layer in range(2)]
        padding_BN = ~real_BT[:, place : place + 7]
        _, state, _ = memory.exit(state, q, [trace(*one, padding_BN) for one in here])  # type: ignore[arg-type]


@torch.no_grad()
def test_until_a_block_leaves_it_is_streaming_llm() -> None:
    ids, sizes = words(tokens=20), {"sinks": 2, "recent": 18, "block": 1}
    streaming = {"name": "streaming_llm", "sinks": 2, "length": 18, "keep": "kv"}
    for memory in ({**SMALL, **sizes}, {**SMALL, **sizes, "capacity": 1}):
        hosts = [LLAMA.build(), LLAMA.build()]
        for host, spec in zip(hosts, (memory, streaming), strict=True):
            add_memory(host, spec, segment_length=4)
        one, two = (host(ids).logits for host in hosts)
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)
    one, two = (run(build(m, positions="rotary").eval(), segments(4))[-1].outputs for m in (memory, streaming))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@pytest.mark.parametrize("vote", ["layers", "layer"])
@torch.no_grad()
def test_every_store_answers_alike(tmp_path: Path, vote: str) -> None:
    """One that grows, one of a fixed size, a file; and narrower ones nearly so."""
    pieces, padded = segments(9), [*paddings(2), *([None] * 7)]
    first = run(build({**SMALL, "vote": vote}).eval(), pieces, None, padded)[-1].outputs
    for options in (*KEPT, {"store": "file", "folder": str(tmp_path)}, {"dtype": "int8", "capacity": 30}):
        model = build({**SMALL, "vote": vote, **options}).eval()
        narrow = "dtype" in options
        found = run(model, pieces, None, padded)[-1].outputs
        torch.testing.assert_close(found, first, rtol=0, atol=0.05 if narrow else 1e-12)
        assert narrow == (not torch.equal(found, first)) or not narrow


@torch.no_grad()
def test_states_share_their_blocks_and_files_take_them_back(tmp_path: Path) -> None:
    model = build({**SMALL, "store": "file", "folder": tmp_path}).eval()
    session = Session(model, segment_length=5)
    session.read(torch.cat(segments(8, rows=1), 1))
    mark, blocks = session.mark(), session.state.model.blocks_BCXbE.rows[0]
    file, sizes = blocks[0].store, []
    for seed in (1, 2, 3):
        session.read(torch.cat(segments(4, rows=1, seed=seed), 1))
        longer = session.state.model.blocks_BCXbE.rows[0]
        assert len(longer) > len(blocks) and all(a is b for a, b in zip(blocks, longer, strict=False))
        del longer
        sizes.append(file.records)
        session.rewind(mark)
    assert sizes == sizes[:1] * 3 and not list(tmp_path.iterdir())
    again = states.reorder(session.state, torch.tensor([0, 0]))
    assert again.model.blocks_BCXbE.rows == (blocks, blocks)


def test_slabs_are_written_in_any_mode_and_take_blocks_back() -> None:
    model = build({**SMALL, "dtype": "int8"}).eval()
    session, whole, text = (Session(model, 5), Session(model, 5), torch.cat(segments(12, rows=1), 1))
    for mode, part in zip((torch.inference_mode, torch.no_grad, torch.inference_mode), text.split(20, 1), strict=True):
        with mode():
            session.read(part)
    whole.read(text)
    assert torch.equal(session.generate(tokens=4, temperature=0).tokens, whole.generate(tokens=4, temperature=0).tokens)
    store, before = session.state.model.blocks_BCXbE.rows[0][0].store, session.mark()
    made = []
    for _ in range(3):
        session.read(text)
        made.append(store.records)
        session.rewind(before)
    assert made == made[:1] * 3


@pytest.mark.parametrize("options", [*KEPT, {"store": "file"}], ids=str)
@torch.no_grad()
def test_sessions_are_saved_and_go_on(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = {"folder": tmp_path} if "store" in options else {}
    model = build({**SMALL, **options, **folder}).eval()
    session, more = Session(model, segment_length=5), segments(3, rows=1, seed=4)
    session.read(torch.cat(segments(8, rows=1), 1))
    session.save(tmp_path / "state")
    if folder:  # its files are gone with the process, and the state goes on in another folder
        model = build({**SMALL, **options, "folder": tmp_path.parent}).eval()
    loaded = Session.load(model, tmp_path / "state", 5)
    for one in (session, loaded):
        one.read(torch.cat(more, 1))
    torch.testing.assert_close(loaded.state.model.recent, session.state.model.recent, rtol=0, atol=1e-6)
    assert torch.equal(loaded.state.model.chosen_BUK, session.state.model.chosen_BUK)
    got, want = (one.generate(tokens=6, temperature=0).tokens for one in (loaded, session))
    assert torch.equal(got, want)
    refuses("state", Session.load, build({**SMALL, **options, **folder, "topk": 1}).eval(), tmp_path / "state", 5)


@torch.no_grad()
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    model = build({**SMALL, "store": "file", "folder": tmp_path / "gone"})
    (tmp_path / "gone").rmdir()
    refuses("folder='.*gone'", run, model.eval(), segments(6))


@pytest.mark.parametrize("options", KEPT[:2], ids=str)
@torch.no_grad()
def test_a_row_that_is_reset_begins_again_and_others_go_on(options: dict[str, Any]) -> None:
    model = build({**SMALL, **options}).eval()
    before, (after, last) = run(model, segments(6))[-1].state, segments(2, seed=2)
    reset = torch.tensor([True, False, False])
    out = model(after, before, reset)
    fresh, kept = model(after), model(after, before)
    torch.testing.assert_close(out.outputs[0], fresh.outputs[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(out.outputs[1:], kept.outputs[1:], rtol=0, atol=1e-12)
    for state, want in ((out.state, fresh.state), (states.join([out.state, fresh.state]), fresh.state)):
        more = model(last.repeat(len(state.clock_B) // ROWS, 1), state).outputs
        torch.testing.assert_close(more[:1], model(last, want).outputs[:1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", KEPT[:2], ids=str)
@torch.no_grad()
def test_a_row_of_no_numbers_leaves_the_others_and_the_next_text(options: dict[str, Any]) -> None:
    memory = memory_of(HEADS, HEADS, 4, **options)
    outs = []
    for bad in (0.0, math.nan):
        state = memory.init_state(2, torch.zeros(1))
        for place in range(0, 30, 5):
            given = [torch.randn(2, HEADS, 5, 4, generator=torch.Generator().manual_seed(place + i)) for i in range(3)]
            for t in given:
                t[0] += bad
            _, state, _ = memory.exit(state, given[0], [trace(*given)])  # type: ignore[arg-type]
        (context,) = memory.open(state, tokens_at(30, 5, 2), ())
        outs.append((context.k_BHME[1], context.valid_BM[1], state.chosen_BUK[1]))
    for got, want in zip(outs[1], outs[0], strict=True):
        assert torch.equal(got, want)
    begun = states.reset(state, memory.init_state(2, torch.zeros(1)), torch.tensor([True, False]))
    (context,) = memory.open(begun, tokens_at(30, 5, 2), ())
    assert bool(context.k_BHME.isfinite().all()) and not bool(context.valid_BM[0].any())


def test_a_prompt_asks_before_it_is_answered_and_no_score_knows() -> None:
    """In every way to generate alike; a forward, in training or not, chooses by the segment before."""
    torch.manual_seed(0)
    ids = words(tokens=53)
    hosts = {}
    for retrieve in ("always", "segments", "prompts"):
        hosts[retrieve] = host = LLAMA.build()
        add_memory(host, {**SMALL, "topk": 1, "retrieve": retrieve}, segment_length=6)
    with torch.no_grad():
        scored = {name: host(ids).logits for name, host in hosts.items()}
        assert torch.equal(scored["always"], scored["segments"])
        assert not torch.equal(scored["always"][:, 20:], scored["prompts"][:, 20:])
    asked: dict[str, list[Tensor]] = {name: [] for name in hosts}
    for name, host in hosts.items():
        ask = host.model.memory.ask

        def heard(*args: Any, ask: Any = ask, name: str = name) -> Any:
            state = ask(*args)
            asked[name].append(state.chosen_BUK)
            return state

        host.model.memory.ask = heard
        mask = torch.ones_like(ids)
        told = host.generate(ids, attention_mask=mask, max_new_tokens=9, min_new_tokens=9, do_sample=False)[:, 53:]
        assert torch.equal(told, generate(host, ids, tokens=9, temperature=0, segment_length=6).tokens)
        session = Session(host)
        session.read(ids[:1])
        mark = session.mark()
        assert torch.equal(told[:1], session.generate(tokens=9, temperature=0).tokens)
        session.rewind(mark)
        assert told[0].tolist() == list(session.stream(tokens=9, temperature=0))
    assert not asked["segments"] and len(asked["always"]) == len(asked["prompts"]) == 4
    assert all(bool((chosen >= 0).all()) for chosen in (*asked["always"], *asked["prompts"]))
    assert all(torch.equal(a, asked["always"][0][: len(a)]) for a in asked["always"])


@torch.no_grad()
def test_a_conversation_asks_with_each_prompt() -> None:
    """Inside a partial segment, which is then read again, and not with tokens that were generated."""
    host, ids = LLAMA.build(), words(1, 40)
    add_memory(host, {**SMALL, "topk": 1}, segment_length=16)
    calls: list[int] = []
    ask = host.model.memory.ask

    def heard(state: Any, tokens: Tokens, through: Any) -> Any:
        calls.append(tokens.x_BND.shape[1])
        return ask(state, tokens, through)

    host.model.memory.ask = heard
    options: dict[str, Any] = {"min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    first = host.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **options)
    more = torch.cat([first.sequences, words(1, 2, seed=3)], 1)
    given = {"attention_mask": torch.ones_like(more), "past_key_values": first.past_key_values}
    second = host.generate(more, max_new_tokens=3, **given, **options)
    whole = host.generate(more, attention_mask=given["attention_mask"], max_new_tokens=3, **options)
    assert calls == [8, 13, 13] and torch.equal(second.sequences, whole.sequences)


@pytest.mark.parametrize("retrieve", ["always", "prompts"])
@torch.no_grad()
def test_each_row_asks_with_its_own_last_segment(retrieve: str) -> None:
    """One ends inside a segment, one with it, one long before the others; and none of them without a cache."""
    host, ids, lengths = LLAMA.build(), words(3, 47), (47, 42, 23)
    add_memory(host, {**SMALL, "topk": 1, "retrieve": retrieve}, segment_length=6)
    mask = torch.arange(47) >= 47 - torch.tensor(lengths)[:, None]
    options: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    told = host.generate(ids, attention_mask=mask.long(), **options)[:, 47:]
    for row, length in enumerate(lengths):
        text = ids[row : row + 1, 47 - length :]
        alone = host.generate(text, attention_mask=torch.ones_like(text), **options)[:, length:]
        assert torch.equal(told[row : row + 1], alone)
        assert torch.equal(alone, generate(host, text, tokens=9, temperature=0, segment_length=6).tokens)
    with pytest.raises(ValueError, match=r"use_cache=False.*retrieve='segments'"):
        host.generate(ids, attention_mask=mask.long(), use_cache=False, **options)


IN_LLAMA: list[Callable[[Family, dict[str, Any]], None]] = [
    *(checks.answers_alone, checks.answers_by_beams, checks.answers_sampled, checks.checkpoints, checks.generates),
    *(checks.hears_no_later_token, checks.packs, checks.plain_again),
]


@pytest.mark.parametrize("check", IN_LLAMA, ids=lambda check: check.__name__)
def test_in_llama(check: Callable[[Family, dict[str, Any]], None]) -> None:
    """Answers are compared with those of forwards, which do not ask."""
    check(LLAMA, {**SMALL, "retrieve": "segments"})


@pytest.mark.skipif(TORCH < (2, 9), reason="older versions of torch refuse an earlier line")
def test_a_store_without_a_limit_is_not_compiled() -> None:
    model = torch.compile(build(SMALL).eval(), backend="eager", fullgraph=True)
    refuses("capacity=None", model, segments(1)[0], raises=Exception)


REFUSED = [
    ({"score": "?"}, "score='\\?'"),
    ({"observe": 2}, "observe=2.*attention"),
    ({"store": "file"}, "store='file'.*folder=None"),
    ({"folder": "/"}, "store='memory'.*folder='/'"),
    ({"store": "file", "folder": "/none/here"}, "folder='/none/here'"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED, ids=str)
def test_options_that_contradict_are_refused(options: dict[str, Any], named: str) -> None:
    refuses(named, memory_of, 4, 2, 8, **options)
