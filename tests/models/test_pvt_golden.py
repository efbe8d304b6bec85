"""PVT with the cache of the released code against the authors' own model: every output, cache and gradient recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from grc.golden import Attended, Golden, Place, check_gradients, close, load, thirds
from torch import nn

from cached_transformers import add_memory
from cached_transformers.memories.grc.grc import GRC
from cached_transformers.models.pvt import PyramidVisionTransformer

pytestmark = pytest.mark.usefixtures("double")


def places(golden: Golden) -> dict[str, Place]:
    """Names of recorded parameters in our model; they differ only in attention."""
    whole, table = slice(None), {}
    for name in golden.names("param/"):
        block, found, inner = name.partition(".attn.")
        if not found:
            table[name] = (whole, (name,))
            continue
        attention = f"{block}.attn"
        cache = int(golden.meta["embed_dims"][int(block[len("block")]) - 1] * golden.meta["ratio"])
        part, _, rest = inner.partition(".")
        if part == "lam":
            table[name] = (whole, (f"{attention}.memory.branch.gate_H",))
        elif part == "attn_self_func":
            table[name] = (whole, (f"{attention}.{rest}",))
        elif part == "attn_mem":
            layer, _, kind = rest.partition(".")
            ours = {"q": "query", "kv": "key_value", "proj": "projection", "sr": "reduction.convolution"}
            where = ours.get(layer, "reduction.norm")
            table[name] = (whole, (f"{attention}.memory.branch.{where}.{kind}",))
        elif part.startswith("linear_"):
            rows = thirds(cache)[("update", "reset", "add").index(part.removeprefix("linear_"))]
            gates = f"{attention}.memory.cache.from_"
            both = (f"{gates}cache.weight", f"{gates}tokens.weight")
            table[name] = (rows, both if rest == "weight" else (f"{gates}tokens.bias",))
        else:
            ours = {"Norm1": "cache.norm", "pos_emb": "convolution.convolution"}
            table[name] = (whole, (f"{attention}.memory.{ours[part]}.{rest}",))
    return table


def build(golden: Golden) -> PyramidVisionTransformer:
    meta = golden.meta
    names = {"img_size": "img", "patch_size": "patch", "num_classes": "classes", "num_heads": "heads"}
    names |= {"norm_eps": "ln_eps", **{name: name for name in ("embed_dims", "mlp_ratios", "depths", "sr_ratios")}}
    model = PyramidVisionTransformer(**{ours: meta[theirs] for ours, theirs in names.items()})
    add_memory(model, "grc", variant="released", ratio=meta["ratio"])
    return model


def caches_equal(model: nn.Module, golden: Golden, key: str, when: int) -> None:
    for name, memory in memories(model).items():
        memory.cache.commit()
        close(memory.cache.cache_MC, golden[f"{key}/{name}/{when}"][0], f"{key}/{name}/{when}")


def memories(model: nn.Module) -> dict[str, GRC]:
    return {n.removesuffix(".memory"): m for n, m in model.named_modules() if isinstance(m, GRC)}


@pytest.mark.device
def test_three_steps_and_an_evaluation(shared: Path) -> None:
    golden = Golden(shared / "golden" / "grc" / "official_minipvt_r050.npz")
    model, table = build(golden), places(golden)
    load(model, golden, table)
    attended = {name: Attended(memory) for name, memory in memories(model).items()}
    assert len(attended) == sum(golden.meta["depths"])
    for t in (1, 2, 3):
        y = model(golden[f"x/{t}"])
        close(y, golden[f"y/{t}"], f"y/{t}")
        (y * golden[f"gy/{t}"]).sum().backward()
        check_gradients(model, golden, table, f"grad/{t}/")
        caches_equal(model, golden, "cache", t)
        for name, note in attended.items():
            close(note.value, golden[f"attended/{name}/{t}"], f"attended/{name}/{t}")
    model.eval()
    close(model(golden["eval_x/1"]), golden["eval_y/1"], "eval_y/1")
    caches_equal(model, golden, "eval_cache", 1)
    for name, note in attended.items():
        close(note.value, golden[f"eval_attended/{name}/1"], f"eval_attended/{name}/1")
