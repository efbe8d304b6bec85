"""Options that do not fit are refused when a memory is built: choices, sizes, and what contradicts another option."""

from __future__ import annotations

from typing import Any

import pytest
from common import refuses

from cached_transformers import create_memory, create_model
from cached_transformers.memories.memformer import Memformer
from cached_transformers.memories.memorizing import Memorizing
from cached_transformers.memories.ttt import TTT

CHOICES = {
    "armt": "mask",
    "crtn": "query scope renormalise empty placed summary",
    "ernie_doc": "start",
    "memformer": "norm",
    "memory_transformer": "place mask",
    "rmt": "mask norm",
    "segatron": "shift",
}
"""Choices whose annotation does not list them; for others see `test_checks.py`."""


def build(name: str, **options: Any) -> Any:
    """The memory by itself; in a model what only a layer refuses."""
    facts = {"length": 5} if name in ("grc", "attention_cache") else {}
    if name in ("segatron", "transformer_xl"):
        sizes = {"vocabulary": 5, "width": 12, "depth": 2, "heads": 2, "feed_forward": 8}
        return create_model("language_model", memory={"name": name, **options}, **sizes)
    width, heads = options.pop("width", 8), options.pop("heads", 2)
    given = {key: options.pop(key) for key in ("depth", "index", "causal") if key in options}
    return create_memory({"name": name, **facts, **options}, width, heads, **{"depth": 2, **given})


@pytest.mark.parametrize(("name", "option"), [(n, o) for n, options in CHOICES.items() for o in options.split()])
def test_a_choice_that_is_none_is_named(name: str, option: str) -> None:
    refuses(rf"{option}='\?'", build, name, **{option: "?"})


SIZES = {
    "armt": "length key_width nu value_scale",
    "attention_cache": "length ratio",
    "block_retrieval": "recent block topk observe capacity sinks=-1",
    "block_recurrent": "length feed_forward initial_scale",
    "compressive": "length rate eval_length compressed=-1",
    "crtn": "segment regions topk temperature key_width short_memory=-1",
    "ernie_doc": "length longest",
    "expire_span": "length ramp longest initial divisor price=-1.0",
    "feedback": "length",
    "grc": "length ratio stride",
    "expected_attention": "length future epsilon=-1.0 sinks=-1 observe=-1",
    "h2o": "length heavy=-1 observe",
    "infinity_former": "length chunk samples bins ridge prior_deviation contraction min_variance=-1.0 kl_weight=-1.0",
    "keydiff": "length sinks=-1 observe=-1",
    "knorm": "length sinks=-1 observe=-1",
    "lact": "nets expansion rate",
    "lagkv": "length sinks=-1 observe=-1",
    "memformer": "length temperature",
    "memorizing": "length eval_length k layer initial_scale",
    "memory_caching": "topk",
    "memory_transformer": "length cache=-1",
    "read_twice": "slots every top_k clip block_length",
    "rmt": "length cache=-1 slots=-1",
    "segatron": "length clamp",
    "snapkv": "length kernel observe sinks=-1 beta=1.0",
    "streaming_llm": "length sinks=-1",
    "titans": "nets layers chunk rate limit half_life momentum",
    "tova": "length",
    "transformer_xl": "length eval_length clamp",
    "ttt": "mini_batch limit rate=-1.0",
}
"""Sizes that must not be 0, and others with a negative value."""


