"""A sample of families through every check, each for something of its own; and every memory with a state."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from common import refuses
from integrations import families as F
from integrations import family_checks as checks
from integrations.hosts import library
from integrations.test_outside_memories import NAMES as OUTSIDE
from integrations.test_outside_memories import registered  # noqa: F401  (a fixture for every test)
from integrations.transformers_hosts import STREAMS

from cached_transformers import add_memory
from cached_transformers.integrations.hosts import _ADAPTERS

NAMED = {family.name: family for family in F.ALL}
ODD = [NAMED[name] for name in ("falcon_groups", "gemma3_text", "gptj", "opt")]
"""Fused and grouped; norms after the heads; a state that no keyword carries; a decoder inside a decoder."""
SHARED = [
    NAMED[name] for name in ("modernbert", "debertav2", "swin", "timm_eva", "bert", "bart", "t5", "switchtransformers")
]
"""Windows of tokens; a mask of products; windows of images, saved under other names; rotary positions of patches;
encoder-decoders."""


NO_STATE = ("swin", "timm_beit", "timm_cait", "timm_davit", "timm_eva", "timm_dinov3", "timm_swin_v2", "sigliptext")
SEEN = [f for f in F.DECODERS + F.HYBRIDS + F.ENCODERS + F.IMAGES + F.TIMM if not f.refused and f.name not in NO_STATE]


@F.families(SEEN)
def test_a_memory_is_given_what_the_layer_compares(family: F.Family) -> None:
    checks.sees_the_layers_own(family)


@pytest.mark.parametrize("memory", ["grc_stream", "memorizing", "rmt"])
@F.families(ODD)
def test_a_decoder_with_a_memory(family: F.Family, memory: str) -> None:
    spec = checks.STREAMS[memory]
    for check in (
        checks.plain_again,
        checks.carries,
        checks.packs,
        checks.generates,
        checks.trains,
        checks.checkpoints,
        checks.saves,
    ):
        check(family, spec)


@pytest.mark.slow
@F.families([family for family in F.DECODERS if not family.refused])
def test_any_decoder_reads_packed_rows(family: F.Family) -> None:
    for memory in (checks.STREAMS["grc_stream"], checks.CAUSAL["rmt"]):
        checks.packs(family, memory)


WITHOUT_STORED = {
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt_neo", "opt"), r"positions are a table added .*rotary positions"),
    "hunyuan_v1_dense": r"normalises rotated keys.*take another decoder",
}
"""Families whose layers cannot attend hidden states of earlier segments, and why."""


@F.families(F.DECODERS + F.HYBRIDS)
def test_what_was_stored_is_attended_as_if_it_stood_there(family: F.Family) -> None:
    """Keys and values are those that the layer makes itself, whatever its norms, its layout and its positions."""
    if family.name not in WITHOUT_STORED:
        return checks.remembers_all(family)
    refuses(rf"needs context .*{WITHOUT_STORED[family.name]}", family.with_memory, checks.STREAMS["transformer_xl"])


@pytest.mark.parametrize(
    "name, memory",
    [("falcon_groups", "crtn"), ("gemma3_text", "infinity_former"), ("gptj", "compressive"), ("bloom", "ernie_doc")],
)
def test_a_decoder_that_attends_stored_states(name: str, memory: str) -> None:
    for check in (checks.carries, checks.generates, checks.trains, checks.checkpoints, checks.saves):
        check(NAMED[name], checks.STREAMS[memory])


@pytest.mark.parametrize("name", ["bloom", "falcon_alibi"])
def test_alibi_takes_no_masks_but_tokens_in_order(name: str) -> None:
    family = NAMED[name]
    refuses("'rmt'", family.with_memory, "rmt")
    checks.generates(family, checks.CAUSAL["rmt"])
    checks.checkpoints(family, checks.STREAMS["grc_stream"])


def test_a_window_shorter_than_the_segment_is_not_lost_behind_a_mask() -> None:
    family = F.decoder("mistral", "Mistral", **F.GROUPED, sliding_window=4)
    refuses(r"4.*segment_length=2.*mask='causal'", family.with_memory, {"name": "rmt", "length": 1})
    refuses(r"sliding window of 4 tokens; take the memory's mask='causal'", family.with_memory, checks.STREAMS["rmt"])
    checks.generates(family, checks.CAUSAL["rmt"])
    checks.generates(family, checks.STREAMS["grc_stream"])


def test_a_layer_that_runs_again_outside_its_model_s_checkpoint_has_no_state() -> None:
    """GPT-J hands its blocks no keywords before transformers 5.24: others checkpoint without the context."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = NAMED["gptj"].with_memory(checks.STREAMS["grc_stream"]).train()
    kind = type(model.transformer.h[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    loss = model(F.words(), labels=F.words()).loss
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24):
        loss.backward()
        plain = NAMED["gptj"].with_memory(checks.STREAMS["grc_stream"]).train()
        plain(F.words(), labels=F.words()).loss.backward()
        for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-6, msg=name)
    else:
        refuses("gradient_checkpointing_enable", loss.backward)


def test_experts_are_not_balanced_over_segments() -> None:
    model = NAMED["mixtral"].with_memory(checks.STREAMS["grc_stream"])
    refuses("output_router_logits=True", model, F.words(), output_router_logits=True)


CARRIED = [NAMED[name] for name in ("bert", "deberta", "xmod", "rembert", "vit", "dinov3vit")]
"""Biases beside the projections; adapters of languages; narrow embeddings; rotary positions of patches; the usual."""
ENCODED = [(family, "grc") for family in SHARED] + [(family, name) for family in CARRIED for name in checks.BY_ROW]


