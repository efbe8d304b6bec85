"""Rules that all memories with scored slots keep, in streams of heads and in decoders, and twins in loops.

Legend: B rows, H heads, G heads of keys, R heads of queries per key, T tokens, E head width.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from integrations import family_checks as checks
from integrations.families import DECODERS, GROUPED, PAD, decoder, words
from integrations.test_query_weights import padded, same_as_rows
from memories.scored_streams import Golden, steps, turned
from torch import Tensor

from cached_transformers import add_memory, create_memory, create_model
from cached_transformers.memories.keydiff import KeyDiff
from cached_transformers.state import named_tensors

RULES: dict[str, dict[str, Any]] = {
    "snapkv": {"observe": 3, "kernel": 3},
    "knorm": {"observe": 3},
    "keydiff": {"observe": 3},
    "keydiff/rotated": {"observe": 3, "rotated": True},
    "lagkv": {"observe": 3},
    "expected_attention": {"observe": 3, "future": 6, "epsilon": 0.01},
    "h2o": {"length": 3, "heavy": 8},
    "h2o/window": {"length": 3, "heavy": 8, "observe": 2},
    "attention_matching": {"observe": 3, "queries": 5},
}
SLOTS, SINKS, WIDTH, HEADS = 11, 2, 8, 6
every = pytest.mark.parametrize("rule", RULES)


def options(rule: str, **more: Any) -> dict[str, Any]:
    name = rule.partition("/")[0]
    room = {} if name == "h2o" else {"length": SLOTS, "sinks": SINKS}
    return {"name": name, "relative": False, **room, **RULES[rule], **more}


def memory_of(rule: str, heads: int = HEADS, **more: Any) -> Any:
    return create_memory(options(rule, **more), heads * WIDTH, heads)


def stream(tokens: int = 27, groups: int = 2, seed: int = 0) -> Golden:
    generator = torch.Generator().manual_seed(seed)
    heads = {"q": HEADS, "k": groups, "v": groups}
    return {
        name: torch.randn(2, number, tokens, WIDTH, generator=generator, dtype=torch.double)
        for name, number in heads.items()
    }


def kept_of(rule: str, data: Golden, segment: int = 6, offset: int = 0, **more: Any) -> list[Tensor]:
    return [step.kept for step in steps(memory_of(rule, data["q"].shape[1], **more), data, segment, offset=offset)]


class Twin:
    """One row and head of keys in loops: the rule's scores of a list of (key, value, carried score)."""

    def __init__(self, rule: str, data: Golden, row: int, group: int) -> None:
        self.rule = rule
        shared = data["q"].shape[1] // data["k"].shape[1]
        self.q = data["q"][row, group * shared : (group + 1) * shared]  # (R, T, E)
        self.k, self.v = data["k"][row, group], data["v"][row, group]
        self.kept: list[int] = []
        self.carried: dict[int, float] = {}

    def at(self, t_E: Tensor, place: int) -> Tensor:
        return turned(t_E[None, None, None], torch.tensor([[[place]]]))[0, 0, 0]

    def weights(self, places: dict[int, int], query: int) -> dict[int, float]:
        """Mean over the group's heads of the weights that a token gives to the keys before it."""
        mean = dict.fromkeys(places, 0.0)
        for head in self.q:
            asks = self.at(head[query], query)
            seen = [i for i in places if places[i] <= query]
            logits = [float(asks @ self.at(self.k[i], places[i])) / math.sqrt(WIDTH) for i in seen]
            total = sum(math.exp(logit) for logit in logits)
            for i, logit in zip(seen, logits, strict=True):
                mean[i] += math.exp(logit) / total / len(self.q)
        return mean

    def scores(self, known: list[int], new: list[int], places: dict[int, int]) -> dict[int, float]:
        name, spec = self.rule.partition("/")[0], RULES[self.rule]
        if name == "knorm":
            return {i: -float(self.k[i].norm()) for i in known}
        if name == "keydiff":
            keys = {i: self.at(self.k[i], places[i]) if "rotated" in spec else self.k[i] for i in known}
            anchor = sum((key / key.norm() for key in keys.values()), torch.zeros(WIDTH)) / len(keys)
            return {i: -float(key @ anchor / key.norm() / anchor.norm()) for i, key in keys.items()}
        if name == "lagkv":
            return self.lag(known, new)
        if name == "expected_attention":
            return self.expected(known, places, new[-1] + 1)
        asked = new[-spec["observe"] :] if "observe" in spec else new
        weights = [self.weights(places, query) for query in asked]
        summed = {i: sum(given[i] for given in weights) for i in known}
        if name == "h2o":
            self.carried = {i: self.carried.get(i, 0.0) + summed[i] for i in known}
            return self.carried
        older = known[: -spec["observe"]]
        pooled = dict.fromkeys(known, math.inf)
        for number, i in enumerate(older):
            around = [older[j] for j in range(number - 1, number + 2) if 0 <= j < len(older)]
            pooled[i] = sum(summed[j] for j in around) / 3
        return pooled

    def lag(self, known: list[int], new: list[int]) -> dict[int, float]:
        waiting = [i for i in known if i not in new and i not in self.carried]
        shares = dict.fromkeys(waiting, 0.0)
        for t in (self.k, self.v):
            least, most = t[new].min(0).values, t[new].max(0).values
            spread = {i: float(((t[i] - least) / (most - least + 1e-12)).std()) for i in waiting}
            total = sum(math.exp(s) for s in spread.values())
            for i in waiting:
                shares[i] += math.exp(spread[i]) / total / 2
        for place, i in enumerate(sorted(waiting, key=lambda i: shares[i])):
            self.carried[i] = place / len(waiting)
        return {i: self.carried.get(i, 2.0) for i in known}

    def expected(self, known: list[int], places: dict[int, int], end: int) -> dict[int, float]:
        spec, counted = RULES[self.rule], [i for i in known if i >= SINKS]
        share = dict.fromkeys(counted, 0.0)
        places_F = range(end, end + spec["future"])
        turns = [torch.stack([self.at(unit, place) for unit in torch.eye(WIDTH).double()]) for place in places_F]
        turn = torch.stack(turns).mean(0)
        for head in self.q:
            past = head[SINKS:end]
            mean = past.mean(0)
            spread = (past - mean).mT @ (past - mean) / len(past)
            z = {}
            for i in counted:
                key = self.at(self.k[i], places[i])
                z[i] = float(key @ (mean @ turn) / math.sqrt(WIDTH) + key @ (turn.mT @ spread @ turn) @ key / 2 / WIDTH)
            total = sum(math.exp(value) for value in z.values())
            for i in counted:
                share[i] += math.exp(z[i]) / total / len(self.q)
        return {i: (share.get(i, 0.0) + spec["epsilon"]) * float(self.v[i].norm()) for i in known}

    def step(self, new: list[int]) -> list[int]:
        slots = len(self.kept)
        places = {i: new[0] - slots + number for number, i in enumerate(self.kept)} | {i: i for i in new}
        known = [*self.kept, *new]
        scores = self.scores(known, new, places)
        first = [i for i in known if i < (0 if self.rule.startswith("h2o") else SINKS)]
        forced = {*first, *known[-3:]}
        ranked = sorted(known, key=lambda i: (i in forced, scores[i], i), reverse=True)
        self.kept = sorted(ranked[:SLOTS])
        self.carried = {i: score for i, score in self.carried.items() if i in self.kept}
        return self.kept


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "attention_matching"])
def test_the_twin_in_loops_keeps_the_same(rule: str) -> None:
    data, segment = stream(), 6
    found = kept_of(rule, data, segment)
    for row in range(2):
        for group in range(2):
            twin = Twin(rule, data, row, group)
            for number, kept in enumerate(found):
                new = list(range(number * segment, min((number + 1) * segment, 27)))
                assert [i for i in kept[row, group].tolist() if i >= 0] == twin.step(new), (row, group, number)
    assert any(kept[0, 0].tolist() != kept[0, 1].tolist() for kept in found), "heads choose for themselves"


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.startswith("h2o")])
def test_sinks_stay_and_no_option_makes_them_leave(rule: str) -> None:
    data = stream()
    data["k"][:, :, :SINKS] *= 0.01 if rule in ("snapkv", "attention_matching") else 9
    data["v"][:, :, :SINKS] = 0
    for kept in kept_of(rule, data):
        assert (kept.masked_fill(kept < 0, 99).sort(-1).values[..., :SINKS] == torch.arange(SINKS)).all()
    unsunk = kept_of(rule, data, sinks=0)[-1]
    assert not (unsunk[..., :SINKS] == torch.arange(SINKS)).all(), "nothing but the option keeps them"


