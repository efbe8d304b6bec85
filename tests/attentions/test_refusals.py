"""Options that do not fit are refused when an attention is built: choices, sizes, contradictions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cached_transformers.attentions import create_attention
from cached_transformers.attentions.bp_layer import BPLayer
from cached_transformers.attentions.etc_layer import ETCLayer
from cached_transformers.attentions.sac import PolicyGradient
from cached_transformers.attentions.set_transformer import ISAB, MAB, PMA
from cached_transformers.attentions.star import StarLayer

NEEDED: dict[str, dict[str, Any]] = {
    "linformer": {"length": 24},
    "reformer": {"buckets": 4},
    "routing": {"clusters": 3, "window": 4},
    "sinkhorn": {"length": 24},
    "sparse_transformer": {"stride": 4},
}
CHOICES = {
    "axial": "mode",
    "image_transformer": "order",
    "informer": "sampling",
    "linformer": "sharing",
    "memory_compressed": "grouping",
    "reformer": "logits see_self",
    "routing": "combine update",
    "sac": "learn",
    "sinkhorn": "sort_net combine",
    "sparse_transformer": "pattern combine",
}
SIZES = {
    "axial": "columns",
    "bigbird": "block",
    "bp_transformer": "k",
    "clustered": "clusters bits iterations",
    "delta_net": "order chunk",
    "etc": "radius segment clip",
    "gated_delta": "decay_rank scale chunk value_width steps",
    "image_transformer": "block",
    "improved_clustered": "topk",
    "informer": "factor",
    "linear": "chunk",
    "linformer": "slots length",
    "longformer": "window dilation",
    "memory_compressed": "rate",
    "performer": "features chunk",
    "reformer": "chunk rounds",
    "rfa": "features temperature chunk",
    "routing": "clusters window",
    "sac": "edges hidden clip",
    "sinkhorn": "block iterations sortcut hidden temperature",
    "sparse_transformer": "stride",
}
NEGATIVE = {
    "axial": "prefix",
    "bigbird": "window random",
    "bp_transformer": "clip",
    "image_transformer": "memory prefix",
    "linear": "epsilon",
    "longformer": "prefix",
    "memory_compressed": "local",
    "rfa": "floor",
    "routing": "length commitment",
    "sparse_transformer": "prefix",
    "star": "radius",
}
HEADS = "bp_transformer clustered delta_net memory_compressed performer reformer rfa routing set_transformer star"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((name, {option: "?"}, rf"{option}='\?'") for name, words in CHOICES.items() for option in words.split()),
    *((name, {option: 0}, f"{option}=0") for name, words in SIZES.items() for option in words.split()),
    *((name, {option: -1}, f"{option}=-1") for name, words in NEGATIVE.items() for option in words.split()),
    ("axial", {}, "columns"),
    ("axial", {"columns": 3, "size": (2, 4)}, r"size=\(2, 4\)"),
    ("axial", {"size": (2, 0)}, r"size=\(2, 0\)"),
    ("bigbird", {"window": 2}, "window=2"),
    ("bigbird", {"seed": 2**32}, "seed=4294967296"),
    ("bigbird", {"dropout": 1.0}, "dropout"),
    ("delta_net", {"order": 12}, "order=12.*12"),
    ("delta_net", {"order": 2, "features": "elu"}, "order=2.*features"),
    ("gated_delta", {"decay": "fixed", "decay_gate": "safe"}, "decay_gate='safe'"),
    ("gated_delta", {"decay": "none", "decay_rank": 2}, "decay_rank=2.*decay='none'"),
    ("gated_delta", {"half_life": (64.0, 8.0)}, r"half_life=\(64.0, 8.0\)"),
    ("gated_delta", {"half_life": (8.0, math.inf)}, r"half_life=\(8.0, inf\)"),
    ("gated_delta", {"half_life": (0.5, 8.0)}, r"half_life=\(0.5, 8.0\)"),
    ("gated_delta", {"features": "silu"}, "features='silu'.*rule=\"delta\""),
    ("gated_delta", {"rule": "gates", "features": "none"}, "features='none'.*rule=\"gates\""),
    ("gated_delta", {"rule": "gates", "steps": 2}, 'steps=2.*rule="delta"'),
    ("gated_delta", {"rule": "gates", "kernel": "fla"}, 'kernel="fla".*rule="gates"'),
    ("gated_delta", {"rule": "sum", "negative_eigenvalues": True}, 'rule="sum"'),
    ("gated_delta", {"decay": "channel", "step_length": True}, 'step_length=True.*decay="scalar"'),
    ("image_transformer", {"block": (2, 2), "memory": 3}, r"block=\(2, 2\).*memory=3"),
    ("image_transformer", {"block": (2, 2), "memory": (3, 3)}, "size="),
    ("image_transformer", {"block": (2, 2, 2), "memory": (3, 3), "size": (4, 4)}, r"block=\(2, 2, 2\)"),
    ("image_transformer", {"block": (2, 2), "memory": (1, 1), "size": (4, 0)}, r"size=\(4, 0\)"),
    ("informer", {"lazy_sum": True}, "lazy_sum=True.*allow_leak=True"),
    ("longformer", {"window": 5}, "window=5"),
    ("longformer", {"window": (4, 4), "index": 2}, r"window=\(4, 4\).*2"),
    ("longformer", {"dilation": (1, 0)}, "dilation="),
    ("longformer", {"dilation": (1, 2, 3)}, "dilation=.*heads=2"),
    ("longformer", {"global_tokens": (-1,)}, "global_tokens="),
    ("longformer", {"global_projections": True, "prefix": 1, "width": None}, "width=None"),
    ("longformer", {"global_projections": True, "prefix": 1, "width": 7}, "heads=2"),
    ("longformer", {"global_projections": True}, "global"),
    ("performer", {"features": 5, "paired": True}, "features=5"),
    ("performer", {"chunk": 12}, "chunk=12"),
    ("reformer", {"buckets": 5}, "buckets=5"),
    ("reformer", {"buckets": [4, 1]}, "buckets="),
    ("reformer", {"buckets": []}, "buckets="),
    ("reformer", {"buckets": None}, "buckets.*length"),
    ("rfa", {"pool": 1}, "pool=1"),
    ("routing", {"clusters": None}, "clusters.*length"),
    ("routing", {"window": None}, "window.*length"),
    ("routing", {"decay": 1.5}, "decay=1.5"),
    ("set_transformer", {"points": 0}, "0 points"),
    ("sinkhorn", {"combine": "scores", "sortcut": 1}, "combine"),
    ("sinkhorn", {"sort_net": "mlp", "length": None}, "length"),
    ("sparse_transformer", {"pattern": "fixed", "summary": 5}, "summary=5"),
    ("sparse_transformer", {"pattern": "fixed", "summary": 2, "slices": 3}, "slices=3.*summary=2"),
    ("sparse_transformer", {"pattern": "fixed", "summary": 0}, "summary=0"),
    ("sparse_transformer", {"pattern": "fixed", "slices": 0}, "slices=0"),
    ("sparse_transformer", {"slices": 2}, "pattern='fixed'"),
    ("sparse_transformer", {"combine": "heads", "heads": 1}, "heads"),
    *((name, {"width": 12, "heads": 5}, r"width=12.*heads=5") for name in HEADS.split()),
]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_an_option_that_does_not_fit_is_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        create_attention({"name": name, **{"width": 12, "heads": 2}, **NEEDED.get(name, {}), **options})


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "message"),
    [
        (BPLayer, (12, 2, 8), {"k": 0}, "k=0"),
        (BPLayer, (12, 2, 8), {"clip": -1}, "clip=-1"),
        (BPLayer, (10, 3, 8), {}, "width=10.*heads=3"),
        (ETCLayer, (12, 2), {"radius": 0}, "radius=0"),
        (ETCLayer, (12, 2), {"clip": 0}, "clip=0"),
        (ETCLayer, (10, 3), {}, "heads=3"),
        (ETCLayer, (10, 2), {"dropout": 1.0}, "dropout=1.0"),
        (ISAB, (4, 6, 2, 0), {}, "0 points"),
        (PMA, (6, 2, -1), {}, "-1 points"),
        (MAB, (4, 4, 6, 4), {}, "must be"),
        (PolicyGradient, (), {"momentum": 1.0}, r"momentum=1\.0"),
        (StarLayer, (12, 2), {"radius": -1}, "radius=-1"),
        (StarLayer, (10, 3), {}, "width=10.*heads=3"),
    ],
)
def test_layers_and_blocks_name_it_too(kind: Any, arguments: tuple[Any, ...], options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*arguments, **options)
