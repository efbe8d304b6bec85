"""Memories that decoders of transformers attend beside their segment: stored hidden states, made keys and values of by
the layer that attends them."""

from __future__ import annotations

import copy
import pickle
from random import Random
from typing import Any

import pytest
import torch
from common import refuses
from drills import padding
from integrations import family_checks as checks
from integrations.families import DECODERS, EIGHT, GROUPED, PAD, SEGMENT, Family, decoder, families, words
from memories.scored_streams import turned
from torch import Tensor, nn

from cached_transformers import add_memory, remove_memory, replace_attention
from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Reading
from cached_transformers.memories.crtn import CRTN
from cached_transformers.memories.transformer_xl import TransformerXL
from cached_transformers.registry import MEMORIES

WINDOWED = {**EIGHT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA = decoder("llama", "Llama", **GROUPED)
GEMMA = decoder("gemma3_text", "two rotations, a window in one layer", **WINDOWED)
HOSTS = [
    *(f for f in DECODERS if f.name in ("llama", "qwen3", "gpt_neox", "phi3", "bloom", "falcon_alibi")),
    GEMMA,
    decoder("exaone4", "no positions without a window", **WINDOWED),
    decoder("mistral", "a window", **GROUPED, sliding_window=4),
    decoder("gpt_oss", "sinks", **WINDOWED, num_local_experts=2, num_experts_per_tok=1),
]
ALL = {"name": "transformer_xl", "length": 32}
"""A memory of all that is read here."""
TEXT = 17


def left_padded() -> tuple[Tensor, Tensor]:
    """Two texts that end in one column, of 9 tokens and of all but one."""
    ids, mask = words(tokens=TEXT), torch.ones(2, TEXT, dtype=torch.long)
    mask[0, : TEXT - 9] = mask[1, :1] = 0
    return ids.masked_fill(mask == 0, PAD), mask


WRITTEN_OUT = [(family, "eager") for family in HOSTS if family.name in ("llama", "gemma3_text", "bloom")]


@pytest.mark.parametrize("family, attention", [*((family, None) for family in HOSTS), *WRITTEN_OUT], ids=str)
@torch.no_grad()
def test_with_all_in_memory_segments_are_the_whole_text(family: Family, attention: str | None) -> None:
    plain, model, (ids, mask) = family.build(), family.build(), left_padded()
    for host in (plain, model) if attention else ():
        host.set_attn_implementation(attention)
    add_memory(model, ALL, segment_length=SEGMENT)
    checks.equal(model(words(tokens=TEXT)).logits, plain(words(tokens=TEXT)).logits, 1e-5)
    found = model(ids, attention_mask=mask).logits
    for row, hidden in enumerate(mask):
        text = ids[row : row + 1, hidden.bool()]
        checks.equal(found[row : row + 1, hidden.bool()], plain(text).logits, 1e-5)


@families([family for family in HOSTS if family.name in ("llama", "gpt_neox", "gemma3_text", "phi3", "bloom")])
@torch.no_grad()
def test_with_all_in_memory_it_says_what_the_host_says(family: Family) -> None:
    plain, model, (ids, mask) = family.build(), family.with_memory(ALL), left_padded()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    for beams in (1, 3):
        said = plain.generate(ids, attention_mask=mask, num_beams=beams, **options)
        for keeps in (True, False):
            found = model.generate(ids, attention_mask=mask, num_beams=beams, use_cache=keeps, **options)
            assert torch.equal(found, said)


@torch.no_grad()
def test_a_window_of_the_memory_does_not_care_where_a_text_is_cut() -> None:
    spec = {"name": "transformer_xl", "length": 6, "same_length": True}
    found = [LLAMA.with_memory(spec, segment_length=length)(words(tokens=TEXT)).logits for length in (3, 5, None)]
    checks.equal(found[0], found[1], 1e-5)
    checks.equal(found[0], found[2], 1e-5)
    assert (found[0] - LLAMA.build()(words(tokens=TEXT)).logits)[:, 6:].abs().max() > 1e-4


def test_a_choice_of_slots_takes_no_window_s_place() -> None:
    family = decoder("mistral", "Mistral", **GROUPED, sliding_window=4)
    checks.carries(family, checks.KINDS["crtn, each token"])
    refuses("sliding window of 4 tokens", family.with_memory, checks.KINDS["rmt with a cache"])


@pytest.mark.parametrize("name", padding.WINDOWS)
@pytest.mark.parametrize("memory", [spec for spec in padding.SPANNING if spec.get("mask") == "causal"][1:], ids=str)
def test_padding_takes_no_place_in_a_window(name: str, memory: dict[str, Any]) -> None:
    padding.compare(padding.host(name, 3, memory, cached=True), Random(0), "NaN")


@torch.no_grad()
def test_in_half_the_digits() -> None:
    plain, model = LLAMA.build().bfloat16(), LLAMA.with_memory(ALL).bfloat16()
    checks.equal(model(words(tokens=TEXT)).logits, plain(words(tokens=TEXT)).logits, 2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        found = LLAMA.with_memory(ALL)(words(tokens=TEXT)).logits
    assert found.isfinite().all()


def by_hand(model: Any, ids: Tensor, length: int) -> Tensor:
    """Logits of a Llama of one layer whose attention sees the last inputs of earlier segments, detached."""
    block = model.model.layers[0]
    layer, heads, groups, width = block.self_attn, 4, 2, 8
    embedded, logits = model.model.embed_tokens(ids), []
    for start in range(0, ids.shape[1], SEGMENT):
        h = embedded[:, start : start + SEGMENT]
        first = max(0, start - length)
        both = torch.cat([embedded[:, first:start].detach(), h], 1)
        x, y = block.input_layernorm(h), block.input_layernorm(both)
        q = (x @ layer.q_proj.weight.T).unflatten(-1, (heads, width)).transpose(1, 2)
        k, v = ((y @ p.weight.T).unflatten(-1, (groups, width)).transpose(1, 2) for p in (layer.k_proj, layer.v_proj))
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        tokens, keys = torch.arange(start, start + h.shape[1]), torch.arange(first, start + h.shape[1])
        score = turned(q, tokens) @ turned(k, keys).mT / width**0.5
        weight = score.masked_fill(keys > tokens[:, None], -torch.inf).softmax(-1)
        h = h + (weight @ v).transpose(1, 2).flatten(2) @ layer.o_proj.weight.T
        h = h + block.mlp(block.post_attention_layernorm(h))
        logits.append(model.lm_head(model.model.norm(h)))
    return torch.cat(logits, 1)


@pytest.mark.parametrize("length", [3, 7, 32])
def test_values_and_gradients_are_those_written_out(length: int) -> None:
    """The norm and the projections learn from what was stored; what it was made of does not."""
    family, ids = decoder("llama", "Llama", **GROUPED, num_hidden_layers=1), words(tokens=TEXT)
    found = []
    for memory in (True, False):
        model = family.build().double()
        if memory:
            add_memory(model, "transformer_xl", length=length, sinks=0, segment_length=SEGMENT)
        logits = model(ids).logits if memory else by_hand(model, ids, length)
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        found.append([logits.detach(), *(p.grad for p in model.parameters())])
    for ours, expected in zip(*found, strict=True):
        checks.equal(ours, expected, 1e-5)  # angles and norms are float32 even so


def test_frozen_projections_pass_the_gradient_on() -> None:
    model = LLAMA.with_memory(checks.KINDS["transformer_xl"])
    model(words())
    project_kv, hidden = model.model.segment_reader.hooks[1].project_kv, torch.randn(2, 3, 32, requires_grad=True)
    for frozen in (False, True):
        k, v = project_kv(hidden, frozen=frozen)
        asked = [
            hidden,
            *(p for n, p in model.named_parameters() if "layers.1" in n and ("k_proj" in n or "input" in n)),
        ]
        given = torch.autograd.grad((k + v).square().sum(), asked, allow_unused=True)
        assert given[0] is not None and [g is None for g in given[1:]] == [frozen, frozen]
    normed = model.model.layers[1].input_layernorm(hidden)
    checks.equal(project_kv(normed, normed=True)[0], project_kv(hidden)[0], 0.0)


@torch.no_grad()
def test_a_memory_keeps_what_went_into_the_block_or_came_out_of_it() -> None:
    ids = words(tokens=2 * SEGMENT)
    for name, shift in (("transformer_xl", 0), ("ernie_doc", 1)):
        out = LLAMA.with_memory({"name": name, "length": SEGMENT, "sinks": 0})(ids, output_hidden_states=True)
        layer = out.memory_state.layers[0]
        checks.equal(layer.hidden_BMD, out.hidden_states[shift][:, SEGMENT:], 1e-6)
        assert layer.positions_BMP[0, :, 0].tolist() == list(range(SEGMENT, 2 * SEGMENT))
        assert out.memory_state.clock_B.tolist() == [2 * SEGMENT] * 2


@torch.no_grad()
def test_far_down_a_stream_it_is_as_near_the_start() -> None:
    """Where a slot stands counts from its segment: no angle of a large number is ever taken."""
    model, ids = LLAMA.with_memory({"name": "transformer_xl", "length": 7, "sinks": 0}), words(tokens=TEXT)
    state, far = model(ids).memory_state, 10**12
    layers = tuple(rows._replace(positions_BMP=rows.positions_BMP + far) for rows in state.layers)
    moved = state._replace(clock_B=state.clock_B + far, layers=layers)
    assert torch.equal(model(ids, memory_state=moved).logits, model(ids, memory_state=state).logits)


@torch.no_grad()
def test_places_that_begin_elsewhere_are_as_far_apart() -> None:
    model, ids = LLAMA.with_memory(checks.KINDS["transformer_xl"]), words(tokens=TEXT)
    state, places = model(words(tokens=9, seed=3)).memory_state, torch.arange(9, 9 + TEXT).expand(2, -1)
    found = model(ids, position_ids=places, memory_state=state).logits
    checks.equal(found, model(ids, memory_state=state).logits, 1e-5)


@torch.no_grad()
def test_a_segment_s_slots_are_projected_once() -> None:
    model, seen = LLAMA.with_memory({"name": "transformer_xl", "length": 7, "sinks": 0}), []
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda m, args, out: seen.append(out.shape[1]))
    model.generate(words(tokens=SEGMENT + 1), max_new_tokens=SEGMENT - 1, do_sample=False, eos_token_id=None)
    # Two segments are read, the slots and then their tokens, and the open one grows token by token.
    assert seen == [7, SEGMENT, 7, 1] + [1] * (SEGMENT - 2)


@torch.no_grad()
def test_slots_go_through_whatever_stands_in_the_projections_places() -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 1.5 * self.inner(x)  # type: ignore[no-any-return]

    plain, model, ids = LLAMA.build(), LLAMA.with_memory(ALL), words(tokens=TEXT)
    before = model(ids).logits
    for host in (plain, model):
        block = host.model.layers[1]
        block.input_layernorm, layer = Scaled(block.input_layernorm), block.self_attn
        layer.k_proj, layer.v_proj = Scaled(layer.k_proj), Scaled(layer.v_proj)
    checks.equal(model(ids).logits, plain(ids).logits, 1e-5)
    assert (model(ids).logits - before).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@torch.no_grad()
def test_quantised_layers_without_a_parameter_keep_it() -> None:
    model, ids = LLAMA.with_memory(ALL), words(tokens=TEXT)
    expected, plain = model(ids).logits, LLAMA.build()
    packing = pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization any more")
    ours, packed = (packing.quantize_dynamic(m, {nn.Linear}, dtype=torch.qint8) for m in (model, plain))
    effect = (expected - checks.segments(plain, ids)).abs().max()
    assert (ours(ids).logits - expected).abs().max() < 0.2 * effect
    assert torch.equal(remove_memory(ours)(ids).logits, packed(ids).logits)


@torch.no_grad()
def test_a_class_made_of_the_host_s_is_one_of_its_kind() -> None:
    plain, model = LLAMA.build(), LLAMA.build()
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Mine", (type(layer.self_attn),), {"__module__": __name__})
    add_memory(model, ALL, segment_length=SEGMENT)
    checks.equal(model(words()).logits, plain(words()).logits, 1e-5)


@torch.no_grad()
def test_copied_and_pickled_it_says_the_same() -> None:
    for family in (LLAMA, GEMMA):
        model, ids = family.with_memory(ALL), words(tokens=TEXT)
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(again(ids).logits, model(ids).logits)
            assert not {id(m) for m in model.modules()} & {
                id(t.rotary.module) for t in again.model.segment_reader.hooks
            }


@pytest.mark.slow
@torch.no_grad()
def test_exported_it_computes_the_same() -> None:
    model, ids = LLAMA.with_memory({"name": "transformer_xl", "length": 7, "sinks": 0}), words(tokens=SEGMENT)
    state = model.init_memory_state(2)
    program = torch.export.export(model, (ids,), {"memory_state": state, "use_cache": False}, strict=False)
    for seed in range(2):
        expected = model(words(tokens=SEGMENT, seed=seed), memory_state=state, use_cache=False)
        found = program.module()(words(tokens=SEGMENT, seed=seed), memory_state=state, use_cache=False)
        checks.equal(found.logits, expected.logits)
        state = expected.memory_state


class Poisoned(TransformerXL):
    """Empty slots hold what is no number."""

    def read(self, state: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        context = super().read(state, query, project_kv).context
        assert context is not None
        empty = ~context.valid_BM[:, None, :, None]
        return Reading(
            context._replace(**{n: getattr(context, n).masked_fill(empty, torch.nan) for n in ("k_BHME", "v_BHME")})
        )


def test_what_stands_in_empty_slots_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    MEMORIES.register("poisoned")(Poisoned)
    model = LLAMA.with_memory({"name": "poisoned", "length": 32})
    logits = model(words(tokens=TEXT)).logits
    checks.equal(logits, LLAMA.build()(words(tokens=TEXT)).logits, 1e-5)
    logits.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


class Silent(TransformerXL):
    """Does not say that it has a context."""

    needs = frozenset({"state"})

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Any:
        return state

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        k_BGME = query.x_BND.new_zeros(len(query.x_BND), 2, self.length, 8)
        return Reading(Context(k_BGME, k_BGME, opened.positions_BMP, opened.valid_BM))


class SilentRecall(CRTN):
    """Likewise, for all layers."""

    needs = frozenset({"state"})


@pytest.mark.parametrize("kind, options", [(Silent, {}), (SilentRecall, {"segment": SEGMENT})])
def test_slots_that_nobody_would_attend_are_not_lost(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    MEMORIES.register("silent")(kind)
    with pytest.raises(ValueError, match=rf"memory {kind.__name__} offers a context .*add 'context' to its needs"):
        LLAMA.with_memory({"name": "silent", **({"sinks": 0} if kind is Silent else {}), **options})(words())


def test_heads_of_another_width_than_the_model_are_refused_where_they_are_mixed() -> None:
    wide = decoder("gemma", "Gemma", num_key_value_heads=2, head_dim=16)
    refuses(r"32.*64.*'infinity_former'", wide.with_memory, checks.STREAMS["infinity_former"])
    checks.remembers_all(wide)


def test_attention_without_masks_is_refused_when_it_is_added_and_when_it_comes_later() -> None:
    other, model = LLAMA.build(), LLAMA.with_memory(ALL)
    other.config._attn_implementation = "flex_attention"
    refuses(r"context.*'flex_attention'.*'sdpa'", add_memory, other, ALL, segment_length=SEGMENT)
    model.config._attn_implementation = "flex_attention"
    refuses(r"'flex_attention'.*'sdpa'", model, words())


@pytest.mark.parametrize("first", [True, False])
def test_another_attention_is_softmax_or_refused(first: bool) -> None:
    def both(**attention: Any) -> Any:
        model = LLAMA.build()
        for step in (add_memory, replace_attention) if first else (replace_attention, add_memory):
            step(model, **attention) if step is replace_attention else step(model, ALL, segment_length=SEGMENT)
        return model

    checks.equal(both(attention="softmax")(words()).logits, LLAMA.build()(words()).logits, 1e-5)
    refuses(r"TransformerXL.*restore_attention", both(attention="longformer", window=4), words())


def test_a_block_that_does_not_end_is_not_lost() -> None:
    model = LLAMA.with_memory(ALL)
    model(words())
    model.model.layers[1]._forward_hooks.clear()
    refuses(r"LlamaAttention.*ModuleList.1", model, words())
    assert torch.equal(remove_memory(model)(words()).logits, LLAMA.build()(words()).logits)