@every
def test_a_group_of_equal_heads_is_one_head(rule: str) -> None:
    data = stream()
    one = data["q"][:, ::3]
    grouped = kept_of(rule, data | {"q": one.repeat_interleave(3, 1)})
    for ours, theirs in zip(grouped, kept_of(rule, data | {"q": one}), strict=True):
        assert torch.equal(ours, theirs)


@every
def test_where_a_stream_begins_changes_no_choice(rule: str) -> None:
    data = stream()
    for plain, moved in zip(kept_of(rule, data), kept_of(rule, data, offset=1000), strict=True):
        assert torch.equal(plain, moved)


@every
def test_a_cache_of_half_precision_runs(rule: str) -> None:
    memory = memory_of(rule)
    memory.key_shape = (2, WIDTH)
    state = memory.init_state(1, torch.zeros((), dtype=torch.bfloat16))
    assert state.k_BGME.dtype == torch.bfloat16
    assert all(
        t.dtype != torch.bfloat16 for name, t in named_tensors(state) if name[-4:] not in ("GME", "BGME", "_BMD")
    )


GROUPED_LLAMA = decoder("llama", "Llama", **GROUPED)
OTHERS = ("bloom", "gemma3_text", "gpt_neox", "gptj", "phi3", "qwen3", "falcon_groups")


