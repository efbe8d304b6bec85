"""TOVA and H2O: recorded steps, twins in loops, limits.

Legend: B rows, H heads, N tokens, M slots, L slots and tokens, E head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from integrations.families import EIGHT, GROUPED, PAD, decoder, words
from memories.harness import agree, logit, project, sines
from memories.xl_family import joined, language_model, run, text
from torch import Tensor

from cached_transformers import add_memory
from cached_transformers.attentions.softmax import key_weights
from cached_transformers.interfaces.memory import Query, Reading, Trace
from cached_transformers.memories.h2o import H2O
from cached_transformers.memories.tova import TOVA
from cached_transformers.models.language_model import LanguageModel

SPECS = {
    "tova": {"name": "tova", "length": 5},
    "tova/cache": {"name": "tova", "length": 5, "places": "cache"},
    "h2o": {"name": "h2o", "length": 2, "heavy": 3},
}


@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_the_recorded_steps(shared: Path, name: str) -> None:
    """One token a step; which keys are kept, what is read before the choice, and the scores."""
    golden = np.load(shared / "golden/recurrent/bounded_kv.npz", allow_pickle=False)
    q, k, v = (torch.tensor(golden[kind])[None] for kind in "qkv")
    heads, steps, width = k.shape[1:]
    memory: Any = TOVA(heads * width, heads, int(golden["capacity"]), keep="kv").eval()
    if name == "h2o":
        memory = H2O(heads * width, heads, int(golden["recent"]), heavy=int(golden["heavy"]))
    state = memory.init_state(1, k)
    for step in range(steps):
        here_B1P = torch.full((1, 1, 1), step)
        context = memory.open(state, here_B1P, lambda *_, **__: None)
        asks, own_k, own_v = (t[:, :, step : step + 1] for t in (q, k, v))
        weights = key_weights(asks, own_k, causal=True, key_padding_mask=None, context=context, bias_BHNM=None)
        found = weights.nan_to_num(0) @ torch.cat([context.v_BHME, own_v], 2)
        wanted = torch.tensor(golden[f"{name}/out"][:, step])
        torch.testing.assert_close(found[0, :, 0], wanted, rtol=1e-10, atol=1e-12)
        x_B1D = torch.zeros(1, 1, heads * width)
        trace = Trace(x_B1D, x_B1D, Query(x_B1D, asks, here_B1P, None, None, own_k, own_v), Reading(context), weights)
        state, _ = memory.write(state, trace)
        valid_M = state.valid_BM[0]
        keys = state.k_BGME if name == "h2o" else memory.open(state, here_B1P, lambda *_, **__: None).k_BHME
        kept = [[int((k[0, h] == key).all(-1).nonzero()) for key in keys[0, h][valid_M]] for h in range(heads)]
        recorded = np.broadcast_to(golden[f"{name}/kept"][step], (heads, valid_M.numel()))
        assert kept == [[place for place in row if place >= 0] for row in recorded.tolist()]
        if name == "h2o":
            real = torch.tensor(golden["h2o/scores"][step])[:, : int(valid_M.sum())]
            torch.testing.assert_close(state.scores_BGM[0][:, valid_M], real, rtol=1e-10, atol=1e-12)
        else:
            assert state.positions_BMP[0, valid_M, 0].tolist() == kept[0]


Kept = dict[str, Any]
Choose = Callable[[list[Kept], Tensor, int], list[Kept]]


def tova_keeps(slots: int) -> Choose:
    def choose(known: list[Kept], weights_HNL: Tensor, n: int) -> list[Kept]:
        asked = weights_HNL[:, -1].mean(0)
        stay = sorted(range(len(known)), key=lambda i: -asked[i].item())[:slots]
        return [known[i] for i in sorted(stay)]

    return choose


def attend(layer: Any, h: int, x: list[Tensor], slots: list[Kept], first: int, places: str) -> tuple[Tensor, Tensor]:
    """Results (N, E) and weights (N, L) of one head; each token sees the slots and the tokens up to itself."""
    out, shares = [], []
    for i, hidden in enumerate(x):
        logits, values = [], []
        for number, slot in enumerate([*slots, *({"x": t, "place": first + j} for j, t in enumerate(x[: i + 1]))]):
            place = first - len(slots) + number if number < len(slots) and places == "cache" else slot["place"]
            k, v = slot["kv"][h] if "kv" in slot else (t[h] for t in project(layer, slot["x"])[1:])
            code_D = sines(first + i - place, layer.width)
            logits.append(logit(layer.positions, project(layer, hidden)[0][h], k, h, code_D))
            values.append(v)
        share = torch.stack(logits).softmax(0)
        out.append(share @ torch.stack(values))
        shares.append(torch.cat([share, torch.zeros(len(x) - i - 1, dtype=torch.double)]))
    return torch.stack(out), torch.stack(shares)


def twin(model: LanguageModel, tokens: list[int], segment: int, spec: dict[str, Any]) -> Tensor:
    """(N, V): logits of one row, one head and token at a time; lists of what each layer and head keeps."""
    blocks: list[Any] = list(model.stack.blocks)
    heads = blocks[0].attention.heads
    kept: list[list[list[Kept]]] = [[[] for _ in range(heads)] for _ in blocks]
    logits = []
    for first in range(0, len(tokens), segment):
        x = [model.embedding.weight[token] for token in tokens[first : first + segment]]
        for index, block in enumerate(blocks):
            layer = block.attention
            places = spec.get("places", "cache" if spec["name"] == "h2o" else "stream")
            both = [attend(layer, h, x, kept[index][h], first, places) for h in range(heads)]
            weights_HNL = torch.stack([weights for _, weights in both]).detach()
            new = [{"x": t.detach(), "place": first + i} for i, t in enumerate(x)]
            if spec["name"] == "tova":
                stay = tova_keeps(spec["length"])([*kept[index][0], *new], weights_HNL, len(x))
                kept[index] = [stay] * heads
            else:
                kept[index] = [h2o_keeps(layer, h, kept[index][h], x, weights_HNL[h], spec) for h in range(heads)]
            merged = torch.cat([out for out, _ in both], -1)
            y = [t + layer.output(o) for t, o in zip(x, merged, strict=True)]
            x = [t + block.feed_forward(t) for t in y]
        logits += [model.head(model.stack.norm(t)) for t in x]
    return torch.stack(logits)


def h2o_keeps(layer: Any, h: int, slots: list[Kept], x: list[Tensor], weights_NL: Tensor, spec: Any) -> list[Kept]:
    pairs = [tuple(t[h].detach() for t in project(layer, hidden)[1:]) for hidden in x]
    new = [{"kv": {h: pair}, "place": 0, "score": 0.0} for pair in pairs]
    known = [{**slot, "score": slot["score"] + weights_NL[:, i].sum().item()} for i, slot in enumerate([*slots, *new])]
    older, last = known[: -spec["length"]], known[-spec["length"] :]
    heavy = sorted(range(len(older)), key=lambda i: -older[i]["score"])[: spec["heavy"]]
    return [older[i] for i in sorted(heavy)] + last


@pytest.mark.parametrize("segment", [1, 3, 7])
@pytest.mark.parametrize("kind", list(SPECS))
def test_the_twin(kind: str, segment: int) -> None:
    model, tokens_BN = language_model(SPECS[kind]), text(2, 16)
    ours = joined(run(model, tokens_BN, segment))
    wanted = torch.stack([twin(model, row.tolist(), segment, SPECS[kind]) for row in tokens_BN])
    agree([ours], [wanted], model, grads=1e-9, least=None)


def eager(family: Any) -> Any:
    model = family.build()
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def test_tova_in_a_decoder_keeps_what_the_host_itself_attends() -> None:
    """A twin: the host reads what was kept and the next token, at their places in the stream, and shows its weights.

    Of one layer, whose keys are of the tokens alone.
    """
    family = decoder("llama", "Llama", **GROUPED, num_hidden_layers=1)
    plain, model = eager(family), family.with_memory(SPECS["tova"], segment_length=1)
    ids, state = words(tokens=14)[:1], None
    kept = list[int]()
    for place in range(14):
        seen = [*kept, place]
        wanted = plain(ids[:, seen], position_ids=torch.tensor([seen]), output_attentions=True)
        found = model(ids[:, place : place + 1], memory_state=state)
        state = found.memory_state
        torch.testing.assert_close(found.logits[:, -1], wanted.logits[:, -1], rtol=0, atol=1e-5)
        asked = wanted.attentions[0][0, :, -1].mean(0)
        kept = sorted(seen[i] for i in asked.topk(min(5, len(seen))).indices)
        layer = state.layers[0]
        assert layer.positions_BMP[0, layer.valid_BM[0], 0].tolist() == kept
    assert kept != list(range(9, 14)), "what it chooses is not the last ones"


@torch.no_grad()
def test_h2o_in_a_decoder_keeps_what_the_host_itself_attends_most() -> None:
    """Likewise, of one head, for the next token behind what was kept, which stands at its places in the cache."""
    family = decoder("llama", "Llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    plain, model = eager(family), family.with_memory(SPECS["h2o"], segment_length=1)
    ids, state = words(tokens=14)[:1], None
    scores = dict[int, float]()
    for place in range(14):
        seen = [*scores, place]
        wanted = plain(ids[:, seen], output_attentions=True)
        found = model(ids[:, place : place + 1], memory_state=state)
        state = found.memory_state
        torch.testing.assert_close(found.logits[:, -1], wanted.logits[:, -1], rtol=0, atol=1e-5)
        for i, received in zip(seen, wanted.attentions[0][0, 0, -1].tolist(), strict=True):
            scores[i] = scores.get(i, 0.0) + received
        heavy = sorted(seen[:-2], key=lambda i: -scores[i])[:3]
        scores = {i: scores[i] for i in seen if i in (*heavy, *seen[-2:])}
        layer = state.layers[0]
        stored = layer.scores_BGM[0, 0, layer.valid_BM[0]]
        torch.testing.assert_close(stored, torch.tensor([*scores.values()]), rtol=0, atol=1e-5)
    assert list(scores) != list(range(9, 14)), "what it chooses is not the last ones"


CHOSEN = [{"name": "tova", "length": 32}, {"name": "compressive", "function": "most_used", "length": 32}]
OF_EVERY_HEAD: list[dict[str, Any]] = [
    {"name": "h2o", "length": 8, "heavy": 24},
    {"name": "tova", "length": 32, "keep": "kv"},
    {"name": "transformer_xl", "length": 32, "keep": "kv"},
]
FAMILIES: list[tuple[Any, list[dict[str, Any]]]] = [
    (decoder("llama", "Llama", **GROUPED), [*CHOSEN, *OF_EVERY_HEAD]),
    (decoder("phi3", "fused", **GROUPED), [*CHOSEN, *OF_EVERY_HEAD]),
    (decoder("bloom", "alibi"), [*CHOSEN, *OF_EVERY_HEAD]),
    (decoder("gpt_oss", "sinks", **EIGHT, num_local_experts=2, num_experts_per_tok=1), CHOSEN),
    (decoder("llama", "Llama"), OF_EVERY_HEAD),
    (decoder("gpt_neox", "fused, turned in part"), OF_EVERY_HEAD),
    (decoder("phi3", "fused"), OF_EVERY_HEAD),
    (decoder("olmo2", "norms of all heads"), OF_EVERY_HEAD),
]


@pytest.mark.parametrize(("family", "specs"), FAMILIES, ids=lambda given: getattr(given, "name", ""))
@torch.no_grad()
def test_with_room_for_all_a_decoder_is_the_host(family: Any, specs: list[dict[str, Any]]) -> None:
    """With its keys and with those of every head that are kept; and what goes on without a cache."""
    plain, ids = family.build(), words(tokens=14)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    said = plain.generate(ids, num_beams=2, **options)
    for spec in specs:
        model = family.with_memory(spec, segment_length=4)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
        for use in (True, False):
            assert torch.equal(model.generate(ids, num_beams=2, use_cache=use, **options), said)


@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_weights_that_a_decoder_does_not_give_are_asked_for(name: str) -> None:
    """Ministral 3 scales its queries by their positions."""
    family = decoder("ministral3", "Ministral 3", **EIGHT)
    refuses(rf"'{name}'.*'eager'", add_memory, family.build(), name, segment_length=4)
    model = add_memory(eager(family), name, segment_length=4)
    model.set_attn_implementation("sdpa")
    refuses("Ministral3Attention.*'eager'", model, words(tokens=8))
