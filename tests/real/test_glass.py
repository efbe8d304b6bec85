"""A trained Llama: its golden logits by the NumPy forward of its own package, and memories over more than its context.

Legend: N tokens, M kept tokens, L = M + N, H heads of queries, G of keys, E head width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from memories.scored_streams import turned
from real_weights import TEXT, glass, glass_ids, package_folder
from torch import Tensor

from cached_lab.experiments.fetch import llama_weights
from cached_transformers import add_memory

SEGMENT, PROMPT, NEW = 16, 40, 120
"""More tokens than the 128 of its training, at distances that it was trained with."""


@pytest.fixture(scope="module")
def golden() -> Any:
    package_folder()
    return pytest.importorskip("glassllm")


def logits(model: Any, ids: list[int]) -> np.ndarray:
    return model(torch.tensor([ids])).logits.detach().numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-5)])
def test_logits_are_those_of_its_own_forward(golden: Any, dtype: torch.dtype, tolerance: float) -> None:
    """In float64 the rotary angles of transformers stay float32."""
    model, _ = glass(dtype)
    folder = package_folder() / "weights"
    own = golden.GlassLM.load(folder / "en.npz", dtype=np.float32 if dtype == torch.float32 else np.float64)
    ids = glass_ids(own.cfg.max_len)
    np.testing.assert_allclose(logits(model, ids), own.forward(ids).data, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mistake", ["heads as they are stored", "gate and up exchanged"])
def test_a_wrong_mapping_is_loud(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "heads as they are stored":
        monkeypatch.setattr("cached_lab.experiments.fetch.half_order", lambda weight, width: weight)
    with np.load(package_folder() / "weights" / "en.npz") as file:
        weights = llama_weights({name: file[name] for name in file.files if name != "__config__"}, 32)
    if mistake == "gate and up exchanged":
        for layer in range(4):
            gate, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
            weights[gate], weights[up] = weights[up], weights[gate]
    model, _ = glass()
    right = logits(model, glass_ids(100))
    model.load_state_dict(weights)
    assert np.abs(logits(model, glass_ids(100)) - right).max() > 1


def test_its_tokenizer_is_its_own(golden: Any) -> None:
    _, own = golden.load_pretrained("en")
    _, tokenizer = glass()
    text = TEXT + "  two blanks , a mark .\n\n\n a▁b aaaa <bos> cafe\u0301 \u00fc 日本 — ‘what’"
    ids = tokenizer(text)["input_ids"]
    assert ids == own.encode(text) and tokenizer.eos_token is None
    assert tokenizer.decode(ids).replace("<unk>", "⁇") == own.decode(ids)


@torch.no_grad()
def twin(model: Any, ids_N: Tensor, slots: int, sinks: int | None, in_cache: bool) -> Tensor:
    """Logits (N, V) with full attention of each segment over its own tokens and the kept ones, each head by itself.

    Args:
        sinks: tokens at the beginning that stay, beside the last ones; None: those that the last token weighs most.
        in_cache: kept tokens are right before the segment, else where they were read.
    """
    kept: dict[int, list[Tensor]] = {}
    found = []
    for start in range(0, len(ids_N), SEGMENT):
        x_ND = model.model.embed_tokens(ids_N[start : start + SEGMENT])
        n = len(x_ND)
        for number, layer in enumerate(model.model.layers):
            own, h_ND = layer.self_attn, layer.input_layernorm(x_ND)
            q_HNE, k_GNE, v_GNE = (
                project(h_ND).view(n, -1, own.head_dim).transpose(0, 1)
                for project in (own.q_proj, own.k_proj, own.v_proj)
            )
            places_L = torch.arange(start, start + n)
            if number in kept:
                old_k, old_v, old = kept[number]
                k_GNE, v_GNE = torch.cat([old_k, k_GNE], 1), torch.cat([old_v, v_GNE], 1)
                before = torch.arange(start - len(old), start) if in_cache else old
                places_L, read_L = torch.cat([before, places_L]), torch.cat([old, places_L])
            else:
                read_L = places_L
            hidden_NL = torch.ones(n, len(read_L), dtype=torch.bool).triu(len(read_L) - n + 1)
            heads, last_L = [], torch.zeros(len(read_L), dtype=x_ND.dtype)
            for head in range(len(q_HNE)):
                k, v = (t[head // (len(q_HNE) // len(k_GNE))] for t in (k_GNE, v_GNE))
                scores_NL = turned(q_HNE[head], places_L[-n:]) @ turned(k, places_L).T / own.head_dim**0.5
                weights_NL = scores_NL.masked_fill(hidden_NL, -torch.inf).softmax(-1)
                heads.append(weights_NL @ v)
                last_L += weights_NL[-1]
            x_ND = x_ND + own.o_proj(torch.cat(heads, -1))
            x_ND = x_ND + layer.mlp(layer.post_attention_layernorm(x_ND))
            order = list(range(len(read_L)))
            if len(order) > slots and sinks is None:
                order = sorted(last_L.topk(slots).indices.tolist())
            elif len(order) > slots:
                order = [*order[:sinks], *order[len(order) - slots + sinks :]]
            kept[number] = [k_GNE[:, order], v_GNE[:, order], read_L[order]]
        found.append(model.lm_head(model.model.norm(x_ND)))
    return torch.cat(found)


@pytest.mark.parametrize(
    "memory, sinks, in_cache",
    [
        ({"name": "streaming_llm", "length": 28}, 4, True),
        ({"name": "transformer_xl", "length": 30, "sinks": 2}, 2, True),
        ({"name": "tova", "length": 32}, None, False),
        ({"name": "tova", "length": 32, "places": "cache"}, None, True),
    ],
    ids=str,
)
def test_its_text_with_a_memory_is_that_of_full_attention_over_the_same_tokens(
    memory: dict[str, Any], sinks: int | None, in_cache: bool
) -> None:
    plain, _ = glass(torch.float64)
    model, _ = glass(torch.float64)
    add_memory(model, memory, segment_length=SEGMENT)
    prompt = torch.tensor([glass_ids(PROMPT)])
    said = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0]
    expected = twin(plain, said, slots=32, sinks=sinks, in_cache=in_cache)
    torch.testing.assert_close(model(said[None]).logits[0], expected, rtol=0, atol=1e-4)
    assert len(said) == PROMPT + NEW and torch.equal(expected[PROMPT - 1 : -1].argmax(-1), said[PROMPT:])