@pytest.mark.parametrize(("name", "option"), [(n, o) for n, options in SIZES.items() for o in options.split()])
def test_a_size_of_nothing_is_named(name: str, option: str) -> None:
    option, _, negative = option.partition("=")
    size = float(negative or 0) if "." in negative else int(negative or 0)
    refuses(f"{option}={size}", build, name, **{option: size})


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("attention_cache", {"attend": "sample", "update": "store"}, "attend='sample'.*update='store'"),
    ("attention_cache", {"size": (2, 3)}, r"length=5.*2 x 3"),
    ("block_recurrent", {"layers": 3}, "layers=3"),
    ("block_recurrent", {"layers": []}, r"layers=\[\]"),
    ("block_recurrent", {"layers": [1, 0]}, r"layers=\[1, 0\]"),
    ("block_recurrent", {"width": 10, "heads": 3}, "width=10.*heads=3"),
    ("compressive", {"compressed": 0, "eval_compressed": 4}, "compressed=0.*eval_compressed=4"),
    ("compressive", {"function": "mean", "loss": "attention"}, "loss='attention'.*function='mean'"),
    ("compressive", {"compressed": 0, "loss": "task"}, "compressed=0.*loss=None"),
    ("compressive", {"function": "dilated", "rate": 1}, "rate=1.*function='conv'"),
    ("compressive", {"clamp": 3, "relative": False}, "clamp=3.*relative=True"),
    ("compressive", {"keep": "kv", "compressed": 0}, "keep='kv'.*compressed=0"),
    ("convolution", {"ratio": 0.2, "sequence": False}, "ratio=0.2.*width=8"),
    ("crtn", {"topk": 6}, "topk=6.*regions=5"),
    ("crtn", {"placed": "packed", "scope": "token"}, "scope='token'"),
    ("crtn", {"allow_leak": True}, "allow_leak=True.*scope='segment'"),
    ("crtn", {"summary": "last", "key_width": 4}, "key_width=4.*summary='last'"),
    ("crtn", {"summary": "bilstm", "key_width": 5}, "key_width=5.*summary='bilstm'"),
    ("ernie_doc", {"longest": 8, "relative": False}, "longest=8.*relative=True"),
    ("ernie_doc", {"keep": "kv", "start": "zeros"}, "start='zeros'"),
    ("expire_span", {"length": 8, "longest": 16, "ramp": 4}, "length=8.*length=19.*longest=5.*evict=True"),
    ("expire_span", {"length": 4, "ramp": 5}, "ramp=5.*length=4"),
    ("expire_span", {"initial": 1.0}, "initial=1.0"),
    ("expire_span", {"relative": False, "clamp": 3}, "clamp=3"),
    ("feedback", {"keep": "kv", "official_renorm": True}, "official_renorm=True.*keep='hidden'"),
    ("grc", {"ratio": 0.1, "width": 16}, "heads=2.*width=16.*0.125, 0.25"),
    ("grc", {"ratio": 0.375, "width": 16, "positional_convolution": True}, "16 into 6 groups"),
    ("grc", {"combine": "project", "variant": "released"}, "combine='project'.*mix='heads'"),
    ("grc", {"size": (2, 3)}, "length=5.*2 x 3"),
    ("grc", {"stride": 2}, "stride=2"),
    ("grc", {"heads": 3}, "width=8.*heads=3"),
    ("grc_stream", {"update_gate": "stretched", "update_bias": -2.5}, "update_bias"),
    ("grc_stream", {"mix": "joint"}, "ratio=1.*0.5"),
    ("grc_stream", {"mix": "joint", "ratio": 1.0, "combine": "project"}, "'project'.*mix=\"ratio\""),
    ("infini", {"decay": "channel"}, "decay='channel'.*gated_delta"),
    ("infini", {"update": "exact", "half_life": (8.0, 9.0)}, r"half_life=\(8.0, 9.0\).*update='exact'"),
    ("infini", {"update": "gated_delta", "half_life": (9.0, 8.0)}, r"half_life=\(9.0, 8.0\)"),
    ("infini", {"width": 10, "heads": 3}, "width=10.*heads=3"),
    ("infinity_former", {"basis": 7, "widths": (0.1, 0.3)}, "basis=7.*2 widths"),
    ("infinity_former", {"basis": 2, "widths": (0.1, 0.3)}, "basis=2.*2 widths"),
    ("infinity_former", {"widths": (0.1, 0)}, r"widths=\(0.1, 0\)"),
    ("lact", {"nets": 3}, "nets=3.*width=8"),
    ("memorizing", {"layer": 5, "depth": 4, "index": 0}, "layer=5.*4"),
    ("memorizing", {"faiss_index": "HNSW32"}, "faiss_index='HNSW32'.*store='faiss'"),
    ("memorizing", {"store": "faiss", "faiss_index": "IVF"}, "faiss_index='IVF'"),
    ("memorizing", {"joint": True, "empty": "zero"}, "joint=True"),
    ("memory_transformer", {"place": "back"}, "place='back'.*place='front'"),
    ("memory_transformer", {"bottleneck": True, "control": True, "causal": False}, "bottleneck=True with control=True"),
    ("memory_transformer", {"bottleneck": True, "cache": 4, "causal": False}, "bottleneck=True with cache=4"),
    ("memory_transformer", {"bottleneck": True, "place": "back", "causal": False}, "bottleneck=True with place='back'"),
    ("read_twice", {"first_read": "running", "scope": "document"}, "scope='document'.*first_read='plain'"),
    ("read_twice", {"new_layers": 2}, "new_layers=2"),
    ("read_twice", {"new_layers": 1, "layer": 0}, "new_layers=1.*layer=0"),
    ("read_twice", {"new_layers": 1, "attention": "joint"}, "attention='joint'"),
    ("read_twice", {"layer": 2}, "layer=2"),
    ("read_twice", {"attention": "joint", "top_k": 3}, "top_k=3"),
    ("rmt", {"read_cache": True}, "read_cache=True"),
    ("snapkv", {"kernel": 4}, "kernel=4.*5"),
    ("snapkv", {"length": 30, "observe": 32}, "length=30.*sinks=4.*observe=32"),
    ("knorm", {"length": 60, "budget": "pyramid", "index": 0}, "length=60.*beta=20.*sinks=4.*observe=0"),
    ("knorm", {"length": 720, "budget": "pyramid", "index": None}, "budget='pyramid'.*budget='uniform'"),
    ("segatron", {"sentence_ends": (3, -1)}, r"sentence_ends=\(3, -1\)"),
    ("segatron", {"paragraph_ends": (-2,)}, r"paragraph_ends=\(-2,\)"),
    ("segatron", {"widths": (4, 4, 2)}, r"widths=\(4, 4, 2\).*width=12.*\(4, 4, 4\)"),
    ("segatron", {"widths": (5, 5, 2)}, r"widths=\(5, 5, 2\)"),
    ("segatron", {"shift": "official"}, "shift='exact'.*allow_leak=True"),
    ("segatron", {"allow_leak": True}, "allow_leak=True.*shift='official'"),
    ("titans", {"nets": 3}, "nets=3.*width=8"),
    ("titans", {"persistent": 2, "place": "layer"}, "persistent=2.*place='context'"),
    ("titans", {"loss": "lp", "power": 1.0}, "power=1.0"),
    ("transformer_xl", {"clamp": 8, "relative": False}, "clamp=8.*relative=True"),
    ("transformer_xl", {"lenght": 4}, "'lenght'.*'length'"),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_what_contradicts_is_named(name: str, options: dict[str, Any], message: str) -> None:
    refuses(f"(?s){message}", build, name, **options)


def test_heads_share_out_the_width() -> None:
    for memory in (Memformer, Memorizing, TTT):
        refuses(r"width=8.*heads=3", memory, 8, 3)
    refuses(r"3.*rotary=False", TTT, 6, 2)
    assert TTT(6, 2, rotary=False)