@pytest.mark.parametrize("family, memory", ENCODED, ids=str)
def test_an_encoder_with_a_memory(family: F.Family, memory: str) -> None:
    """One for all rows, or one of each."""
    uses = [checks.shared_plain_again, checks.shared_pads, checks.trains]
    uses += [checks.checkpoints, checks.saves]
    if family.kind == "encoder-decoders":
        uses += [checks.generates, checks.searches]
    for check in uses:
        check(family, (checks.SHARED | checks.BY_ROW)[memory])


def test_the_layers_of_albert_share_one_memory() -> None:
    model = NAMED["albert"].with_memory("grc")
    assert sum(name.endswith("memory") for name, _ in model.named_modules()) == 1
    assert len(NAMED["albert"].with_memory(checks.STREAMS["grc_stream"]).init_memory_state(2).layers) == 1


@F.families([f for f in F.ALL if f.refused and (f.name == "timm_resnet" or not f.name.startswith("timm"))])
def test_what_cannot_be_is_refused_by_name(family: F.Family) -> None:
    model = family.build()
    before = copy.deepcopy(model.state_dict())
    for memory in ("grc", "grc_stream"):
        refuses(family.refused, add_memory, model, memory, length=4)
    assert before.keys() == model.state_dict().keys()
    assert not any("uninstall_memory" in vars(module) for module in model.modules())


def test_pooling_heads_are_left_as_they_are() -> None:
    model = NAMED["timm_siglip"].with_memory("grc")
    assert not any("attn_pool" in name for name, _ in model.named_modules() if name.endswith("memory"))


def test_torchvision_s_vit_knows_its_tokens() -> None:
    torchvision = library("torchvision")
    sizes: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_layers": 1, "num_heads": 2, "hidden_dim": 16}
    model = torchvision.models.VisionTransformer(**sizes, mlp_dim=32)
    add_memory(model, "grc")
    cache = next(module.memory.cache for module in model.modules() if hasattr(module, "memory"))
    assert cache.cache_MC.shape[0] == 17
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 1000)


def test_every_class_that_an_adapter_names_is_there() -> None:
    """A name with a slip in it would describe nothing, and nobody would see it."""
    missing = []
    for name in _ADAPTERS:
        module, _, kind = name.rpartition(".")
        if module.partition(".")[0] not in ("timm", "transformers"):
            continue
        library(module.partition(".")[0])
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None, name
        if not re.search(rf"^ *class {kind}\b", Path(spec.origin).read_text(encoding="utf-8"), re.M):
            missing.append(name)
    old = ["timm.models.vision_transformer.Attention"]  # where timm had it before
    assert [name for name in missing if name not in old] == []


def test_a_segment_ends_where_learned_positions_end() -> None:
    family = F.decoder("opt", "OPT", ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=8)
    refuses(r"segment_length=9.*ForCausalLM", family.with_memory, checks.STREAMS["grc_stream"], segment_length=9)
    assert F.SEGMENT < 8


HOSTS = {family.name: family for family in F.DECODERS}
Case = tuple[F.Family, dict[str, Any]]
FIRST: dict[str, Case] = {
    f"{name}/{host}": (HOSTS[host], spec) for name, spec in STREAMS.items() for host in ("gpt2", "llama")
}
OTHERS: dict[str, Case] = {
    **{name: (HOSTS[name.split("/")[1]], spec) for name, spec in checks.RECENT.items()},
    **{f"{name}/kv": (HOSTS["llama"], spec) for name, spec in checks.KINDS.items()},
    **{f"{name}/{host}": (HOSTS[host], {"name": name}) for name in OUTSIDE for host in ("gpt2", "llama")},
    **{f"memory_transformer/{host}": (HOSTS[host], {"name": "memory_transformer"}) for host in ("gpt2", "llama")},
}
NOISY = "armt/llama"
"""The noise on its weights leaves no gradient for some."""


def each(check: Callable[..., None], cases: dict[str, Case]) -> list[Any]:
    return [pytest.param(check, *case, id=f"{check.__name__}-{name}") for name, case in cases.items()]


def some(*names: str) -> dict[str, Case]:
    return {name: (FIRST | OTHERS)[name] for name in names}


EVERY = FIRST | OTHERS
ANY_PADDING = {name: case for name, case in EVERY.items() if not name.startswith("outside_t")}
"""Those whose state at the end of a segment does not depend on the last column."""
SAMPLE = some(
    "grc_stream/gpt2", "memorizing/llama", "rmt/gpt2", "armt/llama/mask", "infinity_former/kv", "delta_mem/gpt2"
)
PROPERTIES = [
    *each(checks.carries, EVERY),
    *each(checks.rows_alone, ANY_PADDING),
    *each(checks.in_pieces, ANY_PADDING),
    *each(checks.searches, EVERY),
    *each(checks.saves, EVERY),
    *each(checks.trains, {name: case for name, case in EVERY.items() if name != NOISY}),
    *each(checks.plain_again, FIRST | SAMPLE),
    *each(checks.moves_rows, FIRST | SAMPLE),
    *each(checks.hears_no_later_token, FIRST | SAMPLE),
    *each(checks.answers_alone, FIRST | SAMPLE),
    *each(checks.answers_by_beams, SAMPLE),
    *each(checks.answers_sampled, SAMPLE),
    *each(checks.generates, some("armt/gpt2", "infinity_former/kv", "crtn/kv", "outside_twice/llama")),
    *each(
        checks.checkpoints,
        some("armt/gpt2", "armt/llama", "delta_mem/llama", "crtn/kv", "compressive trained by the task/kv"),
    ),
]


@pytest.mark.parametrize("check, family, memory", PROPERTIES)
def test_a_memory_with_a_state(check: Callable[..., None], family: F.Family, memory: dict[str, Any]) -> None:
    check(family, memory)
