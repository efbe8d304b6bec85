"""Weights of the last queries beside SDPA: equal to those of eager attention, and what memories choose by them.

Legend: B rows, H heads, N tokens, W queries, L slots and tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.families import DECODERS, EIGHT, GROUPED, PAD, decoder, words
from memories.xl_family import language_model, text
from torch import Tensor

from cached_transformers import add_memory
from cached_transformers.integrations.segment_context import running
from cached_transformers.integrations.transformers.context_hook import ContextHook
from cached_transformers.memories.parts.composite import side_by_side
from cached_transformers.memories.tova import TOVA
from cached_transformers.state import map_state

UNLIKE = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "opt", "hunyuan_v1_dense"), "no context"),
    **dict.fromkeys(("gpt_oss", "ministral3"), "logits that are not known"),
    "falcon_alibi": "its eager attention adds the slope twice",
}
ONLY_EAGER = ("bloom", "gemma2", "gemma2_capped", "gptj")
CAPPED = decoder("gemma2", "Gemma 2", name="gemma2_capped", **EIGHT, attn_logit_softcapping=0.05)
FAMILIES = [*(family for family in DECODERS if family.name not in UNLIKE), CAPPED]
SPECS: list[dict[str, Any]] = [
    {"name": "tova", "length": 3},
    {"name": "h2o", "length": 2, "heavy": 3},
    {"name": "compressive", "function": "most_used", "length": 4},
]
PADDED = {"none": (slice(0), slice(0)), "left": (slice(4), slice(2)), "right": (slice(10, None), slice(11, None))}


def padded(side: str, tokens: int = 13) -> dict[str, Tensor]:
    """Both rows have padding, of other widths."""
    ids = words(tokens=tokens)
    mask = torch.ones_like(ids)
    for row, columns in enumerate(PADDED[side]):
        mask[row, columns] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def with_memory(family: Any, spec: Any, kind: str, **options: Any) -> Any:
    model = family.build()
    model.set_attn_implementation(kind)
    if "falcon" in family.name:  # which sets it only when it is built
        model.config._attn_implementation = kind
    return add_memory(model, spec, **{"segment_length": 5, **options})


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@torch.no_grad()
def test_weights_are_those_of_eager_attention(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    keep = ContextHook.keep_weights

    def both(hook: Any, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        assert isinstance(output[1], Tensor)
        keep(hook, layer, args, kwargs, (output[0], None))
        segment: Any = running().segment
        ours = segment.attended[hook.number].weights_BHWL
        keep(hook, layer, args, kwargs, output)
        pairs.append((ours, segment.attended[hook.number].weights_BHWL))

    monkeypatch.setattr(ContextHook, "keep_weights", both)
    for spec in SPECS:
        model = with_memory(family, spec, "eager")
        for side in PADDED:
            model(**padded(side))
    assert len(pairs) == len(SPECS) * len(PADDED) * 3 * 2  # segments, layers
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name not in ONLY_EAGER], ids=str)
@torch.no_grad()
def test_sdpa_and_eager_attention_keep_the_same(family: Any) -> None:
    for spec in SPECS:
        models = [with_memory(family, spec, kind) for kind in ("sdpa", "eager")]
        for side in PADDED:
            states = [model(**padded(side)).memory_state for model in models]
            torch.testing.assert_close(*states, rtol=0, atol=1e-4)


GROUPED_LLAMA = decoder("llama", "Llama", **GROUPED)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
@torch.no_grad()
def test_a_text_that_comes_token_by_token_is_kept_as_one_that_comes_at_once(spec: dict[str, Any]) -> None:
    """The segment's queries and keys are there when it closes."""
    model, call = GROUPED_LLAMA.with_memory(spec), padded("left")
    whole, cache = model(**call), None
    for end in range(4, 14):
        part = {"input_ids": call["input_ids"][:, (0 if cache is None else end - 1) : end]}
        out = model(**part, attention_mask=call["attention_mask"][:, :end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    torch.testing.assert_close(out.logits[:, -1], whole.logits[:, -1], rtol=0, atol=1e-5)
    torch.testing.assert_close(cache.memory_state, whole.memory_state, rtol=0, atol=1e-5)


def same_as_rows(model: Any, call: dict[str, Tensor], atol: float) -> None:
    """The state of a padded row is that of the row by itself."""
    beside = model(**call, use_cache=False).memory_state.layers
    for row, real in enumerate(call["attention_mask"].bool()):
        ours = map_state(lambda t, row=row: t[row : row + 1], beside)
        alone = model(call["input_ids"][row : row + 1, real]).memory_state.layers
        torch.testing.assert_close(ours, alone, rtol=0, atol=atol)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["name"])
@torch.no_grad()
def test_padding_asks_nothing(spec: dict[str, Any], side: str) -> None:
    """The last queries of a padded row are those of the row by itself."""
    same_as_rows(GROUPED_LLAMA.with_memory(spec), padded(side), 1e-5)


def test_members_get_the_weights_of_as_many_queries_as_they_observe() -> None:
    """Of one computation, whose last queries are those of the member that observes fewer."""
    got: list[Tensor] = []

    class Watcher(TOVA):
        def write(self, state: Any, trace: Any) -> Any:
            got.append(trace.weights_BHWL)
            return super().write(state, trace)

    model = language_model("tova")
    layer: Any = model.stack.blocks[0].attention
    members = [Watcher(layer.width, layer.heads, 3) for _ in range(3)]
    members[1].observe, members[2].observe = 2, 9
    layer.memory = side_by_side(members)
    model(text(2, 4))
    assert [weights.shape[2] for weights in got] == [1, 2, 4]
    slots = 3
    for number, weights in enumerate(got):
        assert weights.shape[3] == slots + 4
        assert torch.equal(weights[:, :, -1, slots:], got[0][:, :, -1, slots:]), number
    members[1].observe = None
    assert side_by_side(members).observe is None


@torch.no_grad()
def test_h2o_from_a_window_adds_up_the_weights_of_its_last_queries() -> None:
    """Of one layer with room for all: the column sums of eager attention, per key head."""
    family = decoder("llama", "Llama", **GROUPED, num_hidden_layers=1)
    plain, ids = family.build(), words(tokens=7)
    plain.set_attn_implementation("eager")
    weights = plain(ids, output_attentions=True).attentions[0]
    for observe in (None, 1, 3, 9):
        model = family.with_memory({"name": "h2o", "length": 2, "heavy": 5, "observe": observe}, segment_length=7)
        scores = model(ids).memory_state.layers[0].scores_BGM
        wanted = weights[:, :, -min(observe or 7, 7) :].sum(2).unflatten(1, (2, 2)).mean(2)
        torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-5)