@pytest.mark.parametrize("family", [GROUPED_LLAMA, *(f for f in DECODERS if f.name in OTHERS)], ids=str)
@torch.no_grad()
def test_with_room_for_all_a_decoder_is_the_host(family: Any) -> None:
    plain, ids = family.build(), words(tokens=14)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    wanted, said = plain(ids).logits, plain.generate(ids, **settings)
    for rule in RULES:
        room = {"heavy": 40} if rule.startswith("h2o") else {"length": 40}
        model = family.with_memory(options(rule, **room), segment_length=4)
        checks.equal(model(ids).logits, wanted)
        assert torch.equal(model.generate(ids, **settings), said)


@every
@torch.no_grad()
def test_in_a_grouped_decoder_sdpa_and_eager_attention_keep_the_same(rule: str) -> None:
    states = []
    for kind in ("sdpa", "eager"):
        model = GROUPED_LLAMA.build()
        model.set_attn_implementation(kind)
        states.append(add_memory(model, options(rule), segment_length=5)(**padded("left", 27)).memory_state)
    torch.testing.assert_close(*states, rtol=0, atol=1e-4)


@every
@torch.no_grad()
def test_in_a_grouped_decoder_padding_documents_and_the_size_of_a_state(rule: str) -> None:
    model, ids = GROUPED_LLAMA.with_memory(options(rule), segment_length=5), words(tokens=24)
    separate = [model(row[None]).logits for row in (ids[0], ids[1, :9], ids[1, 9:])]
    for side in ("left", "right"):
        same_as_rows(model, padded(side, 24), 1e-4)
    numbers = torch.stack([torch.zeros(24), (torch.arange(24) >= 9).float()]).long()
    packed = model(ids, document_ids=numbers).logits
    for found, wanted in zip((packed[:1], packed[1:, :9], packed[1:, 9:]), separate, strict=True):
        checks.equal(found, wanted)
    numbers_of = [t.numel() * t.element_size() for _, t in named_tensors(model.init_memory_state(1).layers)]
    groups, width, heads = 2, 8, 4
    a_layer = 8 * SLOTS * groups * width + 8
    if rule.startswith(("h2o", "lagkv", "attention_matching")):
        a_layer += 4 * SLOTS * groups
    if rule == "expected_attention":
        a_layer += 8 + 4 * heads * (width + width**2)
    if rule == "attention_matching":
        a_layer += 8 + 5 * (4 * heads * width + 8)
    assert sum(numbers_of) == 2 * a_layer


@pytest.mark.parametrize("family", [GROUPED_LLAMA, *(f for f in DECODERS if f.name in ("gptj", "gpt_neox"))], ids=str)
@torch.no_grad()
def test_a_host_turns_keys_as_it_compares_them(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned queries and keys give the weights of its attention."""
    compared = []

    def score(memory: Any, found: Any, carried: Any) -> Tensor:
        query, weights_BHWL = found.query, found.weights_BHWL
        k_BHLE = found.turned_keys().repeat_interleave(query.q_BHNE.shape[1] // found.k_BGLE.shape[1], 1)
        logits = query.turn(query.q_BHNE, query.positions_BNP) @ k_BHLE.mT / query.q_BHNE.shape[-1] ** 0.5
        hidden = weights_BHWL.isnan()
        ours = logits[:, :, -weights_BHWL.shape[2] :].masked_fill(hidden, -torch.inf).softmax(-1)
        checks.equal(ours, weights_BHWL.nan_to_num(0))
        compared.append(found.valid_BL.sum())
        return found.k_BGLE.norm(dim=-1)

    monkeypatch.setattr(KeyDiff, "needs", KeyDiff.needs | {"weights"})
    monkeypatch.setattr(KeyDiff, "score", score)
    family.with_memory(options("keydiff/rotated"), segment_length=5)(words(tokens=19))
    assert len(compared) == 4 * 2


def test_layers_share_a_budget_by_the_pyramid() -> None:
    spec = {"name": "knorm", "length": 20, "budget": "pyramid", "beta": 2, "observe": 2}
    model = decoder("llama", "Llama", **GROUPED, num_hidden_layers=4).with_memory(spec)
    slots = [layer.k_BGME.shape[2] for layer in model.init_memory_state(1).layers]
    assert slots == [30, 23, 17, 10] and sum(slots) == 4 * 20


@pytest.mark.parametrize("rule", ["keydiff/rotated", "expected_attention", "attention_matching"])
def test_relative_positions_turn_no_keys(rule: str) -> None:
    sizes = {"vocabulary": 5, "width": 12, "depth": 1, "heads": 2, "feed_forward": 8}
    with pytest.raises(ValueError, match=r"RelativePositions.*relative=False"):
        create_model("language_model", memory=options(rule, relative=True), **sizes)
    with pytest.raises(ValueError, match=r"RelativePositions"):
        create_model("language_model", memory=options(rule), positions="relative", **sizes)
