"""Attention Matching: recorded results, limiting cases, and `compact` in models and hosts.

Legend: B rows, G heads of keys, N queries, M slots, L keys, E head width.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations.families import GROUPED, decoder, words
from memories.scored_streams import Golden, close, golden, steps, turned
from torch import Tensor
from torch.nn import functional as F

from cached_transformers import Session, add_memory, compact, create_memory, create_model, export_cache
from cached_transformers.memories.parts.attention_matching import importance, match_mass, pursue, solve

OMP = {"bound": 7, "steps": 0}
VARIANTS: dict[str, tuple[Any, dict[str, Any], float]] = {
    "baseline": ("mean", {}, 0),
    "rms_nnls2": ("rms", {"steps": 2}, 0),
    "rms_tight": ("rms", {"bound": 0.5, "steps": 5}, 0),
    "max_pooled": ("max", {"steps": 0}, 0),
    "ridge": ("mean", {"steps": 0}, 1e-3),
    **dict.fromkeys(("omp", "omp_simple"), ((1, 1), OMP, 0)),
    "omp_k2": ((2, 2), OMP, 0),
}


def logits(q_NE: Tensor, k_LE: Tensor) -> Tensor:
    return q_NE @ k_LE.mT / q_NE.shape[-1] ** 0.5


def biases(z_XNL: Tensor, z_XNM: Tensor, **more: Any) -> Tensor:
    return match_mass(z_XNL, z_XNM, torch.zeros_like(z_XNM[:, 0]), **more)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_recorded_results(shared: Path, name: str) -> None:
    data, (choice, mass, ridge) = golden(shared, "attention_matching"), VARIANTS[name]
    slots, k, v, q, asked = (data[key] for key in ("slots", "keys", "values", "queries", "test_queries"))
    z, slots = logits(q, k)[None], int(slots)
    index = data[f"{name}/indices"]
    if isinstance(choice, str):
        found = importance(z, choice, 7 if name == "max_pooled" else 1)[0].argsort(descending=True, stable=True)[:slots]
        assert torch.equal(found, index)
    else:
        assert torch.equal(pursue(z, slots, *choice)[0].nonzero()[:, 0], index.sort().values)
    bias, value = torch.zeros(1, slots, dtype=z.dtype), v[index]
    if mass:
        bias = biases(z, z[..., index], **mass, ridge=0, power_M=data["power_start"])
        start = torch.zeros_like(value) if ridge else value  # the release pulls to 0
        value = solve((z[..., index] + bias[:, None]).softmax(-1), z.softmax(-1) @ v, start[None], ridge)[0]
    close(bias[0], data[f"{name}/bias"])
    if name == "omp_simple":
        return
    close(value, data[f"{name}/values"])
    own, more = logits(asked, k[index]) + bias, logits(asked, data["more_keys"])
    close(own.logsumexp(-1), data[f"{name}/test_lse"])
    beside = torch.cat([own, more], -1).softmax(-1) @ torch.cat([value, data["more_values"]])
    close(beside, data[f"{name}/test_out_with_more"])


def test_all_keys_stay_as_they_are_and_equal_ones_are_one_with_their_number() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 8, dtype=torch.double) for n in (5, 12, 12))  # fewer queries than keys
    z = logits(q, k)[None]
    close(biases(z, z), torch.zeros_like(z[:, 0]))
    close(solve(z.softmax(-1), z.softmax(-1) @ v, v[None])[0], v)
    few = z[..., :4]
    close(biases(torch.cat([few, few], -1), few, ridge=0)[0], torch.full((4,), math.log(2), dtype=torch.double))
    close(biases(few, few - 1, ridge=0)[0], torch.ones(4).double())
    q, k, v = (torch.randn(2, n, 8) for n in (48, 60, 60))
    q[1, 3] = torch.nan  # a row that leaves the other row alone
    z = q @ k.mT
    bias = biases(z, z[..., :20])
    found = solve((z[..., :20] + bias[:, None]).softmax(-1), z.softmax(-1) @ v, v[:, :20])
    assert found[0].abs().max() < 10 and bias[0].abs().max() <= 3.01 and found[1].isnan().all()


@pytest.mark.parametrize("choice", ["rms", "omp"])
def test_an_overflow_merges_all_but_sinks_and_newest_tokens(choice: str) -> None:
    torch.manual_seed(0)
    data: Golden = {name: torch.randn(1, n, 24, 8, dtype=torch.double) for name, n in {"q": 2, "k": 1, "v": 1}.items()}
    options = {"choice": choice, "sinks": 2, "observe": 3, "queries": 20}
    memory: Any = create_memory({"name": "attention_matching", "length": 12, **options}, 16, 2)
    state = steps(memory, data, 12)[-1].state
    k, v, slot = data["k"][0, 0], data["v"][0, 0], state.k_BGME[0, 0]
    kept = (slot[:, None] == k).all(-1).long().argmax(1)
    assert kept[:2].tolist() == [0, 1] and kept[-3:].tolist() == [21, 22, 23] and len(set(kept.tolist())) == 12
    place = lambda t, first: turned(t[None, None], torch.arange(first, first + len(t)).view(1, 1, -1))[0, 0]  # noqa: E731
    q = torch.cat([place(head[-20:], 0) for head in data["q"][0]])
    z, z_slot = (logits(q, place(t, -len(t))) for t in (k, slot))
    z, z_slot = z[None, :, 2:21], z_slot[None, :, 2:9]
    found = pursue(z, 7, 4, 2) if choice == "omp" else importance(z, choice)
    assert sorted(found[0].float().argsort(descending=True)[:7] + 2) == kept[2:9].tolist()
    bias, longest = biases(z, z_slot), v.norm(dim=-1).max()
    close(state.scores_BGM[0, :, 2:9], bias)
    value = solve((z_slot + bias[:, None]).softmax(-1), z.softmax(-1) @ v[2:21], v[None, kept[2:9]])
    value = torch.where(value.norm(dim=-1, keepdim=True) > longest, F.normalize(value, dim=-1) * longest, value)
    close(state.v_BGME[0, :, 2:9], value)


def test_however_often_slots_are_merged_biases_and_values_stay_bounded() -> None:
    torch.manual_seed(0)
    data: Golden = {name: 3 * torch.randn(1, n, 800, 8).double() for name, n in {"q": 2, "k": 1, "v": 1}.items()}
    memory: Any = create_memory({"name": "attention_matching", "length": 40, "queries": 8}, 16, 2)
    state = steps(memory, data, 16)[-1].state
    longest = data["v"].norm(dim=-1).max()
    assert 2.9 < state.scores_BGM.abs().max() <= 3.0001 and state.v_BGME.norm(dim=-1).max() <= longest * 1.0001


SPEC = {"name": "attention_matching", "length": 120, "sinks": 2, "observe": 4}


@torch.no_grad()
def test_a_compacted_decoder_is_nearer_to_the_whole_than_a_window() -> None:
    plain = decoder("llama", "Llama", **GROUPED).build().eval().double()
    for p in plain.parameters():
        p.mul_(2.5)  # so that attention is not even
    text, question = words(tokens=96), words(tokens=6, seed=3)
    model = add_memory(copy.deepcopy(plain), SPEC, segment_length=8)
    state = model(text).memory_state
    whole = model(question, memory_state=state).logits
    export_cache(model, state)
    for slots in (48, 16):
        window = add_memory(copy.deepcopy(plain), "streaming_llm", length=slots - 2, sinks=2, segment_length=8)
        far = (window(question, memory_state=window(text).memory_state).logits - whole).norm()
        merged = compact(model, state, slots)
        near = model(question, memory_state=merged).logits
        assert (near - whole).norm() < far / 2 and int(merged.layers[0].count_B[0]) == slots
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(question, memory_state=merged).logits, near, rtol=0, atol=1e-5)
        model.set_attn_implementation("sdpa")
    refuses("layer 0", export_cache, model, merged)
    for slots in (5, 121):
        refuses(f"slots={slots}", compact, model, state, slots)
    refuses("memory StreamingLLM", compact, window, window(text).memory_state, 9)


@torch.no_grad()
def test_a_session_goes_on_after_it_was_merged(tmp_path: Path) -> None:
    sizes = {"vocabulary": 30, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "positions": "rotary"}
    model = create_model("language_model", **sizes, feed_forward=32, memory=SPEC).eval()
    session, text = Session(model, segment_length=8), torch.randint(30, (1, 45))
    session.read(text)
    before, fork = session.mark(), session.fork()
    fork.compact(9)
    assert int(fork.state.layers[1].count_B) == 9 and fork.state.layers[1].scores_BGM.any()
    fork.save(tmp_path / "text")
    said = Session.load(model, tmp_path / "text", 8).generate(tokens=12, temperature=0).tokens
    assert torch.equal(fork.generate(tokens=12, temperature=0).tokens, said) and fork.tokens == 57
    fork.rewind(before)
    assert not fork.state.layers[0].scores_BGM.any()
    fork.compact(9)
    beams = fork.fork().generate(tokens=3, beams=3, temperature=0)
    plain = model(torch.cat([text[:, 40:], beams.tokens], 1), fork.state).outputs[:, 4:-1].log_softmax(-1)
    torch.testing.assert_close(beams.scores, plain.gather(2, beams.tokens[..., None]).sum((1, 2)))
